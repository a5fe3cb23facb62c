"""The episodes that earned most, every few steps, for people to read.

Monitors only find known tricks; new ones are found by reading the episodes that earned most. Each
dump is one file, ``top_rewards/step_00000150.jsonl`` in the run's directory, one episode per line,
written completely or not at all; a step that is done again writes it again.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from agentjax.config import Config, NonNegativeInt, PositiveInt
from agentjax.files import write_atomically
from agentjax.rewards.formula import TERMS
from agentjax.rewards.monitor import FINDINGS
from agentjax.text.tokenizer import Tokenizer
from agentjax.trajectory.record import Task, Trajectory

FOLDER = "top_rewards"


@dataclasses.dataclass(unsafe_hash=True)
class SampleConfig(Config):
  """When episodes are written down, and how many; the figures are ours.

  Attributes:
    every: steps of reinforcement learning from one dump to the next; 0 writes none.
    count: episodes of a dump, at most.
    keep: dumps that are kept, the newest.
  """

  every: NonNegativeInt = 50
  count: PositiveInt = 8
  keep: PositiveInt = 100


def top_rewards(trajectories: Iterable[Trajectory], count: int) -> list[Trajectory]:
  """The episodes with the ``count`` highest valid rewards. Among equal rewards the first of each
  task comes before its second; then addresses decide. The order of the input does not matter."""
  valid = [t for t in trajectories if t.reward.value is not None]
  valid.sort(key=lambda t: (-_value(t), t.address))
  seen: collections.Counter[tuple[float, int]] = collections.Counter()
  ranks = {}
  for trajectory in valid:
    equal = (_value(trajectory), trajectory.task_id)
    ranks[trajectory.address] = seen[equal]
    seen[equal] += 1
  valid.sort(key=lambda t: (-_value(t), ranks[t.address], t.address))
  return valid[:count]


def write_samples(
  directory: pathlib.Path,
  step: int,
  trajectories: Sequence[Trajectory],
  *,
  tasks: Iterable[Task],
  tokenizer: Tokenizer,
  config: SampleConfig,
) -> pathlib.Path:
  """Writes the dump of a step; removes those of later steps, which a resumed run does again.

  Args:
    directory: of the run.
    step: of training.
    trajectories: all that the step sampled.
    tasks: they belong to, for the expected answers.
    tokenizer: turns ids into text, markup included.
    config: see SampleConfig.

  Returns:
    The file.
  """
  answers = {task.id: task.answer for task in tasks}
  rows = [
    _row(step, trajectory, tokenizer, answers.get(trajectory.task_id))
    for trajectory in top_rewards(trajectories, config.count)
  ]
  folder = directory / FOLDER
  path = folder / f"step_{step:08d}.jsonl"
  write_atomically(path, "".join(json.dumps(row, default=str) + "\n" for row in rows))
  files = sorted(folder.glob("step_*.jsonl"))
  earlier = [file for file in files if file.name <= path.name]
  for file in {*files} - {*earlier[-config.keep :]}:
    file.unlink()
  return path


def _row(
  step: int, trajectory: Trajectory, tokenizer: Tokenizer, expected: str | None
) -> dict[str, Any]:
  notes = ("reason", *sorted(trajectory.reward_parts), FINDINGS, TERMS)
  return {
    "step": step,
    "source": trajectory.source,
    "task": trajectory.task_id,
    "sample": trajectory.sample,
    "reward": trajectory.reward.value,
    "parts": {name: part.value for name, part in sorted(trajectory.reward_parts.items())},
    "status": str(trajectory.status),
    "answer": trajectory.answer,
    "expected": expected,
    "notes": {n: trajectory.metadata[n] for n in notes if n in trajectory.metadata},
    "segments": [
      {"owner": s.owner, "turn": s.turn, "text": tokenizer.decode(s.token_ids.tolist())}
      for s in trajectory.segments
    ],
    "tools": [
      {"turn": t.turn, "name": t.name, "arguments": dict(t.arguments), "status": t.status,
       "output": t.output}
      for t in trajectory.tools
    ],
  }  # fmt: skip


def _value(trajectory: Trajectory) -> float:
  assert trajectory.reward.value is not None
  return trajectory.reward.value
