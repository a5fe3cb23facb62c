"""Settings of DMax (2604.08302)."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from agentjax.config import (
  AtLeastTwo,
  Config,
  ConfigError,
  NonNegativeInt,
  PositiveInt,
  PositiveShare,
  check,
)
from agentjax.engine import Engine, EngineConfig
from agentjax.models import ModelConfig
from agentjax.recipes.dmax.settings import NoiseSettings
from agentjax.text import Chat
from agentjax.training.likelihood import LikelihoodConfig, ScoreTokens

if TYPE_CHECKING:
  from agentjax.training.experiment import Experiment

# Settings of a run that blocks are neither trained nor drawn with, and the value that they must
# have: always, and with reinforcement learning.
_PLAIN: Mapping[str, Any] = {
  "supervised.qk_clip": None,
  "supervised.token_sets": None,
  "supervised.mtp_coefficient": 0,
  "supervised.balance_coefficient": 0,
  "supervised.z_loss_coefficient": 0,
  "engine.lanes": 1,
  "engine.speculate": "none",
  "engine.record_experts": False,
  "engine.cache_dtype": None,
  "rollout.grammar": "none",
}
_PLAIN_RL: Mapping[str, Any] = {
  "rollout.max_turns": 1,
  "rl.old_log_probs": "recomputed",
  "rl.replay_experts": False,
  "rl.qk_clip": None,
  "rl.mtp_coefficient": 0,
  "rl.balance_coefficient": 0,
  "rl.z_loss_coefficient": 0,
  "rl.teachers": (),
  "rl.critic": None,
  "rl.diagnostics.information_every": 0,
}


@dataclasses.dataclass(unsafe_hash=True)
class DecodingConfig(Config):
  """How the tokens of a block are decided, in one forward pass after the other.

  Attributes:
    mode: "soft" is soft parallel decoding: masks are decided from the left up to the first one that
      the policy is not sure of, decided tokens are predicted again, and what stands for them is a
      mixture of token and mask by how sure the policy is. "threshold" decides all masks that the
      policy is sure of, for good.
    threshold: probability from which on the policy is sure; each pass decides at least one token.
      1 decides exactly one token a pass, for good: the leftmost with "soft", the surest with
      "threshold". The paper's is 0.5 for mathematics.
    settled: with "soft" a block is done when all its tokens have this probability, or nothing has
      changed.
    most_forwards: passes a block at most, if all its tokens are decided by then; None is twice the
      block. Ours: nothing else ends a block whose tokens keep changing.
  """

  mode: Literal["soft", "threshold"] = "soft"
  threshold: PositiveShare = 0.5
  settled: PositiveShare = 0.9
  most_forwards: PositiveInt | None = None

  @property
  def parallel(self) -> bool:
    """Whether a pass may decide several tokens."""
    return self.threshold < 1

  @property
  def soft(self) -> bool:
    """Whether decided tokens may change."""
    return self.parallel and self.mode == "soft"


@dataclasses.dataclass(unsafe_hash=True)
class DMaxConfig(LikelihoodConfig):
  """A policy that sees whole blocks and fills in masks; for ``config.likelihood``.

  Attributes:
    block: tokens of a block, S; by its place in its sequence, a token is in block place // S.
    mask_id: id that stands for a token that is not known. None is the last row of the embedding,
      which must be beyond the tokenizer: set ``config.model.vocab_size`` one larger.
    training: supervised loss. "on_policy" is the paper's, over two passes; "masked" is its first
      pass alone; "bound" is the bound on the likelihood, as block diffusion is usually trained.
    mask_ratio: share of the written tokens that are masked in "on_policy" and "masked".
    draws: masks a sequence behind one estimate of the bound. Ours.
    noise_seed: of all masks.
    decoding: how tokens are decided in episodes.
  """

  block: AtLeastTwo = 32
  mask_id: NonNegativeInt | None = None
  training: Literal["on_policy", "masked", "bound"] = "on_policy"
  mask_ratio: PositiveShare = 0.75
  draws: PositiveInt = 1
  noise_seed: NonNegativeInt = 0
  decoding: DecodingConfig = dataclasses.field(default_factory=DecodingConfig)

  @property
  def align(self) -> int:
    return self.block

  def check_run(self, experiment: Experiment, path: str) -> None:
    rl = experiment.rl
    said = f"with {path}={self.chosen!r}"
    lengths = [("engine.max_length", experiment.engine.max_length)]
    for name in ("supervised", "rl"):
      if getattr(experiment, name).steps:
        lengths.append((f"{name}.row_length", getattr(experiment, name).row_length))
    for name, length in lengths:
      check(length % self.block == 0, f"config.{name}", length, f"a multiple of {path}.block")
    for name, allowed in {**_PLAIN, **(_PLAIN_RL if rl.steps else {})}.items():
      found = operator.attrgetter(name)(experiment)
      check(found == allowed, f"config.{name}", found, f"{allowed!r} {said}")
    devices, seats = experiment.engine.mesh.size, tuple(experiment.seats)
    check(devices == 1, "config.engine.mesh", devices, f"1 {said}")
    check(not seats, "config.seats", seats, f"() {said}")
    for i, phase in enumerate(rl.all_phases if rl.steps else ()):
      where, credit = f"config.rl.phases[{i}]", phase.objective.advantage.credit
      check(phase.context == "episode", f"{where}.context", phase.context, f"'episode' {said}")
      valued = phase.objective.needs_values
      check(not valued, f"{where}.objective.advantage.credit", credit, f"one without values {said}")

  def mask_of(self, model: ModelConfig) -> int:
    """The id of the mask."""
    return model.vocab_size - 1 if self.mask_id is None else self.mask_id

  def settings(self, model: ModelConfig, chat: Chat) -> NoiseSettings:
    """What the functions of the recipe need.

    Raises:
      ConfigError: the mask is a token of the vocabulary, or outside the embedding; or the model has
        blocks whose tokens cannot be told what they see.
    """
    try:
      model.check_sight()
    except ValueError as error:
      raise ConfigError(f"config.likelihood={self.chosen!r}: {error}") from error
    limit, mask = chat.tokenizer.vocab_size, self.mask_of(model)
    inside = mask < model.vocab_size
    check(
      inside and (self.mask_id is not None or mask >= limit),
      "config.model.vocab_size",
      model.vocab_size,
      f"above {limit}, the vocabulary of the tokenizer, so that there is a row for the mask; or "
      "config.likelihood.mask_id names a token that no text has",
    )
    return NoiseSettings(
      self.block, mask, limit, chat.stop_ids, self.mask_ratio, self.draws, self.noise_seed
    )

  def demonstrations(self, model: ModelConfig, chat: Chat) -> ScoreTokens:
    from agentjax.recipes.dmax.likelihood import bound_scores, on_policy_scores

    settings = self.settings(model, chat)
    if self.training == "bound":
      return bound_scores(settings)
    return on_policy_scores(settings, second_pass=self.training == "on_policy")

  def episodes(self, model: ModelConfig, chat: Chat) -> ScoreTokens:
    from agentjax.recipes.dmax.likelihood import bound_scores

    return bound_scores(self.settings(model, chat))

  def engine(self, model: ModelConfig, config: EngineConfig, chat: Chat, **options: Any) -> Engine:
    from agentjax.recipes.dmax.engine import BlockEngine

    return BlockEngine(model, config, self, **options)
