"""Optimisers from optax: schedule, clipping, AdamW, Muon or your own, a guard for bad gradients."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from agentjax.config import (
  Config,
  NonNegativeFloat,
  NonNegativeInt,
  PositiveFloat,
  PositiveInt,
  Share,
  ShareBelowOne,
)
from agentjax.models.matrices import matrix_axes
from agentjax.models.spec import ParamSpec, decay_mask, is_spec
from agentjax.names import Adopted, Choice, check_callable, wrong

Array = jax.Array


@dataclasses.dataclass(unsafe_hash=True)
class DirectionConfig(Choice):
  """Settings of a transformation from gradients to directions, which replaces AdamW or Muon."""

  group = "agentjax.optimizers"
  adopts = "a function without arguments that makes an optax.GradientTransformation"

  @classmethod
  def adopt(cls, name: str, found: Any, path: str) -> Self:
    check_callable(found, f"{path}={name!r}", cls.allowed(), arguments=0)
    if not isinstance(made := found(), optax.GradientTransformation):
      raise wrong(name, path, made, cls.allowed())
    return OwnDirection(name, made)  # type: ignore[return-value]

  def build(self, config: OptimizerConfig, specs: Any) -> optax.GradientTransformation:
    """The transformation; clipping, decay, learning rate and float32 masters are added to it.

    Args:
      config: of the whole optimiser, for what it shares with others, such as ``b1`` and ``b2``.
      specs: tree of ParamSpec like the parameters. Gradients of arrays that are not trained are
        ``optax.MaskedNode`` when the transformation sees them.
    """
    raise NotImplementedError(f"{type(self).__name__} must define build()")


@dataclasses.dataclass(unsafe_hash=True)
class OwnDirection(Adopted, DirectionConfig):
  """A transformation of optax without settings, such as ``optax:scale_by_lion``."""


@dataclasses.dataclass(unsafe_hash=True)
class OptimizerConfig(Config):
  """AdamW, Muon or a direction of your own, with warm-up and decay.

  Moments are float32 whatever the parameters' dtype.

  Attributes:
    name: "muon" moves every matrix (``models.matrices``) by its orthogonalised momentum and all
      other arrays by Adam; "adamw" moves everything by Adam. Weight decay is decoupled in all.
    direction: moves everything instead of ``name``, such as
      ``agentjax.recipes.moclip:MoClipConfig`` or ``optax:scale_by_lion``; None leaves it to
      ``name``.
    learning_rate: peak, after warm-up.
    schedule: shape after warm-up; "linear" and "cosine" end at learning_rate * final_fraction.
    warmup_steps: optimiser steps from 0 to the peak.
    weight_decay: for arrays whose ParamSpec says ``decayed``; norms, biases and decay rates are
      not.
    clip_norm: global gradient norm, None for no clipping.
    max_bad_steps: consecutive non-finite gradients that are skipped before training stops.
    momentum, nesterov: of Muon; 0.95 without Nesterov's look-ahead in Kimi K2.
    update_rms: Muon's update is ``update_rms sqrt(max(n, m))`` times the orthogonalised [n, m]
      momentum, 0.2 in Kimi K2, about the size of an Adam update; None scales by
      ``sqrt(max(1, m / n))`` instead (n in, m out).
    newton_schulz_steps: iterations of the orthogonalisation.
    master_dtype: "float32" keeps a float32 copy of narrower parameters and updates the copy; the
      parameters are its rounding, so small updates add up. None updates the parameters themselves.

  References: Loshchilov & Hutter, 1711.05101 (AdamW); Liu et al., 2502.16982, and Kimi K2,
  2507.20534 (Muon).
  """

  name: Literal["adamw", "muon"] = "adamw"
  direction: DirectionConfig | None = None
  learning_rate: PositiveFloat = 1e-3
  schedule: Literal["constant", "linear", "cosine"] = "constant"
  warmup_steps: NonNegativeInt = 0
  final_fraction: Share = 0.1
  b1: ShareBelowOne = 0.9
  b2: ShareBelowOne = 0.999
  eps: float = 1e-8
  weight_decay: NonNegativeFloat = 0.0
  clip_norm: PositiveFloat | None = 1.0
  max_bad_steps: PositiveInt = 5
  momentum: ShareBelowOne = 0.95
  nesterov: bool = False
  update_rms: PositiveFloat | None = 0.2
  newton_schulz_steps: PositiveInt = 5
  master_dtype: Literal["float32"] | None = "float32"


class MasterState(NamedTuple):
  """State of an optimiser that works in float32 on narrower parameters."""

  masters: Any  # float32 copies of the narrower arrays, optax.MaskedNode for all others
  inner: Any


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
  config: OptimizerConfig, total_steps: int, specs: Any
) -> optax.GradientTransformation:
  """The transformation; its state counts skipped updates (``bad_steps``).

  Arrays whose spec says they are not trained stay as they are and have no moments. Gradients must
  be float32, whatever the parameters are.

  Args:
    config: settings.
    total_steps: optimiser steps the schedule spans.
    specs: tree of ParamSpec like the parameters: what is a matrix, what decays, what is trained.
  """
  steps = [
    optax.partition(_directions(config, specs), _labels(config, specs)),
    optax.add_decayed_weights(config.weight_decay, decay_mask(specs)),
    optax.scale_by_learning_rate(learning_rate_schedule(config, total_steps)),
  ]
  if config.clip_norm is not None:
    steps.insert(0, optax.clip_by_global_norm(config.clip_norm))
  optimizer = optax.chain(*steps)
  if any(jnp.dtype(s.dtype) != jnp.float32 for s in jax.tree.leaves(specs, is_leaf=is_spec)):
    optimizer = _in_float32(optimizer, keep=config.master_dtype is not None)
  # The limit is enforced on the host, which can say what happened; optax would let the update pass.
  return optax.apply_if_finite(optimizer, max_consecutive_errors=2**30)


def bad_steps(state: Any) -> Array:
  """Consecutive updates skipped so far because a gradient was not finite; 0 when healthy."""
  return state.notfinite_count


def applied_updates(state: Any) -> Array:
  """Updates so far that the learning rate's schedule counts: those that were not skipped."""

  def scheduled(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)

  leaves = jax.tree.leaves(state, is_leaf=scheduled)
  return next(leaf.count for leaf in leaves if scheduled(leaf))


def scale_masters(state: Any, scales: Any) -> Any:
  """Optimiser state after the parameters were multiplied by ``scales`` outside of it.

  Args:
    state: of an optimiser from ``build_optimizer``.
    scales: tree like the parameters: what an array was multiplied by, None where it was not.
  """
  if not isinstance(state.inner_state, MasterState):
    return state

  def multiply(master: Any, scale: Array | None) -> Any:
    return master if scale is None or is_masked(master) else master * scale

  masters = jax.tree.map(multiply, state.inner_state.masters, scales, is_leaf=is_masked)
  return state._replace(inner_state=state.inner_state._replace(masters=masters))


def _labels(config: OptimizerConfig, specs: Any) -> Any:
  def label(spec: ParamSpec) -> str:
    if not spec.trained:
      return "frozen"
    if config.direction is not None:
      return "own"
    return "muon" if config.name == "muon" and matrix_axes(spec) is not None else "adam"

  return jax.tree.map(label, specs, is_leaf=is_spec)


def _directions(config: OptimizerConfig, specs: Any) -> dict[str, optax.GradientTransformation]:
  """The transformation from gradients to directions, by label."""

  def numbers(spec: ParamSpec) -> Any:
    axes = matrix_axes(spec)
    if axes is None:
      return optax.MaskedNode()
    return optax.contrib.MuonDimensionNumbers(axes.inputs, axes.outputs)

  def scaled(change: Array, axes: optax.contrib.MuonDimensionNumbers) -> Array:
    n, m = (math.prod(change.shape[i] for i in side) for side in axes)
    if config.update_rms is None:
      return change * math.sqrt(max(1.0, m / n))
    return change * (config.update_rms * math.sqrt(max(n, m)))

  matrices = jax.tree.map(numbers, specs, is_leaf=is_spec)
  muon = optax.chain(
    optax.contrib.scale_by_muon(
      ns_steps=config.newton_schulz_steps,
      beta=config.momentum,
      nesterov=config.nesterov,
      weight_dimension_numbers=lambda _: matrices,
    ),
    optax.stateless(lambda changes, _: jax.tree.map(scaled, changes, matrices)),
  )
  chosen = {"muon": muon} if config.name == "muon" else {}
  if config.direction is not None:
    chosen = {"own": config.direction.build(config, specs)}
  return {
    "adam": optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
    "frozen": optax.set_to_zero(),
  } | chosen


def _in_float32(inner: optax.GradientTransformation, *, keep: bool) -> optax.GradientTransformation:
  """``inner`` on float32 parameters, which it keeps between updates where ``keep``."""

  def widen(value: Any) -> Any:
    return value.astype(jnp.float32)

  def init(params: Any) -> MasterState:
    def master(value: Any) -> Any:
      return widen(value) if keep and value.dtype != jnp.float32 else optax.MaskedNode()

    return MasterState(jax.tree.map(master, params), inner.init(jax.tree.map(widen, params)))

  def update(grads: Any, state: MasterState, params: Any) -> tuple[Any, MasterState]:
    wide = jax.tree.map(
      lambda m, p: widen(p) if is_masked(m) else m, state.masters, params, is_leaf=is_masked
    )
    changes, inner_state = inner.update(grads, state.inner, wide)
    masters = jax.tree.map(
      lambda m, c: m if is_masked(m) else m + c, state.masters, changes, is_leaf=is_masked
    )
    # The difference of two narrow numbers: adding it to the one gives the other exactly.
    changes = jax.tree.map(
      lambda m, c, p: c if is_masked(m) else widen(m.astype(p.dtype)) - widen(p),
      masters,
      changes,
      params,
      is_leaf=is_masked,
    )
    return changes, MasterState(masters, inner_state)

  return optax.GradientTransformation(init, update)


def is_masked(value: Any) -> bool:
  """Leaf test for ``jax.tree`` functions: what an optimiser leaves alone has no state."""
  return isinstance(value, optax.MaskedNode)
