"""Solutions in steps, a step a line: where they are read from, and how a reward model is asked."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl
from agentjax.rewards.judges import question_text
from agentjax.trajectory.record import Message, Task, Trajectory

LogProbs = Callable[[Sequence[Message], str, Sequence[str]], Awaitable[list[float]]]
"""``LetterJudge.log_probs``."""

RIGHT, WRONG = "Verdict: +", "Verdict: -"  # what a process reward model says of the last step


@dataclasses.dataclass(frozen=True)
class Solution:
  """A solution of a task.

  Attributes:
    id: of its own; the number of its line, or of its episode, from 0.
    task: what it solves.
    steps: its lines, without those that are blank.
  """

  id: int
  task: Task
  steps: tuple[str, ...]

  @property
  def text(self) -> str:
    """All steps."""
    return "\n".join(self.steps)


def steps_of(text: str) -> tuple[str, ...]:
  """The lines of a text that are not blank."""
  return tuple(line for line in text.split("\n") if line.strip())


def read_solutions(path: str | os.PathLike[str], tasks: Mapping[int, Task]) -> list[Solution]:
  """Solutions of a JSONL file: ``task``, the id of a task, and ``steps``, texts of one line each.

  Raises:
    DataError: a file that cannot be read, or a row that does not fit, with line and field.
  """
  found = []
  for line, row in read_jsonl(path):
    number, steps = row.get("task"), row.get("steps")
    task = tasks.get(number) if type(number) is int else None
    if task is None:
      raise DataError(
        f"'task' is {number!r}; allowed: the id of one of the {len(tasks)} tasks of config.data",
        path,
        line,
      )
    if not isinstance(steps, list) or not steps:
      raise DataError(f"'steps' is {steps!r}; allowed: a list of at least one text", path, line)
    for i, step in enumerate(steps):
      if not isinstance(step, str) or steps_of(step) != (step,):
        raise DataError(
          f"'steps'[{i}] is {step!r}; allowed: a text of one line, not blank", path, line
        )
    found.append(Solution(line - 1, task, tuple(steps)))
  return found


def solutions_of_episodes(
  episodes: Sequence[Trajectory], tasks: Mapping[int, Task], texts: Sequence[str | None]
) -> list[Solution]:
  """Solutions of stored episodes.

  Args:
    episodes: of the tasks.
    tasks: by id.
    texts: what the policy wrote in its only turn; None leaves an episode out.

  Raises:
    DataError: no episode is left, or one is of a task that is not there.
  """
  found = []
  for number, (episode, text) in enumerate(zip(episodes, texts, strict=True)):
    if text is None or not steps_of(text):
      continue
    if episode.task_id not in tasks:
      raise DataError(
        f"episode {number} is of task {episode.task_id}, which config.data does not have",
        "--trajectories",
      )
    found.append(Solution(number, tasks[episode.task_id], steps_of(text)))
  if not found:
    raise DataError(
      f"none of {len(episodes)} episodes is a solution; allowed: episodes of one turn of text",
      "--trajectories",
    )
  return found


def step_messages(question: str, steps: Sequence[str]) -> tuple[Message, ...]:
  """Asks a process reward model about the last of some steps; it answers RIGHT or WRONG."""
  return (Message("user", f"{question}\n\nSolution:\n" + "\n".join(steps)),)


async def step_scores(
  log_probs: LogProbs, prompt: Sequence[Message], steps: Sequence[str]
) -> Float[np.ndarray, " steps"]:
  """The probability that each step is right, of the two verdicts.

  Args:
    log_probs: of a judge that was trained on ``step_messages``.
    prompt: of the task.
    steps: of one solution.
  """
  question = question_text(prompt)
  opening = RIGHT[:-1]
  scores = []
  for count in range(1, len(steps) + 1):
    right, wrong = await log_probs(
      step_messages(question, steps[:count]), opening, (RIGHT[-1], WRONG[-1])
    )
    scores.append(1 / (1 + np.exp(np.clip(wrong - right, -700, 700))))
  return np.array(scores, np.float64)
