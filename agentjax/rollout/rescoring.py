"""Scoring stored episodes again: with another verifier, other weights, or a further monitor."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from agentjax.faults import FAULT, Fault, Owner
from agentjax.rewards.formula import TERMS
from agentjax.rewards.graph import ENDED, RewardGraph
from agentjax.rewards.monitor import FINDINGS
from agentjax.rollout.program import ENVIRONMENT_REWARD
from agentjax.rollout.scoring import score
from agentjax.trajectory.record import MONTE_CARLO, Reward, Status, Task, Trajectory


async def rescore(
  trajectories: Sequence[Trajectory],
  tasks: Mapping[int, Task],
  rewards: RewardGraph,
  *,
  timeout: float = 300.0,
  concurrency: int = 8,
) -> list[Trajectory]:
  """Copies of ``trajectories`` with new rewards, in the order given; the originals stay.

  Payments of the environment stay; every other part is computed again, and so is a status of
  VERIFIER_ERROR. A graph that compares the members of a group gets the members among
  ``trajectories``.

  Args:
    trajectories: finished episodes.
    tasks: their tasks by id.
    rewards: the new graph.
    timeout: seconds for one episode, or one group.
    concurrency: how many at once.

  Raises:
    ValueError: an episode of a task that is not among ``tasks``.
  """
  unknown = sorted({t.task_id for t in trajectories} - set(tasks))
  if unknown:
    raise ValueError(
      f"{len(unknown)} tasks of the episodes are not in the data, the first with id {unknown[0]}; "
      "use the data settings that the episodes were made with"
    )
  fresh = [_unscored(t) for t in trajectories]
  if rewards.needs_groups:
    ordered = sorted(fresh, key=lambda t: t.address)
    groups = [list(g) for _, g in itertools.groupby(ordered, key=lambda t: t.address[:2])]
  else:
    groups = [[t] for t in fresh]
  turn = asyncio.Semaphore(concurrency)

  async def run(group: list[Trajectory]) -> None:
    async with turn:
      await score(rewards, group, tasks[group[0].task_id], timeout=timeout)

  await asyncio.gather(*map(run, groups))
  return fresh


def compare(
  before: Sequence[Trajectory], after: Sequence[Trajectory]
) -> list[tuple[str, str, str, str]]:
  """Rows (what, before, after, episodes that changed) of the total, each part, and the faults."""
  rows = []
  parts = sorted({name for t in (*before, *after) for name in t.reward_parts})
  for name in ("reward", *parts):
    pairs = [(_value(b, name), _value(a, name)) for b, a in zip(before, after, strict=True)]
    changed = sum(b != a for b, a in pairs)
    was, now = _mean([b for b, _ in pairs]), _mean([a for _, a in pairs])
    rows.append((name, was, now, str(changed)))
  counts = [[t.status is Status.VERIFIER_ERROR for t in ts] for ts in (before, after)]
  changed = sum(b != a for b, a in zip(*counts, strict=True))
  rows.append(("without a verdict", str(sum(counts[0])), str(sum(counts[1])), str(changed)))
  return rows


def _unscored(trajectory: Trajectory) -> Trajectory:
  status = trajectory.status
  if status is Status.VERIFIER_ERROR:
    status = Status(trajectory.metadata.get(ENDED, Status.OK))
  of_episode = (ENVIRONMENT_REWARD, MONTE_CARLO)
  paid = {k: v for k, v in trajectory.turn_rewards.items() if k in of_episode}
  notes = {ENDED, FINDINGS, TERMS, *trajectory.reward_parts}  # that scorers left in the metadata
  metadata = {k: v for k, v in trajectory.metadata.items() if k not in notes}
  if FAULT in metadata and Fault.from_dict(metadata[FAULT]).owner is Owner.VERIFIER:
    del metadata[FAULT]
  return dataclasses.replace(
    trajectory,
    status=status,
    reward_parts=_paid_by_environment(trajectory.reward_parts),
    turn_rewards=paid,
    metadata=metadata,
    agents={
      agent: dataclasses.replace(outcome, parts=_paid_by_environment(outcome.parts))
      for agent, outcome in trajectory.agents.items()
    },
  )


def _paid_by_environment(parts: Mapping[str, Reward]) -> dict[str, Reward]:
  return {name: part for name, part in parts.items() if name == ENVIRONMENT_REWARD}


def _value(trajectory: Trajectory, name: str) -> float | None:
  if name == "reward":
    return trajectory.reward.value
  part = trajectory.reward_parts.get(name)
  return None if part is None else part.value


def _mean(values: Sequence[float | None]) -> str:
  known = [value for value in values if value is not None]
  return f"{sum(known) / len(known):.4f}" if known else "-"
