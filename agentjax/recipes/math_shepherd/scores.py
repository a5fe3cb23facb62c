"""Scores of solutions by a process reward model on disk."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Sequence

import numpy as np

from agentjax.files import write_atomically
from agentjax.models import score_responses
from agentjax.recipes.math_shepherd.solutions import Solution, read_solutions, step_scores
from agentjax.recipes.math_shepherd.steps import Aggregate, solution_score
from agentjax.training.build import Extensions, build_scoring
from agentjax.training.experiment import Experiment, resolve
from agentjax.training.model_pool import Policy, load_policy_with_chat
from agentjax.trajectory.record import Message


@dataclasses.dataclass(frozen=True)
class PolicyLogProbs:
  """Log-probs of continuations under a policy, as ``LetterJudge.log_probs`` has them.

  Opening and choice are encoded together, as in the replies that the policy was trained on.
  """

  policy: Policy

  async def __call__(
    self, messages: Sequence[Message], opening: str, choices: Sequence[str]
  ) -> list[float]:
    chat = self.policy.chat
    prompt = [i for span in chat.prompt(messages) for i in span.ids]
    replies = [chat.begun(opening + choice) for choice in choices]
    found = score_responses(self.policy.params, self.policy.model, [prompt] * len(replies), replies)
    return [float(one.log_probs.sum(dtype=np.float64)) for one in found]


def score_solutions(
  experiment: Experiment,
  output: str | os.PathLike[str],
  *,
  checkpoint: str,
  solutions: str,
  aggregate: Aggregate = "min",
  extensions: Extensions | None = None,
) -> tuple[int, int]:
  """Writes a JSONL file with the score of each solution; the best of each task has ``best`` true.

  Args:
    experiment: validated and frozen here; its data holds the tasks.
    output: file to write; it is written whole or not at all.
    checkpoint: of the process reward model.
    solutions: JSONL file of ``read_solutions``.
    aggregate: of the steps' scores.
    extensions: may bring tasks.

  Returns:
    How many solutions, and how many tasks they solve.

  Raises:
    CheckpointError: no model to load.
    DataError: tasks or solutions that cannot be read.
  """
  resolve(experiment)
  scoring = build_scoring(experiment, extensions or Extensions())
  asyncio.run(scoring.close())
  tasks = {task.id: task for task in (*scoring.tasks.train, *scoring.tasks.test)}
  found = read_solutions(solutions, tasks)
  ask = PolicyLogProbs(load_policy_with_chat(checkpoint, experiment))

  async def work() -> list[np.ndarray]:
    return [await step_scores(ask, one.task.prompt, one.steps) for one in found]

  scores = asyncio.run(work())
  whole = [solution_score(one, aggregate) for one in scores]
  best: dict[int, int] = {}
  for at, one in enumerate(found):
    first = best.setdefault(one.task.id, at)
    if whole[at] > whole[first]:
      best[one.task.id] = at
  rows = [
    _row(one, steps, score) | {"best": best[one.task.id] == at}
    for at, (one, steps, score) in enumerate(zip(found, scores, whole, strict=True))
  ]
  write_atomically(output, "".join(json.dumps(row) + "\n" for row in rows))
  return len(found), len(best)


def _row(solution: Solution, scores: np.ndarray, score: float) -> dict[str, object]:
  return {
    "id": solution.id,
    "task": solution.task.id,
    "steps": list(solution.steps),
    "scores": scores.tolist(),
    "score": score,
  }
