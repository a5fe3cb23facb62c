"""Self-play preference optimisation (2405.00675): log-ratios of sequences go to their win rates."""

from agentjax.recipes.self_play.loss import self_play_preference

__all__ = ["self_play_preference"]
