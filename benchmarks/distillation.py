r"""On-policy distillation: memory against the share of kept tokens, and online against stored.

  JAX_PLATFORMS=cpu python benchmarks/distillation.py --part=memory
  JAX_PLATFORMS=cpu python benchmarks/distillation.py --part=lightning --seeds=3

"memory": what XLA plans for value and gradient of the exact KL over a vocabulary of 32,768 (its
temporary buffers, from ``memory_analysis``) and the median time of a call, for shares of the tokens
and for chunks of logits. "whole" holds all logits of the kept tokens at once, as elsewhere.

"lightning": a policy of bytes learns to count on, mod 10, from the first digit of a prompt in steps
of the second. The teacher is trained on right answers; the student, a third as wide, is warmed up
for a few steps on answers that the teacher wrote. From there it learns on line (``preset("opd")``:
fresh episodes, scored by the teacher, at every step), or from stored ones
(``preset("lightning_opd")``) for as many updates: ``--steps=15 --stored=1920`` takes each stored
episode once, the defaults seven or eight times. Printed are held-out success (greedy), and seconds
without compilation: those of the first step and of a first, discarded precomputation are left out.
"weighed" multiplies the advantage of a stored token by how much likelier the token has become since
it was drawn, at most 2 (``mismatch.weight_level="token"``), which Lightning OPD does not. "FLOPs"
counts 2 a parameter and token of a forward pass and 6 of an update.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pathlib
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from rich.console import Console

from agentjax import (
  Environment,
  Experiment,
  Extensions,
  Message,
  Observation,
  Reward,
  Run,
  Step,
  Task,
  TaskSplits,
)
from agentjax.engine import EngineConfig
from agentjax.models import ModelConfig, count, param_specs
from agentjax.models.vocabulary import Readout, over_vocabulary, take_tokens
from agentjax.objectives import MismatchConfig, divergence, preset
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.rollout.loop import collect
from agentjax.training import HeldOutConfig, OptimizerConfig, RLStage, SupervisedStage
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.evaluation import build_engine, load_policy
from agentjax.training.loop_thread import LoopThread
from agentjax.training.metrics import read_metrics
from agentjax.training.parts import build_parts
from agentjax.training.precompute import precompute
from agentjax.training.teacher import TeacherConfig
from agentjax.trajectory.builder import token_paths

_PART = flags.DEFINE_enum("part", "memory", ["memory", "lightning"], "What to measure.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Students, each with its own seed.")
_STEPS = flags.DEFINE_integer("steps", 60, "Updates of distillation.")
_STORED = flags.DEFINE_integer("stored", 1024, "Stored episodes.")
_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Of distillation, at its peak.")
_CLIP = flags.DEFINE_float("clip", 2.0, "Bound on the teacher's advantages, nats.")
_WARM = flags.DEFINE_integer("warm", 150, "Updates of the student's warm start.")
_TEACHER = flags.DEFINE_integer("teacher_steps", 800, "Updates of the teacher.")

_LENGTH, _BATCH, _TASKS, _HELD_OUT, _WRITTEN = 6, 128, 2000, 256, 512
_STUDENT_WIDTH, _TEACHER_WIDTH = 24, 72


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


# Online against stored.


class Count(Environment):
  """Shows digits; pays 1 for the right ones to follow."""

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


def tasks() -> TaskSplits:
  """First digit, step of 1 to 3, two digits to be ignored; the right answer as demonstration."""
  rows = np.random.default_rng(0).permutation(3000)[: _TASKS + _HELD_OUT]

  def one(number: int, row: int) -> Task:
    start, step, rest = row // 300, 1 + row // 100 % 3, row % 100
    answer = "".join(str((start + i * step) % 10) for i in range(1, _LENGTH + 1))
    asked = Message("user", f"{start}{step}{rest:02d}")
    return Task(number, (asked,), answer, "count", (Message("assistant", answer),))

  every = [one(i, int(row)) for i, row in enumerate(rows)]
  return TaskSplits(every[:_TASKS], every[_TASKS:])


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


def experiment(width: int, seed: int, **stages) -> Experiment:
  return Experiment(
    name="count",
    seed=seed,
    model=model(width),
    engine=EngineConfig(
      slots=64, max_length=32, chunk_tokens=8, extend_buckets=(16,), extend_rows=(64,)
    ),
    rollout=RolloutConfig(
      group_size=1, max_turns=1, max_tokens_per_turn=10, max_total_tokens=32, concurrency=256
    ),
    reward=RewardConfig(parts=("environment",)),
    evaluation=HeldOutConfig(tasks=_HELD_OUT, samples=0, success_part="environment"),
    checkpoint=CheckpointConfig(every=10_000),
    **stages,
  )


def supervised(steps: int) -> SupervisedStage:
  return SupervisedStage(
    steps=steps,
    tasks_per_step=64,
    row_length=128,
    microbatch_rows=8,
    optimizer=OptimizerConfig(learning_rate=3e-3, schedule="cosine", warmup_steps=20),
  )


def distilled(name: str, steps: int, teacher: pathlib.Path | None, **changes) -> RLStage:
  objective = preset(name)
  objective.distillation.clip = _CLIP.value
  return RLStage(
    steps=steps,
    tasks_per_step=_BATCH,
    row_length=128,
    microbatch_rows=32,
    old_log_probs="recomputed",
    objective=objective,
    mismatch_alarm=50.0,
    optimizer=OptimizerConfig(
      learning_rate=_RATE.value, schedule="linear", warmup_steps=5, clip_norm=1.0
    ),
    teachers=() if teacher is None else (TeacherConfig(str(teacher)),),
    **changes,
  )


def train(made: Experiment, directory: pathlib.Path, splits: TaskSplits) -> Run:
  own = Extensions(tasks=splits, make_environment=lambda task: Count())
  run = Run(made, directory, extensions=own, console=Console(file=io.StringIO()))
  run.train()
  return run


def answers(made: Experiment, directory: pathlib.Path, splits: TaskSplits) -> TaskSplits:
  """The tasks with the policy's own answers as demonstrations."""
  own = Extensions(tasks=splits, make_environment=lambda task: Count())
  parts = build_parts(made, directory, own)
  engine, runner = build_engine(parts), LoopThread()
  engine.publish(load_policy(parts, directory), 0)
  played = runner.run(
    collect(
      splits.train[:_WRITTEN],
      step=0,
      samples_per_task=1,
      player=parts.player(engine, made.rl.sampling, 0),
      make_environment=parts.make_environment,
      rewards=parts.rewards,
    )
  )
  engine.close()
  runner.close()
  written = {}
  for trajectory in played:
    path = token_paths(trajectory)[0]
    turn = [int(i) for i in path.token_ids[path.sampled] if i not in parts.chat.stop_ids]
    written[trajectory.task_id] = (Message("assistant", parts.tokenizer.decode(turn)),)
  return TaskSplits(
    [dataclasses.replace(t, demonstration=written.get(t.id, ())) for t in splits.train],
    splits.test,
  )


def success(directory: pathlib.Path, when: str) -> float:
  return json.loads((directory / "report.json").read_text())[when]["greedy"]


def step_seconds(directory: pathlib.Path) -> float:
  """Of all steps: rollouts, the teacher's passes and updates; the first counts as the median."""
  rows = [r for r in read_metrics(directory / "metrics.jsonl") if "time/rollout" in r]
  each = [row["time/rollout"] + row["time/update"] for row in rows]
  return sum(each[1:]) + statistics.median(each[1:])


def lightning() -> None:
  """Prints a line a seed and the means."""
  right = tasks()
  table = []
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder)
    started = time.monotonic()
    big = experiment(_TEACHER_WIDTH, 0, supervised=supervised(_TEACHER.value))
    train(big, root / "teacher", right)
    theirs = answers(big, root / "teacher", right)
    agree = np.mean(
      [t.demonstration[0].content.strip() == t.answer for t in theirs.train[:_WRITTEN]]
    )
    print(f"teacher: {agree:.1%} of its sampled answers right; {time.monotonic() - started:.0f} s")
    print(
      f"{'seed':>4} {'warm':>7} {'online':>7} {'stored':>7} {'weighed':>7} {'online s':>9} "
      f"{'play s':>7} {'score s':>8} {'train s':>8} {'ratio':>6} {'FLOPs':>6}"
    )
    for seed in range(_SEEDS.value):
      home = root / str(seed)
      warm = experiment(_STUDENT_WIDTH, seed, supervised=supervised(_WARM.value))
      train(warm, home / "warm", theirs)

      online = experiment(_STUDENT_WIDTH, seed, rl=distilled("opd", _STEPS.value, root / "teacher"))
      online.start_from = str(home / "warm")
      train(online, home / "online", theirs)

      own = Extensions(tasks=theirs, make_environment=lambda task: Count())
      for attempt in ("compile", "stored"):
        plan = experiment(_STUDENT_WIDTH, seed, rl=distilled("lightning_opd", 1, root / "teacher"))
        _, timing = precompute(
          plan,
          home / "warm",
          home / attempt,
          tasks=_STORED.value,
          demonstrations_by=str(root / "teacher"),
          extensions=own,
        )
      for name in ("offline", "weighed"):
        offline = experiment(
          _STUDENT_WIDTH,
          seed,
          rl=distilled("lightning_opd", _STEPS.value, None, rollouts=str(home / "stored")),
        )
        if name == "weighed":
          offline.rl.objective.policy_loss.mismatch = MismatchConfig(weight_level="token")
        offline.start_from = str(home / "warm")
        train(offline, home / name, theirs)

      seconds = step_seconds(home / "online"), step_seconds(home / "offline")
      whole = timing.playing + timing.scoring + seconds[1]
      spent = [_flops(n) for n in (_BATCH * _STEPS.value, _STORED.value)]
      row = (
        success(home / "online", "before"),
        success(home / "online", "after"),
        success(home / "offline", "after"),
        success(home / "weighed", "after"),
        seconds[0],
        timing.playing,
        timing.scoring,
        seconds[1],
        whole / seconds[0],
        spent[1] / spent[0],
      )
      table.append(row)
      _line(str(seed), row)
  _line("mean", np.mean(table, axis=0))


def _flops(played: int) -> float:
  """Of playing and scoring so many episodes, and of all updates, a token of an episode."""
  student, teacher = (count(param_specs(model(w))) for w in (_STUDENT_WIDTH, _TEACHER_WIDTH))
  # Updates ask the student for its log-probs first.
  return played * 2 * (student + teacher) + _BATCH * _STEPS.value * (2 + 6) * student


def _line(name: str, row) -> None:
  shares, seconds = row[:4], row[4:8]
  print(
    f"{name:>4} "
    + " ".join(f"{x:>7.1%}" for x in shares)
    + f" {seconds[0]:>9.1f} {seconds[1]:>7.1f} {seconds[2]:>8.1f} {seconds[3]:>8.1f}"
    + f" {row[8]:>6.2f} {row[9]:>6.2f}",
    flush=True,
  )


def main(argv: list[str]) -> None:
  del argv
  logging.set_verbosity(logging.ERROR)
  print(f"{os.cpu_count()} CPUs, {jax.devices()[0].device_kind}")
  {"memory": memory, "lightning": lightning}[_PART.value]()


if __name__ == "__main__":
  app.run(main)
