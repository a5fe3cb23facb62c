"""Worlds and environments: the protocols, and helpers that worlds share. No jax."""

from agentjax.world.environment import Action, Environment, Observation, Step
from agentjax.world.question import QuestionEnvironment
from agentjax.world.text_game import TextGame, TurnConfig
from agentjax.world.world import Site, World, WorldConfig

__all__ = [
  "Action",
  "Environment",
  "Observation",
  "QuestionEnvironment",
  "Site",
  "Step",
  "TextGame",
  "TurnConfig",
  "World",
  "WorldConfig",
]
