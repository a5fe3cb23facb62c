"""Settings that cannot work are refused by name."""

import pytest

from agentjax.config import ConfigError
from agentjax.rollout.config import RolloutConfig


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("group_size", 0),
    ("max_turns", 0),
    ("max_tokens_per_turn", 0),
    ("max_total_tokens", 1),
    ("concurrency", 0),
    ("episode_timeout", 0.0),
    ("environment_timeout", -1.0),
    ("reward_timeout", 0.0),
    ("cancel_grace", 0.0),
    ("group_size", 2.5),
  ],
)
def test_an_impossible_setting_is_named(field, value):
  with pytest.raises(ConfigError, match=rf"config\.rollout\.{field}={value}.*allowed"):
    RolloutConfig(**{field: value}).validate("config.rollout")


def test_the_defaults_are_possible():
  RolloutConfig().validate()
