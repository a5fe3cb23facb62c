"""A guarded episode whose rules are AgentSpec's."""

import dataclasses

import pytest

from agentjax.recipes.agentspec import AgentSpecConfig
from agentjax.rollout.guards import GuardsConfig
from tests.rollout.conftest import run
from tests.rollout.guards.conftest import TASK, play_guarded

__all__ = ["play", "run"]

_OF_RULES = {field.name for field in dataclasses.fields(AgentSpecConfig)}


@pytest.fixture
def play():
  """Plays turns. ``rules`` is text; the other settings are AgentSpecConfig's and GuardsConfig's."""

  def play(*actions, channels=(), task=TASK, make=None, rules="", **settings):
    own = {key: settings.pop(key) for key in _OF_RULES & settings.keys()}
    config = GuardsConfig(rules=AgentSpecConfig(text=rules, **own), **settings)
    return play_guarded(config, *actions, channels=channels, task=task, make=make)

  return play
