"""Additional losses: of routers, logits and prediction heads.

Each is a sum over micro-batches divided by counts of the whole batch, so the number of
micro-batches changes no gradient.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from agentjax import models
from agentjax.config import Config, NonNegativeFloat, PositiveFloat
from agentjax.models import ModelConfig, TokenScores


@dataclasses.dataclass(unsafe_hash=True)
class AuxiliaryConfig(Config):
  """Additional losses and rules of a stage's updates.

  Attributes:
    router_bias_rate: step of the aux-loss-free expert bias (models.update_router_bias).
    balance_coefficient, sequence_balance_coefficient, router_z_coefficient: weights of the routers'
      losses (``auxiliary_losses``): balance over the whole batch, which needs an extra forward
      pass; balance within each sequence; squared log-normaliser.
    z_loss_coefficient: weight of the output distribution's squared log-normaliser.
    mtp_coefficient: weight of the loss of ``model.mtp``, which must be set.
    qk_clip: attention heads whose largest score on a batch is above this are scaled down after its
      update (``models.qk_clip_scales``); 100 in Kimi K2 (2507.20534), None is off.
  """

  router_bias_rate: NonNegativeFloat = 0.0
  balance_coefficient: NonNegativeFloat = 0.0
  sequence_balance_coefficient: NonNegativeFloat = 0.0
  router_z_coefficient: NonNegativeFloat = 0.0
  z_loss_coefficient: NonNegativeFloat = 0.0
  mtp_coefficient: NonNegativeFloat = 0.0
  qk_clip: PositiveFloat | None = None


@flax.struct.dataclass
class WholeBatch:
  """Counts of the whole batch.

  Attributes:
    tokens, sequences: float32 scalars, how many there are.
    load: float32 [routers, experts], tokens sent to each expert; None where no loss asks for it.
  """

  tokens: Array
  sequences: Array
  load: Array | None


class Auxiliary(NamedTuple):
  """Result of ``auxiliary_losses``.

  Attributes:
    total: float32 scalar, the sum of all losses times their coefficients.
    metrics: each loss without its coefficient, and ``mtp/nll_k``.
    load: float32 [routers, experts] of all routers in the order of ``update_router_bias``, those of
      the prediction heads last; None without routers.
  """

  total: Array
  metrics: dict[str, Array]
  load: Array | None


def count_batch(
  segment_ids: Int[Array, "..."], positions: Int[Array, "..."]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Tokens and sequences that are not padding, in a micro-batch or in all of them."""
  real = segment_ids != 0
  return jnp.sum(real, dtype=jnp.float32), jnp.sum(real & (positions == 0), dtype=jnp.float32)


def auxiliary_losses(
  scores: TokenScores,
  params: Any,
  config: ModelConfig,
  batch: Any,
  whole: WholeBatch,
  settings: AuxiliaryConfig,
) -> Auxiliary:
  """All losses whose coefficient is not 0.

  Args:
    scores: of the micro-batch, from the current parameters.
    params: the parameters.
    config: model.
    batch: ``UpdateBatch``, the micro-batch.
    whole: what it is a part of.
    settings: which losses there are, and their weights.

  Returns:
    The micro-batch's part of the whole batch's losses, whose metrics are:
    ``auxiliary/balance``: ``E sum_e f_e p_e``, mean over routers; f_e the share of the whole
    batch's choices that fell on e, p_e the mean of its share of a token's scores (2101.03961).
    ``auxiliary/sequence_balance``: the same within a sequence, mean over sequences (2412.19437).
    ``auxiliary/router_z``: mean over tokens of a router's squared log-normaliser (2202.08906).
    ``auxiliary/z``: the same of the output's, over the weighted tokens (2204.02311).
    ``auxiliary/mtp``: see ``models.mtp_loss``, weighted as the metrics' means.
  """
  tokens, sequences = count_batch(batch.prepared.segment_ids, batch.positions)
  of_tokens = tokens / jnp.maximum(whole.tokens, 1)
  of_sequences = sequences / jnp.maximum(whole.sequences, 1)
  losses: dict[str, tuple[float, Array]] = {}
  metrics: dict[str, Array] = {}
  loads = [] if scores.routing is None else [scores.routing.load]
  if settings.balance_coefficient:
    assert scores.routing is not None and whole.load is not None
    share = whole.load / jnp.maximum(jnp.sum(whole.load, axis=-1, keepdims=True), 1)
    products = jnp.sum(share * scores.routing.mean_scores, axis=-1) * share.shape[-1]
    losses["balance"] = settings.balance_coefficient, jnp.mean(products) * of_tokens
  if settings.sequence_balance_coefficient:
    loss = scores.sequence_balance_loss * of_sequences
    losses["sequence_balance"] = settings.sequence_balance_coefficient, loss
  if settings.router_z_coefficient:
    losses["router_z"] = settings.router_z_coefficient, scores.router_z_loss * of_tokens
  if settings.z_loss_coefficient:
    squares = jnp.square(scores.log_normalizers)
    losses["z"] = settings.z_loss_coefficient, jnp.sum(batch.prepared.shares * squares)
  if settings.mtp_coefficient:
    ahead = models.mtp_loss(
      params,
      config,
      scores.hidden,
      batch.token_ids,
      batch.prepared.segment_ids,
      batch.positions,
      batch.prepared.shares,
    )
    losses["mtp"] = settings.mtp_coefficient, ahead.loss
    metrics |= ahead.metrics
    loads += [] if ahead.load is None else [ahead.load]
  total = sum((weight * loss for weight, loss in losses.values()), jnp.zeros(()))
  metrics |= {f"auxiliary/{k}": jax.lax.stop_gradient(v) for k, (_, v) in losses.items()}
  return Auxiliary(total, metrics, jnp.concatenate(loads) if loads else None)
