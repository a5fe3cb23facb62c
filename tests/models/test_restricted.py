"""The restricted softmax: its sets, its value by hand, its gradient, and the whole vocabulary."""

import dataclasses

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

from agentjax import models
from agentjax.models import Readout, TokenSets, restricted_scores
from agentjax.recipes.logits_replay.sets import likely_sets
from tests.models.rows import TINY, draw, pack, score_tokens

_ATTENTION = dataclasses.replace(TINY, pattern="*")


def _reading(logits):
  """A readout whose logits are these: identity columns."""
  logits = jnp.asarray(logits, jnp.float32)
  return Readout(logits[None], jnp.eye(logits.shape[-1]))


def test_the_loss_of_one_token_is_the_one_worked_out_by_hand():
  # Logits 2 and 1 are in the set, gold is the second: -(1 - log(e^2 + e)) = log(1 + e).
  read = _reading([[2.0, 1.0, 0.0, -1.0]])
  sets = TokenSets(jnp.array([[[1, 0, 3]]]), jnp.array([[[True, True, False]]]))
  log_prob, entropy = restricted_scores(read, sets, size=4)
  np.testing.assert_allclose(-log_prob, [[1.313262]], atol=1e-6)
  p = 1 / (1 + np.e)
  np.testing.assert_allclose(entropy, [[-p * np.log(p) - (1 - p) * np.log(1 - p)]], atol=1e-6)


@pytest.mark.parametrize(
  "mass,gold,expected",
  [(0.4, 0, {0}), (0.4, 3, {0, 3}), (0.6, 3, {0, 1, 3}), (0.85, 1, {0, 1, 2}), (1.0, 2, {0, 1, 2})],
)
def test_a_set_is_the_fewest_tokens_that_hold_the_mass_and_the_gold_one(mass, gold, expected):
  probs = np.array([0.5, 0.3, 0.15, 0.05])
  read = _reading(np.log(probs)[None])
  sets, outside = likely_sets(read, jnp.array([[gold]]), mass=mass, most=3, size=4)
  found = np.asarray(sets.ids)[np.asarray(sets.inside)]
  assert sorted(found) == sorted(expected) and found[0] == gold
  np.testing.assert_allclose(outside, [[1 - probs[list(expected)].sum()]], atol=1e-6)


def test_over_the_whole_vocabulary_it_is_the_plain_loss_with_its_gradient(sequences):
  params = draw(_ATTENTION, seed=0)
  rows = pack(sequences, [[0, 2, None], [1, 4]], 30)
  kept = jnp.array([[2, 5, 7, 0], [1, 3, 0, 0]])
  gold = jnp.take_along_axis(rows.token_ids, kept, axis=1)
  states = jnp.zeros((2, 4, _ATTENTION.d_model))
  read = Readout(states, jnp.zeros((_ATTENTION.d_model, _ATTENTION.vocab_size)))
  sets, _ = likely_sets(read, gold, mass=1.0, most=_ATTENTION.vocab_size, size=3)

  def loss(params, sets):
    scores = score_tokens(params, _ATTENTION, *rows, kept=kept, sets=sets)
    return -jnp.sum(scores.log_probs) + 0.1 * jnp.sum(scores.entropies)

  run = jax.jit(jax.value_and_grad(loss))
  value, grads = run(params, sets)
  wanted, wanted_grads = run(params, None)
  np.testing.assert_allclose(value, wanted, rtol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-6), grads, wanted_grads)


def test_its_gradient_is_the_slope_and_leaves_all_other_tokens_alone():
  rng = np.random.default_rng(0)
  hidden = jnp.asarray(rng.standard_normal((1, 5, 6)), jnp.float32)
  weight = jnp.asarray(rng.standard_normal((6, 9)), jnp.float32)
  ids = jnp.asarray(np.stack([rng.permutation(8)[:4] for _ in range(5)])[None])  # never token 8
  inside = jnp.asarray(rng.random((1, 5, 4)) < 0.7).at[..., 0].set(True)

  def loss(hidden, weight, size=2):
    read = Readout(hidden, weight, temperature=0.7)
    return -jnp.sum(restricted_scores(read, TokenSets(ids, inside), size=size)[0])

  jax.test_util.check_grads(loss, (hidden, weight), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)
  slope = jax.grad(loss, argnums=1)(hidden, weight)
  assert not np.any(slope[:, 8]) and np.any(slope[:, :8])
  np.testing.assert_allclose(loss(hidden, weight, size=2), loss(hidden, weight, size=9), rtol=1e-6)


def test_sets_need_the_places_that_they_are_about(sequences):
  rows = pack(sequences, [[0]], 30)
  sets = TokenSets(jnp.zeros((1, 1, 1), jnp.int32), jnp.ones((1, 1, 1), bool))
  with pytest.raises(ValueError, match="give kept"):
    models.score_tokens(draw(_ATTENTION, seed=0), _ATTENTION, *rows, sets=sets)
