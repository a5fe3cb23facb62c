"""Completions after each step of a solution, and the score of a solution from its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

import numpy as np
from jaxtyping import Float

from agentjax.rewards.judges import question_key

Step = TypeVar("Step")
Aggregate = Literal["min", "product", "mean", "last"]


async def monte_carlo_steps(
  steps: Sequence[Step],
  complete: Callable[[Sequence[Step], int], Awaitable[bool | None]],
  *,
  completions: int = 8,
  key: int,
  concurrency: int = 16,
) -> Float[np.ndarray, "steps completions"]:
  """Plays ``completions`` completions after each step, for ``monte_carlo_labels``.

  Args:
    steps: of one solution.
    complete: (the steps so far, key) -> whether the completion succeeded; None without a verdict.
    completions: N; 8 in Math-Shepherd.
    key: with step and completion it addresses all randomness.
    concurrency: completions under way at a time.
  """
  limit = asyncio.Semaphore(concurrency)

  async def one(step: int, number: int) -> float:
    async with limit:
      succeeded = await complete(steps[: step + 1], question_key(key, step, number))
    return float("nan") if succeeded is None else float(succeeded)

  places = [(step, number) for step in range(len(steps)) for number in range(completions)]
  values = await asyncio.gather(*(one(*place) for place in places))
  return np.array(values, np.float64).reshape(len(steps), completions)


def solution_score(steps: Sequence[float] | np.ndarray, how: Aggregate = "min") -> float:
  """The score of a solution from those of its steps. "min": a chain is as good as its weakest
  step."""
  values = np.asarray(steps, np.float64)
  if not values.size:
    raise ValueError("a solution needs at least one step.")
  if how == "last":
    return float(values[-1])
  if how == "mean":
    return float(values.mean())
  return float(values.min() if how == "min" else values.prod())
