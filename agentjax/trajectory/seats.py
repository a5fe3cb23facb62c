"""Episodes of several agents, split by agent. No jax.

For scoring, comparing and learning, each agent is an episode of its own: its segments, its rewards,
and a group key with its name, so that only agents of the same role are compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from agentjax.trajectory.record import (
  BRANCHES,
  ENDED_BY,
  POLICY,
  Outcome,
  Reward,
  Status,
  Trajectory,
)


def learning_agents(trajectory: Trajectory) -> tuple[str, ...]:
  """The agents whose tokens carry loss."""
  return tuple(agent for agent, outcome in trajectory.agents.items() if outcome.learns)


def view(trajectory: Trajectory, agent: str) -> Trajectory:
  """The part of one of several agents, as an episode of one agent.

  Its group is the episode's group with the agent's name. If another agent ended the episode by a
  breach, it is truncated for this one.
  """
  outcome, number = trajectory.agents[agent], list(trajectory.agents).index(agent)
  kept = [i for i, segment in enumerate(trajectory.segments) if segment.agent == agent]
  place: dict[int | None, int | None] = {None: None}
  place |= {index: number for number, index in enumerate(kept)}
  metadata = dict(trajectory.metadata)
  culprit = metadata.pop(ENDED_BY, agent)
  if BRANCHES in metadata:
    metadata[BRANCHES] = [metadata[BRANCHES][i] for i in kept]
  breach = trajectory.status is Status.POLICY_ERROR
  return dataclasses.replace(
    trajectory,
    segments=[
      dataclasses.replace(segment, parent=place[segment.parent])
      for segment in (trajectory.segments[i] for i in kept)
    ],
    status=Status.TRUNCATED if breach and culprit != agent else trajectory.status,
    reward=outcome.reward,
    reward_parts=dict(outcome.parts),
    turn_rewards={n: [paid[i] for i in kept] for n, paid in trajectory.turn_rewards.items()},
    tools=[record for record in trajectory.tools if record.agent == agent],
    group=f"{trajectory.group or f'task {trajectory.task_id}'}, {agent}",
    metadata=metadata,
    columns={**trajectory.columns, "agents": np.array(number, np.int32)},
    agents={},
  )


def learning_views(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
  """An episode for each agent that learns; episodes of one agent are not changed."""
  views: list[Trajectory] = []
  for trajectory in trajectories:
    if trajectory.agents:
      views += [view(trajectory, agent) for agent in learning_agents(trajectory)]
    else:
      views.append(trajectory)
  return views


def policy_of(view: Trajectory) -> str:
  """Who played the agent of an episode; "policy" if it saw nothing."""
  return view.segments[0].policy if view.segments else POLICY


def settle(trajectory: Trajectory, scored: dict[str, Trajectory]) -> None:
  """Copies the results of some agents' views into the episode: rewards, parts, and rewards of
  turns.

  The episode's reward and parts become means over the agents that have one. Without any verdict the
  episode has none.
  """
  outcomes = dict(trajectory.agents)
  by_turn = {name: list(paid) for name, paid in trajectory.turn_rewards.items()}
  for agent, own in scored.items():
    outcomes[agent] = dataclasses.replace(
      outcomes[agent], reward=own.reward, parts=dict(own.reward_parts)
    )
    kept = [i for i, segment in enumerate(trajectory.segments) if segment.agent == agent]
    for name, paid in own.turn_rewards.items():
      whole = by_turn.setdefault(name, [None] * len(trajectory.segments))
      for index, value in zip(kept, paid, strict=True):
        whole[index] = value
  trajectory.agents, trajectory.turn_rewards = outcomes, by_turn
  learning = [outcomes[agent] for agent in learning_agents(trajectory)]
  trajectory.reward = _mean([outcome.reward for outcome in learning])
  names = dict.fromkeys(name for outcome in learning for name in outcome.parts)
  trajectory.reward_parts = {
    name: _mean([o.parts[name] for o in learning if name in o.parts]) for name in names
  }
  failed = [own for own in scored.values() if own.status is Status.VERIFIER_ERROR]
  if failed and len(failed) == len(scored):
    trajectory.status = Status.VERIFIER_ERROR
    said = {name: value for name, value in failed[0].metadata.items() if name != BRANCHES}
    trajectory.metadata = {**trajectory.metadata, **said}


def _mean(rewards: Sequence[Reward]) -> Reward:
  values = [reward.value for reward in rewards if reward.value is not None]
  if values:
    return Reward(float(np.mean(values)))
  return next(iter(rewards), Reward.invalid("no agent learns"))


def agent_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  """Metrics under ``agents/NAME/``: episodes in which it learns, and its mean reward; {} for one
  agent."""
  rewards: dict[str, list[float]] = {}
  for trajectory in trajectories:
    for agent in learning_agents(trajectory):
      value = trajectory.agents[agent].reward.value
      rewards.setdefault(agent, []).extend([] if value is None else [value])
  metrics: dict[str, Any] = {}
  for agent, values in sorted(rewards.items()):
    metrics[f"agents/{agent}/episodes"] = float(len(values))
    if values:
      metrics[f"agents/{agent}/reward"] = float(np.mean(values))
  return metrics


def outcome_of(learns: bool, parts: dict[str, Reward]) -> Outcome:
  """The result of an agent before its episode is scored."""
  reason = "not scored" if learns else "another policy played it"
  return Outcome(learns, Reward.invalid(reason), parts)
