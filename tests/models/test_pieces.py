"""Pieces in a row: exact where layers see the inputs of a whole run; else as their masks say."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.adapters.model_families import gemma4_block
from agentjax.models import attention, mla, pieces
from agentjax.models.blocks import KINDS, Rows
from agentjax.models.cache import HELD, Cache
from agentjax.models.mamba2 import with_opening
from agentjax.models.norm import rms_norm
from agentjax.models.pages import Paged
from agentjax.models.stack import close_stream, given_to_blocks, open_stream, unstack
from tests.models.rows import TINY, draw
from tests.sharding.test_families_on_eight_devices import FAMILIES

GEMMA = FAMILIES["gemma4_e2b"]
NO_POSITIONS = dataclasses.replace(TINY, rope_theta=None)
SCALED = {"rope_scaling_factor": 8.0, "rope_original_length": 64, "qk_norm": False}

# One layer reads embeddings alone, which no context changes: nothing is approximate.
ONE_LAYER = {
  "attention": dataclasses.replace(TINY, pattern="*"),
  "attention, slow pairs slowed": dataclasses.replace(TINY, pattern="*", **SCALED),
  "attention, no positions": dataclasses.replace(NO_POSITIONS, pattern="*"),
  "latent": dataclasses.replace(FAMILIES["youtu"], pattern="A"),
  "window": dataclasses.replace(GEMMA, pattern="l"),
  "a quarter of the pairs turned": dataclasses.replace(GEMMA, pattern="g"),
  "mamba": dataclasses.replace(TINY, pattern="M"),
  "mamba, mlp": dataclasses.replace(TINY, pattern="M-E"),
}
DEEP = {
  "attention": dataclasses.replace(TINY, pattern="*-*-"),
  "attention, no positions": dataclasses.replace(NO_POSITIONS, pattern="*-*-"),
  "latent": FAMILIES["youtu"],
  "windows, lent keys": GEMMA,
  "hybrid": dataclasses.replace(TINY, pattern="M*E-M*"),
}
# Two are shorter than the taps of a convolution reach back.
LENGTHS = (5, 17, 2, 9, 1)
TAIL = 6
ROOM = 64

_extend = jax.jit(models.extend, static_argnums=1)
_step = jax.jit(models.decode_step, static_argnums=1)
_join = jax.jit(pieces.join_pieces, static_argnums=(1, 3))
_join_entries = jax.jit(pieces.join_entries, static_argnums=1)


def runs_of(config, seed: int = 1) -> list[np.ndarray]:
  rng = np.random.default_rng(seed)
  return [rng.integers(0, config.vocab_size, n).astype(np.int32) for n in (*LENGTHS, TAIL)]


def prepared(config):
  params = draw(config, seed=0)
  return params, models.prepare_decode_params(params, config)


def behind(params, config, cache: Cache, tail: np.ndarray) -> models.Decoded:
  """The tail taken in by slot 0."""
  return _extend(
    params, config, cache, jnp.zeros(1, jnp.int32), tail[None], np.array([len(tail)], np.int32)
  )


def joined(params, config, runs) -> Cache:
  made = [pieces.run_piece(params, config, run) for run in runs]
  return _join(params, config, made, ROOM)


@pytest.mark.parametrize("name", DEEP)
def test_one_piece_is_the_slot_that_took_it_in_to_the_bit(name):
  config = DEEP[name]
  _, params = prepared(config)
  run = runs_of(config)[1]
  found = _join(params, config, [pieces.run_piece(params, config, run)], 32)
  padded = np.zeros((1, 32), np.int32)
  padded[0, : len(run)] = run
  taken = _extend(
    params,
    config,
    models.init_cache(config, 1, 32),
    jnp.zeros(1, jnp.int32),
    padded,
    np.array([len(run)], np.int32),
  ).cache
  assert jax.tree.structure(found) == jax.tree.structure(taken)
  jax.tree.map(np.testing.assert_array_equal, found, taken)


@pytest.mark.parametrize("name", ONE_LAYER)
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 1, 0), (3, 3)])
def test_one_layer_on_pieces_computes_what_it_computes_on_all_tokens(name, order):
  config = ONE_LAYER[name]
  _, params = prepared(config)
  runs = runs_of(config)
  chosen, tail = [runs[i] for i in order], runs[-1]
  whole = np.concatenate([*chosen, tail])
  expected = behind(params, config, models.init_cache(config, 1, ROOM), whole)
  found = behind(params, config, joined(params, config, chosen), tail)
  np.testing.assert_allclose(found.hidden, expected.hidden[:, -TAIL:], atol=1e-5)
  np.testing.assert_allclose(found.logits, expected.logits, atol=1e-5)
  for one, other in zip(found.cache.blocks, expected.cache.blocks, strict=True):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, other)


def masked_attend(
  query, key, value, *, segment_ids, scale, block, window=None, kernels=None, sight=None
):
  """Dense; the segment with the highest number sees all before it as well."""
  assert sight is None
  del block, kernels
  at = jnp.arange(query.shape[1])
  back = at[:, None] - at
  last = segment_ids == jnp.max(segment_ids)
  seen = (segment_ids[:, :, None] == segment_ids[:, None]) | last[..., None]
  seen &= (back >= 0) & (back < (window or len(at)))
  shared = query.shape[2] // key.shape[2]
  key, value = (jnp.repeat(v, shared, axis=2) for v in (key, value))
  scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * scale
  weights = jax.nn.softmax(scores, where=seen[:, None], axis=-1)
  return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


@functools.partial(jax.jit, static_argnums=1)
def recomputed(params, config, runs, tail) -> jax.Array:
  """Hidden states of the tail where each run sees itself alone and the tail sees everything.

  All in one row at its final positions. Recurrent layers give the tail what they make of the inputs
  of all tokens.
  """
  ids = jnp.concatenate([*runs, tail])[None]
  sizes = [*map(len, runs), len(tail)]
  segments = jnp.asarray(np.repeat(1 + np.arange(len(sizes)), sizes))[None]
  positions = jnp.arange(ids.shape[1])[None]
  apart, together = Rows(segments, positions), Rows(jnp.ones_like(segments), positions)
  with contextlib.ExitStack() as stack:
    for module in (attention, mla, gemma4_block):
      stack.enter_context(mock.patch.object(module, "attend", masked_attend))
    x, per_layer = open_stream(params, config, ids)
    given = given_to_blocks(config, None, per_layer)
    for kind, block, own in zip(config.pattern, unstack(params.groups, config), given, strict=True):
      after, _ = KINDS[kind].forward(block, x, config, apart, own)
      if kind == "M":
        whole, _ = KINDS[kind].forward(block, x, config, together, own)
        after = jnp.where((segments == len(sizes))[..., None], whole, after)
      x = after
  hidden = rms_norm(close_stream(x, config), params.final_norm, config.norm_eps)
  return hidden[:, -len(tail) :]


@pytest.mark.parametrize("name", DEEP)
def test_a_deep_model_on_pieces_is_a_recomputation_with_their_masks(name):
  config = DEEP[name]
  trained, params = prepared(config)
  *runs, tail = runs_of(config)
  expected = recomputed(trained, config, runs, tail)
  found = behind(params, config, joined(params, config, runs), tail)
  np.testing.assert_allclose(found.hidden, expected, atol=2e-5)
  # Pieces that saw each other would differ, or the masks mean nothing here.
  whole = behind(params, config, models.init_cache(config, 1, ROOM), np.concatenate([*runs, tail]))
  assert np.max(np.abs(whole.hidden[:, -TAIL:] - expected)) > 1e-3


@pytest.mark.parametrize("pattern", ["*-*-", "M*-"])
def test_only_without_positions_and_states_any_order_is_the_same(pattern):
  config = dataclasses.replace(NO_POSITIONS, pattern=pattern)
  _, params = prepared(config)
  *runs, tail = runs_of(config)
  one, other = (
    behind(params, config, joined(params, config, order), tail).hidden
    for order in (runs, runs[::-1])
  )
  apart = np.max(np.abs(one - other))
  assert apart < 1e-5 if "M" not in pattern else apart > 1e-3


def test_a_run_taken_in_in_parts_notes_the_same_opening():
  config = dataclasses.replace(TINY, pattern="M")
  _, params = prepared(config)
  run = runs_of(config)[1]
  (expected,) = pieces.run_piece(params, config, run).entries
  cache = models.init_cache(config, 2, ROOM)
  cache = dataclasses.replace(cache, blocks=(with_opening(cache.blocks[0]),))
  for part in np.split(run, [1, 4]):
    rows = np.array([1, 2], np.int32)  # slot 1, and a row that is not used
    ids = np.stack([part, part])
    counts = np.array([len(part), 0], np.int32)
    cache = _extend(params, config, cache, rows, ids, counts).cache
  (found,) = cache.blocks
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1:], b, atol=1e-6), found, expected)
  assert not any(np.any(leaf[0]) for leaf in jax.tree.leaves(found))


def paged_rows(params, config, made, rows, page: int) -> Cache:
  """Slots of pages that share their pieces: one row of numbers of pieces for each slot."""
  entries = ROOM // page + len(LENGTHS)
  cut = [pieces.cut_pages(piece, page) for piece in made]
  counts = [-(-piece.length // page) for piece in made]
  first = 1 + np.concatenate([[0], np.cumsum(counts)])
  tails = first[-1] + np.arange(len(rows) * entries).reshape(len(rows), entries)
  table = tails.copy()
  laid = [pieces.lay_out([made[i].length for i in row], page, entries) for row in rows]
  for r, row in enumerate(rows):
    held = np.concatenate([first[i] + np.arange(counts[i]) for i in row])
    table[r, : laid[r].pages] = held
  stacked = jax.tree.map(lambda *v: jnp.asarray(np.stack(v)), *(layout.pieces for layout in laid))
  number = int(tails.max()) + 1

  def pool(*parts):
    filled = np.concatenate([np.zeros_like(parts[0][:1]), *parts])
    filled = np.pad(filled, [(0, number - len(filled))] + [(0, 0)] * (filled.ndim - 1))
    return Paged(jnp.asarray(filled), jnp.asarray(table, jnp.int32), ROOM, pieces=stacked)

  own = [pieces.states(piece.entries) for piece in made]
  states = [_join_entries(params, config, [own[i] for i in row], [0] * len(row)) for row in rows]
  blocks = []
  for b, entry in enumerate(made[0].entries):
    if isinstance(entry, HELD):
      blocks.append(jax.tree.map(pool, *(c[b] for c in cut)))
    else:
      blocks.append(jax.tree.map(lambda *v: jnp.concatenate(v), *(s[b] for s in states)))
  lengths = [sum(made[i].length for i in row) for row in rows]
  return Cache(blocks=tuple(blocks), lengths=jnp.asarray(lengths, jnp.int32))


@pytest.mark.parametrize("page", [4, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DEEP)
def test_pages_that_rows_share_at_other_places_read_as_joined_slots(name, page):
  config = DEEP[name]
  _, params = prepared(config)
  *runs, tail = runs_of(config)
  made = [pieces.run_piece(params, config, run) for run in runs]
  rows = [(0, 1, 2, 3, 4), (1, 3), (3, 1, 0), (4,)]
  cache = paged_rows(params, config, made, rows, page)
  taken = _extend(
    params,
    config,
    cache,
    jnp.arange(4),
    jnp.asarray([tail] * 4),
    jnp.asarray([TAIL, TAIL - 3, TAIL, TAIL]),
  )
  after = _step(params, config, taken.cache, jnp.full(4, 7), jnp.array([True, True, True, False]))
  for r, row in enumerate(rows):
    own = _join(params, config, [made[i] for i in row], ROOM)
    count = TAIL - 3 if r == 1 else TAIL
    expected = behind(params, config, own, tail[:count])
    np.testing.assert_allclose(taken.hidden[r, :count], expected.hidden[0], atol=1e-5)
    np.testing.assert_allclose(taken.logits[r], expected.logits[0], atol=1e-5)
    if r < 3:
      next_one = _step(params, config, expected.cache, jnp.full(1, 7), jnp.array([True]))
      # Layers add up what keys turned once and keys turned twice differ by.
      np.testing.assert_allclose(after.logits[r], next_one.logits[0], atol=5e-5)
  for old, new in zip(cache.blocks, after.cache.blocks, strict=True):
    if isinstance(old, HELD):  # pages of pieces are never written
      shared = 1 + sum(-(-n // page) for n in LENGTHS)
      for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        if a.dtype != jnp.int32:
          np.testing.assert_array_equal(a[:shared], b[:shared])


def test_a_row_without_pieces_has_places_as_positions():
  layout = pieces.lay_out([], 4, 3)
  assert (layout.pages, layout.gap) == (0, 0)
  np.testing.assert_array_equal(layout.pieces.firsts, [0, 4, 8])
  layout = pieces.lay_out([5, 4], 4, 5)
  assert (layout.pages, layout.gap) == (3, 3)
  np.testing.assert_array_equal(layout.pieces.firsts, [0, 4, 5, 9, 13])
  np.testing.assert_array_equal(layout.pieces.valid, [4, 1, 4, 4, 4])
  np.testing.assert_array_equal(layout.pieces.turns, [0, 0, 5, 0, 0])
  with pytest.raises(ValueError, match="2 pieces take 3 pages of 4 tokens; allowed: fewer than 3"):
    pieces.lay_out([5, 4], 4, 3)


def test_models_that_cannot_join_say_why():
  loop = dataclasses.replace(TINY, pattern="*-*-*-", loop=models.LoopConfig(2, 2, mean_depth=2))
  assert "run more than once" in (pieces.unjoinable(loop) or "")
  assert "exact_chunk" in (pieces.unjoinable(dataclasses.replace(TINY, exact_chunk=8)) or "")
  assert "S in model.pattern" in (pieces.unjoinable(FAMILIES["longcat_flash"]) or "")
  assert all(pieces.unjoinable(config) is None for config in DEEP.values())
  _, params = prepared(DEEP["attention"])
  with pytest.raises(ValueError, match="0 pieces of 0 tokens"):
    pieces.join_pieces(params, DEEP["attention"], [], ROOM)
