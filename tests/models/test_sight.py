"""Attention to what each token is said to see, in training and over slots."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.models.attend import attend
from tests.models.rows import TINY, draw, forward
from tests.models.test_attend import draw as draw_heads
from tests.models.test_attend import plain, segment_ids, value_and_slopes

SEEING = dataclasses.replace(TINY, pattern="*-E*-").freeze()
PLACES = jnp.arange(16)[None]


def _dense(query, key, value, segments, ranks, lanes, scale):
  """The definition, with every pair of tokens at once."""
  key, value = (jnp.repeat(v, query.shape[2] // v.shape[2], axis=2) for v in (key, value))
  seen = np.zeros((*segments.shape, segments.shape[1]), bool)
  for b, i, j in itertools.product(*map(range, seen.shape)):
    alike = segments[b, i] == segments[b, j]
    lane = lanes[b, j] in (0, lanes[b, i])
    seen[b, i, j] = alike and lane and ranks[b, j] <= ranks[b, i]
  scores = scale * jnp.einsum("bqhd,bkhd->bhqk", query, key)
  weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
  return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


@pytest.mark.parametrize("block", [4, 64])
def test_a_sight_is_the_mask_that_it_describes(block):
  arrays = draw_heads(2, 11, heads=4, kv_heads=2, width=6, value_width=5)
  segments = segment_ids([(1, 7), (2, 4)], [(3, 9), (0, 2)])
  rng = np.random.default_rng(0)
  ranks, lanes = rng.integers(0, 4, (2, 11)), rng.integers(0, 3, (2, 11))
  sight = models.Sight(jnp.asarray(ranks), jnp.asarray(lanes))
  wanted = value_and_slopes(lambda *v: _dense(*v, np.asarray(segments), ranks, lanes, 0.3), *arrays)
  how = {"segment_ids": segments, "scale": 0.3, "block": block, "sight": sight}
  found = value_and_slopes(lambda *v: attend(*v, **how), *arrays)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(a, b, atol=3e-6)


def test_ranks_in_order_on_one_lane_are_causal_attention():
  arrays = draw_heads(1, 9, heads=2, kv_heads=1, width=4, value_width=4)
  segments = segment_ids([(1, 5), (2, 4)])
  sight = models.Sight(jnp.arange(9)[None], jnp.zeros((1, 9), jnp.int32))
  found = attend(*arrays, segment_ids=segments, scale=0.3, block=4, sight=sight)
  np.testing.assert_allclose(found, plain(*arrays, segments, 0.3, None), atol=1e-6)


@pytest.mark.parametrize("pattern", [pytest.param("*-E*-", marks=pytest.mark.slow), "A-"])
def test_slots_that_see_whole_blocks_are_the_pass_that_does(pattern):
  mla = models.config.MlaConfig(query_lora=None, kv_lora=12, nope_dim=8, rope_dim=4, value_dim=8)
  config = dataclasses.replace(SEEING, pattern=pattern, mla=mla).freeze()
  params = draw(config, 0)
  ids = jnp.asarray(np.random.default_rng(1).integers(0, config.vocab_size, (1, 16)))
  sight = models.Sight(PLACES // 4, jnp.zeros_like(PLACES))
  whole = jax.jit(models.forward, static_argnums=1)(
    params, config, ids, jnp.ones_like(ids), PLACES, sight=sight
  ).hidden
  narrow = models.prepare_decode_params(params, config)
  cache, found = models.init_cache(config, 2, 16), []
  for at in (0, 8):
    part = jnp.pad(ids[:, at : at + 8], [(0, 1), (0, 0)])
    sees = jnp.broadcast_to(PLACES[:, at : at + 8] // 4 * 4 + 3, (2, 8))
    # What stands in the place of the ids is read, not the ids.
    rows, counts = jnp.array([1, 2]), jnp.array([8, 0])
    out = models.extend(
      narrow, config, cache, rows, 0 * part, counts, sees=sees, embedded=narrow.embedding[part]
    )
    cache = out.cache
    found.append(out.hidden[0])
  np.testing.assert_allclose(jnp.concatenate(found), whole[0], atol=2e-5)


def test_embeddings_take_the_place_of_ids():
  params = draw(SEEING, 0)
  ids = jnp.arange(16)[None] % SEEING.vocab_size
  given = (jnp.ones_like(ids), PLACES)
  found = forward(params, SEEING, 0 * ids, *given, embedded=params.embedding[ids])
  np.testing.assert_array_equal(found.hidden, forward(params, SEEING, ids, *given).hidden)


def test_blocks_that_cannot_follow_a_sight_are_refused():
  ids = jnp.zeros((1, 16), jnp.int32)
  sight = models.Sight(PLACES, PLACES)
  with pytest.raises(ValueError, match=r"'ME\*-'; what tokens see"):
    models.forward(draw(TINY, 0), TINY, ids, ids + 1, PLACES, sight=sight)
  recorded = dataclasses.replace(SEEING, record_max_scores=True)
  with pytest.raises(ValueError, match="none of .*record_max_scores"):
    models.forward(draw(SEEING, 0), recorded, ids, ids + 1, PLACES, sight=sight)
  cache = models.init_cache(TINY, 1, 16)
  narrow = models.prepare_decode_params(draw(TINY, 0), TINY)
  with pytest.raises(ValueError, match="what tokens see can be chosen"):
    models.extend(narrow, TINY, cache, ids[0, :1], ids, ids[0, :1] + 1, sees=PLACES)
