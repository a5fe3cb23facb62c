"""MUA-RL: a user who says what is wanted when asked, a database, and the state it ends in. No
jax."""

from agentjax.recipes.mua_rl.shop import ShopConfig

__all__ = ["ShopConfig"]
