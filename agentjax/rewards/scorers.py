"""Bundled scorers, by the name that a RewardConfig uses."""

from __future__ import annotations

from collections.abc import Mapping

from agentjax.rewards.answers import answers_equal
from agentjax.rewards.graph import Scorer
from agentjax.trajectory.record import Reward, Status, Task, Trajectory


def exact_match(trajectory: Trajectory, task: Task) -> float:
  """1 if the final answer equals the task's (numbers by value), else 0.

  A policy error counts as 0 whatever answer follows it.
  """
  if trajectory.answer is None or trajectory.status is Status.POLICY_ERROR:
    return 0.0
  return float(answers_equal(trajectory.answer, task.answer))


def format_followed(trajectory: Trajectory, task: Task) -> float:
  """1 where the episode ended properly and the environment could read an answer, else 0."""
  del task
  return float(trajectory.status is Status.OK and trajectory.answer is not None)


def tool_used(trajectory: Trajectory, task: Task) -> float:
  """1 where at least one tool call succeeded, else 0; 0 after a policy error."""
  del task
  used = any(record.status == "ok" for record in trajectory.tools)
  return float(used and trajectory.status is not Status.POLICY_ERROR)


def tool_errors(trajectory: Trajectory, task: Task) -> float:
  """Share of the tool calls that did not succeed, 0..1; 0 without calls. Weigh it negatively."""
  del task
  if not trajectory.tools:
    return 0.0
  return sum(record.status != "ok" for record in trajectory.tools) / len(trajectory.tools)


def turns(trajectory: Trajectory, task: Task) -> float:
  """Number of turns in which the policy wrote something. Weigh it negatively for a cost."""
  del task
  return float(len({s.turn for s in trajectory.segments if s.sampled.any()}))


def sampled_tokens(trajectory: Trajectory, task: Task) -> float:
  """Number of tokens the policy wrote. Weigh it negatively for a cost."""
  del task
  return float(sum(int(s.sampled.sum()) for s in trajectory.segments))


def environment(trajectory: Trajectory, task: Task) -> Reward:
  """Sum of the rewards the environment gave step by step, as the rollout recorded it.

  0 if the episode broke off before the first of them. Invalid if it ended without any, because such
  an environment leaves the reward to other scorers.
  """
  del task
  given = trajectory.reward_parts.get("environment")
  if given is not None:
    return given
  if trajectory.status is Status.OK:
    return Reward.invalid("the environment gave no reward; use another part than 'environment'")
  return Reward(0.0)


SCORERS: Mapping[str, Scorer] = {
  "exact_match": exact_match,
  "format": format_followed,
  "tool_used": tool_used,
  "tool_errors": tool_errors,
  "turns": turns,
  "sampled_tokens": sampled_tokens,
  "environment": environment,
}
