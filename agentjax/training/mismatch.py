"""Sampler against trainer, token by token: the distribution of the gap, and its worst token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from agentjax.objectives.kl import LOG_RATIO_LIMIT
from agentjax.objectives.segments import broadcast_to_tokens
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.packing import PackedSequence

Array = jax.Array

_QUANTILES = (50, 95, 99)


@dataclasses.dataclass(frozen=True)
class WorstToken:
  """The token on which sampler and trainer differ most.

  Attributes:
    batch, sequence: index of its batch, and in it of its sequence.
    position: tokens of its sequence before it.
    version: of the weights that sampled it.
    sampler, trainer: log-probs, nats.
  """

  batch: int
  sequence: int
  position: int
  version: int
  sampler: float
  trainer: float


@dataclasses.dataclass(frozen=True)
class MismatchReport:
  """|log-prob by the sampler - log-prob by the trainer| over all tokens with loss weight.

  Attributes:
    quantiles: nats, by per cent: 50, 95, 99, 100.
    mean: nats.
    alarmed: share of tokens above the alarm threshold.
    multiplicative_error: mean of exp |difference|.
    kl: k3 estimate of KL(sampler || trainer), nats.
    worst: the token of the largest difference.
  """

  quantiles: dict[int, float]
  mean: float
  alarmed: float
  multiplicative_error: float
  kl: float
  worst: WorstToken

  def metrics(self) -> dict[str, float]:
    """Flat scalars under ``mismatch/``."""
    named = {f"mismatch/p{q}": self.quantiles[q] for q in _QUANTILES}
    return named | {
      "mismatch/mean": self.mean,
      "mismatch/max": self.quantiles[100],
      "mismatch/alarmed": self.alarmed,
      "mismatch/multiplicative_error": self.multiplicative_error,
      "mismatch/kl": self.kl,
    }


def mismatch_report(
  batches: Sequence[Batch], log_probs: Sequence[Any], alarm: float
) -> MismatchReport | None:
  """Compares the batches' log-probs with the trainer's; None where no token has weight.

  Replayed tokens (the column ``replayed``) are left out.

  It is computed on the devices of the arrays; only a few numbers come to the host.

  Args:
    batches: arrays [B, T].
    log_probs: float32 [B, T] of each, the trainer's before the update.
    alarm: nats.
  """
  grids = tuple(
    (scored, batch.behaviour_log_probs, _compared(batch))
    for batch, scored in zip(batches, log_probs, strict=True)
  )
  found = jax.device_get(_sums(grids, alarm))
  count = int(found["count"])
  if not count:
    return None
  points = (*_QUANTILES, 100)
  # A percentile lies between two order statistics.
  places = [divmod((count - 1) * q, 100) for q in points]
  ranks = np.array([[low, min(low + 1, count - 1)] for low, _ in places], np.int32)
  between = np.asarray(_order_statistics(grids, ranks), np.float64)
  number, row, column = (int(x) for x in found["worst"])
  batch = batches[number]
  names = ("segment_ids", "positions", "versions", "behaviour_log_probs")
  of_worst = jax.device_get(
    _at((*(getattr(batch, name) for name in names), log_probs[number]), row, column)
  )
  return MismatchReport(
    quantiles={
      q: float(low + (high - low) * rest / 100)
      for q, (low, high), (_, rest) in zip(points, between, places, strict=True)
    },
    mean=float(found["mean"]),
    alarmed=float(found["alarmed"]),
    multiplicative_error=float(found["multiplicative_error"]),
    kl=float(found["kl"]),
    worst=WorstToken(
      batch=number,
      sequence=int(of_worst[0]) - 1,
      position=int(of_worst[1]),
      version=int(of_worst[2]),
      sampler=float(of_worst[3]),
      trainer=float(of_worst[4]),
    ),
  )


def _compared(batch: Batch) -> Any:
  """[B, T] weights, 0 on replayed tokens: the policy has learnt since they were sampled."""
  if "replayed" not in batch.columns:
    return batch.weights
  replayed = broadcast_to_tokens(jnp.asarray(batch.columns["replayed"]), batch.segment_ids)
  return jnp.where(replayed > 0, 0, batch.weights)


_Grids = tuple[tuple[Array, Array, Array], ...]  # of each batch: trainer, sampler, weights


def _gap(grid: tuple[Array, Array, Array]) -> tuple[Array, Array]:
  """Trainer minus sampler, nats, and where tokens have weight."""
  scored, sampled, weights = grid
  inside = weights > 0
  return jnp.where(inside, scored - sampled, 0), inside


@jax.jit
def _sums(grids: _Grids, alarm: float) -> dict[str, Array]:
  """Means over the weighted tokens, their number, and batch, row and column of the worst."""
  gaps = [_gap(grid) for grid in grids]
  count = sum(jnp.sum(inside) for _, inside in gaps)

  def mean(function: Callable[[Array], Array]) -> Array:
    total = sum(jnp.sum(jnp.where(inside, function(gap), 0)) for gap, inside in gaps)
    return total / jnp.maximum(count, 1)

  def limited(gap: Array) -> Array:
    return jnp.clip(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

  largest = jnp.stack([jnp.max(jnp.where(inside, jnp.abs(gap), -1)) for gap, inside in gaps])
  number = jnp.argmax(largest)
  each = jnp.stack(
    [
      jnp.stack(jnp.unravel_index(jnp.argmax(jnp.where(i, jnp.abs(g), -1)), g.shape))
      for g, i in gaps
    ]
  )
  return {
    "count": jnp.asarray(count),
    "mean": mean(jnp.abs),
    "alarmed": mean(lambda gap: jnp.abs(gap) > alarm),
    "multiplicative_error": mean(lambda gap: jnp.exp(jnp.abs(limited(gap)))),
    "kl": mean(lambda gap: _k3(limited(gap))),
    "worst": jnp.append(number, each[number]),
  }


def _k3(gap: Array) -> Array:
  """``exp(gap) - 1 - gap``; by its series where the difference would cancel."""
  series = gap**2 * (1 / 2 + gap * (1 / 6 + gap * (1 / 24 + gap * (1 / 120 + gap / 720))))
  return jnp.where(jnp.abs(gap) < 0.3, series, jnp.expm1(gap) - gap)


@jax.jit
def _order_statistics(grids: _Grids, ranks: Array) -> Array:
  """The |gap| of the weighted tokens that have these ranks from 0, exactly.

  The bit patterns of non-negative floats have the order of the floats, so each is found by
  bisection: only counts are exchanged between devices; nothing is sorted or gathered.
  """
  gaps = [_gap(grid) for grid in grids]
  bits = [(jax.lax.bitcast_convert_type(jnp.abs(gap), jnp.int32), inside) for gap, inside in gaps]

  def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
    low, high = bounds
    middle = low + (high - low) // 2
    below = sum(
      jnp.sum(inside & (b <= middle[..., None, None]), axis=(-2, -1)) for b, inside in bits
    )
    enough = below > ranks
    return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

  low = jnp.zeros(ranks.shape, jnp.int32)
  high = jnp.full(ranks.shape, jnp.iinfo(jnp.int32).max, jnp.int32)
  low, _ = jax.lax.fori_loop(0, 32, halve, (low, high))
  return jax.lax.bitcast_convert_type(low, jnp.float32)


@jax.jit
def _at(arrays: tuple[Array, ...], row: int, column: int) -> tuple[Array, ...]:
  return tuple(x[row, column] for x in arrays)


def warn_of_mismatch(
  report: MismatchReport, sequences: Sequence[Sequence[PackedSequence]], step: int, alarm: float
) -> None:
  """Logs the worst token of a step if it is above the alarm; ``sequences`` are those packed."""
  worst = report.worst
  if report.quantiles[100] <= alarm:
    return
  logging.warning(
    "step %d: sampler and trainer differ by more than config.rl.mismatch_alarm=%g nats on %.3g of "
    "the tokens, most on token %d of the episode (%s): log-prob %.4f under the sampler, with "
    "weights of version %d, and %.4f under the trainer, with version %d",
    step,
    alarm,
    report.alarmed,
    worst.position,
    sequences[worst.batch][worst.sequence].name,
    worst.sampler,
    worst.version,
    worst.trainer,
    step,
  )
