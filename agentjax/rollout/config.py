"""Settings of episodes."""

from __future__ import annotations

import dataclasses
from typing import Literal

from agentjax.config import Config, check


@dataclasses.dataclass(unsafe_hash=True)
class RolloutConfig(Config):
  """How episodes run. All defaults are ours; no paper fixes them.

  Attributes:
    group_size: episodes a task gets in one step.
    max_turns: model calls in an episode; one that needs more is truncated.
    max_tokens_per_turn: tokens drawn in one model call.
    max_total_tokens: tokens of the whole episode, prompt and observations included; at most the
      engine's max_length and the trainer's row length.
    episode_timeout: seconds the environment of one episode may take in all, tools included; then
      the episode is truncated. The policy's own turns are bounded by their tokens and do not count,
      so that waiting for a slot of the engine truncates nobody.
    environment_timeout: seconds one reset, step or close of an environment may take; then the
      episode is an environment error. It must exceed what the tools are allowed together.
    reward_timeout: seconds the scoring of one trajectory or group may take; then the reward is
      invalid.
    cancel_grace: seconds an environment that is cancelled may take to stop before it is abandoned.
    concurrency: episodes at work at the same time; more than the engine's slots keeps the device
      busy while some of them wait for tools.
    grammar: what the policy may write. "none", anything; "tool_calls", free text and calls that are
      well formed, with arguments that satisfy the schema of an offered tool. The recorded log-probs
      stay those of the unmasked policy. Needs ``engine.grammar_states``.
  """

  group_size: int = 8
  max_turns: int = 8
  max_tokens_per_turn: int = 128
  max_total_tokens: int = 512
  episode_timeout: float = 600.0
  environment_timeout: float = 120.0
  reward_timeout: float = 120.0
  cancel_grace: float = 1.0
  concurrency: int = 64
  grammar: Literal["none", "tool_calls"] = "none"

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    for name in ("group_size", "max_turns", "max_tokens_per_turn", "concurrency"):
      check(getattr(self, name) >= 1, f"{path}.{name}", getattr(self, name), ">= 1")
    check(self.max_total_tokens >= 2, f"{path}.max_total_tokens", self.max_total_tokens, ">= 2")
    for name in ("episode_timeout", "environment_timeout", "reward_timeout", "cancel_grace"):
      check(getattr(self, name) > 0, f"{path}.{name}", getattr(self, name), "seconds > 0")
