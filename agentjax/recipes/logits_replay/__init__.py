"""Logits Replay (2510.09152): fine-tuning over the tokens that the first policy found likely."""

from agentjax.recipes.logits_replay.sets import LogitsReplayConfig

__all__ = ["LogitsReplayConfig"]
