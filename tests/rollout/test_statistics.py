"""Figures of a batch of episodes."""

import pytest

from agentjax.rollout.statistics import (
  group_diversity,
  rollout_statistics,
  staleness_statistics,
)
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Reward, Status, ToolRecord


def trajectory(*, turns, status=Status.OK, reward=None, tools=(), **metadata):
  builder = TrajectoryBuilder(step=0, task_id=0, sample=0, source="made")
  builder.append("user", [1, 2, 3])
  for turn in range(turns):
    builder.append_sampled([5, 6], [-1.0, -1.0], [0.5, 0.5], 0)
    if turn + 1 < turns:
      builder.append("tool", [7])
  made = builder.build(status=status, reward=reward, tools=tools, metadata=metadata)
  made.reward_parts = {"exact_match": made.reward}
  return made


def call(name, status, seconds):
  return ToolRecord(0, name, {}, status, "", seconds)


EPISODES = [
  trajectory(
    turns=2,
    reward=Reward(1.0),
    tools=[call("calculator", "ok", 0.1), call("calculator", "error", 0.3)],
  ),
  trajectory(
    turns=1, status=Status.TRUNCATED, reward=Reward(0.0), tools=[call("calc", "error", 0.2)]
  ),
  trajectory(turns=0, status=Status.ENV_ERROR, reason="step() raised OSError: fire"),
  trajectory(turns=3, status=Status.VERIFIER_ERROR, reward=Reward.invalid("judge gone")),
]


def test_means_shares_and_counts():
  figures = rollout_statistics(EPISODES, tool_names=["calculator"])
  assert figures.episodes == 4
  assert figures.statuses == {
    "ok": 1, "truncated": 1, "env_error": 1, "engine_error": 0, "verifier_error": 1,
    "policy_error": 0,
  }  # fmt: skip
  assert figures.turns == (2 + 1 + 0 + 3) / 4
  assert figures.tool_calls == 3 / 4 and figures.tool_errors == 2 / 4
  assert figures.prompt_tokens == 3
  assert figures.sampled_tokens == 2 * (2 + 1 + 0 + 3) / 4
  assert figures.observation_tokens == (1 + 0 + 0 + 2) / 4
  assert figures.truncated_share == 0.25 and figures.fault_share == 0.5


def test_invalid_rewards_enter_no_mean():
  figures = rollout_statistics(EPISODES, tool_names=[])
  assert figures.reward == 0.5 and figures.valid_share == 0.5
  assert figures.reward_parts == {"exact_match": 0.5}
  nothing = rollout_statistics(EPISODES[2:], tool_names=[])
  assert nothing.reward is None and "reward/mean" not in nothing.metrics()


def test_tools_the_policy_made_up_are_counted_together():
  tools = rollout_statistics(EPISODES, tool_names=["calculator"]).tools
  assert set(tools) == {"calculator", "unknown"}
  assert (tools["calculator"].calls, tools["calculator"].errors) == (2, 1)
  assert tools["calculator"].mean_seconds == pytest.approx(0.2)
  assert tools["calculator"].max_seconds == 0.3
  assert tools["unknown"].calls == 1


def test_every_fault_is_named():
  faults = rollout_statistics([*EPISODES, EPISODES[2]], tool_names=[]).faults
  assert list(faults.items()) == [("step() raised OSError: fire", 2), ("judge gone", 1)]


def test_metrics_are_flat_numbers():
  metrics = rollout_statistics(EPISODES, tool_names=["calculator"]).metrics()
  assert metrics["rollout/status_env_error"] == 1.0
  assert metrics["tool/calculator/errors"] == 1.0
  assert metrics["reward/part_exact_match"] == 0.5
  assert all(type(value) is float for value in metrics.values())


def test_statistics_of_nothing_are_refused():
  with pytest.raises(ValueError, match="at least one trajectory"):
    rollout_statistics([], tool_names=[])


def sampled(task, sample, ids, *, step=4, version=4):
  builder = TrajectoryBuilder(step=step, task_id=task, sample=sample, source="made")
  builder.append("user", [1, 2, 3])
  if ids:
    builder.append_sampled(ids, [-1.0] * len(ids), [0.5] * len(ids), version)
  return builder.build()


def test_diversity_counts_distinct_samples_and_first_tokens_of_each_group():
  figures = group_diversity(
    [
      *(sampled(0, i, ids) for i, ids in enumerate(([5, 6], [5, 7], [5, 6], [8]))),
      *(sampled(1, i, [9, 9]) for i in range(2)),
      sampled(2, 0, [5]),  # alone
      *(sampled(0, i, [5], step=5) for i in range(2)),  # another round of the task
    ]
  )
  assert figures == pytest.approx(
    {
      "diversity/groups": 3,
      "diversity/distinct_share": (3 / 4 + 1 / 2 + 1 / 2) / 3,
      "diversity/first_token_distinct": (6 / 12 + 0 + 0) / 3,
      "diversity/identical_groups": 2 / 3,
    }
  )


def test_diversity_of_nothing_to_compare_is_nothing():
  assert group_diversity([sampled(0, 0, [5]), sampled(0, 1, []), sampled(1, 0, [6])]) == {}


def test_staleness_is_counted_in_updates_from_the_step_that_trains():
  episodes = [sampled(0, 0, [5, 6, 7], version=[3, 3, 4]), sampled(0, 1, [5], version=5)]
  figures = staleness_statistics([*episodes, sampled(0, 2, [])], 5)
  assert figures == pytest.approx(
    {
      "schedule/staleness_mean": (2 + 2 + 1 + 0) / 4,
      "schedule/staleness_max": 2,
      "schedule/carried_share": 1 / 3,
      "schedule/versions": 3,
    }
  )
  assert set(staleness_statistics([sampled(0, 0, [])], 5).values()) == {0.0}
