"""Optimisers from optax: schedule, clipping, AdamW, and a guard against non-finite updates."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import optax

from agentjax.config import Config, check


@dataclasses.dataclass(unsafe_hash=True)
class OptimizerConfig(Config):
  """AdamW with warm-up and decay.

  Attributes:
    learning_rate: peak, after warm-up.
    schedule: shape after warm-up; "linear" and "cosine" end at learning_rate * final_fraction.
    warmup_steps: optimiser steps from 0 to the peak.
    weight_decay: for arrays whose ParamSpec says ``decayed``: no norms, biases or decay rates.
    clip_norm: global gradient norm, None for no clipping.
    max_bad_steps: consecutive non-finite gradients that are skipped before training stops.
  """

  learning_rate: float = 1e-3
  schedule: Literal["constant", "linear", "cosine"] = "constant"
  warmup_steps: int = 0
  final_fraction: float = 0.1
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  weight_decay: float = 0.0
  clip_norm: float | None = 1.0
  max_bad_steps: int = 5

  def validate(self, path: str = "config.optimizer") -> None:
    super().validate(path)
    check(self.learning_rate > 0, f"{path}.learning_rate", self.learning_rate, "> 0")
    check(self.warmup_steps >= 0, f"{path}.warmup_steps", self.warmup_steps, ">= 0")
    check(0 <= self.final_fraction <= 1, f"{path}.final_fraction", self.final_fraction, "0 to 1")
    check(0 <= self.b1 < 1, f"{path}.b1", self.b1, "0 <= b1 < 1")
    check(0 <= self.b2 < 1, f"{path}.b2", self.b2, "0 <= b2 < 1")
    check(self.weight_decay >= 0, f"{path}.weight_decay", self.weight_decay, ">= 0")
    check(
      self.clip_norm is None or self.clip_norm > 0,
      f"{path}.clip_norm",
      self.clip_norm,
      "> 0 or none",
    )
    check(self.max_bad_steps >= 1, f"{path}.max_bad_steps", self.max_bad_steps, ">= 1")


def learning_rate_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
  """Learning rate as a function of the optimiser step, 0 ... total_steps."""
  peak, warmup = config.learning_rate, config.warmup_steps
  rest = max(total_steps - warmup, 1)
  if config.schedule == "constant":
    main = optax.constant_schedule(peak)
  elif config.schedule == "linear":
    main = optax.linear_schedule(peak, peak * config.final_fraction, rest)
  else:
    main = optax.cosine_decay_schedule(peak, rest, config.final_fraction)
  if not warmup:
    return main
  # Step 0 already moves: a first update of size zero would waste a batch of rollouts.
  ramp = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
  return optax.join_schedules([ramp, main], [warmup])


def build_optimizer(
  config: OptimizerConfig, total_steps: int, decay_mask: Any
) -> optax.GradientTransformation:
  """The transformation; its state counts skipped updates (``bad_steps``).

  Args:
    config: settings.
    total_steps: optimiser steps the schedule spans.
    decay_mask: tree of bool like the parameters, from ``models.spec.decay_mask``.
  """
  steps = [
    optax.adamw(
      learning_rate_schedule(config, total_steps),
      b1=config.b1,
      b2=config.b2,
      eps=config.eps,
      weight_decay=config.weight_decay,
      mask=decay_mask,
    )
  ]
  if config.clip_norm is not None:
    steps.insert(0, optax.clip_by_global_norm(config.clip_norm))
  # The limit is enforced on the host, which can say what happened; optax would let the update pass.
  return optax.apply_if_finite(optax.chain(*steps), max_consecutive_errors=2**30)


def bad_steps(state: Any) -> jax.Array:
  """Consecutive updates skipped so far because a gradient was not finite; 0 when healthy."""
  return state.notfinite_count
