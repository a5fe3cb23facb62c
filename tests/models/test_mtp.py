import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from tests.models.rows import by_sequence, draw, pack

PLAIN = {"pattern": "-", "rope_theta": None, "qk_norm": False}


def with_mtp(tiny, pattern, depths=2, **changes):
  mtp = models.MtpConfig(depths=depths, pattern=pattern, **changes)
  return dataclasses.replace(tiny, **PLAIN, mtp=mtp)


def weights_of(rows):
  """Different for every token, the same wherever it is packed."""
  return jnp.where(rows.segment_ids > 0, jnp.cos(rows.token_ids + 0.3 * rows.positions) + 1.5, 0.0)


@functools.partial(jax.jit, static_argnums=1)
def learn(params, config, rows):
  """The loss on the weighted tokens, its gradient, and the scores it is made of."""

  def loss(params):
    hidden = models.forward(params, config, *rows).hidden
    out = models.mtp_loss(params, config, hidden, *rows, weights_of(rows))
    return out.loss, (out, models.mtp_scores(params, config, hidden, *rows))

  (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params)
  return value, *aux, grads


def norm(x, weight):
  return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight


def by_hand(params, config, tokens, hidden):
  """Log-probs of depths 1 and 2 of one sequence, on states that have a target and no others."""
  layer = jax.tree.map(lambda w: w[0], params.mtp)
  attention, mlp = layer.blocks
  state, found = hidden, []
  for k in range(1, config.mtp.depths + 1):
    count = len(tokens) - k - 1
    embedded = norm(params.embedding[tokens[k : k + count]], layer.token_norm)
    joined = [embedded, norm(state[:count], layer.hidden_norm)]
    x = jnp.concatenate(joined, axis=1) @ layer.join
    inputs = norm(x, attention.norm)
    query, key, value = (
      jnp.einsum("td,dhk->htk", inputs, w)
      for w in (attention.mixer.query, attention.mixer.key, attention.mixer.value)
    )
    shared = config.num_heads // config.num_kv_heads
    key, value = jnp.repeat(key, shared, axis=0), jnp.repeat(value, shared, axis=0)
    scores = jnp.einsum("hqk,hsk->hqs", query, key) / jnp.sqrt(config.head_dim)
    scores = jnp.where(jnp.tril(jnp.ones((count, count), bool)), scores, -jnp.inf)
    heads = jnp.einsum("hqs,hsk->qhk", jax.nn.softmax(scores), value)
    x = x + jnp.einsum("qhk,hkd->qd", heads, attention.mixer.out)
    up = jax.nn.relu(norm(x, mlp.norm) @ mlp.mixer.up)
    x = x + jnp.square(up) @ mlp.mixer.down
    state = norm(x, layer.final_norm)
    log_probs = jax.nn.log_softmax(state @ params.lm_head)
    found.append(log_probs[jnp.arange(count), tokens[k + 1 :]])
  return found


def test_values_and_gradients_are_those_of_a_computation_by_hand(tiny):
  config = with_mtp(tiny, "*-")
  params, tokens = draw(config, seed=0), np.arange(3, 15)
  rows = pack([tokens], [[0]], len(tokens))

  def naive(params):
    hidden = models.forward(params, config, *rows).hidden[0]
    found = by_hand(params, config, tokens, hidden)
    weights = weights_of(rows)[0]
    return sum(-jnp.sum(weights[-len(f) :] * f) for f in found) / 2, found

  value, out, scores, grads = learn(params, config, rows)
  (wanted, found), wanted_grads = jax.jit(jax.value_and_grad(naive, has_aux=True))(params)
  for k, log_probs in enumerate(found, start=1):
    np.testing.assert_array_equal(scores.log_probs[k - 1, 0, : k + 1], 0.0)
    np.testing.assert_allclose(scores.log_probs[k - 1, 0, k + 1 :], log_probs, atol=2e-5)
    weighted = jnp.sum(weights_of(rows) * scores.log_probs[k - 1])
    np.testing.assert_allclose(out.metrics[f"mtp/nll_{k}"], -weighted, rtol=1e-5)
  np.testing.assert_allclose(value, wanted, rtol=1e-5)
  jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=2e-4), grads, wanted_grads)


@pytest.mark.slow
def test_packing_and_padding_change_neither_values_nor_gradients(tiny, sequences):
  config = with_mtp(tiny, "*E")
  params = draw(config, seed=0)
  alone = pack(sequences, [[i] for i in range(5)], 28)
  packed = pack(sequences, [[4, 0], [3], [None, 2, 1], []], 28)
  (value, out, scores, grads), (other, other_out, other_scores, other_grads) = (
    learn(params, config, rows) for rows in (alone, packed)
  )
  np.testing.assert_allclose(value, other, rtol=1e-5)
  np.testing.assert_array_equal(out.load, other_out.load)
  for k in range(2):
    expected = by_sequence(scores.log_probs[k], alone)
    for index, log_probs in by_sequence(other_scores.log_probs[k], packed).items():
      np.testing.assert_allclose(log_probs, expected[index], atol=2e-5)
      np.testing.assert_array_equal(log_probs[: k + 2], 0.0)
  jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=2e-4), other_grads, grads)


def test_a_router_counts_the_states_that_have_something_to_predict(tiny, sequences):
  config = with_mtp(tiny, "*E")
  load = learn(draw(config, seed=0), config, pack(sequences, [[i] for i in range(5)], 28))[1].load
  targets = sum(max(len(s) - k - 1, 0) for s in sequences for k in (1, 2))
  assert load.shape == (1, config.num_experts)
  assert jnp.sum(load) == config.experts_per_token * targets


def test_the_bias_of_its_routers_is_balanced_after_those_of_the_pattern(tiny):
  config = dataclasses.replace(
    tiny, pattern="E-", mtp=models.MtpConfig(depths=2, pattern="EE", shared=False)
  )
  specs = models.abstract(models.param_specs(config))
  params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), specs)
  load = jnp.zeros((5, 4)).at[jnp.arange(5), jnp.array([3, 0, 1, 2, 3])].set(8.0)
  moved = models.update_router_bias(params, config, load, 1.0)
  biases = [block.mixer.router_bias for block in moved.mtp.blocks]
  chosen = [[int(jnp.argmin(b[depth])) for b in biases] for depth in range(2)]
  assert chosen == [[0, 1], [2, 3]]
  alone = models.update_router_bias(params, config, load[:1], 1.0)
  assert int(jnp.argmin(alone.groups[0][0].mixer.router_bias[0])) == 3
  jax.tree.map(np.testing.assert_array_equal, alone.mtp, params.mtp)


@pytest.mark.parametrize("tied", [False, True])
def test_detached_heads_move_nothing_else(tiny, tied):
  config = dataclasses.replace(with_mtp(tiny, "-", detach=True), tie_embeddings=tied)
  grads = learn(draw(config, seed=0), config, pack([np.arange(12)], [[0]], 12))[-1]
  assert all(jnp.any(g != 0.0) for g in jax.tree.leaves(grads.mtp))
  for leaf in jax.tree.leaves(grads.replace(mtp=None)):
    np.testing.assert_array_equal(leaf, 0.0)
  config = dataclasses.replace(config, mtp=dataclasses.replace(config.mtp, detach=False))
  grads = learn(draw(config, seed=0), config, pack([np.arange(12)], [[0]], 12))[-1]
  assert all(jnp.any(g != 0.0) for g in jax.tree.leaves(grads))


def test_the_gradient_of_a_shared_layer_is_the_sum_over_its_uses(tiny):
  shared, own = with_mtp(tiny, "-", 3), with_mtp(tiny, "-", 3, shared=False)
  params, rows = draw(shared, seed=0), pack([np.arange(12)], [[0]], 12)
  repeated = params.replace(mtp=jax.tree.map(lambda w: jnp.repeat(w, 3, axis=0), params.mtp))
  value, *_, grads = learn(params, shared, rows)
  other, *_, own_grads = learn(repeated, own, rows)
  np.testing.assert_allclose(value, other, rtol=1e-6)
  jax.tree.map(
    lambda g, w: np.testing.assert_allclose(g[0], w.sum(axis=0), atol=1e-4),
    grads.mtp,
    own_grads.mtp,
  )
  assert all(jnp.all(jnp.any(g != 0.0, axis=-1)) for g in jax.tree.leaves(own_grads.mtp.final_norm))


@pytest.mark.parametrize(("shared", "layers"), [(True, 1), (False, 3)])
def test_it_adds_one_layer_or_one_a_depth(tiny, shared, layers):
  config = with_mtp(tiny, "*-", 3, shared=shared)
  d, heads, kv_heads, width = 24, 4, 2, 8
  attention = d + 2 * d * width * (heads + kv_heads)
  mlp = d + 2 * d * config.d_mlp
  layer = 2 * d + 2 * d * d + attention + mlp + d
  without = models.count(models.param_specs(dataclasses.replace(config, mtp=None)))
  assert models.count(models.param_specs(config)) - without == layers * layer


def test_what_cannot_be_is_refused(tiny, tiny_params):
  with pytest.raises(ConfigError, match=r"config\.mtp\.depths=0; allowed: >= 1"):
    with_mtp(tiny, "*", 0).validate()
  with pytest.raises(ConfigError, match=r"config\.mtp\.pattern='g'"):
    with_mtp(tiny, "g").validate()
  rows = pack([np.arange(5)], [[0]], 5)
  with pytest.raises(ValueError, match="set config.mtp"):
    models.mtp_scores(tiny_params, tiny, jnp.zeros((1, 5, tiny.d_model)), *rows)
