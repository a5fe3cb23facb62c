"""Agent-R: a failed trajectory is cut at its first error and goes on as a good one. No jax."""

from agentjax.recipes.agent_r.splicing import SpliceConfig, splice

__all__ = ["SpliceConfig", "splice"]
