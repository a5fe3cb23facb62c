"""Scores of chosen tokens, of whole distributions, and of any response after any prefix."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.models.vocabulary import over_vocabulary, put_tokens, readout, take_tokens
from tests.models.rows import TINY, draw, forward, pack, score_tokens

_ATTENTION = dataclasses.replace(TINY, pattern="*")


def test_kept_tokens_have_the_scores_and_gradients_they_have_among_all(sequences):
  params = draw(_ATTENTION, seed=0)
  rows = pack(sequences, [[0, 2, None], [1, 4]], 30)
  kept = jnp.array([[2, 5, 29, 0], [1, 0, 0, 0]])  # 29 may be padding; 0 fills up
  mix = jax.random.normal(jax.random.key(3), (3, *rows.token_ids.shape))
  mask = np.zeros(rows.token_ids.shape, bool)
  mask[np.arange(2)[:, None], kept] = True
  mask[:, 0] = False

  def loss(params, kept):
    scores = score_tokens(params, _ATTENTION, *rows, temperature=0.7, kept=kept)
    three = (scores.log_probs, scores.entropies, scores.log_normalizers)
    return sum(jnp.sum(m * v * mask) for m, v in zip(mix, three, strict=True)), three

  run = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (_, few), grads = run(params, kept)
  (_, every), wanted = run(params, None)
  for ours, theirs in zip(few, every, strict=True):
    np.testing.assert_allclose(ours, np.where(mask, theirs, 0), rtol=1e-6, atol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), grads, wanted)


def test_places_are_taken_and_put_back():
  values = jnp.arange(12.0).reshape(2, 6) + 1
  places = jnp.array([[3, 5, 0], [1, 0, 0]])
  back = put_tokens(take_tokens(values, places), places, 6)
  np.testing.assert_array_equal(back, [[0, 0, 0, 4, 0, 6], [0, 8, 0, 0, 0, 0]])


@pytest.mark.parametrize("size", [3, 7])
def test_chunks_of_the_vocabulary_pass_change_neither_value_nor_gradient(sequences, size):
  student, teacher = draw(_ATTENTION, seed=0), draw(_ATTENTION, seed=1)
  rows = pack(sequences, [[0, 2, None], [1, 4]], 30)
  hidden = [forward(p, _ATTENTION, *rows).hidden for p in (student, teacher)]
  labels = jnp.arange(60).reshape(2, 30)

  def loss(inputs, size):
    params, states = inputs
    reads = [readout(params, _ATTENTION, states, 0.7), readout(teacher, _ATTENTION, hidden[1])]

    def each(log_p, log_q, labels):
      return {"kl": jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1), "labels": labels}

    result = over_vocabulary(each, reads, labels, size=size)
    return jnp.sum(jnp.sin(result["labels"]) * result["kl"]), result["labels"]

  run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
  (value, same), grads = run((student, hidden[0]), size)
  (whole, _), wanted = run((student, hidden[0]), 30)
  np.testing.assert_array_equal(same, labels)
  assert value == pytest.approx(float(whole), rel=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, wanted)


def test_a_response_is_scored_after_any_prefix_as_alone_in_a_row():
  """A hybrid: neither attention nor recurrent state reaches from one pair into the next."""
  config = dataclasses.replace(TINY, pattern="M*")
  params = draw(config, seed=0)
  rng = np.random.default_rng(0)
  prefixes = [rng.integers(0, 41, n) for n in (1, 5, 9)]
  responses = [rng.integers(0, 41, n) for n in (6, 3, 4)]
  together = models.score_responses(
    params, config, prefixes, responses, temperature=0.8, top_k=2, full=True, row_length=24, rows=2
  )
  for prefix, response, scores in zip(prefixes, responses, together, strict=True):
    ids = jnp.asarray(np.concatenate([prefix, response]))[None]
    hidden = forward(params, config, ids, ids * 0 + 1, jnp.arange(ids.size)[None]).hidden
    wanted = jax.nn.log_softmax(models.compute_logits(params, config, hidden)[0] / 0.8)
    wanted = np.asarray(wanted[len(prefix) - 1 : -1])
    np.testing.assert_allclose(scores.distributions, wanted, atol=1e-5)
    chosen = wanted[np.arange(len(response)), response]
    np.testing.assert_allclose(scores.log_probs, chosen, atol=1e-5)
    np.testing.assert_allclose(scores.entropies, -(np.exp(wanted) * wanted).sum(-1), atol=1e-5)
    np.testing.assert_array_equal(scores.top_ids, np.argsort(-wanted)[:, :2])
    np.testing.assert_allclose(scores.top_log_probs, -np.sort(-wanted)[:, :2], atol=1e-5)


def test_a_cross_matrix_has_every_response_after_every_prefix():
  params = draw(_ATTENTION, seed=0)
  prefixes, responses = [[1], [2, 3]], [[4, 5], [6], [7, 8, 9]]
  matrix = models.cross_log_probs(params, _ATTENTION, prefixes, responses)
  assert matrix.shape == (3, 2)
  own = models.score_responses(params, _ATTENTION, [prefixes[1]], [responses[2]])[0]
  assert matrix[2, 1] == pytest.approx(float(own.log_probs.sum()), abs=1e-5)
  assert own.top_ids is None and own.distributions is None


def test_an_empty_prefix_is_refused():
  with pytest.raises(ValueError, match="prefix 1 is empty"):
    models.score_responses({}, _ATTENTION, [[1], []], [[2], [3]])
