"""Step sizes of a state space model, from what its projection gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def step_sizes(
  dt: Array,
  *,
  bias: Array | None,
  softplus: bool,
  limit: tuple[float, float | None] | None,
  real: Array | None,
) -> Array:
  """``clip(softplus(dt + bias), *limit)``, and exactly 0 at padding, whatever stands there.

  Args:
    dt: [..., H] in the dtype of the result.
    bias: [H] or None. softplus: whether to apply it.
    limit: lower and upper bound (None: no upper bound), or None for no clipping.
    real: bool [...], False at padding; None: no padding.

  Raises:
    ValueError: bounds in the wrong order.
  """
  if limit is not None and limit[1] is not None and limit[0] > limit[1]:
    raise ValueError(f"dt_limit={limit}: the lower bound must not be above the upper one.")
  if real is not None:
    # Before softplus as well: 0 times the slope at a NaN would be NaN in the gradient.
    dt = jnp.where(real[..., None], dt, 0.0)
  if bias is not None:
    dt = dt + bias.astype(dt.dtype)
  if softplus:
    dt = jax.nn.softplus(dt)
  if limit is not None and (limit[0] > 0.0 or limit[1] is not None):
    dt = jnp.clip(dt, limit[0], limit[1])
  return dt if real is None else jnp.where(real[..., None], dt, 0.0)
