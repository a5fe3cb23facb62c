"""Environments: the protocol and the bundled ones. No jax."""

from agentjax.envs.bandit import Bandit, BanditConfig, bandit_tasks
from agentjax.envs.countdown import Countdown, CountdownConfig, countdown_tasks
from agentjax.envs.environment import Action, Environment, Observation, Step
from agentjax.envs.frozen_lake import FrozenLake, FrozenLakeConfig, frozen_lake_tasks
from agentjax.envs.number_game import GuessNumber, guess_number_tasks
from agentjax.envs.question import QuestionEnvironment
from agentjax.envs.sokoban import Sokoban, SokobanConfig, sokoban_tasks
from agentjax.envs.text_game import TextGame, TurnConfig

__all__ = [
  "Action",
  "Bandit",
  "BanditConfig",
  "Countdown",
  "CountdownConfig",
  "Environment",
  "FrozenLake",
  "FrozenLakeConfig",
  "GuessNumber",
  "Observation",
  "QuestionEnvironment",
  "Sokoban",
  "SokobanConfig",
  "Step",
  "TextGame",
  "TurnConfig",
  "bandit_tasks",
  "countdown_tasks",
  "frozen_lake_tasks",
  "guess_number_tasks",
  "sokoban_tasks",
]
