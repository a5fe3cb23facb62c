"""RationalRewards (2604.11626): critiques by aspect, as one number."""

from agentjax.recipes.rational_rewards.scorer import RationalRewardsConfig

__all__ = ["RationalRewardsConfig"]
