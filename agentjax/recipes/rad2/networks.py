"""The two networks, small: a scene encoder in each, a flow over plans, a score of plans.

The source has a diffusion transformer over the points of a trajectory, and a transformer that
attends from the trajectory to maps, features of cameras and vehicles. Here a plan is one vector,
and attends to the other vehicles alone. All functions are of one scene. W is the width, K plans.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentjax.models.spec import ParamSpec, Weight
from agentjax.recipes.rad2.settings import STEP_SECONDS, TrafficConfig
from agentjax.recipes.rad2.traffic import CAR, Observation

_EGO, _OTHER = 4, 11  # numbers of an observation
_FREQUENCIES = 4


@flax.struct.dataclass
class Dense:
  """``x W + b``."""

  weight: Weight
  bias: Weight


@flax.struct.dataclass
class Scene:
  """Encodes what is seen; the discriminator's begins as a copy of the generator's."""

  ego: tuple[Dense, Dense]
  other: tuple[Dense, Dense]


@flax.struct.dataclass
class Block:
  """A residual layer that the scene and the time scale and shift."""

  modulate: Dense
  up: Dense
  down: Dense


@flax.struct.dataclass
class Generator:
  """Predicts the velocity of a flow from noise to plans."""

  scene: Scene
  query: Dense
  time: Dense
  plan: Dense
  blocks: tuple[Block, ...]
  out: Dense


@flax.struct.dataclass
class Discriminator:
  """Scores plans."""

  scene: Scene
  plan: tuple[Dense, Dense]
  relation: tuple[Dense, Dense]
  query: Dense
  head: tuple[Dense, Dense]


def _dense(inputs: int, outputs: int, gain: float = 1.0) -> Dense:
  weight = ParamSpec((inputs, outputs), (None, None), scale=gain / inputs**0.5)
  return Dense(weight, ParamSpec((outputs,), (None,), init="zeros", decayed=False))


def _scene(width: int) -> Scene:
  return Scene(
    ego=(_dense(_EGO, width, 1.4), _dense(width, width)),
    other=(_dense(_OTHER, width, 1.4), _dense(width, width)),
  )


def generator_spec(width: int, blocks: int, points: int) -> Generator:
  """Abstract parameters of a generator of plans with so many points."""
  return Generator(
    scene=_scene(width),
    query=_dense(width, width),
    time=_dense(2 * _FREQUENCIES, width),
    plan=_dense(2 * points, width),
    blocks=tuple(
      Block(_dense(width, 2 * width, 0.5), _dense(width, 2 * width, 1.4), _dense(2 * width, width))
      for _ in range(blocks)
    ),
    out=_dense(width, 2 * points, 0.1),
  )


def discriminator_spec(width: int, points: int) -> Discriminator:
  """Abstract parameters of a discriminator of plans with so many points."""
  return Discriminator(
    scene=_scene(width),
    plan=(_dense(4 * points, width, 1.4), _dense(width, width)),
    relation=(_dense(width + 4 * points, width, 1.4), _dense(width, width)),
    query=_dense(width, width),
    head=(_dense(3 * width, width, 1.4), _dense(width, 1, 0.1)),
  )


def context(params: Generator, seen: Observation) -> Float[Array, " width"]:
  """What the generator knows of a scene: the car, and the others by attention."""
  ego, others = _encode(params.scene, seen)
  return ego + _attend(dense(params.query, ego), others, others, seen.present)


def velocity(
  params: Generator,
  known: Float[Array, " width"],
  noisy: Float[Array, "plans numbers"],
  time: Float[Array, " plans"],
) -> Float[Array, "plans numbers"]:
  """Of the flow at some plans; ``time`` is 0 for noise and 1 for plans."""
  angles = time[:, None] * jnp.pi * 2.0 ** jnp.arange(_FREQUENCIES) / 4
  waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
  condition = jax.nn.silu(known + dense(params.time, waves))
  hidden = dense(params.plan, noisy) + known
  for block in params.blocks:
    scale, shift = jnp.split(dense(block.modulate, condition), 2, axis=-1)
    inner = _normed(hidden) * (1 + scale) + shift
    hidden = hidden + dense(block.down, jax.nn.silu(dense(block.up, inner)))
  return dense(params.out, _normed(hidden))


def logits(
  params: Discriminator,
  traffic: TrafficConfig,
  seen: Observation,
  plans: Float[Array, "plans points 2"],
) -> Float[Array, " plans"]:
  """Log-odds of the scores of plans; the score of a plan is their sigmoid.

  Of a plan it sees how far its points are from the edges of the road. The plan attends to the
  others through where each would be, as seen from every point of the plan, if it kept its speed.
  """
  ego, others = _encode(params.scene, seen)
  facts = jnp.concatenate([normalised(traffic, plans, seen), _edges(seen, plans)], axis=-1)
  own = _two(params.plan, facts) + ego
  facts = jnp.concatenate([
    jnp.broadcast_to(others, (len(plans), *others.shape)), _relations(traffic, seen, plans)
  ], axis=-1)  # fmt: skip
  relations = _two(params.relation, facts)
  attended = jax.vmap(_attend, in_axes=(0, 0, 0, None))(
    dense(params.query, own), relations, relations, seen.present
  )
  scene = jnp.broadcast_to(ego, own.shape)
  return _two(params.head, jnp.concatenate([own, attended, scene], axis=-1))[:, 0]


def normalised(
  traffic: TrafficConfig, plans: Float[Array, "*lead points 2"], seen: Observation
) -> Float[Array, "*lead numbers"]:
  """Plans as vectors of about unit size: how far they are from going on at the present speed."""
  straight, scale = _yardstick(traffic, seen)
  return ((plans - straight) / scale).reshape(*plans.shape[:-2], -1)


def in_metres(
  traffic: TrafficConfig, vectors: Float[Array, "*lead numbers"], seen: Observation
) -> Float[Array, "*lead points 2"]:
  """Inverse of ``normalised``."""
  straight, scale = _yardstick(traffic, seen)
  return vectors.reshape(*vectors.shape[:-1], traffic.plan_points, 2) * scale + straight


def dense(layer: Dense, x: Array) -> Array:
  """Applies a layer."""
  return x @ layer.weight + layer.bias


def _yardstick(traffic: TrafficConfig, seen: Observation) -> tuple[Array, Array]:
  due = _due(traffic)
  straight = jnp.stack([10.0 * seen.ego[0] * due, jnp.zeros_like(due)], axis=-1)
  return straight, jnp.stack([2.0 * due, 0.5 * due], axis=-1)


def _due(traffic: TrafficConfig) -> Array:
  return STEP_SECONDS * traffic.plan_stride * (1 + jnp.arange(traffic.plan_points))


def _edges(seen: Observation, plans: Array) -> Array:
  """[plans, 2 points]: the room to the right and to the left of each point, bounded."""
  heading = seen.ego[1] / 5.0
  sideways = jnp.sin(heading) * plans[..., 0] + jnp.cos(heading) * plans[..., 1]
  right, left = 5.0 * seen.ego[2], 5.0 * seen.ego[3]
  return jnp.tanh(jnp.concatenate([right + sideways, left - sideways], axis=-1) / 3.0)


def _relations(traffic: TrafficConfig, seen: Observation, plans: Array) -> Array:
  """[plans, vehicles, 4 points]: offsets of each other vehicle from each point, nearness, order."""
  due = _due(traffic)
  place = seen.others[:, :2] * jnp.array([20.0, 5.0])
  speed = seen.others[:, 2:4] * 5.0 + jnp.stack([10.0 * seen.ego[0], jnp.zeros(())])
  later = place[:, None] + speed[:, None] * due[:, None]  # [vehicles, points, 2]
  offset = later - plans[:, None]
  near = jnp.exp(-jnp.sum((offset / jnp.array([1.5 * CAR[0], 1.2 * CAR[1]])) ** 2, axis=-1))
  in_way = jnp.exp(-((offset[..., 1] / (1.2 * CAR[1])) ** 2)) * jnp.tanh(offset[..., 0] / 10.0)
  bounded = jnp.tanh(offset / jnp.array([20.0, 5.0]))
  facts = jnp.concatenate([bounded, near[..., None], in_way[..., None]], axis=-1)
  return facts.reshape(*facts.shape[:2], -1)


def _encode(scene: Scene, seen: Observation) -> tuple[Array, Array]:
  return _two(scene.ego, seen.ego), _two(scene.other, seen.others)


def _two(layers: tuple[Dense, Dense], x: Array) -> Array:
  return dense(layers[1], jax.nn.silu(dense(layers[0], x)))


def _attend(query: Array, keys: Array, values: Array, present: Array) -> Array:
  """Weighted mean of values; 0 where nobody is present."""
  scores = jnp.where(present, keys @ query / keys.shape[-1] ** 0.5, -jnp.inf)
  top = jnp.max(scores)
  weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
  return weights @ values / jnp.maximum(jnp.sum(weights), 1e-6)


def _normed(x: Any) -> Any:
  centred = x - jnp.mean(x, axis=-1, keepdims=True)
  return centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)
