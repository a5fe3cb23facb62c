"""A panel of judges: its median or, against a policy that has learned to please one, its minimum.

The pessimistic minimum is MaxProof's (2606.13473).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from agentjax.rewards.judges import Judge, JudgeUnavailableError
from agentjax.trajectory.record import Reward

Combine = Literal["median", "min", "mean"]

UNAVAILABLE = "judge unavailable"  # so begins the reason of a verdict that could not be asked for


def combine_verdicts(verdicts: Sequence[Reward], how: Combine) -> Reward:
  """Median, minimum or mean of the valid verdicts; invalid unless more than half are valid.

  The quorum is ours: otherwise a few readable replies would decide.
  """
  valid = [v.value for v in verdicts if v.value is not None]
  if 2 * len(valid) <= len(verdicts):
    reasons = "; ".join(sorted({v.reason for v in verdicts if v.reason}))
    return Reward.invalid(f"{len(valid)} of {len(verdicts)} judges gave a verdict: {reasons}")
  if how == "min":
    return Reward(min(valid))
  return Reward(statistics.median(valid) if how == "median" else statistics.fmean(valid))


async def panel(
  judges: Sequence[Judge], question: Callable[[Judge], Awaitable[Reward]], how: Combine = "median"
) -> Reward:
  """Asks all judges the same question at once and combines their verdicts.

  Args:
    judges: of different families, so that they do not share their weaknesses (2605.12474).
    question: asks one judge. A judge that stays unavailable gives no verdict.
    how: see ``combine_verdicts``.
  """
  if not judges:
    raise ValueError("a panel needs at least one judge.")

  async def one(judge: Judge) -> Reward:
    try:
      return await question(judge)
    except JudgeUnavailableError as error:
      return Reward.invalid(f"{UNAVAILABLE}: {error}")

  return combine_verdicts(await asyncio.gather(*map(one, judges)), how)
