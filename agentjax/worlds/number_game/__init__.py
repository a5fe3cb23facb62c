"""The world "number_game"; see README.md."""

from agentjax.worlds.number_game.game import GuessNumber, NumberGameConfig, guess_number_tasks

Settings = NumberGameConfig

__all__ = ["GuessNumber", "NumberGameConfig", "Settings", "guess_number_tasks"]
