"""Demonstrations, by a driver that knows what the others will do but does not always look.

At each decision it tries 15 plans (five accelerations, three lanes) in the true traffic, scripts
included, and follows the best. No policy has this knowledge. In a share of its decisions it is
careless and judges as if it were alone, so that its demonstrations hold near misses and collisions.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentjax.recipes.rad2.closed_loop import Choice, Episode, play
from agentjax.recipes.rad2.geometry import into_frame
from agentjax.recipes.rad2.settings import STEP_SECONDS, ExpertConfig, TrafficConfig
from agentjax.recipes.rad2.traffic import (
  LANE,
  LANES,
  TOP_SPEED,
  Observation,
  Scenario,
  State,
  drive,
  off_road,
  touches,
)

_ACCELERATIONS = (-7.0, -4.0, -1.5, 0.0, 1.5)
_CHANGE_SECONDS = 2.5


@functools.partial(jax.jit, static_argnums=(0, 1))
def demonstrate(
  traffic: TrafficConfig, expert: ExpertConfig, scenarios: Scenario, keys: Array, careless: float
) -> Episode:
  """An episode of every scenario, by an expert that is careless in this share of its decisions."""

  def one(scenario: Scenario, key: Array) -> Episode:
    choose = functools.partial(_choose, traffic, expert, careless, scenario)
    return play(traffic, scenario, key, choose)

  return jax.vmap(one)(scenarios, keys)


def _choose(
  traffic: TrafficConfig,
  expert: ExpertConfig,
  careless: float,
  scenario: Scenario,
  state: State,
  seen: Observation,
  key: Array,
) -> Choice:
  del seen  # it knows more
  plans, effort = _lattice(traffic, state.ego)

  def judge(plan: Array, effort: Array) -> tuple[Array, Array]:
    driven = drive(traffic, scenario, state, plan, traffic.horizon)
    near = jnp.any(touches(scenario, driven.ego, driven.others, expert.margin))
    late = jnp.argmax(driven.crashed) / traffic.horizon  # a later crash is less bad
    hurt = jnp.where(driven.crashed[-1], 100.0 - 50.0 * late, 0.0) + 15.0 * near
    off = 100.0 * jnp.any(off_road(driven.ego))
    slow = jnp.abs(driven.ego[-1, 3] - expert.cruise)
    return -slow - effort - off, -hurt

  alone, among_others = jax.vmap(judge)(plans, effort)
  looks = jax.random.uniform(key) >= careless
  score = alone + jnp.where(looks, among_others, 0.0)
  return Choice(plans, jnp.argmax(score).astype(jnp.int32), jnp.float32(0.0))


def _lattice(
  traffic: TrafficConfig, ego: Float[Array, "4"]
) -> tuple[Float[Array, "plans points 2"], Float[Array, " plans"]]:
  """Plans for each acceleration and lane, and what they cost in comfort."""
  due = STEP_SECONDS * traffic.plan_stride * (1 + jnp.arange(traffic.plan_points))
  lane = jnp.clip(jnp.round(ego[1] / LANE), 0, LANES - 1)

  def plan(accelerate: Array, side: Array) -> tuple[Array, Array]:
    until = jnp.where(
      accelerate < 0, ego[3] / -jnp.minimum(accelerate, -1e-3), jnp.maximum(TOP_SPEED - ego[3], 0.0)
    )
    changing = jnp.minimum(due, until)
    speed = ego[3] + accelerate * changing
    x = ego[0] + ego[3] * changing + accelerate * changing**2 / 2 + speed * (due - changing)
    share = jnp.clip(due / _CHANGE_SECONDS, 0.0, 1.0)
    y = ego[1] + (LANE * (lane + side) - ego[1]) * (1 - jnp.cos(jnp.pi * share)) / 2
    effort = 0.15 * accelerate**2 + 6.0 * jnp.abs(side)
    return into_frame(jnp.stack([x, y], axis=-1), ego[:3]), effort

  grid = jnp.meshgrid(jnp.array(_ACCELERATIONS), jnp.array([-1.0, 0.0, 1.0]), indexing="ij")
  return jax.vmap(plan)(*(axis.reshape(-1) for axis in grid))
