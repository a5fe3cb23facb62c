"""A small flow-matching generator of drawings.

It sees a noisy image at time t and a condition. It predicts the image, and the velocity ``noise -
image`` follows: a patch has more numbers than the network is wide, so the network could not repeat
the noise. A condition is a weight for each of the values of all aspects; that of a prompt has 1 at
its four values. Training leaves aspects out now and then, so other weights have a meaning too.

Legend: B batch, A aspects, V values of all aspects, D width.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from agentjax.models.spec import ParamSpec, Weight
from agentjax.recipes.diffusion_nft.blocks import (
  PATCH_VALUES,
  PATCHES,
  Blocks,
  blocks_spec,
  matrix,
  patches,
  run_blocks,
  unpatch,
)
from agentjax.recipes.diffusion_nft.drawings import ASPECTS, SIZE, SIZES, STARTS, TOTAL

Array = jax.Array

_WAVES = 32  # sines, and as many cosines, of the time
_LEAST_TIME = 0.1  # below it the distance to the predicted image is divided by it, not by the time
_OF_ASPECT = np.repeat(np.eye(len(ASPECTS), dtype=np.float32), SIZES, axis=1)  # [A, V]


@flax.struct.dataclass
class Generator:
  """Attributes:
  patch_in: [192, D]. places: [16, D]. words: [V, D], of a token for each aspect, which the patches
    see. values: [V, D] and time: [64, D], of the modulation. blocks: conditioned.
  patch_out: [D, 192], zeros at the start.
  """

  patch_in: Weight
  places: Weight
  words: Weight
  values: Weight
  time: Weight
  blocks: Blocks
  patch_out: Weight


def generator_spec(layers: int, width: int, heads: int) -> Generator:
  """Specs of a generator."""
  return Generator(
    patch_in=matrix(PATCH_VALUES, width, fan_in=PATCH_VALUES),
    places=matrix(PATCHES, width, fan_in=width),
    words=matrix(TOTAL, width, fan_in=width),
    values=matrix(TOTAL, width, fan_in=len(ASPECTS)),
    time=matrix(2 * _WAVES, width, fan_in=_WAVES),
    blocks=blocks_spec(layers, width, heads, conditioned=True),
    patch_out=ParamSpec((width, PATCH_VALUES), (None, None), init="zeros"),
  )


def condition_of(prompts: Int[np.ndarray, "B A"]) -> Float[np.ndarray, "B V"]:
  """1 at the values of each prompt."""
  condition = np.zeros((len(prompts), TOTAL), np.float32)
  np.put_along_axis(condition, prompts + STARTS, 1.0, axis=1)
  return condition


def velocity(
  params: Generator,
  noisy: Float[Array, "B 32 32 3"],
  time: Float[Array, " B"],
  condition: Float[Array, "B V"],
) -> Float[Array, "B 32 32 3"]:
  """The predicted ``noise - image`` at ``noisy``; time is 0 at the image and 1 at the noise.

  ``(noisy - predicted image) / max(time, .1)``.
  """
  angles = 1000 * time[:, None] * jnp.exp(-jnp.log(1e4) * jnp.arange(_WAVES) / _WAVES)
  waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
  moved = waves @ params.time + condition @ params.values
  asked = (condition[:, None] * _OF_ASPECT) @ params.words
  tokens = patches(noisy) @ params.patch_in + params.places
  hidden = run_blocks(params.blocks, jnp.concatenate([asked, tokens], axis=1), condition=moved)
  image = unpatch(hidden[:, len(ASPECTS) :] @ params.patch_out)
  return (noisy - image) / jnp.maximum(time, _LEAST_TIME)[:, None, None, None]


def mix(
  clean: Float[Array, "B 32 32 3"], noise: Float[Array, "B 32 32 3"], time: Float[Array, " B"]
) -> Float[Array, "B 32 32 3"]:
  """``x_t = (1 - t) image + t noise``."""
  spread = time[:, None, None, None]
  return (1 - spread) * clean + spread * noise


def flow_loss(
  params: Generator,
  key: Array,
  images: Float[Array, "B 32 32 3"],
  condition: Float[Array, "B V"],
  left_out: float,
) -> Float[Array, ""]:
  """``|v - (noise - image)|²``, mean, at times drawn uniformly (Lipman et al., 2210.02747).

  Args:
    params: of the generator.
    key: of times, noise and what is left out.
    images: drawings.
    condition: of their prompts.
    left_out: probability of leaving out an aspect of a condition.
  """
  times, noises, drops = jax.random.split(key, 3)
  time = jax.random.uniform(times, images.shape[:1])
  noise = jax.random.normal(noises, images.shape)
  stays = jax.random.bernoulli(drops, 1 - left_out, (len(images), len(ASPECTS)))
  condition = condition * jnp.repeat(stays, SIZES, axis=1, total_repeat_length=TOTAL)
  predicted = velocity(params, mix(images, noise, time), time, condition)
  return jnp.mean(jnp.square(predicted - (noise - images)))


@functools.partial(jax.jit, static_argnames="steps")
def draw(
  params: Generator, key: Array, condition: Float[Array, "B V"], steps: int
) -> Float[Array, "B 32 32 3"]:
  """Images from noise, by ``steps`` Euler steps of equal size; no guidance."""

  def step(x: Array, index: Array) -> tuple[Array, None]:
    time = jnp.full(len(x), 1.0) - index / steps
    return x - velocity(params, x, time, condition) / steps, None

  start = jax.random.normal(key, (len(condition), SIZE, SIZE, 3))
  images, _ = jax.lax.scan(step, start, jnp.arange(steps))
  return jnp.clip(images, -1.0, 1.0)
