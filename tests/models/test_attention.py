import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.models.attention import (
  RopeScaling,
  attention,
  attention_spec,
  rope_frequencies,
  rotate,
)

# As transformers 5.23 computes them: llama3, theta 5e5, factor 8, low 1, high 4, length 8192.
SCALED = np.array(
  [
    1.0,
    0.193922758102417,
    0.03760603070259094,
    0.00729266507551074,
    0.0005248460220173001,
    3.428102354519069e-05,
    6.647869668086059e-06,
    1.289173155782919e-06,
  ],
  np.float32,
)


def plain(params, x, config, segment_ids, positions):
  """Attention written out over every head and query."""
  heads = [jnp.einsum("btd,dhk->bhtk", x, w) for w in (params.query, params.key, params.value)]
  if config.attention_bias:
    biases = (params.query_bias, params.key_bias, params.value_bias)
    heads = [h + bias[:, None] for h, bias in zip(heads, biases, strict=True)]
  query, key, value = heads
  if config.qk_norm:
    query, key = (
      v / jnp.sqrt(jnp.mean(v**2, -1, keepdims=True) + config.norm_eps) * w
      for v, w in ((query, params.query_norm), (key, params.key_norm))
    )
  if config.rope_theta is not None:
    half = config.head_dim // 2
    angle = positions[:, None, :, None] * config.rope_theta ** (-jnp.arange(half) / half)
    if config.rope_scaling_factor is not None:
      angle = positions[:, None, :, None] * SCALED
    turn = jnp.exp(1j * angle)

    def rotate(v):
      turned = (v[..., :half] + 1j * v[..., half:]) * turn
      return jnp.concatenate([turned.real, turned.imag], -1)

    query, key = rotate(query), rotate(key)
  repeats = config.num_heads // config.num_kv_heads
  key, value = (jnp.repeat(v, repeats, axis=1) for v in (key, value))
  scores = jnp.einsum("bhqk,bhsk->bhqs", query, key) / config.head_dim**0.5
  time = x.shape[1]
  seen = (segment_ids[:, :, None] == segment_ids[:, None]) & jnp.tri(time, dtype=bool)
  weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
  return jnp.einsum("bhqs,bhsk,hkd->bqd", weights, value, params.out)


@pytest.mark.parametrize("block", [4, 64])
@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"rope_theta": None, "qk_norm": False, "num_kv_heads": 4},
    {"attention_bias": True, "head_dim": 16, "rope_theta": 5e5, "rope_scaling_factor": 8.0},
  ],
)
def test_blocks_of_queries_equal_one_square_product(tiny, block, changes):
  config = dataclasses.replace(tiny, attention_block=block, **changes)
  params = models.init_params(attention_spec(config), jax.random.key(0))
  # Off their start: norms of one and biases of zero would hide a missing one.
  params = jax.tree.map(lambda v: v + 0.1 * jnp.cos(jnp.arange(v.size)).reshape(v.shape), params)
  x = jax.random.normal(jax.random.key(1), (2, 11, config.d_model))
  segments = jnp.array([[1] * 4 + [2] * 7, [3] * 9 + [0] * 2])
  positions = jnp.array([[*range(4), *range(7)], [*range(9), 0, 1]])

  def ours(params, x):
    return attention(params, x, config, segment_ids=segments, positions=positions)[0]

  def theirs(params, x):
    return plain(params, x, config, segments, positions)

  np.testing.assert_allclose(jax.jit(ours)(params, x), jax.jit(theirs)(params, x), atol=2e-6)
  got, want = (
    jax.jit(jax.grad(lambda p, x, f=f: jnp.sum(jnp.sin(3 * f(p, x))), (0, 1)))(params, x)
    for f in (ours, theirs)
  )
  jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=3e-5), got, want)


def test_rotary_attention_sees_only_distances(tiny):
  params = models.init_params(attention_spec(tiny), jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (1, 9, tiny.d_model))
  segments = jnp.ones((1, 9), jnp.int32)
  here, there, stretched = (
    attention(params, x, tiny, segment_ids=segments, positions=positions[None])[0]
    for positions in (jnp.arange(9), jnp.arange(9) + 50, 2 * jnp.arange(9))
  )
  np.testing.assert_allclose(here, there, atol=1e-5)
  assert jnp.max(jnp.abs(here - stretched)) > 1e-3


def test_scaled_frequencies_are_those_of_llama_3_1():
  scaling = RopeScaling(8.0, 1.0, 4.0, 8192)
  np.testing.assert_allclose(rope_frequencies(16, 5e5, scaling=scaling), SCALED, rtol=5e-7)
  plain_ones = 5e5 ** (-np.arange(8) / 8)
  np.testing.assert_allclose(rope_frequencies(16, 5e5), plain_ones, rtol=1e-6)


def test_interleaved_pairs_turn_as_halves_do_in_another_order():
  x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8))
  positions = jnp.array([[0, 1, 2, 3, 4], [7, 8, 9, 0, 1]])
  frequencies = rope_frequencies(8, 1e4, turned=3)
  halves = rotate(x, positions, frequencies)
  order = np.arange(8).reshape(2, 4).T.reshape(-1)  # 0 4 1 5 2 6 3 7
  np.testing.assert_array_equal(
    rotate(x[..., order], positions, frequencies, interleaved=True), halves[..., order]
  )
  np.testing.assert_array_equal(halves[..., [3, 7]], x[..., [3, 7]])  # the fourth pair stays
  turn = np.exp(1j * np.asarray(positions)[..., None, None] * frequencies)
  turned = (np.asarray(x[..., :4]) + 1j * np.asarray(x[..., 4:])) * turn
  wanted = np.concatenate([turned.real, turned.imag], -1)
  np.testing.assert_allclose(halves, wanted, atol=1e-6)


def test_rope_scaling_without_a_rotary_embedding_is_refused(tiny):
  with pytest.raises(ConfigError, match="rope_scaling_factor=8.0"):
    dataclasses.replace(tiny, rope_theta=None, rope_scaling_factor=8.0).validate()
