"""On-policy distillation on candidates with clipped ratios (2604.13016)."""

from agentjax.recipes.opd.clipped import ClippedCandidates

__all__ = ["ClippedCandidates"]
