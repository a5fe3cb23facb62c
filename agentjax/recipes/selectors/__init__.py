"""Selectors that many methods share, as signals: which episodes of a step are trained on."""

from agentjax.recipes.selectors.fifo import SuccessesConfig
from agentjax.recipes.selectors.keep import KeepConfig
from agentjax.recipes.selectors.priority import PriorityConfig
from agentjax.recipes.selectors.quotas import QuotasConfig

__all__ = ["KeepConfig", "PriorityConfig", "QuotasConfig", "SuccessesConfig"]
