r"""A policy that collapses on all of its groups and survives on those that tell it something.

  python benchmarks/ragen.py --part=collapse --out=/tmp/ragen
  python benchmarks/ragen.py --part=all --out=/tmp/ragen

A policy of 33 thousand parameters reads four letters and writes the letter after each. It is warmed
up on demonstrations that are wrong now and then: it reads its prompts and has something to learn.
Then comes GRPO with an entropy bonus. Of the training tasks the share SIGNAL is judged as it should
be; the others cannot be won ("hopeless": the reward is 0), or pay by chance whatever is answered
("noise"). Nothing in a prompt tells the kinds apart, and held-out tasks are of the first kind.

Hopeless groups have no advantage, so all that they add to the gradient is the bonus, which does not
ask for the prompt. In a step on all groups the bonus weighs 1 / SIGNAL times as much, beside what
there is to learn, as in a step on the groups whose rewards spread (2604.06268).

Parts: "collapse" compares the rules at one strength of the bonus; "sweep" other strengths; "noise"
puts rewards by chance in the place of hopeless tasks; "signs" reads what the finished runs left and
says when the warnings came. Finished runs are kept in ``out`` and not run again. Figures belong to
this toy.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import json
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.console import Console

from agentjax.data import TaskSplits
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.engine import EngineConfig
from agentjax.models import ModelConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
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
from agentjax.training.diagnostics import CollapseMonitor, DiagnosticsConfig
from agentjax.training.metrics import read_metrics
from agentjax.training.selectors import SelectionConfig
from agentjax.trajectory.record import Message, Reward, Task
from agentjax.world import Action, Environment, Observation, Step

_FINISHED = "held_out.json"
_LOST = 0.5  # of the warm start's success: a run that has no more has collapsed
_KEPT = 0.9  # of the first retrieval accuracy, which a run that survives holds

Kind = Literal["signal", "hopeless", "noise"]

LETTERS = "abcdefgh"
LENGTH = 4
PAYS = 10.0  # for the right answer, as in Sokoban
WARM_STEPS = 400
TRAIN, TEST = 2048, 64
SIGNAL = 3 / 16  # of the training tasks
EVERY = 5  # steps between measurements
PATIENCE = 20  # steps without any group, of which some come by chance

SELECTIONS = {
  "all": SelectionConfig(),
  "top_p": SelectionConfig(rule="top_p", share=0.9, patience=PATIENCE),
  "top_p_softmax": SelectionConfig(
    rule="top_p_softmax", share=0.9, keep_zeros=True, patience=PATIENCE
  ),
  "top_k": SelectionConfig(rule="top_k", share=0.25, keep_zeros=True, patience=PATIENCE),
}
WATCHED = DiagnosticsConfig(information_every=EVERY, prompts=8, samples=8, window=5)


class Setting(NamedTuple):
  """What tells one run from another."""

  rule: str
  strength: float  # of the entropy bonus
  other: Kind = "hopeless"
  noise: float = 0.0  # what a coin pays in a task of kind "noise"
  seed: int = 0

  @property
  def name(self) -> str:
    kind = self.other if self.other == "hopeless" else f"{self.other}{self.noise:g}"
    return f"{kind}_{self.strength:g}_{self.rule}_{self.seed}"


_MAIN = 0.06
PARTS = {
  "collapse": [Setting(rule, _MAIN) for rule in SELECTIONS],
  "sweep": [Setting(rule, b) for b in (0.02, 0.2, 0.6) for rule in ("all", "top_p")],
  "noise": [Setting(rule, 0.02, "noise", 1.0) for rule in ("all", "top_p", "top_k")],
}


class NextLetters(Environment):
  """One turn: the letter after each letter of the prompt, around the end of the alphabet."""

  def __init__(self, noise: float):
    self._noise = noise

  async def reset(self, task: Task, key: int) -> Observation:
    self._task, self._random = task, np.random.default_rng(key)
    return Observation(task.prompt)

  async def step(self, action: Action) -> Step:
    kind: Kind = self._task.metadata["kind"]
    reward = 0.0
    if kind == "signal":
      reward = PAYS if action.text == self._task.answer else 0.0
    elif kind == "noise":
      reward = self._noise * float(self._random.random() < 0.5)
    return Step(Observation(()), Reward(reward), terminated=True)

  def snapshot(self) -> bytes:
    return b""  # nothing happens before the only turn

  def restore(self, state: bytes) -> None:
    pass


def make_tasks(other: Kind, seed: int) -> TaskSplits:
  """Training tasks of two kinds and held-out tasks of one.

  Each of a demonstration's letters is drawn anew in one case of ten, and the last one is left as it
  was in half: the warm policy is right about the first three and unsure of the last.
  """
  random = np.random.default_rng(seed)
  numbers = random.permutation(len(LETTERS) ** LENGTH)[: TRAIN + TEST]
  tasks = []
  for i, number in enumerate(numbers):
    letters = np.array(np.unravel_index(number, (len(LETTERS),) * LENGTH))
    answer = (letters + 1) % len(LETTERS)
    shown = np.where(
      random.random(LENGTH) < 0.1, random.integers(len(LETTERS), size=LENGTH), answer
    )
    if random.random() < 0.5:
      shown[-1] = letters[-1]
    kind: Kind = "signal" if i >= TRAIN or i < SIGNAL * TRAIN else other
    tasks.append(
      Task(
        id=i if i < TRAIN else FIRST_TEST_ID + i,
        prompt=(Message("user", _text(letters)),),
        answer=_text(answer),
        source="next_letters",
        demonstration=(Message("assistant", _text(shown)),),
        metadata={"kind": kind},
      )
    )
  return TaskSplits(tasks[:TRAIN], tasks[TRAIN:])


def _text(letters: Iterable[int]) -> str:
  return "".join(LETTERS[i] for i in letters)


def experiment(setting: Setting, steps: int, rate: float, start: str | None) -> Experiment:
  """The warm start where ``start`` is None, else reinforcement learning from there."""
  return Experiment(
    name="ragen_toy",
    seed=setting.seed,
    model=ModelConfig(
      vocab_size=264, d_model=32, pattern="*-*-", num_heads=2, num_kv_heads=2, head_dim=16, d_mlp=64
    ),
    reward=RewardConfig(parts=("environment",)),
    engine=EngineConfig(
      slots=128,
      max_length=32,
      chunk_tokens=6,
      extend_buckets=(16,),
      extend_rows=(16,),
      host_turns=2,
    ),
    rollout=RolloutConfig(
      group_size=8, max_turns=1, max_tokens_per_turn=6, max_total_tokens=32, concurrency=128
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
      microbatch_rows=16,
      objective=ObjectiveConfig(
        AdvantageConfig(), PolicyLossConfig(entropy_coefficient=setting.strength)
      ),
      selection=dataclasses.replace(SELECTIONS[setting.rule]),
      optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=2),
      diagnostics=dataclasses.replace(WATCHED),
    ),
    evaluation=HeldOutConfig(
      tasks=TEST, every=EVERY, samples=0, success_part="environment", success_threshold=PAYS
    ),
    checkpoint=CheckpointConfig(every=10_000),
    start_from=start,
  )


def run(
  setting: Setting, out: pathlib.Path, steps: int, rate: float
) -> tuple[list[dict[str, Any]], float]:
  """Metrics of a run's steps and held-out success before them; done if ``out`` has it not."""
  warm = out / f"warm_{setting.seed}"
  start: str | None = None
  run_directory = out / setting.name
  for directory in (warm, run_directory):
    made = experiment(setting, steps, rate, start)
    if not (directory / _FINISHED).exists():
      extensions = Extensions(
        tasks=make_tasks(setting.other, setting.seed),
        make_environment=lambda task: NextLetters(setting.noise),
      )
      console = Console(file=io.StringIO())
      report = Run(made, directory, extensions=extensions, console=console).train()
      held_out = {"before": report.before.get("greedy"), "after": report.after.get("greedy")}
      (directory / _FINISHED).write_text(json.dumps(held_out))
    start = str(warm)
  rows = [r for r in read_metrics(run_directory / "metrics.jsonl") if r["stage"] == "rl"]
  return rows, json.loads((run_directory / _FINISHED).read_text())["before"]


class Outcome(NamedTuple):
  """Of one run; pairs are means over the first and the last fifth of its steps.

  Attributes:
    before: greedy success on the held-out tasks after the warm start.
    after: likewise, mean over the evaluations of the last fifth.
    retrieval: how often an answer's own prompt, of eight, makes it likeliest.
    entropy: of a drawn token, nats, over all groups.
    spread: of rewards in a group, over all groups.
  """

  before: float
  after: float
  retrieval: tuple[float, float]
  entropy: tuple[float, float]
  spread: tuple[float, float]

  @property
  def verdict(self) -> str:
    if self.after >= self.before and self.retrieval[1] >= _KEPT * self.retrieval[0]:
      return "survives"
    return "collapses" if self.after <= _LOST * self.before else "is harmed"


def outcome(rows: Sequence[Mapping[str, Any]], before: float) -> Outcome:
  """What became of a run, from the metrics of its steps."""
  fifth = max(EVERY, len(rows) // 5)

  def mean(name: str, part: Sequence[Mapping[str, Any]]) -> float:
    return statistics.fmean(r[name] for r in part if r.get(name) is not None)

  def ends(name: str) -> tuple[float, float]:
    return mean(name, rows[:fifth]), mean(name, rows[-fifth:])

  return Outcome(
    before,
    mean("eval/greedy", rows[-fifth:]),
    ends("information/first_turn_retrieval_accuracy"),
    ends("collapse/entropy"),
    ends("collapse/reward_std"),
  )


def fall(rows: Sequence[Mapping[str, Any]], level: float) -> int | None:
  """The first step from which held-out success stays at or below ``level``."""
  known = [(r["step"], r["eval/greedy"]) for r in rows if r.get("eval/greedy") is not None]
  low = list(itertools.takewhile(lambda pair: pair[1] <= level, reversed(known)))
  return low[-1][0] if low else None


def first_signs(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
  """The step at which each sign of collapse is first seen."""
  monitor = CollapseMonitor(WATCHED, SelectionConfig(patience=PATIENCE))
  found: dict[str, int] = {}
  for row in rows:
    for sign in monitor.observe(row):
      found.setdefault(sign.name, row["step"])
  return found


def print_outcomes(part: str, settings: Sequence[Setting], options: argparse.Namespace) -> None:
  """Does the runs that are missing and prints a line of each."""
  print(
    f"\n{part}: held-out greedy success, warm start and last fifth of steps; first and last fifth"
  )
  for setting in settings:
    rows, before = run(setting, options.out, options.steps, options.rate)
    found = outcome(rows, before)
    pairs = {"retrieval": found.retrieval, "entropy": found.entropy, "spread": found.spread}
    rest = "  ".join(f"{name} {one:.2f} to {two:.2f}" for name, (one, two) in pairs.items())
    success = f"{found.before:.2f} to {found.after:.2f}"
    print(f"{setting.name:>28}: {success}  {rest}  {found.verdict}", flush=True)


def print_signs(settings: Sequence[Setting], options: argparse.Namespace) -> None:
  """When success fell, and when each sign was first seen, of the runs that were done."""
  print(
    "\nsigns: first step of each, and from when held-out success is half, and a tenth, of the warm"
  )
  for setting in settings:
    if not (options.out / setting.name / _FINISHED).exists():
      continue
    rows, before = run(setting, options.out, options.steps, options.rate)
    found = outcome(rows, before)
    half, gone, signs = fall(rows, 0.5 * before), fall(rows, 0.1 * before), first_signs(rows)
    told = ", ".join(f"{name} {step}" for name, step in sorted(signs.items(), key=lambda s: s[1]))
    print(
      f"{setting.name:>28}: {found.verdict}, half {half}, tenth {gone}; {told or 'no sign'}",
      flush=True,
    )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--part", choices=[*PARTS, "signs", "all"], default="collapse")
  parser.add_argument("--steps", type=int, default=80)
  parser.add_argument("--rate", type=float, default=4e-4)
  parser.add_argument("--seeds", type=int, help="of each run; 3 for collapse and 2 for the others")
  parser.add_argument("--out", type=pathlib.Path, required=True)
  options = parser.parse_args()
  every: list[Setting] = []
  for part, cases in PARTS.items():
    seeds = options.seeds or (3 if part == "collapse" else 2)
    settings = [case._replace(seed=seed) for case in cases for seed in range(seeds)]
    every += settings
    if options.part in (part, "all"):
      print_outcomes(part, settings, options)
  if options.part in ("signs", "all"):
    print_signs(every, options)


if __name__ == "__main__":
  main()
