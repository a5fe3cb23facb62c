import asyncio
import json

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.recipes.scorers.lengths import OverlongConfig, overlong
from agentjax.rewards import RewardConfig
from agentjax.rewards.config import build_rewards
from agentjax.training.flags import set_field
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
    settings={"overlong": OverlongConfig(limit=100, buffer=20)},
  )
  trajectory = episode(90)
  asyncio.run(build_rewards(config).score(trajectory, TASK))
  assert trajectory.reward.value == pytest.approx(0.5)
  assert trajectory.reward_parts["overlong"].value == pytest.approx(-0.5)


def test_a_buffer_longer_than_the_limit_is_refused():
  with pytest.raises(ConfigError, match=r"reward\.settings\.overlong\.buffer=30.*1 to limit 20"):
    RewardConfig(
      ("overlong",), settings={"overlong": OverlongConfig(limit=20, buffer=30)}
    ).validate()


def test_settings_of_what_is_no_part_are_refused():
  with pytest.raises(ConfigError, match=r"reward\.settings='overlong'; allowed: one of config"):
    RewardConfig(settings={"overlong": OverlongConfig()}).validate()


def test_settings_are_saved_with_the_name_of_what_they_are_of():
  own = {"long": OverlongConfig(limit=9, buffer=3), "overlong": OverlongConfig()}
  config = RewardConfig(("long", "overlong"), (1.0, 1.0), settings=own)
  saved = config.to_short_dict()
  assert saved["settings"] == {
    "long": {"use": "overlong", "limit": 9, "buffer": 3},
    "overlong": "overlong",
  }
  assert RewardConfig.from_dict(json.loads(json.dumps(saved))) == config
  assert set(build_rewards(config).part_names) == {"long", "overlong"}


def test_settings_are_set_by_flag_and_a_part_may_be_there_twice():
  config = RewardConfig()
  for name, value in (
    ("parts", "overlong,late"),
    ("weights", "1,0"),
    ("settings.overlong.limit", "2048"),
    ("settings.late", "overlong"),
    ("settings.late.buffer", "7"),
    ("settings.overlong.buffer", "9"),
  ):
    set_field(config, name.split("."), value, "reward")
  config.validate()
  assert config.part("overlong") == OverlongConfig(limit=2048, buffer=9)
  assert config.part("late") == OverlongConfig(buffer=7)
  assert build_rewards(config).part_names == ("overlong", "late")
