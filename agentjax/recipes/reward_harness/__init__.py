"""RewardHarness (2605.08703): skills and tools that evolve over frozen judges."""

from agentjax.recipes.reward_harness.scorer import RewardHarnessConfig

__all__ = ["RewardHarnessConfig"]
