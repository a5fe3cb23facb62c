r"""Process rewards: a number for every step of an episode. Numpy on the host; nothing is trained.

* Monte-Carlo labels (Math-Shepherd, 2312.08935): from each step N completions are played; hard 1
  if any of them succeeds, soft the share that does. A solution scores the least of its steps.
* Implicit rewards (PRIME, 2502.01456): ``r_t = beta (log pi_phi - log pi_ref)`` of the tokens
  taken, where pi_phi was trained on outcomes alone (``objectives.preference``, preset
  "implicit_prm").
* Progress advantages (2606.26080): the same difference between the policy that reinforcement
  learning made and the one it started from recovers the optimal advantage; nothing else is
  trained.
* AgentPRM (2511.08325): labels for promise Q and progress A by temporal differences and GAE over
  rollouts, in the place of Monte Carlo.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

import numpy as np
from jaxtyping import Float, Int

from agentjax.rewards.judges import question_key
from agentjax.trajectory.record import Trajectory

Step = TypeVar("Step")


def monte_carlo_labels(
  successes: Float[np.ndarray, "steps completions"], kind: Literal["hard", "soft"]
) -> Float[np.ndarray, " steps"]:
  """Labels of the steps: "hard" 1 where any completion succeeded, "soft" the share of them.

  Args:
    successes: 0 or 1; NaN for a completion without a verdict, which is left out.
    kind: see above.

  Returns:
    One label a step; NaN where no completion has a verdict.
  """
  values = np.asarray(successes, np.float64)
  known = ~np.isnan(values)
  count, total = known.sum(axis=1), np.where(known, values, 0).sum(axis=1)
  label = (total > 0).astype(np.float64) if kind == "hard" else total / np.maximum(count, 1)
  return np.where(count > 0, label, np.nan)


async def monte_carlo_steps(
  steps: Sequence[Step],
  complete: Callable[[Sequence[Step], int], Awaitable[bool | None]],
  *,
  completions: int = 8,
  key: int,
  concurrency: int = 16,
) -> Float[np.ndarray, "steps completions"]:
  """Plays ``completions`` completions from behind every step; what ``monte_carlo_labels`` takes.

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


def solution_score(
  steps: Sequence[float] | np.ndarray, how: Literal["min", "product", "mean", "last"] = "min"
) -> float:
  """The score of a solution from those of its steps. A chain is as good as its weakest step."""
  values = np.asarray(steps, np.float64)
  if not values.size:
    raise ValueError("a solution needs at least one step.")
  if how == "last":
    return float(values[-1])
  if how == "mean":
    return float(values.mean())
  return float(values.min() if how == "min" else values.prod())


def log_ratio_rewards(
  log_probs: Float[np.ndarray, " tokens"],
  reference_log_probs: Float[np.ndarray, " tokens"],
  *,
  beta: float,
) -> Float[np.ndarray, " tokens"]:
  """``beta (log pi - log pi_ref)`` of the tokens taken, nats.

  With pi a reward model trained on outcomes: implicit process rewards. With pi the policy after and
  pi_ref the one before reinforcement learning with KL weight beta: progress advantages.
  """
  left, right = (np.asarray(x, np.float64) for x in (log_probs, reference_log_probs))
  if left.shape != right.shape:
    raise ValueError(f"log-probs of one shape are needed, got {left.shape} and {right.shape}.")
  return beta * (left - right)


def step_sums(
  values: Float[np.ndarray, " tokens"], steps: Int[np.ndarray, " tokens"]
) -> Float[np.ndarray, " steps"]:
  """Sums of token values over their steps; step -1 belongs to none (prompt, observations)."""
  steps = np.asarray(steps)
  inside = steps >= 0
  return np.bincount(
    steps[inside], np.asarray(values, np.float64)[inside], int(steps.max(initial=-1)) + 1
  )


def sampled_steps(trajectory: Trajectory) -> Int[np.ndarray, " tokens"]:
  """The turn of every token that the policy drew, -1 for all others; segments as they stand."""
  parts = [np.where(s.sampled, s.turn, -1) for s in trajectory.segments]
  return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def promise_and_progress(
  values: Float[np.ndarray, " steps"],
  rewards: Float[np.ndarray, " steps"],
  *,
  gamma: float = 1.0,
  gae_lambda: float = 0.95,
) -> tuple[Float[np.ndarray, " steps"], Float[np.ndarray, " steps"]]:
  """AgentPRM's labels: promise ``Q_t = A_t + V_t`` and progress ``A_t``.

  ``A_t = sum_k (gamma lambda)^k d_{t+k}`` with ``d_t = r_t + gamma V_{t+1} - V_t`` and V = 0 behind
  the last step. The defaults are ours: the source's were not found.

  Args:
    values: the present model's V before each step of one rollout.
    rewards: of each step; usually the outcome at the last and 0 before.
  """
  before, paid = np.asarray(values, np.float64), np.asarray(rewards, np.float64)
  if before.shape != paid.shape:
    raise ValueError(f"values and rewards need one shape, got {before.shape} and {paid.shape}.")
  after = np.append(before[1:], 0.0) if before.size else before
  error = paid + gamma * after - before
  progress = np.zeros_like(before)
  running = 0.0
  for t in reversed(range(before.size)):
    running = error[t] + gamma * gae_lambda * running
    progress[t] = running
  return progress + before, progress
