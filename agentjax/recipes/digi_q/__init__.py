"""Digi-Q (2502.15760): values of actions by temporal differences on a frozen model's features, and
the best of several candidate actions imitated. All of it is offline."""

from agentjax.recipes.digi_q.settings import CriticConfig, ExtractionConfig, RecordConfig

__all__ = ["CriticConfig", "ExtractionConfig", "RecordConfig"]
