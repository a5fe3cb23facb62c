"""DMax (2604.08302): a block-diffusion language model that decides many tokens a forward pass."""

from agentjax.recipes.dmax.config import DecodingConfig, DMaxConfig

__all__ = ["DMaxConfig", "DecodingConfig"]
