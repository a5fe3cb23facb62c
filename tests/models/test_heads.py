import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from tests.models.rows import draw, forward, pack, score_tokens


def plain_scores(params, config, rows, temperature):
  hidden = forward(params, config, *rows).hidden
  logits = models.compute_logits(params, config, hidden)[:, :-1] / temperature
  log_probs = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(log_probs, rows.token_ids[:, 1:, None], -1)[..., 0]
  entropies = -jnp.sum(jnp.exp(log_probs) * log_probs, -1)
  inside = (rows.segment_ids[:, 1:] == rows.segment_ids[:, :-1]) & (rows.segment_ids[:, 1:] > 0)
  return tuple(jnp.pad(jnp.where(inside, v, 0.0), ((0, 0), (1, 0))) for v in (chosen, entropies))


@pytest.mark.parametrize(
  ("tied", "temperature", "chunk"), [(False, 1.0, 7), (True, 0.7, 64), (True, 0.7, 3)]
)
def test_chunked_scores_equal_those_of_the_whole_logits(tiny, sequences, tied, temperature, chunk):
  """A few chunks, one, and a loop of ten."""
  config = dataclasses.replace(tiny, pattern="*", tie_embeddings=tied, logits_chunk=chunk)
  params = draw(config, seed=0)
  rows = pack(sequences, [[0, 2, None], [1, 4]], 30)
  mix = jax.random.normal(jax.random.key(3), (2, *rows.token_ids.shape))

  def ours(params):
    scores = score_tokens(params, config, *rows, temperature=temperature)
    return jnp.sum(mix[0] * scores.log_probs + mix[1] * scores.entropies), scores

  def theirs(params):
    log_probs, entropies = plain_scores(params, config, rows, temperature)
    return jnp.sum(mix[0] * log_probs + mix[1] * entropies), (log_probs, entropies)

  (_, scores), grads = jax.jit(jax.value_and_grad(ours, has_aux=True))(params)
  (_, (log_probs, entropies)), want = jax.jit(jax.value_and_grad(theirs, has_aux=True))(params)
  np.testing.assert_allclose(scores.log_probs, log_probs, atol=2e-6)
  np.testing.assert_allclose(scores.entropies, entropies, atol=2e-6)
  jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=2e-5), grads, want)


def test_first_tokens_and_padding_score_zero(tiny, tiny_params, sequences):
  rows = pack(sequences, [[0, 2, None], [3, None, 4]], 24)
  scores = score_tokens(tiny_params, tiny, *rows)
  silent = (rows.positions == 0) | (rows.segment_ids == 0)
  for values in (scores.log_probs, scores.entropies):
    np.testing.assert_array_equal(values[silent], 0.0)
    assert jnp.all(values[~silent] != 0.0)


def test_scores_stay_finite_at_extreme_logits(tiny):
  config = dataclasses.replace(tiny, pattern="-")
  params = draw(config, seed=0)
  params = params.replace(lm_head=1e3 * params.lm_head)
  rows = pack([np.arange(20)], [[0]], 20)

  def loss(params):
    scores = score_tokens(params, config, *rows)
    return jnp.sum(scores.log_probs + scores.entropies)

  value, grads = jax.jit(jax.value_and_grad(loss))(params)
  assert jnp.isfinite(value) and all(jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads))


def test_a_row_of_one_token_has_nothing_to_score(tiny, tiny_params):
  scores = score_tokens(tiny_params, tiny, *pack([np.arange(1)], [[0]], 1))
  np.testing.assert_array_equal(scores.log_probs, jnp.zeros((1, 1)))


def test_the_value_head_is_linear_in_float32_and_starts_at_zero(tiny):
  head = models.init_params(models.value_specs(tiny), jax.random.key(0))
  hidden = jax.random.normal(jax.random.key(1), (2, 5, tiny.d_model), jnp.bfloat16)
  np.testing.assert_array_equal(models.values(head, hidden), jnp.zeros((2, 5)))
  head = models.ValueHead(weight=jnp.arange(tiny.d_model, dtype=jnp.float32), bias=jnp.array(2.0))
  got = models.values(head, hidden)
  assert got.dtype == jnp.float32
  want = np.asarray(hidden, np.float64) @ np.arange(tiny.d_model) + 2.0
  np.testing.assert_allclose(got, want, rtol=1e-5)
