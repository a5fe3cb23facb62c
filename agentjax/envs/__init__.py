"""Environments: the protocol and the bundled ones. No jax."""

from agentjax.envs.environment import Action, Environment, Observation, Step
from agentjax.envs.number_game import GuessNumber, guess_number_tasks
from agentjax.envs.question import QuestionEnvironment

__all__ = [
  "Action",
  "Environment",
  "GuessNumber",
  "Observation",
  "QuestionEnvironment",
  "Step",
  "guess_number_tasks",
]
