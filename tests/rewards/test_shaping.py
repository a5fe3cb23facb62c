import asyncio

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.rewards import RewardConfig
from agentjax.rewards.config import build_rewards
from agentjax.rewards.shaping import OverlongConfig, overlong
from agentjax.trajectory.record import Segment, Task, Trajectory

TASK = Task(0, (), "4", "sums")


def episode(drawn, answer="4"):
  count = drawn + 7  # a prompt of seven tokens, which do not count
  zeros = np.zeros(count, np.float32)
  sampled = np.arange(count) >= 7
  ids = np.zeros(count, np.int32)
  segment = Segment("assistant", ids, sampled, zeros, zeros, zeros, ids)
  return Trajectory(1, 0, 0, "sums", [segment], answer=answer)


@pytest.mark.parametrize("drawn, expected", [(80, 0.0), (90, -0.5), (100, -1.0), (20, 0.0)])
def test_the_penalty_grows_over_the_buffer(drawn, expected):
  score = overlong(OverlongConfig(limit=100, buffer=20))
  assert score(episode(drawn), TASK) == pytest.approx(expected)


def test_it_is_a_part_of_the_reward_by_name():
  config = RewardConfig(
    parts=("exact_match", "overlong"),
    weights=(1.0, 1.0),
    overlong=OverlongConfig(limit=100, buffer=20),
  )
  trajectory = episode(90)
  asyncio.run(build_rewards(config).score(trajectory, TASK))
  assert trajectory.reward.value == pytest.approx(0.5)
  assert trajectory.reward_parts["overlong"].value == pytest.approx(-0.5)


def test_a_buffer_longer_than_the_limit_is_refused():
  with pytest.raises(ConfigError, match=r"config\.reward\.overlong\.buffer=30.*1 to limit 20"):
    RewardConfig(overlong=OverlongConfig(limit=20, buffer=30)).validate()
