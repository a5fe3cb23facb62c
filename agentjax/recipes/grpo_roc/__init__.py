"""GRPO-RoC of rStar2-Agent (2508.20722): of twice as many episodes the cleaner successes stay."""

from agentjax.recipes.grpo_roc.resample import RocConfig

__all__ = ["RocConfig"]
