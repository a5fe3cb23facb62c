"""Edits of driven trajectories, which the generator then learns (on-policy generator optimisation).

Only the clock of a trajectory changes, never its path. One that came too near to a collision is
slowed down, as little as makes it safe among the others as they really moved. One that was safe in
an episode with too little progress is sped up, as much as stays safe. One that leaves the road has
no edit: at any speed its path ends there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from agentjax.recipes.rad2.closed_loop import Episode
from agentjax.recipes.rad2.geometry import at_length, into_frame, path_lengths
from agentjax.recipes.rad2.outcomes import Outcome
from agentjax.recipes.rad2.settings import (
  STEP_SECONDS,
  EditConfig,
  RewardConfig,
  TrafficConfig,
)
from agentjax.recipes.rad2.traffic import TOP_SPEED, Scenario, off_road, touches


def rescaled(
  track: Float[Array, "steps 4"], factor: Float[Array, ""] | float, ramp: float
) -> Float[Array, "steps 4"]:
  """The same path, driven at other speeds.

  The speed is multiplied by ``1 + (factor - 1) min(t / ramp, 1)``, with t the seconds since the
  first step, and stays below the top speed of the car.

  Args:
    track: x, y, heading, speed; at every step.
    factor: below 1 slower, above 1 faster.
    ramp: seconds.
  """
  seconds = STEP_SECONDS * jnp.arange(track.shape[0])
  weights = 1.0 + (factor - 1.0) * jnp.minimum(seconds / ramp, 1.0)
  lengths = path_lengths(track[:, :2])
  pieces = jnp.minimum(jnp.diff(lengths) * weights[1:], TOP_SPEED * STEP_SECONDS)
  driven = jnp.concatenate([jnp.zeros(1), jnp.cumsum(pieces)])
  heading = jnp.interp(driven, lengths, track[:, 2])
  speed = jnp.minimum(track[:, 3] * weights, TOP_SPEED)
  return jnp.concatenate(
    [at_length(track[:, :2], driven), jnp.stack([heading, speed], axis=-1)], axis=-1
  )


def edited_track(
  config: EditConfig,
  scenario: Scenario,
  track: Float[Array, "steps 4"],
  others: Float[Array, "steps vehicles 4"],
  *,
  danger: Bool[Array, ""],
  lags: Bool[Array, ""],
) -> tuple[Float[Array, "steps 4"], Bool[Array, ""]]:
  """One trajectory after its edit, and whether it has been edited.

  Safe is one that touches nobody and stays on the road.

  Args:
    config: the factors, and what is safe.
    scenario: sizes and presence of the others.
    track: as it was driven; without an edit if it leaves the road. others: as they moved meanwhile.
    danger: whether it came too near to a collision: the mildest slower one that is safe, or the
      slowest if none is.
    lags: whether it was safe and should have made more progress: the fastest one that is safe, or
      the track itself, without an edit, if none is.
  """
  factors = jnp.array([*config.slower, *config.faster])
  tracks = jax.vmap(lambda factor: rescaled(track, factor, config.ramp))(factors)
  leaves = jnp.any(off_road(tracks), axis=-1)
  safe = ~leaves & ~jax.vmap(lambda one: jnp.any(touches(scenario, one, others, config.margin)))(
    tracks
  )
  slower, faster = safe[: len(config.slower)], safe[len(config.slower) :]
  slow = jnp.where(jnp.any(slower), jnp.argmax(slower), len(config.slower) - 1)
  fast = len(config.slower) + jnp.argmax(faster)
  hastens = lags & ~danger & jnp.any(faster)
  found = tracks[jnp.where(danger, slow, fast)]
  edits = (danger | hastens) & ~jnp.any(off_road(track))
  return jnp.where(edits, found, track), edits


def edited_plans(
  traffic: TrafficConfig,
  config: EditConfig,
  reward: RewardConfig,
  scenario: Scenario,
  episode: Episode,
  result: Outcome,
) -> tuple[Float[Array, "whole points 2"], Bool[Array, " whole"]]:
  """Plans for the generator at the decisions of an episode, and which of them are edits.

  Args:
    traffic: the clock. config: the edits.
    reward: ``low`` is the progress below which an episode lags; a trajectory is safe if no
      collision with another vehicle was within ``time_to_collision``.
    scenario: that was played.
    episode: of it.
    result: of the episode.
  """
  window = jnp.arange(traffic.horizon + 1)
  points = traffic.plan_stride * (1 + jnp.arange(traffic.plan_points))

  def edit(decision: Array) -> tuple[Array, Array]:
    now = decision * traffic.latch
    least = jnp.min(result.vehicle_times[now + window])
    track, edits = edited_track(
      config,
      scenario,
      episode.ego[now + window],
      episode.others[now + window],
      danger=least < config.danger,
      lags=(least >= reward.time_to_collision) & (result.progress < reward.low),
    )
    return into_frame(track[points, :2], track[0, :3]), edits & episode.alive[decision]

  return jax.vmap(edit)(jnp.arange(traffic.whole))
