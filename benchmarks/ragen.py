r"""A policy that collapses on all of its groups and survives on those that tell it something.

  python benchmarks/ragen.py --part=collapse --out=/tmp/ragen
  python benchmarks/ragen.py --part=all --out=/tmp/ragen

A policy of 30 thousand parameters reads four letters and writes the letter after each. It is warmed
up on demonstrations that are wrong now and then: it reads its prompts and has something to learn.
Then comes GRPO with an entropy bonus. Of the training tasks ``signal`` are judged as they should be;
the others cannot be won ("hopeless": the reward is 0), or pay by chance whatever is answered
("noise"). Nothing in a prompt tells the kinds apart, and held-out tasks are of the first kind.

Hopeless groups have no advantage, so all that they add to the gradient is the bonus, which does not
look at the prompt: a step on all groups has the pull of the bonus 1 / signal times as strong, beside
what there is to learn, as one on the groups whose rewards spread (2604.06268).

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
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.console import Console

from agentjax.data import TaskSplits
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.engine import EngineConfig
from agentjax.envs import Action, Environment, Observation, Step
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

_FINISHED = "held_out.json"

Kind = Literal["signal", "hopeless", "noise"]

LETTERS = "abcdefgh"
LENGTH = 4
PAYS = 10.0  # for the right answer, as in Sokoban
WARM_STEPS = 400
TRAIN, TEST = 2048, 64
SIGNAL = 3 / 16  # of the training tasks
PATIENCE = 20  # steps without any group, of which some come by chance

SELECTIONS = {
  "all": SelectionConfig(),
  "top_p": SelectionConfig(rule="top_p", share=0.9, patience=PATIENCE),
  "top_p_softmax": SelectionConfig(
    rule="top_p_softmax", share=0.9, keep_zeros=True, patience=PATIENCE
  ),
  "top_k": SelectionConfig(rule="top_k", share=0.25, keep_zeros=True, patience=PATIENCE),
}


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
    shown = np.where(random.random(LENGTH) < 0.1, random.integers(len(LETTERS), size=LENGTH), answer)
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
      diagnostics=DiagnosticsConfig(information_every=5, prompts=8, samples=8),
    ),
    evaluation=HeldOutConfig(
      tasks=TEST, every=5, samples=0, success_part="environment", success_threshold=PAYS
    ),
    checkpoint=CheckpointConfig(every=10_000),
    start_from=start,
  )


def run(setting: Setting, out: pathlib.Path, steps: int, rate: float) -> list[dict[str, Any]]:
  """Metrics of the steps of a run, which is done if ``out`` does not hold it."""
  warm = out / f"warm_{setting.seed}"
  start: str | None = None
  for directory in (warm, out / setting.name):
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
  return [r for r in read_metrics(out / setting.name / "metrics.jsonl") if r["stage"] == "rl"]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rules", nargs="+", default=["all","top_p"])
  parser.add_argument("--strengths", nargs="+", type=float, default=[.06])
  parser.add_argument("--seeds", nargs="+", type=int, default=[0])
  parser.add_argument("--other", default="hopeless")
  parser.add_argument("--noise", type=float, default=0.0)
  parser.add_argument("--steps", type=int, default=80)
  parser.add_argument("--rate", type=float, default=4e-4)
  parser.add_argument("--out", type=pathlib.Path, required=True)
  o = parser.parse_args()
  import time
  for seed in o.seeds:
   for b in o.strengths:
    for rule in o.rules:
      t=time.time()
      s=Setting(rule,b,o.other,o.noise,seed)
      rows=run(s,o.out,o.steps,o.rate)
      print(s.name, round(time.time()-t,1), "s; cpu", round(time.process_time(),1))
      print("  eval", *(f"{r['eval/greedy']:.2f}" for r in rows if "eval/greedy" in r))
      print("  H", *(f"{r['collapse/entropy']:.2f}" for r in rows[::4]))
      print("  rew", *(f"{r['reward/mean']:.2f}" for r in rows[::4]))
      print("  std", *(f"{r['collapse/reward_std']:.2f}" for r in rows[::4]))
      print("  ret", *(f"{r['information/first_turn_retrieval_accuracy']:.2f}/{r['information/first_turn_sequence']:.2f}" for r in rows if "information/first_turn_sequence" in r),flush=True)

if __name__ == "__main__":
  main()
