"""IPA (ROME): episodes that begin at anchors, inside an expert's trajectory. No jax."""

from agentjax.recipes.ipa.anchors import AnchoredConfig

__all__ = ["AnchoredConfig"]
