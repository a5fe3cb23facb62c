r"""Rewards of single tokens by a reward model: none, one trained beforehand, one trained on line.

  JAX_PLATFORMS=cpu python benchmarks/process_rewards.py --out=/tmp/process

A policy of 33 thousand parameters reads four letters and writes the letter after each; only a
wholly right answer pays 1. Demonstrations of its warm start leave a letter as it is in two cases of
ten, so that it is right about one answer in three. Then come as many steps of PRIME's objective
(2502.01456) with every kind of process reward:

  none     outcomes against the others of the group
  frozen   and log-ratios of a model that was trained for as many steps beforehand, on as many
           episodes again (preset "implicit_prm")
  double   and those of a model that learns on line and then rewards (``OnlineConfig``)
  single   likewise, rewarding before it learns

Printed are, over the seeds, the share of right answers: in training, of all steps and of the last
fifth; on held-out tasks, drawn at temperature 1 and greedy. "accuracy" is that of the model on
the episodes of the last fifth, before it learns from them, and beside it the share of episodes that
end like most. Finished runs are kept in ``out``. Figures belong to this toy.
"""

from __future__ import annotations

import argparse
import collections
import io
import json
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging
from rich.console import Console

from agentjax.data import TaskSplits
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.engine import EngineConfig
from agentjax.models import ModelConfig
from agentjax.objectives import preset
from agentjax.recipes.prime import OnlineConfig, ProcessConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.signals.teacher import TeacherConfig
from agentjax.training import (
  Experiment,
  Extensions,
  HeldOutConfig,
  OptimizerConfig,
  RLStage,
  Run,
  SupervisedStage,
)
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.record import Message, Reward, Task
from agentjax.world import Action, Environment, Observation, Step

_FINISHED = "held_out.json"
_KINDS = ("none", "frozen", "double", "single")

LETTERS = "abcdefgh"
LENGTH = 4
TRAIN, TEST = 2048, 64
WARM_STEPS = 600


class Setting(NamedTuple):
  """What tells one run from another."""

  kind: str
  seed: int
  steps: int
  rate: float  # of the policy
  model_rate: float  # of the reward model
  beta: float
  left: float  # share of a demonstration's letters that stay as they are

  @property
  def name(self) -> str:
    own = () if self.kind == "none" else (f"{self.model_rate:g}", f"{self.beta:g}")
    rest = (f"{self.rate:g}", str(self.steps), f"{self.left:g}", str(self.seed))
    return "_".join((self.kind, *own, *rest))


class NextLetters(Environment):
  """One turn; pays 1 for the letter after each letter of the prompt, around the alphabet's end."""

  async def reset(self, task: Task, key: int) -> Observation:
    del key
    self._answer = task.answer
    return Observation(task.prompt)

  async def step(self, action: Action) -> Step:
    return Step(Observation(()), Reward(float(action.text == self._answer)), terminated=True)

  def snapshot(self) -> bytes:
    return b""  # nothing happens before the only turn

  def restore(self, state: bytes) -> None:
    del state


def make_tasks(seed: int, left: float) -> TaskSplits:
  """Different prompts, in training and held out."""
  random = np.random.default_rng(seed)
  numbers = random.choice(len(LETTERS) ** LENGTH, TRAIN + TEST, replace=False)
  tasks = []
  for i, number in enumerate(numbers):
    letters = np.array(np.unravel_index(number, (len(LETTERS),) * LENGTH))
    answer = (letters + 1) % len(LETTERS)
    shown = np.where(random.random(LENGTH) < left, letters, answer)
    tasks.append(
      Task(
        id=i if i < TRAIN else FIRST_TEST_ID + i,
        prompt=(Message("user", _text(letters)),),
        answer=_text(answer),
        source="next_letters",
        demonstration=(Message("assistant", _text(shown)),),
      )
    )
  return TaskSplits(tasks[:TRAIN], tasks[TRAIN:])


def _text(letters: Iterable[int]) -> str:
  return "".join(LETTERS[i] for i in letters)


def experiment(seed: int, steps: int, rate: float, start: str | None) -> Experiment:
  """The warm start where ``start`` is None, else outcomes alone from there."""
  objective = preset("prime")
  objective.advantage.credit = "broadcast"  # until there is a reward a token
  return Experiment(
    name="process_rewards_toy",
    seed=seed,
    model=ModelConfig(
      vocab_size=264, d_model=32, pattern="*-*-", num_heads=2, num_kv_heads=2, head_dim=16, d_mlp=64
    ),
    reward=RewardConfig(parts=("environment",)),
    engine=EngineConfig(
      slots=128,
      max_length=32,
      chunk_tokens=LENGTH + 2,
      extend_buckets=(16,),
      extend_rows=(16,),
      host_turns=2,
    ),
    rollout=RolloutConfig(
      group_size=8,
      max_turns=1,
      max_tokens_per_turn=LENGTH + 2,
      max_total_tokens=32,
      concurrency=128,
    ),
    supervised=SupervisedStage(
      steps=0 if start else WARM_STEPS,
      tasks_per_step=64,
      row_length=32,
      microbatch_rows=32,
      optimizer=OptimizerConfig(learning_rate=5e-3, schedule="cosine", warmup_steps=5),
    ),
    rl=RLStage(
      steps=steps if start else 0,
      tasks_per_step=16,
      row_length=32,
      microbatch_rows=32,
      objective=objective,
      optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=2),
    ),
    evaluation=HeldOutConfig(
      tasks=TEST, samples=8, pass_at=(8,), success_part="environment", success_threshold=1.0
    ),
    checkpoint=CheckpointConfig(every=10_000),
    start_from=start,
  )


def _train(made: Experiment, left: float, directory: pathlib.Path) -> dict[str, float]:
  """Held-out success before and after, of a run that is done if it was not yet."""
  file = directory / _FINISHED
  if not file.exists():
    extensions = Extensions(
      tasks=make_tasks(made.seed, left), make_environment=lambda task: NextLetters()
    )
    console = Console(file=io.StringIO())
    report = Run(made, directory, extensions=extensions, console=console).train()
    found = {
      f"{when}_{name}": values[name]
      for when, values in (("before", report.before), ("after", report.after))
      for name in ("greedy", "avg@8")
      if values
    }
    file.write_text(json.dumps(found))
  return json.loads(file.read_text())


def run(setting: Setting, out: pathlib.Path) -> tuple[list[dict[str, float]], dict[str, float]]:
  """Metrics of a run's steps, and held-out success."""
  warm = out / f"warm_{setting.left:g}_{setting.seed}"
  _train(experiment(setting.seed, 0, setting.rate, None), setting.left, warm)
  made = experiment(setting.seed, setting.steps, setting.rate, str(warm))
  optimizer = OptimizerConfig(learning_rate=setting.model_rate, warmup_steps=2)
  if setting.kind == "frozen":
    first = experiment(setting.seed, setting.steps, setting.model_rate, str(warm))
    first.rl.objective = preset("implicit_prm")
    first.rl.objective.preference.beta = setting.beta
    first.rl.old_log_probs = "recomputed"
    model = out / f"model_{setting.name}"
    _train(first, setting.left, model)
    made.rl.process = ProcessConfig(model=TeacherConfig(str(model)))
  elif setting.kind != "none":
    made.rl.process = ProcessConfig(online=OnlineConfig(optimizer, forward=setting.kind))
  if made.rl.process is not None:
    made.rl.objective.advantage.credit = "reward_to_go"
    made.rl.process.beta, made.rl.process.centre = setting.beta, "leave_one_out"
  held_out = _train(made, setting.left, out / setting.name)
  rows = read_metrics(out / setting.name / "metrics.jsonl")
  return [row for row in rows if row["stage"] == "rl"], held_out


def print_line(kind: str, settings: Sequence[Setting], out: pathlib.Path) -> None:
  """Does the runs that are missing and prints their means, and in brackets each."""

  def told(values: Sequence[float]) -> str:
    every = " ".join(f"{v:.2f}" for v in values)
    return f"{statistics.fmean(values):.3f} ({every})"

  columns: dict[str, list[float]] = collections.defaultdict(list)
  for setting in settings:
    rows, held_out = run(setting, out)
    late = rows[-max(1, len(rows) // 5) :]
    success = [row["reward/mean"] for row in late]
    columns["training, all steps"].append(statistics.fmean(r["reward/mean"] for r in rows))
    columns["last fifth"].append(statistics.fmean(success))
    columns["held out, drawn"].append(held_out["after_avg@8"])
    columns["greedy"].append(held_out["after_greedy"])
    if "process/accuracy" in rows[-1]:
      columns["accuracy"].append(statistics.fmean(row["process/accuracy"] for row in late))
      columns["most"].append(statistics.fmean(max(s, 1 - s) for s in success))
  print(f"{kind:>7}: " + "; ".join(f"{k} {told(v)}" for k, v in columns.items()), flush=True)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=list(_KINDS))
  parser.add_argument("--steps", type=int, default=60)
  parser.add_argument("--rate", type=float, default=3e-4, help="of the policy")
  parser.add_argument("--model_rate", type=float, default=1e-4, help="of the reward model")
  parser.add_argument("--beta", type=float, default=0.05)
  parser.add_argument("--left", type=float, default=0.2, help="of a demonstration's letters")
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--out", type=pathlib.Path, required=True)
  options = parser.parse_args()
  rest = options.steps, options.rate, options.model_rate, options.beta, options.left
  print(
    f"steps {options.steps}, rate {options.rate:g}, model {options.model_rate:g}, "
    f"beta {options.beta:g}; mean (each seed)"
  )
  for kind in options.kinds:
    print_line(kind, [Setting(kind, seed, *rest) for seed in range(options.seeds)], options.out)


if __name__ == "__main__":
  logging.set_verbosity(logging.ERROR)  # signs of collapse are part of the figures
  main()
