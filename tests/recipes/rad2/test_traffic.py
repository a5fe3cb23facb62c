"""The traffic: what a scenario is, what drivers do, and that many at once are as one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.recipes.rad2.settings import TrafficConfig
from agentjax.recipes.rad2.traffic import (
  KINDS,
  LANE,
  LANES,
  drive,
  observe,
  off_road,
  scenarios,
  start,
  touches,
)

_CONFIG = TrafficConfig()
_DUE = 0.5 * np.arange(1, 7)
_drive = jax.jit(functools.partial(drive, _CONFIG), static_argnums=3)


def _of_kind(kind):
  found = scenarios(0, 0, 64)
  place = int(np.argmax(np.asarray(found.kind) == KINDS.index(kind)))
  return jax.tree.map(lambda v: v[place], found)


def _alone(speed=10.0, lane=1):
  """A road without others."""
  one = jax.tree.map(lambda v: v[0], scenarios(0, 0, 1))
  ego = jnp.array([0.0, lane * LANE, 0.0, speed])
  far = one.others.at[:, 0].set(-1000.0)
  return one.replace(ego=ego, others=far, present=jnp.zeros_like(one.present))


def _straight(speed):
  return jnp.stack([speed * _DUE, np.zeros(6)], axis=-1)


def test_a_scenario_depends_on_its_number_alone():
  many, few = scenarios(3, 0, 6), scenarios(3, 4, 2)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[4:], b), many, few)
  other = scenarios(4, 4, 2)
  assert not np.array_equal(other.ego, few.ego)


def test_no_scenario_begins_with_a_crash_and_all_kinds_occur():
  found = scenarios(1, 0, 512)
  hit = jax.vmap(lambda s: touches(s, s.ego, s.others))(found)
  assert not np.asarray(hit).any()
  assert set(np.asarray(found.kind).tolist()) == set(range(len(KINDS)))


def test_many_at_once_are_as_one_by_one():
  """Programs of two shapes may round otherwise: metres agree to a tenth of a millimetre."""
  found = scenarios(2, 0, 4)
  plans = jnp.stack([_straight(speed) for speed in (4.0, 8.0, 10.0, 12.0)])
  together = jax.jit(jax.vmap(lambda s, p: drive(_CONFIG, s, start(s), p, 30)))(found, plans)
  for place in range(4):
    one = jax.tree.map(lambda v, place=place: v[place], found)
    alone = _drive(one, start(one), plans[place], 30)
    np.testing.assert_allclose(together.ego[place], alone.ego, atol=1e-4)
    np.testing.assert_allclose(together.others[place], alone.others, atol=1e-3)
    np.testing.assert_array_equal(together.crashed[place], alone.crashed)


def test_a_plan_is_followed():
  one = _alone()
  driven = _drive(one, start(one), _straight(10.0), 30)
  np.testing.assert_allclose(driven.ego[-1], [30.0, LANE, 0.0, 10.0], atol=0.05)
  stopping = jnp.stack([jnp.array([4.4, 7.5, 9.4, 10.0, 10.0, 10.0]), jnp.zeros(6)], axis=-1)
  driven = _drive(one, start(one), stopping, 40)
  assert driven.ego[-1, 3] < 0.5 and abs(driven.ego[-1, 0] - 10.0) < 0.8
  share = (1 - np.cos(np.pi * np.minimum(_DUE / 2.5, 1))) / 2
  aside = jnp.stack([10 * _DUE, LANE * share], axis=-1)
  driven = _drive(one, start(one), aside, 40)
  assert abs(driven.ego[-1, 1] - 2 * LANE) < 0.5 and abs(driven.ego[-1, 2]) < 0.1


def test_who_leaves_the_road_has_crashed_and_stays_there():
  one = _alone(lane=LANES - 1)
  aside = jnp.stack([8 * _DUE, 3 * _DUE], axis=-1)
  driven = _drive(one, start(one), aside, 40)
  first = int(jnp.argmax(driven.crashed))
  assert driven.crashed[-1] and off_road(driven.ego[first]) and 0 < first < 39
  np.testing.assert_array_equal(driven.ego[-1], driven.ego[first])
  assert driven.ego[first, 3] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_other_does_what_its_script_says(kind):
  one = _of_kind(kind)
  standing = one.replace(ego=one.ego.at[0].set(-500.0).at[3].set(0.0))
  driven = _drive(standing, start(standing), jnp.zeros((6, 2)), 90)
  speeds, ys = np.asarray(driven.others)[:, 0, 3], np.asarray(driven.others)[:, 0, 1]
  if kind == "brake":
    begins = round(float(one.brake_from[0]) / 0.1)
    assert speeds[begins + 12] < speeds[begins - 1] - 3.0
  elif kind == "cut_in":
    assert abs(ys[0] - one.ego[1]) > 3.0 and abs(ys[-1] - one.ego[1]) < 0.1
  elif kind == "crossing":
    assert np.ptp(ys) > 20.0 and np.ptp(np.asarray(driven.others)[:, 0, 0]) < 0.1
  else:
    assert np.ptp(np.asarray(driven.others)[:, 0, 0]) == 0.0


def test_a_follower_stops_behind_a_standing_car():
  one = _alone(speed=0.0)
  behind = one.others.at[1].set(jnp.array([-40.0, LANE, 0.0, 12.0]))
  one = one.replace(
    others=behind, present=one.present.at[1].set(True), desired=jnp.full(len(behind), 12.0)
  )
  driven = _drive(one, start(one), jnp.zeros((6, 2)), 90)
  assert not driven.crashed[-1]
  assert driven.others[-1, 1, 3] < 1.0 and -12.0 < driven.others[-1, 1, 0] < -4.6


def test_what_is_seen_does_not_depend_on_the_place_along_the_road():
  one = _of_kind("cut_in")
  shift = jnp.array([250.0, 0.0, 0.0, 0.0])
  moved = one.replace(ego=one.ego + shift, others=one.others + shift)
  here, there = observe(one, start(one)), observe(moved, start(moved))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), here, there)


def test_what_is_seen_holds_nothing_of_the_script():
  one = _of_kind("brake")
  other = one.replace(
    brake_from=one.brake_from + 1.0, change_at=one.change_at * 0, desired=one.desired * 0
  )
  here, there = observe(one, start(one)), observe(other, start(other))
  jax.tree.map(np.testing.assert_array_equal, here, there)
