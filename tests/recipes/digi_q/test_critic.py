"""Values by temporal differences on fixed features, and the policy that they give offline."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.recipes.digi_q import CriticConfig, ExtractionConfig
from agentjax.recipes.digi_q.critic import (
  Data,
  Heads,
  Mlp,
  Scale,
  begin,
  both_values,
  followed,
  learn,
  outputs,
  td_loss,
  td_targets,
)
from agentjax.recipes.digi_q.selection import advantages, select
from agentjax.training import OptimizerConfig

_FEATURES = 3
_TINY = CriticConfig(width=4, hidden=1, steps=4, batch=8).freeze()


def _data(rng, count):
  draw = {
    name: rng.normal(size=(count, _FEATURES)) for name in ("actions", "states", "next_states")
  }
  return Data(
    **{name: jnp.asarray(v, jnp.float32) for name, v in draw.items()},
    rewards=jnp.asarray(rng.random(count), jnp.float32),
    done=jnp.asarray(np.arange(count) % 3 == 0, jnp.float32),
  )


def _heads(rng):
  """Heads with all parameters drawn, so that no two of them agree."""
  template = begin(_TINY, _FEATURES).heads
  return jax.tree.map(lambda v: jnp.asarray(rng.normal(size=v.shape), jnp.float32), template)


def _one(mlp, pair, features, loss):
  """What a network says of one feature vector, neuron by neuron."""
  x = [float(v) for v in features]
  layers = list(zip(mlp.weights, mlp.biases, strict=True))
  for number, (weights, biases) in enumerate(layers):
    weight, bias = np.asarray(weights[pair], np.float64), np.asarray(biases[pair], np.float64)
    x = [sum(x[i] * weight[i, j] for i in range(len(x))) + bias[j] for j in range(weight.shape[1])]
    if number + 1 < len(layers):
      x = [max(v, 0.0) for v in x]
  return x[0] if loss == "mse" else 1 / (1 + np.exp(-x[0]))


@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_targets_and_loss_are_those_of_a_loop(loss):
  rng = np.random.default_rng(0)
  config = dataclasses.replace(_TINY, loss=loss, gamma=0.9).freeze()
  heads, targets, data = _heads(rng), _heads(rng), _data(rng, 7)
  q, v = td_targets(config, targets, data)
  total = 0.0
  for pair, i in itertools.product(range(2), range(7)):
    after = _one(targets.states, pair, data.next_states[i], loss)
    own_q = float(data.rewards[i]) + (0.0 if data.done[i] else 0.9 * after)
    own_v = _one(targets.actions, pair, data.actions[i], loss)
    np.testing.assert_allclose(q[pair, i], own_q, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(v[pair, i], own_v, rtol=1e-5, atol=1e-6)
    said = (
      _one(heads.actions, pair, data.actions[i], loss),
      _one(heads.states, pair, data.states[i], loss),
    )
    for value, target in zip(said, (own_q, own_v), strict=True):
      if loss == "mse":
        total += (value - target) ** 2
      else:
        total -= target * np.log(value) + (1 - target) * np.log(1 - value)
  np.testing.assert_allclose(td_loss(config, heads, targets, data), total / 14, rtol=1e-4)


def test_targets_of_an_ended_episode_take_nothing_from_what_would_follow():
  rng = np.random.default_rng(1)
  data = dataclasses.replace(_data(rng, 6), next_states=jnp.full((6, _FEATURES), jnp.nan))
  q, _ = td_targets(_TINY, _heads(rng), data)
  ended = np.asarray(data.done) > 0
  np.testing.assert_array_equal(np.asarray(q)[:, ended], np.tile(data.rewards[ended], (2, 1)))
  assert np.isnan(np.asarray(q)[:, ~ended]).all()


def test_no_gradient_reaches_the_targets():
  rng = np.random.default_rng(2)
  heads, data = _heads(rng), _data(rng, 6)
  gradient = jax.grad(lambda t: td_loss(_TINY, heads, t, data))(_heads(rng))
  assert all(not np.any(v) for v in jax.tree.leaves(gradient))


def test_target_heads_follow_by_tau():
  def heads(value):
    mlp = Mlp((jnp.full((2, 1, 1), value),), (jnp.full((2, 1), value),))
    return Heads(mlp, mlp)

  targets, seen = heads(0.0), []
  for _ in range(3):
    targets = followed(targets, heads(1.0), 0.1)
    seen.append(float(targets.states.weights[0][0, 0, 0]))
  np.testing.assert_allclose(seen, [0.1, 0.19, 0.271], rtol=1e-6)


def test_an_update_moves_targets_by_a_tenth_of_the_new_heads():
  data = _data(np.random.default_rng(3), 16)
  before = begin(_TINY, _FEATURES)
  after, _ = learn(_TINY, before, data, steps=1)
  moved = followed(before.targets, after.heads, 0.1)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), after.targets, moved
  )
  assert np.any(after.heads.states.weights[0] != before.heads.states.weights[0])


def test_updates_do_not_depend_on_where_learning_was_stopped():
  data = _data(np.random.default_rng(4), 16)
  whole, losses = learn(_TINY, begin(_TINY, _FEATURES), data, steps=4)
  half, first = learn(_TINY, begin(_TINY, _FEATURES), data, steps=2)
  again, second = learn(_TINY, half, data, steps=2)
  np.testing.assert_array_equal(losses, jnp.concatenate([first, second]))
  jax.tree.map(np.testing.assert_array_equal, whole, again)


def test_the_two_heads_of_a_pair_begin_apart():
  said = outputs(begin(_TINY, _FEATURES).heads.actions, jnp.ones((1, _FEATURES)))
  assert said[0, 0] != said[1, 0]


def test_features_that_never_change_are_read_as_nothing():
  features = np.array([[1.0, 5.0], [3.0, 5.0]], np.float32)
  np.testing.assert_allclose(Scale.of(features)(features), [[-1, 0], [1, 0]])


# Two states. In the first, "on" leads to the second and all else ends with nothing; in the second
# "on" pays 1. The policy that played does "on" in a fourth of its turns.
_ACTIONS, _ON = 4, 2


def _logged(count):
  """Feature data of episodes of the bad policy, and their mean return."""
  rng = np.random.default_rng(5)
  eye = np.eye(2 * _ACTIONS, dtype=np.float32)
  states = eye[:2]
  rows = {name: [] for name in ("actions", "states", "next_states", "rewards", "done")}
  returns = []
  for _ in range(count):
    state = 0
    while True:
      action = int(rng.integers(_ACTIONS))
      on = action == _ON
      done = state == 1 or not on
      reward = float(on and state == 1)
      values = (eye[state * _ACTIONS + action], states[state], states[1], reward, float(done))
      for name, value in zip(rows, values, strict=True):
        rows[name].append(value)
      if done:
        returns.append(reward)
        break
      state = 1
  return Data(**{k: jnp.asarray(np.array(v), jnp.float32) for k, v in rows.items()}), returns


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_best_of_n_reaches_the_optimum_from_the_episodes_of_a_bad_policy(loss):
  """Supervised learning on the same episodes would repeat the policy that played, which wins one
  in 16; GRPO has no episodes of its own to compare."""
  data, returns = _logged(3000)
  assert np.mean(returns) < 0.1
  config = CriticConfig(
    width=32,
    hidden=1,
    loss=loss,
    gamma=0.9,
    steps=1500,
    batch=128,
    optimizer=OptimizerConfig(learning_rate=1e-2, schedule="linear"),
  ).freeze()
  critic, _ = learn(config, begin(config, 2 * _ACTIONS), data, steps=1500)
  pairs = np.eye(2 * _ACTIONS, dtype=np.float32)
  q, v = (np.asarray(x) for x in both_values(config, critic.heads, pairs, pairs[:2]))
  # The values are those of the policy that played.
  np.testing.assert_allclose(q[:, _ACTIONS + _ON], 1, atol=0.1)
  np.testing.assert_allclose(v[:, 1], 1 / _ACTIONS, atol=0.05)
  np.testing.assert_allclose(q[:, _ON], 0.9 / _ACTIONS, atol=0.05)
  found = advantages(ExtractionConfig(), q.reshape(2, 2, _ACTIONS), v)
  chosen = select(ExtractionConfig(stored=_ACTIONS, used=_ACTIONS), found)
  assert chosen.best.tolist() == [_ON, _ON] and chosen.imitated.all()
