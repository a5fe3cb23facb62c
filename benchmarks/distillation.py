r"""On-policy distillation: memory, online against stored, kept tokens, several teachers, DSRL.

  JAX_PLATFORMS=cpu python benchmarks/distillation.py --part=memory
  JAX_PLATFORMS=cpu python benchmarks/distillation.py --part=lightning --workdir=runs/counting
  JAX_PLATFORMS=cpu python benchmarks/distillation.py --part=tip --rate=3e-4 --workdir=runs/counting

"memory": what XLA plans for value and gradient of the exact KL over a vocabulary of 32,768 (its
temporary buffers, from ``memory_analysis``) and the median time of a call, for shares of the tokens
and for chunks of logits. "whole" holds all logits of the kept tokens at once, as elsewhere.

All others are about policies of bytes that count on, mod 10, from the first digit of a prompt in
steps of the second, up or down by its sign. A teacher learns from answers with some slips; a
student, a fifth as wide, is warmed up on answers that the teacher wrote. Printed is success on 512
held-out tasks (right to the last digit), of greedy answers and of answers drawn at temperature 1:
the mean over the students, and each student's.

"lightning": on line (``preset("opd")``: fresh episodes, scored by the teacher, at every step) or
from stored ones (``preset("lightning_opd")``) for as many updates, at every ``--rate``, and the
same with "centred" advantages (``distillation.centre``). Of 1,024 stored episodes each is used 3.75
times, of ``--stored=4000`` once at most, as online. "top k": the divergence on 16 candidates a
token (``preset("lightning_opd_top_k")``), on line or with the teacher's log-probs of them stored,
from ``--top_k_stored`` episodes in ``--top_k_steps`` updates. "A third": on line for a third of the
updates, and so of the cost. CPU seconds of this process are without compilation: the first step
counts as the median of the others, and what is stored is played once before. "FLOPs" are 2 a
parameter and token of a forward pass and 6 of an update; updates on sampled log-probs ask
the student for its own first; for candidates it is asked once.

"tip": the exact divergence on a share of the tokens, the best by soft-OR or any, after as many
updates. "mopd": a teacher that counts up, one that counts down, and a student of both. "dsrl": GRPO
after some steps on wrong answers without their prompts, the number of updates being the same.
These take the first ``--rate``.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from agentjax import (
  Environment,
  Experiment,
  Extensions,
  Message,
  Observation,
  Reward,
  Step,
  Task,
  TaskSplits,
)
from agentjax.data import TaskIterator
from agentjax.engine import Engine, EngineConfig, SamplingConfig
from agentjax.models import ModelConfig, count, init, param_specs
from agentjax.models.vocabulary import Readout, over_vocabulary, take_tokens
from agentjax.objectives import ObjectiveConfig, divergence, preset
from agentjax.objectives.objective import policy_objective
from agentjax.recipes.lightning_opd.precompute import with_answers
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.rollout.loop import collect
from agentjax.signals.teacher import TeacherConfig
from agentjax.threads import LoopThread
from agentjax.training import HeldOutConfig, OptimizerConfig, RLStage, SupervisedStage
from agentjax.training.build import build_parts
from agentjax.training.checkpoint import CheckpointConfig, CheckpointStore
from agentjax.training.evaluation import build_engine, load_policy
from agentjax.training.experiment import PhaseConfig, resolve
from agentjax.training.learner import Learner
from agentjax.training.state import Network, TrainState, Weights
from agentjax.trajectory.builder import token_paths
from agentjax.trajectory.record import Trajectory

_PART = flags.DEFINE_enum(
  "part", "memory", ["memory", "lightning", "tip", "mopd", "dsrl"], "What to measure."
)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Students, each with its own seed.")
_STEPS = flags.DEFINE_integer("steps", 60, "Updates of distillation.")
_STORED = flags.DEFINE_integer("stored", 1024, "Stored episodes.")
_TOP_K_STORED = flags.DEFINE_integer("top_k_stored", 512, "Episodes stored with candidates.")
_TOP_K_STEPS = flags.DEFINE_integer("top_k_steps", 45, "Updates on these.")
_RATES = flags.DEFINE_multi_float("rate", [1e-4, 3e-4, 1e-3], "Learning rates of distillation.")
_CLIP = flags.DEFINE_float("clip", 1.0, "Bound on the sampled advantages, nats.")
_WARM = flags.DEFINE_integer("warm", 300, "Updates of a student's warm start.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Keeps teachers and warm students, to go on from.")

_LENGTH, _BATCH, _TASKS, _HELD_OUT, _WRITTEN = 7, 64, 2000, 512, 1024
_NOISE = 0.05  # share of the digits that a teacher is shown wrong
_STUDENT_WIDTH, _TEACHER_WIDTH, _TEACHER_STEPS = 32, 160, 300


# Memory.


def memory() -> None:
  """Prints a line a setting."""
  tokens, vocab, student, teacher = 2048, 32768, 256, 512
  keys = jax.random.split(jax.random.key(0), 4)
  hidden = jax.random.normal(keys[0], (1, tokens, student))
  weight = jax.random.normal(keys[1], (student, vocab)) * student**-0.5
  other = jax.random.normal(keys[2], (1, tokens, teacher))
  head = jax.random.normal(keys[3], (teacher, vocab)) * teacher**-0.5
  print(f"{tokens} tokens, {vocab} ids, widths {student} and {teacher}, float32")
  print(f"{'kept':>6} {'chunk':>6} {'temporary MB':>13} {'seconds':>8}")
  for share in (1.0, 0.5, 0.2):
    count = int(share * tokens)
    places = jnp.arange(count)[None]

    for chunk in (count, 128):

      def loss(hidden, weight, other, head, places=places, chunk=chunk):
        reads = [Readout(take_tokens(hidden, places), weight), Readout(other, head)]
        values = over_vocabulary(
          lambda log_p, log_q: divergence(log_p, log_q, "reverse_kl"), reads, size=chunk
        )
        return jnp.mean(values)

      given = hidden, weight, other[:, :count], head
      compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*given).compile()
      planned = compiled.memory_analysis().temp_size_in_bytes / 1e6
      seconds = []
      for _ in range(4):
        started = time.monotonic()
        jax.block_until_ready(compiled(*given))
        seconds.append(time.monotonic() - started)
      name = "whole" if chunk == count else str(chunk)
      print(f"{share:>6.0%} {name:>6} {planned:>13,.0f} {statistics.median(seconds[1:]):>8.2f}")


# Policies that count, and what trains them.


class Count(Environment):
  """Shows a sign and digits; pays 1 for the right digits to follow."""

  async def reset(self, task, key):
    self._task = task
    return Observation(task.prompt)

  async def step(self, action):
    right = action.text.strip() == self._task.answer
    return Step(Observation(()), Reward(float(right)), terminated=True)

  def snapshot(self):
    return b""

  def restore(self, state):
    del state


def count_tasks(signs: str) -> TaskSplits:
  """First digit, step of 1 to 3, two digits to be ignored; the right answer as demonstration.

  Args:
    signs: "+" counts up and "-" down, mod 10; the source of a task is its sign.
  """
  size = _TASKS + _HELD_OUT

  def one(number: int, sign: str, row: int) -> Task:
    start, step, rest = row // 300, 1 + row // 100 % 3, row % 100
    step_by = step if sign == "+" else -step
    digits = np.array([(start + i * step_by) % 10 for i in range(1, _LENGTH + 1)])
    random = np.random.default_rng([1, number])
    slips = random.uniform(size=_LENGTH) < _NOISE
    shown = (digits + slips * random.integers(1, 10, _LENGTH)) % 10
    answer, told = ("".join(map(str, d)) for d in (digits, shown))
    asked = Message("user", f"{sign}{start}{step}{rest:02d}")
    return Task(number, (asked,), answer, sign, (Message("assistant", told),))

  train, test = [], []
  for at, sign in enumerate(signs):
    rows = np.random.default_rng(at).permutation(3000)[:size]
    every = [one(at * size + i, sign, int(row)) for i, row in enumerate(rows)]
    train += every[:_TASKS]
    test += every[_TASKS:]
  return TaskSplits(train, test)


def model(width: int) -> ModelConfig:
  return ModelConfig(
    vocab_size=264,
    d_model=width,
    pattern="*-*-",
    num_heads=4,
    num_kv_heads=4,
    head_dim=width // 4,
    d_mlp=4 * width,
  )


def experiment(width: int, **stages) -> Experiment:
  return Experiment(
    name="count",
    model=model(width),
    engine=EngineConfig(
      slots=64, max_length=32, chunk_tokens=8, extend_buckets=(16,), extend_rows=(64,)
    ),
    rollout=RolloutConfig(
      max_turns=1, max_tokens_per_turn=_LENGTH + 1, max_total_tokens=32, concurrency=256
    ),
    reward=RewardConfig(parts=("environment",)),
    evaluation=HeldOutConfig(tasks=0, success_part="environment"),
    checkpoint=CheckpointConfig(every=10_000),
    **stages,
  )


def supervised(steps: int) -> SupervisedStage:
  return SupervisedStage(
    steps=steps,
    tasks_per_step=64,
    row_length=128,
    microbatch_rows=4,
    optimizer=OptimizerConfig(learning_rate=3e-3, schedule="cosine", warmup_steps=20),
  )


def distilled(
  objective: ObjectiveConfig,
  rate: float,
  teachers: Sequence[TeacherConfig],
  steps: int | None = None,
  **changes,
) -> RLStage:
  """Adam's betas as in Lightning OPD's configs; their rate is constant."""
  return RLStage(
    steps=steps or _STEPS.value,
    tasks_per_step=_BATCH,
    row_length=128,
    microbatch_rows=4,
    objective=objective,
    mismatch_alarm=50.0,
    optimizer=OptimizerConfig(learning_rate=rate, schedule="linear", warmup_steps=5, b2=0.98),
    teachers=tuple(teachers),
    **changes,
  )


class Workshop:
  """One experiment's compiled parts, for any number of students.

  It does what ``Run`` does, without files, so that what is timed is playing, scoring and updating.
  """

  def __init__(self, made: Experiment, splits: TaskSplits, engine: Engine | None = None):
    resolve(made)
    own = Extensions(tasks=splits, make_environment=lambda task: Count())
    self.parts = build_parts(made, None, own)
    self.learner = Learner(self.parts, policy_objective(made.rl.objective))
    self.engine = engine or build_engine(self.parts)
    self._runner, self._versions = LoopThread(), itertools.count(1000)

  def play(
    self,
    policy,
    tasks: Sequence[Task],
    *,
    step: int = 0,
    seed: int = 0,
    samples: int = 1,
    temperature: float = 1.0,
  ) -> list[Trajectory]:
    self.engine.publish(policy, next(self._versions))
    return self._runner.run(
      collect(
        tasks,
        step=step,
        samples_per_task=samples,
        player=self.parts.player(self.engine, SamplingConfig(temperature=temperature), seed),
        make_environment=self.parts.make_environment,
        rewards=self.parts.rewards,
      )
    )

  def success(self, policy, tasks: Sequence[Task], temperature: float = 0.0) -> float:
    """Share of right answers; 0 takes the likeliest token each time."""
    played = self.play(policy, tasks, seed=99, temperature=temperature)
    return float(np.mean([t.reward.value for t in played]))

  def answers(self, policy, tasks: Sequence[Task]) -> list[Task]:
    """The tasks with the policy's own answers as demonstrations."""
    written = []
    for task, played in zip(tasks, self.play(policy, tasks, seed=7), strict=True):
      path = token_paths(played)[0]
      turn = [int(i) for i in path.token_ids[path.sampled] if i not in self.parts.chat.stop_ids]
      said = Message("assistant", self.parts.tokenizer.decode(turn))
      written.append(dataclasses.replace(task, demonstration=(said,)))
    return written

  def warm(self, seed: int, tasks: Sequence[Task]):
    """A policy after the supervised stage on the tasks' demonstrations."""
    stage = self.parts.experiment.supervised
    key = jax.random.key(seed)
    start = Weights(policy=init(self.parts.model, key), value=None)
    state = self.learner.initial_state("supervised", start)
    order = TaskIterator(tasks, batch_size=stage.tasks_per_step, seed=seed)
    for _ in range(stage.steps):
      state, _ = self.learner.supervised_step(state, next(order))
    return state.weights.policy

  def learn(
    self, policy, seed: int, stored: Sequence[Trajectory] = (), thin: float = 1.0
  ) -> Learnt:
    """The policy after reinforcement learning.

    Args:
      policy: where it starts.
      seed: of the order of tasks, and of what is drawn.
      stored: episodes of tasks, in the place of new ones.
      thin: share of the drawn tokens that keep their weight, by chance.
    """
    stage = self.parts.experiment.rl
    state = self.learner.initial_state("rl", Weights(jax.tree.map(jnp.array, policy), None))
    of: dict[int, list[Trajectory]] = collections.defaultdict(list)
    for episode in stored:
      of[episode.task_id].append(episode)
    tasks = [t for t in self.parts.tasks.train if t.id in of or not stored]
    order = TaskIterator(tasks, batch_size=stage.tasks_per_step, seed=seed)
    group, rows, seconds = self.parts.experiment.rollout.group_size, [], []
    for step in range(1, stage.steps + 1):
      begun, chosen = time.process_time(), next(order)
      if stored:
        played = []
        for task in chosen:  # its episodes take turns
          of[task.id].append(of[task.id].pop(0))
          played.append(dataclasses.replace(of[task.id][-1], step=step))
      else:
        played = self.play(self.learner.policy(state), chosen, step=step, seed=seed, samples=group)
      if thin < 1:
        played = [_thinned(t, thin, seed) for t in played]
      state, metrics = self.learner.rl_step(state, played, step)
      rows.append(metrics)
      seconds.append(time.process_time() - begun)
    # The first step compiles.
    whole = sum(seconds[1:]) + statistics.median(seconds[1:])
    return Learnt(state.weights.policy, rows, whole)

  def store(self, policy, seed: int, number: int, objective: ObjectiveConfig) -> Stored:
    """What ``precompute`` stores: episodes of the first or of all tasks, scored by the teacher."""
    assert objective.distillation is not None
    asked = objective.distillation.stored
    begun = time.process_time()
    samples = max(1, number // _TASKS)
    played = self.play(policy, self.parts.tasks.train[:number], seed=seed, samples=samples)
    between = time.process_time()
    student = policy if asked.needs_comparison else None
    scores = self.learner.signals["teacher"].teachers.score(played, asked, student)
    episodes = [with_answers(t, answers) for t, answers in zip(played, scores, strict=True)]
    return Stored(episodes, between - begun, time.process_time() - between)

  def close(self) -> None:
    """Ends the event loop; the engine may be another workshop's."""
    self._runner.close()


def _thinned(trajectory: Trajectory, share: float, seed: int) -> Trajectory:
  """The episode with weights at a random share of its tokens."""
  random = np.random.default_rng([seed, *trajectory.address])
  segments = [
    dataclasses.replace(s, weights=s.weights * (random.uniform(size=len(s)) < share))
    for s in trajectory.segments
  ]
  return dataclasses.replace(trajectory, segments=segments)


class Learnt(NamedTuple):
  """A student after its updates, the metrics of each, and CPU seconds without compilation."""

  policy: Any
  rows: list[dict[str, float]]
  seconds: float


class Stored(NamedTuple):
  """Episodes with a teacher's log-probs, and the CPU seconds of both."""

  episodes: list[Trajectory]
  playing: float
  scoring: float


class Class:
  """Teachers of one sign each, students warmed up on answers of all, held-out tasks.

  Args:
    root: where policies are kept, and found again.
    signs: see ``count_tasks``.
    warm: updates of a student's warm start.
  """

  def __init__(self, root: pathlib.Path, signs: str, warm: int):
    self.tasks = count_tasks(signs)
    self.paths = {sign: root / f"teacher{sign}" for sign in signs}
    written: list[Task] = []
    for sign, path in self.paths.items():
      own = [t for t in self.tasks.train if t.source == sign]
      made = experiment(_TEACHER_WIDTH, supervised=supervised(_TEACHER_STEPS))
      teaching = Workshop(made, self.tasks)
      teacher = kept(path, teaching, lambda own=own, shop=teaching: shop.warm(0, own))
      found = [f"{s} {teaching.success(teacher, self.test(s)):.1%}" for s in signs]
      print(f"teacher of {sign}: {', '.join(found)}", flush=True)
      written += teaching.answers(teacher, own[: _WRITTEN // len(signs)])
      teaching.close()
    warming = Workshop(experiment(_STUDENT_WIDTH, supervised=supervised(warm)), self.tasks)
    self.engine = warming.engine
    self._warming, self._signs = warming, signs
    self.students = []
    for seed in range(_SEEDS.value):
      path = root / f"warm{signs}-{warm}-{seed}"
      self.students.append(kept(path, warming, lambda seed=seed: warming.warm(seed, written)))
    self.show("warm start", self.students)

  def test(self, sign: str) -> list[Task]:
    return [task for task in self.tasks.test if task.source == sign]

  def workshop(self, stage: RLStage, group: int = 1) -> Workshop:
    made = experiment(_STUDENT_WIDTH, rl=stage)
    made.rollout.group_size = group
    return Workshop(made, self.tasks, self.engine)

  def show(self, name: str, policies: Sequence[Any], more: str = "") -> None:
    """Prints held-out success: for each sign of the likeliest answers, then of drawn ones."""
    each = np.array(
      [
        [self._warming.success(p, self.test(sign), t) for t in (0.0, 1.0) for sign in self._signs]
        for p in policies
      ]
    )
    means = " ".join(f"{m:>6.1%}" for m in each.mean(axis=0))
    single = " ".join("/".join(f"{100 * s:.1f}" for s in row) for row in each)
    print(f"{name:<34} {means}  ({single}) {more}", flush=True)


def kept(path: pathlib.Path, shop: Workshop, make: Callable[[], Any]) -> Any:
  """The policy at ``path``, made where there is none, as a checkpoint that can be a teacher."""
  store = CheckpointStore(path / "checkpoints", 1, shop.parts.identity)
  if not store.steps():
    store.save(0, TrainState(jnp.zeros((), jnp.int32), {"policy": Network(Weights(make()))}), {})
  return load_policy(shop.parts, path / "checkpoints" / "0")


# Online against stored.


def lightning(root: pathlib.Path) -> None:
  """Prints a line a method and learning rate, and what both cost."""
  room = Class(root, "+", _WARM.value)
  teacher = TeacherConfig(str(room.paths["+"]))
  top_k = preset("lightning_opd_top_k")

  def store(objective: ObjectiveConfig, number: int) -> list[Stored]:
    shop = room.workshop(distilled(objective, 1.0, [teacher]))
    shop.store(room.students[0], 0, _BATCH, objective)  # compiles
    stored = [shop.store(s, seed, number, objective) for seed, s in enumerate(room.students)]
    shop.close()
    return stored

  sampled, candidates = store(bounded("opd"), _STORED.value), store(top_k, _TOP_K_STORED.value)
  third = _STEPS.value // 3
  for rate in _RATES.value:
    whole = 0.0
    for name, objective in ("online", bounded("opd")), ("online top k", top_k):
      for steps in (_STEPS.value, third):
        shop = room.workshop(distilled(objective, rate, [teacher], steps))
        found = [shop.learn(student, seed) for seed, student in enumerate(room.students)]
        shop.close()
        seconds = statistics.mean(f.seconds for f in found)
        whole = whole or seconds
        room.show(
          f"{name} {rate:g}" + (", a third" if steps == third else ""),
          [f.policy for f in found],
          f"{seconds:.1f} s, {seconds / whole:.2f} of online",
        )

    centred = bounded("lightning_opd")
    centred.distillation.centre = "batch_mean"
    for name, objective, stored, steps in (
      ("stored", bounded("lightning_opd"), sampled, _STEPS.value),
      ("stored centred", centred, sampled, _STEPS.value),
      ("stored top k", top_k, candidates, _TOP_K_STEPS.value),
    ):
      before = "behaviour" if objective.only_divergences else "recomputed"
      shop = room.workshop(
        distilled(objective, rate, (), steps, rollouts="stored", old_log_probs=before)
      )
      found = [
        shop.learn(student, seed, stored[seed].episodes)
        for seed, student in enumerate(room.students)
      ]
      shop.close()
      spent = statistics.mean(s.playing + s.scoring for s in stored)
      seconds = statistics.mean(f.seconds for f in found)
      moved = statistics.mean(f.rows[-1]["mismatch/kl"] for f in found)
      room.show(
        f"{name} {rate:g}",
        [f.policy for f in found],
        f"mismatch/kl {moved:.3f}; {spent:.1f} s + {seconds:.1f} s, "
        f"{seconds / whole:.2f} and {(spent + seconds) / whole:.2f} of online",
      )
  online, top = _STEPS.value * _BATCH, _TOP_K_STEPS.value * _BATCH
  all_online = _flops(online, online, online)
  for name, each, updates, number, passes in (
    ("stored", 1, online, _STORED.value, 1),
    ("stored top k", 0, top, _TOP_K_STORED.value, 2),  # playing, and whose candidates they are
  ):
    alone = _flops(each * updates, 0, updates)
    both = alone + _flops(passes * number, number, 0)
    print(f"FLOPs of {name}: {alone / all_online:.2f}, {both / all_online:.2f} of online")


def bounded(name: str) -> ObjectiveConfig:
  objective = preset(name)
  objective.distillation.clip = _CLIP.value
  return objective


def _flops(student: int, teacher: int, updated: int) -> float:
  """Of forward passes of both and of updates, each of so many episodes of one token."""
  own, other = (count(param_specs(model(w))) for w in (_STUDENT_WIDTH, _TEACHER_WIDTH))
  return 2 * student * own + 2 * teacher * other + 6 * updated * own


# Fewer tokens, several teachers, learning without the prompt.


def tip(root: pathlib.Path) -> None:
  """Prints a line a share of tokens and a way to choose them."""
  room = Class(root, "+", _WARM.value)
  teacher = TeacherConfig(str(room.paths["+"]))
  for share in (1.0, 0.5, 0.2):
    for chosen in ("soft-OR", "random") if share < 1 else ("all",):
      objective = preset("opd_full")
      objective.distillation.keep = share if chosen == "soft-OR" else 1.0
      shop = room.workshop(distilled(objective, _RATES.value[0], [teacher]))
      found = [
        shop.learn(student, seed, thin=share if chosen == "random" else 1.0)
        for seed, student in enumerate(room.students)
      ]
      room.show(f"{share:.0%} of the tokens, {chosen}", [f.policy for f in found])
      shop.close()


def mopd(root: pathlib.Path) -> None:
  """Prints a line a set of teachers."""
  room = Class(root, "+-", _WARM.value)
  up, down = (str(room.paths[sign]) for sign in "+-")
  for name, teachers in (
    ("each teacher for its own sign", [TeacherConfig(up, ("+",)), TeacherConfig(down, ("-",))]),
    ("teacher of + for all", [TeacherConfig(up)]),
    ("teacher of - for all", [TeacherConfig(down)]),
  ):
    stage = distilled(bounded("mopd"), _RATES.value[0], teachers, old_log_probs="recomputed")
    shop = room.workshop(stage)
    found = [shop.learn(student, seed) for seed, student in enumerate(room.students)]
    room.show(name, [f.policy for f in found])
    shop.close()


def dsrl(root: pathlib.Path) -> None:
  """Prints a line a length of the first phase."""
  room = Class(root, "+", _WARM.value)
  for first in (0, _STEPS.value // 8, _STEPS.value // 4):
    stage = distilled(preset("grpo"), _RATES.value[0], ())
    stage.tasks_per_step = _BATCH // 8
    if first:
      stage.phases = (PhaseConfig(first, preset("nsr_prerl"), context="response"),)
    shop = room.workshop(stage, group=8)
    found = [shop.learn(student, seed) for seed, student in enumerate(room.students)]
    entropy = statistics.mean(f.rows[max(first - 1, 0)]["policy/entropy"] for f in found)
    room.show(
      f"{first} steps without prompts, then GRPO",
      [f.policy for f in found],
      f"entropy after the first {entropy:.3f}",
    )
    shop.close()


def main(argv: list[str]) -> None:
  del argv
  logging.set_verbosity(logging.ERROR)
  print(f"{os.cpu_count()} CPUs, {jax.devices()[0].device_kind}", flush=True)
  if _PART.value == "memory":
    memory()
    return
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(_WORKDIR.value or folder).absolute()
    {"lightning": lightning, "tip": tip, "mopd": mopd, "dsrl": dsrl}[_PART.value](root)


if __name__ == "__main__":
  app.run(main)
