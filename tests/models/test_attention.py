import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.models.attention import attention, attention_spec


def plain(params, x, config, segment_ids, positions):
  """Attention written out over every head and query."""
  heads = [jnp.einsum("btd,dhk->bhtk", x, w) for w in (params.query, params.key, params.value)]
  query, key, value = heads
  if config.qk_norm:
    query, key = (
      v / jnp.sqrt(jnp.mean(v**2, -1, keepdims=True) + config.norm_eps) * w
      for v, w in ((query, params.query_norm), (key, params.key_norm))
    )
  if config.rope_theta is not None:
    half = config.head_dim // 2
    angle = positions[:, None, :, None] * config.rope_theta ** (-jnp.arange(half) / half)
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
@pytest.mark.parametrize("changes", [{}, {"rope_theta": None, "qk_norm": False, "num_kv_heads": 4}])
def test_blocks_of_queries_equal_one_square_product(tiny, block, changes):
  config = dataclasses.replace(tiny, attention_block=block, **changes)
  params = models.init_params(attention_spec(config), jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (2, 11, config.d_model))
  segments = jnp.array([[1] * 4 + [2] * 7, [3] * 9 + [0] * 2])
  positions = jnp.array([[*range(4), *range(7)], [*range(9), 0, 1]])

  def ours(params, x):
    return attention(params, x, config, segment_ids=segments, positions=positions)

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
    attention(params, x, tiny, segment_ids=segments, positions=positions[None])
    for positions in (jnp.arange(9), jnp.arange(9) + 50, 2 * jnp.arange(9))
  )
  np.testing.assert_allclose(here, there, atol=1e-5)
  assert jnp.max(jnp.abs(here - stretched)) > 1e-3
