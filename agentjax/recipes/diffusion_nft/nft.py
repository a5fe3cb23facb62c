r"""DiffusionNFT (2509.16117) as RationalRewards (2604.11626) uses it: a flow learns from rewards.

A group of images is drawn for a prompt by an old policy v_old. With the reward's advantage A,

    A   = (reward - mean of the group) / (std of the group + 1e-4)
    r   = clip(A / c, -1, 1) / 2 + 1/2          c = 5; r = 1/2 where A = 0
    v+  = beta v + (1 - beta) v_old             v- = (1 + beta) v_old - beta v
    x0± = x_t - t v±                            x_t = (1 - t) x0 + t noise
    L   = c (r |x0+ - x0|² / (w+ beta) + (1 - r) |x0- - x0|² / (w- beta)) + k |v - v_ref|²

|.|² is the mean over an image, w± = mean |x0± - x0| without a gradient and at least 1e-5, k = 1e-4.
No noise of a sampler enters, so any sampler may draw the images.

The division by 2 and the shift by 1/2 matter: clip(A / c, 0, 1) alone would give all images below
the mean of their group r = 0, however little worse they are, and those just above it almost 0 too.

A group teaches nothing if its rewards hardly differ or are all high: it is left out where
std <= .05 or mean >= .9, as in the released training loop. The old policy follows the new one,
``v_old <- d v_old + (1 - d) v`` after each step with ``d = min(.001 step, .5)``, as released.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from agentjax.config import Config, NonNegativeFloat, PositiveFloat, Share

Array = jax.Array
T = TypeVar("T")

_LEAST_WEIGHT = 1e-5
_LEAST_STD = 1e-4


@dataclasses.dataclass(unsafe_hash=True)
class NftConfig(Config):
  """Constants of the loss; the defaults are the paper's, or those of its code.

  Attributes:
    beta: how far v+ and v- lie from the old policy.
    advantage_clip: c, in standard deviations.
    reference: k, weight of the distance from the frozen policy.
    least_std, most_mean: a group is left out at or below the one, or at or above the other.
    old_rate, old_most: d rises by the one a step, up to the other.
  """

  beta: PositiveFloat = 1.0
  advantage_clip: PositiveFloat = 5.0
  reference: NonNegativeFloat = 1e-4
  least_std: NonNegativeFloat = 0.05
  most_mean: float = 0.9
  old_rate: NonNegativeFloat = 0.001
  old_most: Share = 0.5


def group_advantages(
  rewards: Float[Array, "groups images"], config: NftConfig
) -> tuple[Float[Array, "groups images"], Bool[Array, " groups"]]:
  """A of every image, and which groups are kept."""
  mean = rewards.mean(axis=1, keepdims=True)
  std = rewards.std(axis=1, keepdims=True)
  kept = (std[:, 0] > config.least_std) & (mean[:, 0] < config.most_mean)
  return (rewards - mean) / (std + _LEAST_STD), kept


def optimality(advantages: Float[Array, "..."], clip: float) -> Float[Array, "..."]:
  """r in [0, 1]: the probability with which an image counts as good."""
  return jnp.clip(advantages / clip, -1.0, 1.0) / 2 + 0.5


def nft_loss(
  velocity: Float[Array, "images ..."],
  old: Float[Array, "images ..."],
  reference: Float[Array, "images ..."],
  noisy: Float[Array, "images ..."],
  clean: Float[Array, "images ..."],
  time: Float[Array, " images"],
  good: Float[Array, " images"],
  kept: Bool[Array, " images"],
  config: NftConfig,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
  """L of the module, the mean over the images that are kept; 0 where none is.

  Args:
    velocity: v at ``noisy``; the gradient goes through it alone.
    old, reference: v_old and v_ref there.
    noisy, clean, time: x_t, x0 and t in [0, 1].
    good: r, from ``optimality``.
    kept: images whose group is kept.
    config: constants.

  Returns:
    The loss, and its parts as metrics.
  """
  old, reference = jax.lax.stop_gradient((old, reference))
  beta = config.beta
  plus = _distance(beta * velocity + (1 - beta) * old, noisy, clean, time)
  minus = _distance((1 + beta) * old - beta * velocity, noisy, clean, time)
  policy = config.advantage_clip * (good * plus + (1 - good) * minus) / beta
  from_reference = _image_mean(jnp.square(velocity - reference))
  count = jnp.maximum(kept.sum(), 1)

  def mean(values: Array) -> Array:
    return jnp.where(kept, values, 0.0).sum() / count

  loss = mean(policy) + config.reference * mean(from_reference)
  return loss, {"policy": mean(policy), "from_reference": mean(from_reference)}


def _distance(velocity: Array, noisy: Array, clean: Array, time: Array) -> Array:
  """``|x0 predicted - x0|² / w``, a number an image."""
  spread = time.reshape(-1, *[1] * (clean.ndim - 1))
  error = noisy - spread * velocity - clean
  weight = jnp.maximum(_image_mean(jnp.abs(error)), _LEAST_WEIGHT)
  return _image_mean(jnp.square(error)) / jax.lax.stop_gradient(weight)


def _image_mean(values: Array) -> Array:
  return values.reshape(len(values), -1).mean(axis=1)


def follow(old: T, new: T, step: int, config: NftConfig) -> T:
  """The old policy after ``step`` steps, from 0: it moves towards the new one."""
  stay = min(config.old_rate * step, config.old_most)
  return jax.tree.map(lambda o, n: stay * o + (1 - stay) * n, old, new)
