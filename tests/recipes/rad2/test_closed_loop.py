"""A plan is chosen at decision points alone, and held in between."""

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.recipes.rad2.closed_loop import Choice, driven_plans, play
from agentjax.recipes.rad2.settings import TrafficConfig
from agentjax.recipes.rad2.traffic import drive, scenarios, start

_CONFIG = TrafficConfig(decisions=4, latch=8)
_DUE = 0.5 * jnp.arange(1, 7)


def _plan(speed):
  return jnp.stack([speed * _DUE, jnp.zeros(6)], axis=-1)


def _cautious(state, seen, key):
  """Brakes if another is near ahead and in the lane, else goes on."""
  near = (seen.others[:, 0] > 0) & (seen.others[:, 0] < 1.0) & (abs(seen.others[:, 1]) < 0.3)
  chosen = jnp.any(near & seen.present).astype(jnp.int32)
  return Choice(jnp.stack([_plan(8.0), _plan(0.0)]), chosen, jnp.float32(0.0))


def _scenario(appears):
  """The car alone on the road; another comes near at a step, far outside any rule of traffic."""
  one = jax.tree.map(lambda v: v[0], scenarios(0, 0, 1))
  one = one.replace(present=jnp.arange(5) == 0, crosses=jnp.arange(5) == 0)
  # It crosses from the side and reaches the lane of the car at the step.
  x, y, speed = 25.0, one.ego[1], 10.0
  first = jnp.array([x, y - 0.1 * appears * speed, jnp.pi / 2, speed])
  others = one.others.at[0].set(first).at[1:, 0].set(-1000.0)
  return one.replace(ego=jnp.array([0.0, y, 0.0, 8.0]), others=others)


def test_between_two_decisions_nothing_is_chosen():
  scenario = _scenario(appears=8 + 3)
  episode = jax.jit(lambda s, k: play(_CONFIG, s, k, _cautious))(scenario, jax.random.key(0))
  assert episode.choices.chosen.shape == (4,) and episode.ego.shape == (33, 4)
  state = start(scenario)
  for decision in range(4):
    plan = episode.choices.candidates[decision, episode.choices.chosen[decision]]
    driven = drive(_CONFIG, scenario, state, plan, 8)
    held = episode.ego[1 + 8 * decision : 9 + 8 * decision]
    np.testing.assert_allclose(held, driven.ego, atol=1e-4)
    state = driven.state


def test_what_appears_within_a_latch_is_answered_at_the_next_decision():
  play_one = jax.jit(lambda s, k: play(_CONFIG, s, k, _cautious))
  episodes = {at: play_one(_scenario(at), jax.random.key(0)) for at in (8, 8 + 3)}
  assert episodes[8].choices.chosen.tolist()[1] == 1  # seen at the decision itself
  late = episodes[8 + 3]
  assert late.choices.chosen.tolist()[1] == 0  # not in the lane at step 8 ...
  np.testing.assert_allclose(late.ego[8:17, 3], 8.0, atol=0.1)  # ... so no braking until 16


def test_a_driven_plan_is_what_came_after_the_decision():
  scenario = _scenario(appears=500)
  episode = play(_CONFIG, scenario, jax.random.key(0), _cautious)
  plans, whole = driven_plans(_CONFIG, episode)
  assert plans.shape == (1, 6, 2) and whole.tolist() == [True]  # 3 s within 3.2 s
  np.testing.assert_allclose(plans[0], _plan(8.0), atol=0.05)
  crashed = episode.replace(crashed=episode.crashed.at[20:].set(True))
  assert not driven_plans(_CONFIG, crashed)[1].any()
