"""What stages are paid: hypotheses, summaries, test generators, solutions, and their length.

Reference: 2604.02721 (GrandCode), known to us from second-hand descriptions. Published: the share
of checks that a hypothesis passes, ``beta (S(x, h) - S(x, none))`` on top, and the order of a
solution's reward (does not compile 0, wrong 0, late .1, else by its speed beside brute force). The
formulas of speed and of the penalty of length are not published; those here are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

LEVELS = 5  # of difficulty; 1 is easy

Outcome = Literal["broken", "wrong", "late", "right"]


def hypothesis_reward(passed: int, checks: int, *, caught: int, decoys: int) -> float:
  """``passed / checks``, the share of checks that a conjecture passes.

  A conjecture that accepts every wrong result is true and says nothing, so it earns 0 (ours).

  Args:
    passed, checks: right results of small inputs that it accepts, and how many there are.
    caught, decoys: wrong results that it refuses, and how many there are.
  """
  if not checks or (decoys and not caught):
    return 0.0
  return passed / checks


def joint_reward(with_it: float, without: Sequence[float], beta: float) -> float:
  """``beta (S(x, h) - S(x, none))``: what a conjecture is paid besides in the joint phase.

  Args:
    with_it: score of the solver that saw it.
    without: scores of solvers that saw none; without any the term is 0.
    beta: not published.
  """
  return beta * (with_it - sum(without) / len(without)) if without else 0.0


def solution_reward(
  outcome: Outcome,
  *,
  seconds: float = 0.0,
  brute_seconds: float = 0.0,
  full_speedup: float = 10.0,
  late: float = 0.1,
  right: float = 0.5,
) -> float:
  """0 for code that does not run or is wrong, ``late`` for a time-out, else by its speed.

  ``right + (1 - right) log(speed-up) / log(full_speedup)``, the second factor cut to 0 to 1, where
  the speed-up is beside brute force on a large input. Without times of both it is 1. Ours, but for
  the order and ``late``.
  """
  if outcome in ("broken", "wrong"):
    return 0.0
  if outcome == "late":
    return late
  if seconds <= 0 or brute_seconds <= 0:
    return 1.0
  gain = math.log(brute_seconds / seconds) / math.log(full_speedup)
  return right + (1 - right) * min(1.0, max(0.0, gain))


def generator_reward(
  valid: int, proposed: int, separated: int, wrong: int, *, invalid_cost: float = 0.5
) -> float:
  """The share of wrong candidates that a generator's valid inputs separate, less what invalid ones
  cost; at least 0. Without wrong candidates only the cost counts. Ours.

  Args:
    valid, proposed: inputs.
    separated, wrong: candidates.
    invalid_cost: of a generator without any valid input.
  """
  if not proposed or not valid:
    return 0.0
  share = separated / wrong if wrong else 1.0
  return max(0.0, share - invalid_cost * (1 - valid / proposed))


def summary_reward(score: float, tokens: int, budget: int, *, cost: float = 0.2) -> float:
  """The score that a reader of the summary alone reaches, less the cost of its length; at least 0.

  A summary within ``budget`` tokens costs nothing; one of twice as many, or longer, ``cost``. Ours.
  """
  over = min(1.0, max(0.0, tokens / budget - 1))
  return max(0.0, score - cost * over)


def difficulty(successes: float) -> int:
  """The level of a problem, 1 to 5, from the share of right answers of its group: each level covers
  a fifth, and 5 is almost never solved. The source has a trained classifier; this is ours."""
  return min(LEVELS, LEVELS - math.ceil(LEVELS * successes - 1e-9) + 1)


def length_penalty(
  tokens: float, level: int, *, budget: float, weight: float, growth: float = 2.0
) -> float:
  """What an answer's length costs: nothing up to the level's budget, ``weight`` at twice as much.

  The budget of level 1 is ``budget``, and every further level has ``growth`` times as much: long
  thoughts cost most on easy problems. Ours.
  """
  if not 1 <= level <= LEVELS:
    raise ValueError(f"level={level}; allowed: 1 to {LEVELS}")
  own = budget * growth ** (level - 1)
  return weight * min(1.0, max(0.0, tokens / own - 1))
