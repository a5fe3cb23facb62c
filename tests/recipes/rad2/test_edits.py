"""Edits change the clock of a trajectory, as much as is needed and no more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.recipes.rad2.closed_loop import Episode
from agentjax.recipes.rad2.edits import edited_plans, edited_track, rescaled
from agentjax.recipes.rad2.geometry import out_of_frame, path_lengths
from agentjax.recipes.rad2.outcomes import outcome
from agentjax.recipes.rad2.settings import EditConfig, RewardConfig, TrafficConfig
from agentjax.recipes.rad2.traffic import CAR, LANE, LANES, off_road, scenarios, touches

_CONFIG = EditConfig()
_SCENARIO = jax.tree.map(lambda v: v[0], scenarios(0, 0, 1))
_SCENARIO = _SCENARIO.replace(present=jnp.arange(5) == 0)
_STEPS = 31
_TRUE, _FALSE = jnp.bool_(True), jnp.bool_(False)


def _track(speed=10.0):
  times = 0.1 * jnp.arange(_STEPS)
  zeros = jnp.zeros(_STEPS)
  return jnp.stack([speed * times, zeros, zeros, speed + zeros], axis=-1)


def _standing(x):
  return jnp.broadcast_to(jnp.array([x, 0.0, 0.0, 0.0]), (_STEPS, 5, 4))


def test_a_factor_sets_in_within_the_ramp_and_keeps_the_path():
  angle = 0.1 * jnp.arange(_STEPS) * 0.3  # a bend of 30 m radius at 9 m/s
  bend = jnp.stack([30 * jnp.sin(angle), 30 * (1 - jnp.cos(angle)), angle, 9 + 0 * angle], axis=-1)
  slower = rescaled(bend, 0.5, 1.0)
  radius = jnp.linalg.norm(slower[:, :2] - jnp.array([0.0, 30.0]), axis=-1)
  np.testing.assert_allclose(radius, 30.0, atol=0.02)
  pieces = np.diff(path_lengths(slower[:, :2]))
  np.testing.assert_allclose(pieces[0], 0.9 * 0.95, atol=1e-3)  # 1 - 0.5 / 10
  np.testing.assert_allclose(pieces[10:], 0.45, atol=1e-3)
  np.testing.assert_allclose(slower[-1, 3], 4.5, atol=1e-4)
  np.testing.assert_allclose(rescaled(bend, 1.0, 1.0), bend, atol=1e-3)


def test_with_a_collision_ahead_the_edit_is_slower_and_safe_and_no_slower_than_needed():
  track, others = _track(), _standing(CAR[0] + 20.0)  # 20 m ahead; 30 m are driven
  assert touches(_SCENARIO, track, others).any()
  found, edits = edited_track(_CONFIG, _SCENARIO, track, others, danger=_TRUE, lags=_FALSE)
  assert edits and found[-1, 0] < track[-1, 0] and found[-1, 3] < track[-1, 3]
  assert not touches(_SCENARIO, found, others, _CONFIG.margin).any()
  ends = [float(rescaled(track, f, _CONFIG.ramp)[-1, 0]) for f in _CONFIG.slower]
  allowed = [end for end in ends if end < 20.0 - _CONFIG.margin]
  assert float(found[-1, 0]) == pytest.approx(max(allowed))
  assert len(allowed) < len(ends)  # milder ones were tried and are not safe


def test_without_a_safe_factor_the_slowest_is_taken():
  found, edits = edited_track(
    _CONFIG, _SCENARIO, _track(), _standing(CAR[0] + 1.0), danger=_TRUE, lags=_FALSE
  )
  assert edits
  expected = rescaled(_track(), _CONFIG.slower[-1], _CONFIG.ramp)
  np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(("gap", "factor"), [(60.0, 1.2), (35.0, 1.1), (31.0, None)])
def test_one_that_lags_is_sped_up_as_far_as_is_safe(gap, factor):
  found, edits = edited_track(
    _CONFIG, _SCENARIO, _track(), _standing(CAR[0] + gap), danger=_FALSE, lags=_TRUE
  )
  assert bool(edits) == (factor is not None)
  expected = rescaled(_track(), factor or 1.0, _CONFIG.ramp)
  np.testing.assert_allclose(found, expected, atol=1e-3)


def test_what_was_safe_and_fast_enough_is_left_alone():
  found, edits = edited_track(
    _CONFIG, _SCENARIO, _track(), _standing(60.0), danger=_FALSE, lags=_FALSE
  )
  assert not edits
  np.testing.assert_array_equal(found, _track())


def _left_the_road(reference):
  """Plans and edits of an episode that nobody else is in and that drifts off the road, where the
  car stays; and the plans as places on the road."""
  traffic, reward = TrafficConfig(), RewardConfig()
  times = jnp.minimum(0.1 * jnp.arange(traffic.steps + 1), 4.5)
  angle = jnp.arctan(0.2) + 0 * times
  ego = jnp.stack([10 * times, 2 * times, angle, 10.2 * (times < 4.5)], axis=-1)
  crashed = off_road(ego)
  others = jnp.broadcast_to(_SCENARIO.others, (traffic.steps + 1, 5, 4))
  alone = _SCENARIO.replace(present=jnp.zeros(5, bool))
  starts = traffic.latch * jnp.arange(traffic.decisions)
  episode = Episode(None, None, ~crashed[starts], ego, others, crashed)
  result = outcome(reward, alone, episode, jnp.float32(reference))
  assert result.crashed and result.least_time == 0 and result.vehicle_times.min() == 3.0
  plans, edits = edited_plans(traffic, _CONFIG, reward, alone, episode, result)
  return jax.vmap(lambda plan, pose: out_of_frame(plan, pose))(
    plans, ego[starts[: traffic.whole], None, :3]
  ), edits


def test_to_leave_the_road_is_no_collision_to_slow_down_for():
  _, edits = _left_the_road(reference=40.0)  # progress within no limit: it does not lag
  assert not edits.any()


def test_no_edit_leaves_the_road():
  places, edits = _left_the_road(reference=1000.0)  # it lags
  assert edits[0] and not edits.all()
  assert (places[edits][..., 1] <= (LANES - 0.5) * LANE).all()


def test_in_danger_on_the_way_off_the_road_there_is_no_edit():
  track = _track().at[:, 1].set(0.4 * jnp.arange(_STEPS))
  assert off_road(track).any() and not off_road(track[:20]).any()
  others = _standing(20.0).at[..., 1].set(8.0)
  _, edits = edited_track(_CONFIG, _SCENARIO, track, others, danger=_TRUE, lags=_FALSE)
  assert not edits
