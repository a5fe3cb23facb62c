import asyncio

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.rewards import SCORERS, RewardConfig, build_rewards
from agentjax.trajectory.record import Reward, Segment, Status, Task, ToolRecord, Trajectory

TASK = Task(3, (), "19", "made")


def segment(turn, sampled):
  n = len(sampled)
  return Segment(
    owner="assistant" if any(sampled) else "tool",
    turn=turn,
    token_ids=np.zeros(n, np.int32),
    sampled=np.array(sampled, bool),
    weights=np.array(sampled, np.float32),
    behaviour_log_probs=np.zeros(n, np.float32),
    entropies=np.zeros(n, np.float32),
    versions=np.zeros(n, np.int32),
  )


def tool(status, turn=0):
  return ToolRecord(turn, "calculator", {}, status, "", 0.0)


def trajectory(**fields):
  return Trajectory(
    **{
      "step": 0,
      "task_id": 3,
      "sample": 0,
      "source": "made",
      "segments": [],
      "answer": "19",
      **fields,
    }
  )


@pytest.mark.parametrize(
  ("name", "fields", "value"),
  [
    ("exact_match", {}, 1.0),
    ("exact_match", {"answer": "19.0"}, 1.0),
    ("exact_match", {"answer": "19 apples"}, 0.0),
    ("exact_match", {"answer": "20"}, 0.0),
    ("exact_match", {"answer": None}, 0.0),
    ("exact_match", {"status": Status.POLICY_ERROR}, 0.0),
    ("format", {}, 1.0),
    ("format", {"answer": None}, 0.0),
    ("format", {"status": Status.TRUNCATED}, 0.0),
    ("tool_used", {}, 0.0),
    ("tool_used", {"tools": [tool("error")]}, 0.0),
    ("tool_used", {"tools": [tool("error"), tool("ok")]}, 1.0),
    ("tool_errors", {}, 0.0),
    ("tool_errors", {"tools": [tool("ok"), tool("error"), tool("timeout"), tool("ok")]}, 0.5),
    (
      "turns",
      {"segments": [segment(0, [0, 0]), segment(0, [1]), segment(0, [0]), segment(1, [1, 1])]},
      2.0,
    ),
    (
      "sampled_tokens",
      {"segments": [segment(0, [0, 0]), segment(0, [1]), segment(1, [1, 0, 1])]},
      3.0,
    ),
    ("environment", {"reward_parts": {"environment": Reward(0.7)}}, Reward(0.7)),
    ("environment", {"status": Status.POLICY_ERROR}, Reward(0.0)),
    ("tool_used", {"tools": [tool("ok")], "status": Status.POLICY_ERROR}, 0.0),
  ],
)
def test_a_scorer_measures_what_its_name_says(name, fields, value):
  assert SCORERS[name](trajectory(**fields), TASK) == value


def test_an_environment_without_rewards_cannot_be_the_judge():
  reward = SCORERS["environment"](trajectory(), TASK)
  assert not reward.valid


def score(config, one):
  graph = build_rewards(config)
  asyncio.run(graph.score(one, TASK))
  return one.reward


@pytest.mark.parametrize(("answer", "total"), [("19", 1.0 - 0.1 * 2), ("20", -0.5)])
def test_a_part_may_count_only_where_another_is_high(answer, total):
  config = RewardConfig(
    parts=("exact_match", "turns", "tool_errors"),
    formula="exact_match - 0.5 * tool_errors - (0.1 * turns if exact_match >= 1 else 0)",
  )
  tools = [tool("ok")] if answer == "19" else [tool("error")]
  one = trajectory(answer=answer, tools=tools, segments=[segment(0, [1]), segment(1, [1])])
  assert score(config, one).value == pytest.approx(total)
  assert set(one.reward_parts) == {"exact_match", "turns", "tool_errors"}


def test_the_default_is_the_exact_match():
  assert score(RewardConfig(), trajectory()) == Reward(1.0)


def test_a_scorer_of_ones_own_is_used_by_its_name():
  config = RewardConfig(parts=("short",), weights=(2.0,))
  graph = build_rewards(config, {**SCORERS, "short": lambda t, task: len(t.answer) < 3})
  one = trajectory()
  asyncio.run(graph.score(one, TASK))
  assert one.reward == Reward(2.0)


@pytest.mark.parametrize(
  ("fields", "named"),
  [
    ({"parts": ()}, "config.reward.parts"),
    ({"parts": ("exact_match", "exact_match"), "weights": (1.0, 1.0)}, "distinct"),
    ({"weights": (1.0, 2.0)}, "config.reward.weights"),
    ({"weights": (0.0,)}, "other than 0"),
    ({"parts": ("exact_mach",)}, "exact_match, format"),
    ({"weights": ("1",)}, "config.reward.weights"),
  ],
)
def test_an_impossible_reward_is_refused_by_field_name(fields, named):
  with pytest.raises(ConfigError, match=named):
    build_rewards(RewardConfig(**fields))
