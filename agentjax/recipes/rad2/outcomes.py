"""What an episode was worth: time to a collision, progress, and the reward of both."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float

from agentjax.recipes.rad2.closed_loop import Episode
from agentjax.recipes.rad2.settings import STEP_SECONDS, RewardConfig
from agentjax.recipes.rad2.traffic import Scenario, touches

_LOOKS = 2  # steps between two times at which a projection is compared
_LEAST_REFERENCE = 5.0  # metres


@flax.struct.dataclass
class Outcome:
  """Of one episode.

  Attributes:
    times: seconds to a collision at every step, 0 from a crash on [T + 1].
    vehicle_times: of these the collisions with other vehicles alone; leaving the road, which is a
      crash too, does not count [T + 1].
    progress: metres along the road, over those of the reference.
    crashed: whether it ended in a crash.
    reward: see ``outcome``.
  """

  times: Array
  vehicle_times: Array
  progress: Array
  crashed: Array
  reward: Array

  @property
  def least_time(self) -> Array:
    """Seconds to a collision at the worst step."""
    return jnp.min(self.times, axis=-1)


def times_to_collision(
  scenario: Scenario,
  ego: Float[Array, "steps 4"],
  others: Float[Array, "steps vehicles 4"],
  most: float,
) -> Float[Array, " steps"]:
  """Seconds until the car, if it went straight on, would touch another; ``most`` if later.

  The car of each step is projected with the speed and heading that it has there. The others are
  where they really were at that time, as in the source; beyond the end of the record nobody is.
  """
  steps = ego.shape[0]
  ahead = jnp.arange(0, round(most / STEP_SECONDS), _LOOKS)
  when = jnp.arange(steps)[:, None] + ahead
  seconds = STEP_SECONDS * ahead
  direction = jnp.stack([jnp.cos(ego[:, 2]), jnp.sin(ego[:, 2])], axis=-1)
  moved = ego[:, None, :2] + (ego[:, 3:] * direction)[:, None] * seconds[:, None]
  turned = jnp.broadcast_to(ego[:, None, 2:], (*when.shape, 2))
  projected = jnp.concatenate([moved, turned], axis=-1)
  hit = touches(scenario, projected, others[jnp.minimum(when, steps - 1)]) & (when < steps)
  return jnp.min(jnp.where(hit, seconds, most), axis=1)


def progress_reward(progress: Array, low: float, high: float) -> Array:
  """0 within the window, less by the distance from it, -1 at the least."""
  return -jnp.minimum(jnp.maximum(low - progress, 0.0) + jnp.maximum(progress - high, 0.0), 1.0)


def outcome(
  config: RewardConfig, scenario: Scenario, episode: Episode, reference: Array
) -> Outcome:
  """Time to a collision, progress and reward.

  ``safety (min_t TTC_t - TTC_max) / TTC_max + progress r(progress)``; the time is 0 from a crash
  on. Its form is the source's, the weights and the division are ours.

  Args:
    config: weights, window and the longest time.
    scenario: that was played.
    episode: of it.
    reference: metres that the expert made.
  """
  most = config.time_to_collision
  vehicle_times = times_to_collision(scenario, episode.ego, episode.others, most)
  times = jnp.where(episode.crashed, 0.0, vehicle_times)
  made = episode.ego[-1, 0] - episode.ego[0, 0]
  progress = made / jnp.maximum(reference, _LEAST_REFERENCE)
  safe = (jnp.min(times) - most) / most
  reward = config.safety * safe + config.progress * progress_reward(
    progress, config.low, config.high
  )
  return Outcome(times, vehicle_times, progress, episode.crashed[-1], reward)
