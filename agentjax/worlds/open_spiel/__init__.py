"""The world "open_spiel"; see README.md."""

from agentjax.worlds.open_spiel.game import OpenSpielConfig, TwoPlayerGame

Settings = OpenSpielConfig

__all__ = ["OpenSpielConfig", "Settings", "TwoPlayerGame"]
