r"""Estimators of KL(pi || pi_ref) from tokens sampled by pi, with d = log pi_ref - log pi.

The value and the gradient (as a loss, on policy) of an estimator have different properties:

=========  =====================  ==================  ==========================================
name       value                  bias of the value   expected gradient
=========  =====================  ==================  ==========================================
k1         -d                     none                0: no use as a loss, right in the reward
k2         d^2 / 2                biased              that of KL(pi || pi_ref): right
k3         e^d - d - 1            none, low variance  that of the forward KL(pi_ref || pi)
k3_plus    k3, gradient of k2     none, low variance  that of KL(pi || pi_ref): right
absolute   \|d\|                  biased              sign only
=========  =====================  ==================  ==========================================

The table holds without a weight. With the weight ``r = pi / sg(pi_sampled)`` that
``importance_log_ratios`` gives, r times the estimate has the value of the estimate and, as r is
differentiated, the score function in its gradient: k1 and k3 then have the expected gradient of
KL(pi || pi_ref) (2506.09477; NeMo-RL).

References: Schulman, "Approximating KL divergence" (2020); GRPO, 2402.03300 (k3).
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

KlEstimator = Literal["k1", "k2", "k3", "k3_plus", "absolute"]

LOG_RATIO_LIMIT = 20.0  # exp of more overflows products in fp32; every exponent is clamped to it
KL_LIMIT = 10.0  # k3 of one token beyond this is noise of a stale sampler, nats


def kl_estimate(
  log_probs: Float[Array, "*shape"],
  reference_log_probs: Float[Array, "*shape"],
  estimator: KlEstimator,
  importance_log_ratios: Float[Array, "*shape"] | None = None,
) -> Float[Array, "*shape"]:
  """Per-token estimate in nats, differentiable in ``log_probs``; see the table of this module.

  d is clamped to +-20 and k3 to +-10, where gradients are 0. With a weight the clamp of 10 is that
  of the weighted estimate, of any estimator.

  Args:
    log_probs: of the sampled tokens under the present policy.
    reference_log_probs: under the reference.
    estimator: which.
    importance_log_ratios: log of the weight, differentiable; None is no weight.
  """
  difference = reference_log_probs - log_probs
  if importance_log_ratios is not None:
    limited = jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = jnp.exp(jnp.clip(importance_log_ratios, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    ratio = jnp.where(limited == difference, ratio, jax.lax.stop_gradient(ratio))
    value = {
      "k1": lambda: -limited,
      "k2": lambda: 0.5 * jnp.square(limited),
      "k3": lambda: jnp.expm1(limited) - limited,
    }
    if estimator not in value:
      raise ValueError(f'estimator={estimator!r} has no weighted form; allowed: "k1", "k2", "k3".')
    return jnp.clip(ratio * value[estimator](), -KL_LIMIT, KL_LIMIT)
  if estimator == "k1":
    return -difference
  if estimator == "absolute":
    return jnp.abs(difference)
  if estimator == "k2":
    return 0.5 * jnp.square(difference)
  limited = jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
  low_variance = jnp.clip(jnp.expm1(limited) - limited, -KL_LIMIT, KL_LIMIT)
  if estimator == "k3":
    return low_variance
  if estimator == "k3_plus":
    squared = 0.5 * jnp.square(difference)
    return squared + jax.lax.stop_gradient(low_variance - squared)
  raise ValueError(f'estimator={estimator!r}; allowed: "k1", "k2", "k3", "k3_plus", "absolute".')
