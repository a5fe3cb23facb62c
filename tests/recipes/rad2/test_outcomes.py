"""Times to a collision, progress and rewards by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.recipes.rad2.closed_loop import Episode
from agentjax.recipes.rad2.outcomes import outcome, progress_reward, times_to_collision
from agentjax.recipes.rad2.settings import RewardConfig
from agentjax.recipes.rad2.traffic import CAR, scenarios

_SCENARIO = jax.tree.map(lambda v: v[0], scenarios(0, 0, 1))
_SCENARIO = _SCENARIO.replace(present=jnp.arange(5) == 0)


def _tracks(steps, ego, other):
  """Constant speeds along x; (x, y, speed) of the car and of one other."""

  def track(x, y, speed):
    times = 0.1 * np.arange(steps)
    zeros = np.zeros(steps)
    return np.stack([x + speed * times, y + zeros, zeros, speed + zeros], axis=-1)

  others = np.full((steps, 5, 4), -900.0)
  others[:, 0] = track(*other)
  return jnp.array(track(*ego)), jnp.array(others)


@pytest.mark.parametrize(
  ("other", "expected"),
  [
    ((CAR[0] + 15.1, 0.0, 0.0), 1.6),  # 15.1 m at 10 m/s, looked at every 0.2 s
    ((CAR[0] + 15.1, 0.0, 5.0), 3.0),  # 3.02 s
    ((CAR[0] + 10.1, 0.0, 5.0), 2.2),  # 2.02 s
    ((CAR[0] + 15.1, 3.5, 0.0), 3.0),  # in another lane
    ((CAR[0] - 0.1, 0.0, 10.0), 0.0),  # touches now
  ],
)
def test_times_to_collision(other, expected):
  ego, others = _tracks(60, (0.0, 0.0, 10.0), other)
  found = times_to_collision(_SCENARIO, ego, others, 3.0)
  assert found[0] == pytest.approx(expected, abs=1e-5)


def test_the_others_are_where_they_really_were():
  """A car that is now in the way and leaves before the projection arrives is no danger."""
  ego, others = _tracks(60, (0.0, 0.0, 10.0), (CAR[0] + 15.1, 0.0, 0.0))
  left = others.at[10:, 0, 1].set(10.0)
  assert times_to_collision(_SCENARIO, ego, left, 3.0)[0] == 3.0
  absent = _SCENARIO.replace(present=jnp.zeros(5, bool))
  assert times_to_collision(absent, ego, others, 3.0)[0] == 3.0


def test_progress_is_best_within_the_window():
  found = progress_reward(jnp.array([0.85, 1.05, 1.08, 1.10, 1.20, 9.0]), 1.05, 1.10)
  np.testing.assert_allclose(found, [-0.2, 0.0, 0.0, 0.0, -0.1, -1.0], atol=1e-6)


def _episode(ego, others, crashed):
  return Episode(None, None, None, ego, others, crashed)


def test_a_reward_by_hand():
  ego, others = _tracks(31, (0.0, 0.0, 10.0), (CAR[0] + 60.1, 0.0, 0.0))  # 30 m left at the end
  config = RewardConfig(safety=1.0, progress=0.5)
  quiet = outcome(config, _SCENARIO, _episode(ego, others, jnp.zeros(31, bool)), jnp.float32(40.0))
  # Nobody is there beyond the record, so that no collision comes within 3 s; progress 0.75.
  assert quiet.least_time == 3.0 and quiet.progress == pytest.approx(0.75)
  assert quiet.reward == pytest.approx(-0.5 * 0.3)
  crash = jnp.arange(31) >= 30
  hurt = outcome(config, _SCENARIO, _episode(ego, others, crash), jnp.float32(40.0))
  assert hurt.crashed and hurt.reward == pytest.approx(-1.0 - 0.5 * 0.3)
