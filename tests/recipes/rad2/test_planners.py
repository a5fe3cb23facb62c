"""The two networks' losses by hand, and what their inputs may not change."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agentjax.models.spec import init_params
from agentjax.recipes.rad2.networks import (
  discriminator_spec,
  generator_spec,
  in_metres,
  logits,
  normalised,
)
from agentjax.recipes.rad2.planners import (
  Decisions,
  adapted,
  choice_log_probs,
  choice_loss,
  flow_loss,
  propose,
  score_entropy,
)
from agentjax.recipes.rad2.settings import DiscriminatorConfig, GeneratorConfig, TrafficConfig
from agentjax.recipes.rad2.traffic import observe, scenarios, start
from agentjax.recipes.rad2.training import group_advantages

_TRAFFIC = TrafficConfig()
_CONFIG = DiscriminatorConfig(width=8, candidates=3)
_FOUND = scenarios(0, 0, 4)
_SEEN = jax.vmap(lambda s: observe(s, start(s)))(_FOUND)
_ONE = jax.tree.map(lambda v: v[0], _SEEN)
_GENERATOR = init_params(generator_spec(8, 1, 6), jax.random.key(0))
_SCORER = init_params(discriminator_spec(8, 6), jax.random.key(1))
_PLANS = 5.0 * jax.random.normal(jax.random.key(2), (4, 3, 6, 2))


def test_the_choice_is_a_softmax_of_log_odds():
  scores = jnp.array([0.0, math.log(2.0), math.log(5.0)])
  found = choice_log_probs(DiscriminatorConfig(temperature=1.0), scores)
  np.testing.assert_allclose(jnp.exp(found), [1 / 8, 2 / 8, 5 / 8], rtol=1e-6)
  found = choice_log_probs(DiscriminatorConfig(temperature=0.5), scores)
  np.testing.assert_allclose(jnp.exp(found), [1 / 30, 4 / 30, 25 / 30], rtol=1e-6)


def test_the_entropy_of_scores_by_hand():
  odds = jnp.array([0.0, math.log(3.0), -math.log(3.0), 80.0])  # scores 1/2, 3/4, 1/4, 1
  quarter = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
  np.testing.assert_allclose(
    score_entropy(odds), [math.log(2), quarter, quarter, 0.0], rtol=1e-5, atol=1e-6
  )


def test_the_coefficient_grows_while_entropy_is_missing():
  config = DiscriminatorConfig(entropy_target=0.7, entropy_rate=0.1)
  none, much = jnp.float32(0.0), jnp.float32(math.log(2.0))
  assert adapted(config, jnp.float32(0.01), none) == pytest.approx(0.01 * math.exp(0.07))
  assert adapted(config, jnp.float32(0.01), much) == pytest.approx(0.01 * math.exp(-0.03))
  assert adapted(config, jnp.float32(1.0), none) == 1.0


def test_group_advantages_by_hand():
  """Groups (1, 2, 3, 6) and four equal ones; deviation of the sample, as GRPO here has it."""
  rewards = jnp.array([1.0, 2.0, 3.0, 6.0, 5.0, 5.0, 5.0, 5.0])
  groups = jnp.repeat(jnp.arange(2), 4)
  found, taught = group_advantages(rewards, groups, 0.02)
  deviation = math.sqrt((4 + 1 + 0 + 9) / 3)
  np.testing.assert_allclose(found[:4], np.array([-2, -1, 0, 3]) / deviation, rtol=1e-5)
  np.testing.assert_array_equal(found[4:], 0.0)
  assert taught.tolist() == [True] * 4 + [False] * 4
  _, taught = group_advantages(rewards, groups, 2.0)  # population deviation: sqrt(14 / 4) = 1.87
  assert not taught.any()


def _decisions(log_probs, advantages, weights=(1.0,) * 4):
  return Decisions(
    _SEEN, _PLANS, jnp.array([0, 1, 2, 0]), jnp.asarray(log_probs),
    jnp.asarray(advantages, jnp.float32), jnp.asarray(weights),
  )  # fmt: skip


def _now(params):
  scores = jax.vmap(functools.partial(logits, params, _TRAFFIC))(_SEEN, _PLANS)
  taken = choice_log_probs(_CONFIG, scores)[jnp.arange(4), jnp.array([0, 1, 2, 0])]
  return scores, taken


def test_the_choice_loss_by_hand():
  """Ratios 1, 1.5, 1.5 and 0.5 with a bound of 0.2; the last decision is left out."""
  scores, taken = _now(_SCORER)
  before = taken - jnp.log(jnp.array([1.0, 1.5, 1.5, 0.5]))
  decisions = _decisions(before, [2.0, 1.0, -1.0, 7.0], (1.0, 1.0, 1.0, 0.0))
  loss, metrics = choice_loss(_CONFIG, _TRAFFIC, _SCORER, decisions, jnp.float32(0.3))
  entropy = np.mean(np.asarray(score_entropy(scores))[:3])
  assert metrics["entropy"] == pytest.approx(entropy, rel=1e-5)
  assert metrics["clipped"] == pytest.approx(1 / 3)
  assert loss == pytest.approx(-(2.0 + 1.2 - 1.5) / 3 - 0.3 * entropy, rel=1e-4)


def test_an_update_makes_what_did_well_more_likely():
  _, taken = _now(_SCORER)
  decisions = _decisions(taken, [1.0, 1.0, -1.0, -1.0])
  gradient = jax.grad(lambda p: choice_loss(_CONFIG, _TRAFFIC, p, decisions, jnp.float32(0.0))[0])(
    _SCORER
  )
  after = optax.apply_updates(_SCORER, jax.tree.map(lambda g: -0.01 * g, gradient))
  gained = _now(after)[1] - taken
  assert jnp.sum(gained * jnp.array([1.0, 1.0, -1.0, -1.0])) > 0


def test_a_decision_without_weight_has_no_gradient():
  _, taken = _now(_SCORER)
  loss = jax.grad(lambda p, d: choice_loss(_CONFIG, _TRAFFIC, p, d, jnp.float32(0.1))[0])
  one = loss(_SCORER, _decisions(taken, [1.0, 1.0, 1.0, 5.0], (1.0, 1.0, 1.0, 0.0)))
  two = loss(_SCORER, _decisions(taken, [1.0, 1.0, 1.0, -9.0], (1.0, 1.0, 1.0, 0.0)))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), one, two)


def test_vectors_of_plans_and_back():
  vectors = normalised(_TRAFFIC, _PLANS[0], _ONE)
  np.testing.assert_allclose(in_metres(_TRAFFIC, vectors, _ONE), _PLANS[0], atol=1e-4)
  due = 0.5 * jnp.arange(1, 7)
  straight = jnp.stack([10.0 * _ONE.ego[0] * due, 0 * due], axis=-1)  # the present speed
  np.testing.assert_allclose(normalised(_TRAFFIC, straight, _ONE), 0.0, atol=1e-5)


def test_the_flow_loss_by_hand():
  """A network that says 0 pays the mean square of plan - noise, over plans with weight."""
  zero = jax.tree.map(jnp.zeros_like, _GENERATOR)
  key = jax.random.key(3)
  weights = jnp.array([1.0, 0.0, 1.0, 1.0])
  loss = flow_loss(_TRAFFIC, zero, _SEEN, _PLANS[:, 0], weights, key)
  noise = jax.random.normal(jax.random.split(key)[0], (4, 12))
  target = jax.vmap(functools.partial(normalised, _TRAFFIC))(_PLANS[:, 0], _SEEN)
  each = np.mean((np.asarray(target) - np.asarray(noise)) ** 2, axis=-1)
  assert loss == pytest.approx((each[0] + each[2] + each[3]) / 3, rel=1e-5)
  nothing = flow_loss(_TRAFFIC, zero, _SEEN, _PLANS[:, 0], jnp.zeros(4), key)
  assert nothing == 0.0


def test_a_known_velocity_carries_noise_to_the_plan():
  """With a constant velocity c, Euler's steps end at noise + c."""
  zero = jax.tree.map(jnp.zeros_like, _GENERATOR)
  constant = zero.replace(out=zero.out.replace(bias=jnp.full(12, 0.7)))
  key = jax.random.key(4)
  found = propose(GeneratorConfig(denoising_steps=5), _TRAFFIC, constant, _ONE, key, 3)
  noise = jax.random.normal(key, (3, 12))
  np.testing.assert_allclose(normalised(_TRAFFIC, found, _ONE), noise + 0.7, atol=1e-4)


def test_the_order_of_the_others_and_who_is_absent_change_nothing():
  order = jnp.array([3, 0, 4, 2, 1])
  seen = _ONE.replace(present=jnp.array([True, True, False, True, False]))
  shuffled = seen.replace(others=seen.others[order], present=seen.present[order])
  ghosts = seen.replace(others=jnp.where(seen.present[:, None], seen.others, 9.0))
  nobody = seen.replace(present=jnp.zeros(5, bool))

  def both(seen):
    plans = propose(GeneratorConfig(), _TRAFFIC, _GENERATOR, seen, jax.random.key(5), 3)
    return jnp.append(logits(_SCORER, _TRAFFIC, seen, _PLANS[0]), plans)

  expected = both(seen)
  np.testing.assert_allclose(both(shuffled), expected, rtol=1e-3, atol=1e-4)
  np.testing.assert_allclose(both(ghosts), expected, rtol=1e-3, atol=1e-4)
  assert np.isfinite(both(nobody)).all() and not np.allclose(both(nobody), expected)
