r"""Toy measurements of further methods: what fine-tuning forgets, and which mistakes come again.

  JAX_PLATFORMS=cpu python benchmarks/methods.py --part=forgetting --seeds=3
  JAX_PLATFORMS=cpu python benchmarks/methods.py --part=meds --seeds=3

"forgetting": a policy of bytes learns to copy three digits ("copy 374") and to write each one's
successor ("next 374", 485). It is then fine-tuned on predecessors ("prev 374", 263) alone: AdamW,
MoClip, and either with Logits Replay. Success is that every token of the answer is the
likeliest, on digits that nothing was trained on. Printed are success at the new and the old skills
as training goes on, where the new one first reaches ``--reached``, and after the last step.

"meds": sums of three digits ("3+7+4"), a warm start on others, then DAPO's loss with and without
MEDS, from the same seed, for the same number of steps. A mistake is repeated where the same wrong
answer was given to the task in an earlier step. Printed are means over the last third of the steps.

Figures belong to these toys.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from rich.console import Console

from agentjax.data import TaskSplits
from agentjax.engine import EngineConfig
from agentjax.models import ModelConfig, forward
from agentjax.models.heads import compute_logits
from agentjax.objectives import preset
from agentjax.objectives.supervised import supervised_objective
from agentjax.recipes.logits_replay import LogitsReplayConfig
from agentjax.recipes.meds import MedsConfig
from agentjax.recipes.moclip import MoClipConfig
from agentjax.rollout import RolloutConfig
from agentjax.text.answers import mark_answer
from agentjax.training import (
  Experiment,
  Extensions,
  HeldOutConfig,
  OptimizerConfig,
  RLStage,
  Run,
  SupervisedStage,
)
from agentjax.training.build import build_parts
from agentjax.training.checkpoint import CheckpointConfig, CheckpointStore
from agentjax.training.experiment import resolve
from agentjax.training.journal import read_journal
from agentjax.training.learner import Learner
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.record import Message, Task

PARTS = ("forgetting", "meds")
_PARTS = flags.DEFINE_multi_enum("part", list(PARTS), PARTS, "Parts to run; repeat the flag.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of everything.")
_FIRST_SEED = flags.DEFINE_integer("first_seed", 0, "The first of them.")
_BASE = flags.DEFINE_integer("base_steps", 600, "Updates of the policy that is fine-tuned.")
_STEPS = flags.DEFINE_integer("steps", 128, "Updates of fine-tuning.")
_EVERY = flags.DEFINE_integer("every", 16, "Updates between measurements.")
_RATES = flags.DEFINE_list("rates", ["5e-4"], "Learning rates of fine-tuning.")
_REACHED = flags.DEFINE_float("reached", 0.9, "Success at which the old skills are compared.")
_RL_STEPS = flags.DEFINE_integer("rl_steps", 32, "Steps of reinforcement learning.")
_WARM = flags.DEFINE_integer("warm_steps", 300, "Updates of its warm start.")

MODEL = ModelConfig(
  vocab_size=264, d_model=64, pattern="*-*-", num_heads=4, num_kv_heads=4, head_dim=16, d_mlp=128
)
BATCH = 64
HELD_OUT = 200
PRACTISED = 32
METHODS: dict[str, tuple[MoClipConfig | None, LogitsReplayConfig | None]] = {
  "AdamW": (None, None),
  "MoClip": (MoClipConfig(), None),
  "Replay": (None, LogitsReplayConfig()),
  "both": (MoClipConfig(), LogitsReplayConfig()),
}


# What fine-tuning forgets.


def moved(by: int) -> Callable[[str], str]:
  """Every digit moved on, mod 10."""
  return lambda text: "".join(str((int(digit) + by) % 10) for digit in text)


SKILLS: dict[str, Callable[[str], str]] = {"copy": moved(0), "next": moved(1), "prev": moved(-1)}
OLD, NEW = ("copy", "next"), "prev"


def problems(skill: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
  """(prompt, answer) pairs to learn from and to be measured on."""
  numbers = np.random.default_rng(0).permutation(1000)
  made = [(f"{skill} {n:03d}", SKILLS[skill](f"{n:03d}")) for n in numbers]
  return made[HELD_OUT:], made[:HELD_OUT]


def as_tasks(pairs: Sequence[tuple[str, str]]) -> list[Task]:
  return [
    Task(i, (Message("user", asked),), answer, "digits", (Message("assistant", answer),))
    for i, (asked, answer) in enumerate(pairs)
  ]


class Tuning:
  """Supervised steps on some problems."""

  def __init__(
    self,
    pairs: Sequence[tuple[str, str]],
    seed: int,
    steps: int,
    optimizer: OptimizerConfig,
    replay: LogitsReplayConfig | None = None,
    start_from: str | None = None,
  ):
    experiment = Experiment(
      name="forgetting",
      seed=seed,
      model=dataclasses.replace(MODEL),
      engine=EngineConfig(max_length=32),
      supervised=SupervisedStage(
        steps=steps,
        tasks_per_step=BATCH,
        row_length=256,
        microbatch_rows=4,
        optimizer=optimizer,
        token_sets=replay,
      ),
      evaluation=HeldOutConfig(tasks=0),
      start_from=start_from,
    )
    experiment.rollout = RolloutConfig(max_total_tokens=32, max_tokens_per_turn=16)
    self.tasks = as_tasks(pairs)
    extensions = Extensions(tasks=TaskSplits(self.tasks, ()))
    self.parts = build_parts(resolve(experiment), None, extensions)
    # No step of reinforcement learning will ask for this objective.
    self.learner = Learner(self.parts, supervised_objective)
    self.state = self.learner.first_state("supervised")
    self._rng = np.random.default_rng(seed)

  def step(self) -> None:
    chosen = self._rng.choice(len(self.tasks), BATCH, replace=False)
    self.state, _ = self.learner.supervised_step(self.state, [self.tasks[i] for i in chosen])

  def success(self, pairs: Sequence[tuple[str, str]]) -> float:
    """Share of the answers, their end included, of which each token is the likeliest."""
    chat = self.parts.chat
    prompts = [[i for s in chat.prompt(t.prompt) for i in s.ids] for t in as_tasks(pairs)]
    answers = [chat.assistant(Message("assistant", answer)) for _, answer in pairs]
    ids = np.array([p + a for p, a in zip(prompts, answers, strict=True)], np.int32)
    found = likeliest(self.learner.policy(self.state), ids)[:, len(prompts[0]) - 1 : -1]
    return float(np.mean(np.all(found == np.array(answers), axis=1)))


@jax.jit
def likeliest(policy: Any, ids: Any) -> Any:
  ones = jnp.ones_like(ids)
  places = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
  hidden = forward(policy, MODEL, ids, ones, places).hidden
  return jnp.argmax(compute_logits(policy, MODEL, hidden), axis=-1)


def run_forgetting() -> None:
  skills = {name: problems(name) for name in SKILLS}
  # By method and rate, one a seed: step, and success by skill.
  reached: dict[tuple[str, str], list[tuple[float, ...]]] = {}
  last: dict[tuple[str, str], list[tuple[float, ...]]] = {}
  for seed in range(_FIRST_SEED.value, _FIRST_SEED.value + _SEEDS.value):
    optimizer = OptimizerConfig(
      learning_rate=3e-3, schedule="cosine", warmup_steps=20, weight_decay=0.01
    )
    practised = [pair for name in OLD for pair in skills[name][0]]
    base = Tuning(practised, seed, _BASE.value, optimizer)
    for _ in range(_BASE.value):
      base.step()
    before = ", ".join(f"{k} {base.success(v[1]):.3f}" for k, v in skills.items())
    print(f"seed {seed}: before {before}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
      CheckpointStore(folder, 1, base.parts.base_identity).save(_BASE.value, base.state, {})
      for rate in _RATES.value:
        for method, (direction, replay) in METHODS.items():
          settings = OptimizerConfig(direction=direction, learning_rate=float(rate))
          start = os.path.join(folder, str(_BASE.value))
          run = Tuning(skills[NEW][0], seed, _STEPS.value, settings, replay, start)
          curve: list[tuple[float, ...]] = []
          for step in range(1, _STEPS.value + 1):
            run.step()
            if step % _EVERY.value == 0:
              curve.append((step, *(run.success(skills[k][1]) for k in (NEW, *OLD))))
          shown = " ".join("/".join(f"{v:.2f}" for v in row[1:]) for row in curve)
          print(f"  {method:7s} {rate}: {shown}", flush=True)
          first = next((row for row in curve if row[1] >= _REACHED.value), None)
          reached.setdefault((method, rate), []).extend([] if first is None else [first])
          last.setdefault((method, rate), []).append(curve[-1])
  print(f"\nwhere {NEW!r} reaches {_REACHED.value:.0%}: seeds, step, success; and at the last step")
  print(
    f"method    rate  seeds   step {NEW:>6} " + " ".join(f"{k:>6}" for k in OLD) + "  at the end"
  )
  for key, ends in last.items():
    firsts = reached[key]
    means = [statistics.fmean(v) for v in zip(*firsts, strict=True)] if firsts else [np.nan] * 4
    final = [statistics.fmean(v) for v in zip(*ends, strict=True)]
    numbers = " ".join(f"{v:6.3f}" for v in means[1:])
    print(
      f"{key[0]:7s} {key[1]:>6s} {len(firsts)} of {len(ends)} {means[0]:6.0f} {numbers}  "
      + " ".join(f"{v:6.3f}" for v in final[1:])
    )


# Which mistakes come again.


def sums() -> tuple[list[Task], list[Task]]:
  """Tasks of the warm start, and those that reinforcement learning practises."""
  tasks = []
  for i, number in enumerate(np.random.default_rng(0).permutation(1000).tolist()):
    asked = "+".join(f"{number:03d}")
    answer = str(sum(map(int, f"{number:03d}")))
    shown = (Message("assistant", mark_answer(answer)),)
    tasks.append(Task(i, (Message("user", asked),), answer, "sums", shown))
  return tasks[PRACTISED:], [dataclasses.replace(t, demonstration=()) for t in tasks[:PRACTISED]]


def meds_experiment(seed: int, meds: MedsConfig | None) -> Experiment:
  experiment = Experiment(
    name="meds",
    seed=seed,
    model=dataclasses.replace(MODEL),
    engine=EngineConfig(
      slots=64, max_length=48, chunk_tokens=4, extend_buckets=(16,), extend_rows=(16,)
    ),
    rollout=RolloutConfig(
      group_size=8, max_turns=1, max_tokens_per_turn=12, max_total_tokens=48, concurrency=64
    ),
    supervised=SupervisedStage(
      steps=_WARM.value,
      tasks_per_step=BATCH,
      row_length=256,
      microbatch_rows=8,
      optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=10),
    ),
    rl=RLStage(
      steps=_RL_STEPS.value,
      tasks_per_step=8,
      row_length=256,
      microbatch_rows=8,
      objective=preset("dapo"),
      shaping=meds,
      optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2),
    ),
    evaluation=HeldOutConfig(tasks=0),
    checkpoint=CheckpointConfig(every=10_000),
  )
  return experiment


def repeated(journal: pathlib.Path) -> list[tuple[float, float, int]]:
  """By step: share of right answers, share of the wrong that the task saw before, wrong ones."""
  steps: dict[int, list[Any]] = {}
  for kind, value in read_journal(journal):
    if kind == "trajectory":
      steps.setdefault(value.step, []).append(value)
  seen: dict[int, set[str]] = {}
  rows = []
  for step in sorted(steps):
    wrong = [t for t in steps[step] if t.reward_parts["exact_match"].value != 1.0]
    named = [t for t in wrong if t.answer is not None]
    again = [t.answer in seen.get(t.task_id, set()) for t in named]
    rows.append((1 - len(wrong) / len(steps[step]), float(np.mean(again or [0.0])), len(named)))
    for t in named:
      seen.setdefault(t.task_id, set()).add(t.answer)
  return rows


def run_meds() -> None:
  """Every task comes again each four steps."""
  learned, practised = sums()
  arms = {
    "DAPO": None,
    "MEDS": MedsConfig(marker=mark_answer(""), last_layers=2, radius=0.1),
  }
  table: dict[str, list[tuple[float, ...]]] = {}
  with tempfile.TemporaryDirectory() as folder:
    for seed in range(_FIRST_SEED.value, _FIRST_SEED.value + _SEEDS.value):
      warm = pathlib.Path(folder) / f"warm_{seed}"
      experiment = meds_experiment(seed, None)
      experiment.rl.steps = 0
      Run(
        experiment,
        warm,
        extensions=Extensions(tasks=TaskSplits(learned, ())),
        console=Console(file=io.StringIO()),
      ).train()
      for arm, meds in arms.items():
        directory = pathlib.Path(folder) / f"{arm}_{seed}"
        experiment = meds_experiment(seed, meds)
        experiment.supervised.steps = 0
        experiment.start_from = str(warm)
        Run(
          experiment,
          directory,
          extensions=Extensions(tasks=TaskSplits(practised, ())),
          console=Console(file=io.StringIO()),
        ).train()
        rows = repeated(directory / "journal.log")
        late = rows[-len(rows) // 3 :]
        named = sum(n for *_, n in late)
        values = (
          rows[0][0],
          statistics.fmean(right for right, _, _ in late),
          sum(share * n for _, share, n in late) / max(named, 1),
          statistics.fmean(
            row.get("meds/repeated", float("nan"))
            for row in read_metrics(directory / "metrics.jsonl")[-len(late) :]
          ),
        )
        print(f"  seed {seed} {arm:12s} " + " ".join(f"{v:.3f}" for v in values), flush=True)
        table.setdefault(arm, []).append(values)
  print("\nfirst step's success, late success, late repeated share of the wrong, meds/repeated")
  for arm, found in table.items():
    print(f"{arm:12s} " + " ".join(f"{statistics.fmean(v):.3f}" for v in zip(*found, strict=True)))


def main(argv: list[str]) -> None:
  del argv
  logging.set_verbosity(logging.WARNING)
  print(f"jax {jax.__version__} on {jax.default_backend()}, {os.cpu_count()} cores")
  parts = {"forgetting": run_forgetting, "meds": run_meds}
  for name in dict.fromkeys(_PARTS.value):
    started = time.process_time()
    parts[name]()
    print(f"{name}: {time.process_time() - started:.0f} CPU seconds\n", flush=True)


if __name__ == "__main__":
  app.run(main)
