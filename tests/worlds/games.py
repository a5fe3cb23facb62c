"""Playing a game in tests."""

import asyncio

from agentjax.world.environment import Action


def begin(game, task, key=0):
  asyncio.run(game.reset(task, key))
  return game


def say(game, text, **kwargs):
  return asyncio.run(game.step(Action(text, **kwargs)))


def play(game, texts):
  """Rewards of turns up to the end, and the last step."""
  rewards = []
  for text in texts:
    step = say(game, text)
    rewards.append(step.reward.value)
    if step.terminated or step.truncated:
      break
  return rewards, step
