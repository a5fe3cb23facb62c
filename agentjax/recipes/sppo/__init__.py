"""Sequence-level PPO (2604.08865): a critic that reads prompts says how likely success is."""

from agentjax.recipes.sppo.critic import PromptCritic, PromptCriticConfig

__all__ = ["PromptCritic", "PromptCriticConfig"]
