"""Sampler against trainer, token by token: the distribution of the gap, and its worst token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging

from agentjax.objectives.kl import LOG_RATIO_LIMIT
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.packing import PackedSequence

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
  batches: Sequence[Batch], log_probs: Sequence[np.ndarray], alarm: float
) -> MismatchReport | None:
  """Compares the batches' log-probs with the trainer's; None where no token has weight.

  Args:
    batches: host arrays [B, T].
    log_probs: float32 [B, T] of each, the trainer's before the update.
    alarm: nats.
  """
  gaps, cells = [], []
  for number, (batch, scored) in enumerate(zip(batches, log_probs, strict=True)):
    rows, columns = np.nonzero(np.asarray(batch.weights) > 0)
    gaps.append((scored - np.asarray(batch.behaviour_log_probs))[rows, columns].astype(np.float64))
    cells.append(np.stack([np.full_like(rows, number), rows, columns], axis=1))
  gap, cell = np.concatenate(gaps), np.concatenate(cells)
  if not gap.size:
    return None
  apart = np.abs(gap)
  number, row, column = cell[int(np.argmax(apart))].tolist()
  batch = batches[number]

  def of_worst(array: Any) -> Any:
    return array[row, column].item()

  limited = np.clip(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
  points = (*_QUANTILES, 100)
  return MismatchReport(
    quantiles=dict(zip(points, np.percentile(apart, points).tolist(), strict=True)),
    mean=float(apart.mean()),
    alarmed=float(np.mean(apart > alarm)),
    multiplicative_error=float(np.exp(np.abs(limited)).mean()),
    kl=float(np.mean(np.expm1(limited) - limited)),
    worst=WorstToken(
      batch=number,
      sequence=of_worst(batch.segment_ids) - 1,
      position=of_worst(batch.positions),
      version=of_worst(batch.versions),
      sampler=of_worst(batch.behaviour_log_probs),
      trainer=of_worst(log_probs[number]),
    ),
  )


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
