r"""MoClip: a cap on the turn of a gradient against its momentum, and arctan2 for the division.

A reconstruction. Of the optimiser of Logits Replay (2510.09152) only the abstract's description is
public: an angle cap between gradient and momentum, and an Adam-like update rescaled with arctan2.
With ``t = angle(g, m)`` of one tensor and a cap D:

    g' = |g| (cos D m/|m| + sin D p/|p|),  p = g - (g m/|m|) m/|m|     where t > D, else g
    m  <- b1 m + (1 - b1) g',   v <- b2 v + (1 - b2) g'^2
    direction = a arctan2(m / (1 - b1^n), b sqrt(v / (1 - b2^n)))

The pairing of g' with both moments, the angle a tensor rather than of the whole gradient, and the
exceptions below are ours. ``(a, b) = (4/pi, 1)`` is what Adam-atan2 code has in common (Everett et
al., 2407.05872): a ratio of 1 gives a step of 1.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float

from agentjax.config import PositiveFloat, check
from agentjax.models.matrices import stack_axes
from agentjax.models.spec import is_spec
from agentjax.training.optimizer import DirectionConfig, OptimizerConfig

Array = jax.Array

_NO_PLANE = 1e-6  # of the gradient's norm: below it float32 cannot say in which plane to turn


@dataclasses.dataclass(unsafe_hash=True)
class MoClipConfig(DirectionConfig):
  """MoClip, with the ``b1`` and ``b2`` of the optimiser's settings.

  Attributes:
    max_angle: degrees that a gradient may turn away from its momentum; None is no cap. The paper's
      value is not public; 45 is ours. Gradients of reinforcement learning turn sharply: there 90 to
      120 only forbids reversals.
    atan2_scale: a of ``a arctan2(m, sqrt(v))``, 4/pi in common Adam-atan2 code.
  """

  max_angle: float | None = 45.0
  atan2_scale: PositiveFloat = 4 / math.pi

  def validate(self, path: str = "config.optimizer.direction") -> None:
    super().validate(path)
    angle = self.max_angle
    check(angle is None or 0 < angle < 180, f"{path}.max_angle", angle, "0 < degrees < 180 or none")

  def build(self, config: OptimizerConfig, specs: Any) -> optax.GradientTransformation:
    """See ``DirectionConfig.build``."""
    return scale_by_moclip(
      config.b1,
      config.b2,
      max_angle=self.max_angle,
      scale=self.atan2_scale,
      stack=jax.tree.map(
        lambda spec: stack_axes(spec) if spec.trained else optax.MaskedNode(),
        specs,
        is_leaf=is_spec,
      ),
    )


def cap_angle(
  gradient: Float[Array, "*shape"],
  momentum: Float[Array, "*shape"],
  max_angle: float,
  *,
  stack: int = 0,
) -> Float[Array, "*shape"]:
  """``gradient``, turned towards ``momentum`` until their angle is at most ``max_angle``.

  The norm and the plane of the two do not change. A tensor is not turned if its momentum or
  gradient is 0, or if it is parallel to the momentum, as every tensor of one element is: there is
  no plane to turn it in.

  Args:
    gradient, momentum: float32.
    max_angle: degrees, above 0 and below 180.
    stack: leading axes along which tensors of their own are stacked.
  """
  axes = tuple(range(stack, gradient.ndim))

  def norm(x: Array) -> Array:
    # By the largest entry first: squares of small gradients underflow.
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    scaled = x / jnp.where(largest > 0, largest, 1)
    return largest * jnp.sqrt(jnp.sum(jnp.square(scaled), axis=axes, keepdims=True))

  size, other = norm(gradient), norm(momentum)
  g = gradient / jnp.where(size > 0, size, 1)
  m = momentum / jnp.where(other > 0, other, 1)
  cosine = jnp.sum(g * m, axis=axes, keepdims=True)
  across = g - cosine * m
  # A second pass takes out what rounding has left of the momentum.
  across -= jnp.sum(across * m, axis=axes, keepdims=True) * m
  length = norm(across)
  cap = math.radians(max_angle)
  turned = math.cos(cap) * m + math.sin(cap) * across / jnp.where(length > 0, length, 1)
  turns = (size > 0) & (other > 0) & (length > _NO_PLANE) & (cosine < math.cos(cap))
  return jnp.where(turns, size * turned, gradient)


def scale_by_moclip(
  b1: float = 0.9,
  b2: float = 0.999,
  *,
  max_angle: float | None,
  scale: float = 4 / math.pi,
  ratio_scale: float = 1.0,
  stack: Any = None,
) -> optax.GradientTransformation:
  """Directions of MoClip; every coordinate is within ``scale pi / 2``, and there is no epsilon.

  Args:
    b1, b2: decay of the moments.
    max_angle: the cap D in degrees; None never turns a gradient (Adam-atan2).
    scale, ratio_scale: a and b.
    stack: tree of int like the parameters, leading axes along which tensors of their own are
      stacked; None is 0 everywhere.

  Returns:
    A transformation whose state is ``optax.ScaleByAdamState``; moments have the dtype of the
    parameters.
  """

  def init(params: Any) -> optax.ScaleByAdamState:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return optax.ScaleByAdamState(
      count=jnp.zeros([], jnp.int32), mu=zeros, nu=jax.tree.map(jnp.zeros_like, params)
    )

  def update(
    grads: Any, state: optax.ScaleByAdamState, params: Any = None
  ) -> tuple[Any, optax.ScaleByAdamState]:
    del params
    if max_angle is not None:
      levels = jax.tree.map(lambda _: 0, grads) if stack is None else stack
      grads = jax.tree.map(
        lambda g, m, n: cap_angle(g, m, max_angle, stack=n), grads, state.mu, levels
      )
    mu = optax.tree.update_moment(grads, state.mu, b1, 1)
    nu = optax.tree.update_moment(grads, state.nu, b2, 2)
    count = optax.safe_increment(state.count)
    m_hat = optax.tree.bias_correction(mu, b1, count)
    v_hat = optax.tree.bias_correction(nu, b2, count)
    changes = jax.tree.map(
      lambda m, v: scale * jnp.arctan2(m, ratio_scale * jnp.sqrt(v)), m_hat, v_hat
    )
    return changes, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

  return optax.GradientTransformation(init, update)
