import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from tests.models.rows import draw, pack, score_tokens
from tests.models.slots import copy_slot, read_slots, write_slots

SLOTS, LENGTH, ROWS, CHUNK = 8, 32, 4, 8


@functools.cache
def compiled(config):
  return (
    jax.jit(functools.partial(models.extend, config=config)),
    jax.jit(functools.partial(models.decode_step, config=config)),
  )


class Decoder:
  """Slots driven by hand: ``feed`` appends to some of them, ``step`` decodes one token in each."""

  def __init__(self, params, config):
    self.extend, self.decode = compiled(config)
    self.params = jax.jit(models.prepare_decode_params, static_argnums=1)(params, config)
    self.cache = models.init_cache(config, SLOTS, LENGTH)

  def feed(self, pieces, order=None):
    """Appends ``pieces[slot]``; row ``order[i]`` of the call takes the i-th slot."""
    order = range(len(pieces)) if order is None else order
    rows = np.full(ROWS, SLOTS)
    tokens, counts = np.full((ROWS, CHUNK), 3), np.zeros(ROWS, int)
    for row, (slot, piece) in zip(order, pieces.items(), strict=True):
      rows[row], counts[row] = slot, len(piece)
      tokens[row, : len(piece)] = piece
    logits, self.cache, *_ = self.extend(
      self.params, cache=self.cache, rows=rows, token_ids=tokens, counts=counts
    )
    return {slot: np.asarray(logits[row]) for row, slot in zip(order, pieces, strict=True)}

  def step(self, tokens):
    ids, active = np.full(SLOTS, 5), np.zeros(SLOTS, bool)
    for slot, token in tokens.items():
      ids[slot], active[slot] = token, True
    logits, self.cache, *_ = self.decode(
      self.params, cache=self.cache, token_ids=ids, active=active
    )
    return {slot: np.asarray(logits[slot]) for slot in tokens}


def run_alone(decoder, slot, tokens, splits):
  """Logits after each call: pieces of the given sizes, 1 being a decoding step."""
  out, at = [], 0
  for size in splits:
    piece = tokens[at : at + size]
    out.append(decoder.step({slot: piece[0]}) if size == 1 else decoder.feed({slot: piece}))
    at += size
  return [o[slot] for o in out]


def random_splits(rng, total):
  splits = []
  while sum(splits) < total:
    splits.append(int(min(rng.choice([1, 1, 1, 2, 3, 5, 8]), total - sum(splits))))
  return splits


@pytest.mark.parametrize("seed", range(4))
def test_decoding_scores_tokens_as_training_does(tiny, tiny_params, seed):
  """At any split of the turns into extends and steps, over chunk and convolution seams."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, tiny.vocab_size, 29)
  scores = score_tokens(tiny_params, tiny, *pack([tokens], [[0]], 29))
  decoder, splits = Decoder(tiny_params, tiny), random_splits(rng, 28)
  logits = run_alone(decoder, int(rng.integers(SLOTS)), tokens, splits)
  for end, row in zip(np.cumsum(splits), logits, strict=True):
    log_probs = jax.nn.log_softmax(row)
    np.testing.assert_allclose(log_probs[tokens[end]], scores.log_probs[0, end], atol=2e-5)
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs)
    np.testing.assert_allclose(entropy, scores.entropies[0, end], atol=2e-5)


def test_a_deeper_hybrid_without_positions_decodes_as_it_trains(tiny):
  config = dataclasses.replace(tiny, pattern="M*EM*-", tie_embeddings=True, rope_theta=None)
  params = draw(config, seed=2)
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, config.vocab_size, 29)
  scores = score_tokens(params, config, *pack([tokens], [[0]], 29))
  splits = random_splits(rng, 28)
  logits = run_alone(Decoder(params, config), 3, tokens, splits)
  for end, row in zip(np.cumsum(splits), logits, strict=True):
    got = jax.nn.log_softmax(row)[tokens[end]]
    np.testing.assert_allclose(got, scores.log_probs[0, end], atol=2e-5)


def run_schedule(decoder, prompts, replies, slots, orders):
  """Feeds all prompts in the given rows, then decodes the replies; logits per sequence and call."""
  out = {i: [] for i in slots}
  for order in orders:
    members = [i for i, _ in order]
    logits = decoder.feed({slots[i]: prompts[i] for i in members}, [row for _, row in order])
    for i in members:
      out[i].append(logits[slots[i]])
  for t in range(4):
    logits = decoder.step({slots[i]: replies[i][t] for i in slots})
    for i in slots:
      out[i].append(logits[slots[i]])
  logits = decoder.feed({slots[i]: replies[i][4:7] for i in list(slots)[:ROWS]})
  for i in list(slots)[:ROWS]:
    out[i].append(logits[slots[i]])
  return out


def test_a_slots_result_is_the_same_bits_wherever_and_beside_whatever_it_runs(tiny, tiny_params):
  rng = np.random.default_rng(1)
  prompts = [rng.integers(0, tiny.vocab_size, rng.integers(2, CHUNK + 1)) for _ in range(6)]
  replies = [rng.integers(0, tiny.vocab_size, 7) for _ in range(6)]
  first = run_schedule(
    Decoder(tiny_params, tiny),
    prompts,
    replies,
    {i: i for i in range(6)},
    [[(0, 0), (1, 1), (2, 2), (3, 3)], [(4, 0), (5, 1)]],
  )
  moved = run_schedule(
    Decoder(tiny_params, tiny),
    prompts,
    replies,
    {5: 0, 3: 1, 1: 7, 0: 4},
    [[(3, 3)], [(0, 1), (1, 0)], [(5, 2)]],
  )
  for i, rows in moved.items():
    for t in range(5):
      np.testing.assert_array_equal(rows[t], first[i][t])


def test_inactive_slots_are_untouched(tiny, tiny_params):
  decoder = Decoder(tiny_params, tiny)
  decoder.feed({1: [3, 4, 5], 6: [7, 8]})
  before = jax.tree.map(np.asarray, read_slots(decoder.cache, np.array([0, 1, 3])))
  decoder.step({6: 2, 7: 1})
  decoder.feed({6: [1, 2], 2: [4]})
  after = read_slots(decoder.cache, np.array([0, 1, 3]))
  jax.tree.map(np.testing.assert_array_equal, after, before)
  np.testing.assert_array_equal(decoder.cache.lengths, [0, 3, 1, 0, 0, 0, 5, 1])


@pytest.mark.parametrize("unused", [-1, SLOTS, SLOTS + 9])
def test_unused_rows_and_empty_rows_touch_nothing(tiny, tiny_params, unused):
  decoder = Decoder(tiny_params, tiny)
  decoder.feed({slot: [slot + 1, 2, 3] for slot in range(4)})
  decoder.feed({slot: [slot + 1, 2, 3] for slot in range(4, 8)})
  before = jax.tree.map(np.asarray, decoder.cache)
  _, after, *_ = decoder.extend(
    decoder.params,
    cache=decoder.cache,
    rows=np.array([unused, 2, 7, unused]),
    token_ids=np.ones((ROWS, CHUNK), int),
    counts=np.array([4, 0, 0, 0]),
  )
  jax.tree.map(np.testing.assert_array_equal, after, before)


def test_a_forked_slot_decodes_as_its_source(tiny, tiny_params):
  decoder = Decoder(tiny_params, tiny)
  decoder.feed({2: [3, 4, 5, 6, 7]})
  decoder.feed({5: [9, 9]})
  decoder.cache = copy_slot(decoder.cache, 2, np.array([5, 0, SLOTS]))
  logits = decoder.step({0: 8, 2: 8, 5: 8})
  np.testing.assert_array_equal(logits[0], logits[2])
  np.testing.assert_array_equal(logits[5], logits[2])
  np.testing.assert_array_equal(decoder.cache.lengths, [6, 0, 6, 0, 0, 6, 0, 0])


def test_a_parked_slot_goes_on_elsewhere(tiny, tiny_params):
  stayed, parked = Decoder(tiny_params, tiny), Decoder(tiny_params, tiny)
  for decoder in (stayed, parked):
    decoder.feed({1: [3, 4, 5, 6, 7]})
  state = read_slots(parked.cache, np.array([1]))
  parked.cache = models.init_cache(tiny, SLOTS, LENGTH)
  parked.feed({6: [1, 2, 3, 4, 5, 6, 7]})
  parked.cache = write_slots(parked.cache, np.array([6]), state)
  np.testing.assert_array_equal(stayed.step({1: 8})[1], parked.step({6: 8})[6])
  np.testing.assert_array_equal(stayed.feed({1: [1, 2]})[1], parked.feed({6: [1, 2]})[6])


def test_a_reset_slot_is_as_good_as_new(tiny, tiny_params):
  used, fresh = Decoder(tiny_params, tiny), Decoder(tiny_params, tiny)
  used.feed({3: [1, 2, 3, 4, 5, 6, 7, 8], 4: [1]})
  used.cache = write_slots(used.cache, np.array([3]), models.init_cache(tiny, 1, LENGTH))
  np.testing.assert_array_equal(used.cache.lengths, [0, 0, 0, 0, 1, 0, 0, 0])
  np.testing.assert_array_equal(used.feed({3: [9, 8]})[3], fresh.feed({3: [9, 8]})[3])
  np.testing.assert_array_equal(used.step({3: 7})[3], fresh.step({3: 7})[3])


def test_a_donated_cache_is_updated_in_place(tiny, tiny_params):
  """XLA aliases every array of the cache: a decoding step copies no keys and values."""
  params = models.prepare_decode_params(tiny_params, tiny)
  cache = models.init_cache(tiny, SLOTS, LENGTH)
  step = jax.jit(models.decode_step, static_argnums=1, donate_argnums=2)
  args = (params, tiny, cache, jnp.zeros(SLOTS, jnp.int32), jnp.ones(SLOTS, bool))
  memory = step.lower(*args).compile().memory_analysis()
  held = sum(v.nbytes for v in jax.tree.leaves(cache))
  assert memory.alias_size_in_bytes >= held
  new = step(*args).cache
  assert all(v.is_deleted() for v in jax.tree.leaves(cache))
  assert jax.tree.structure(new) == jax.tree.structure(cache)


def test_decode_weights_are_in_the_compute_dtype_but_for_router_and_recurrence(tiny, tiny_params):
  config = dataclasses.replace(tiny, compute_dtype="bfloat16")
  params = models.prepare_decode_params(tiny_params, config)
  mamba, moe, attention, _ = (block.mixer for block in params.blocks)
  assert mamba.x.dtype == moe.expert_up.dtype == attention.query.dtype == jnp.bfloat16
  assert params.embedding.dtype == params.lm_head.dtype == jnp.bfloat16
  wide = (mamba.decay_rate, mamba.step_bias, mamba.skip, moe.router, moe.router_bias)
  assert all(w.dtype == jnp.float32 for w in wide)
  cache = models.init_cache(config, 2, 4)
  assert cache.blocks[0].state.dtype == jnp.float32
  assert cache.blocks[0].tail.dtype == cache.blocks[2].keys.dtype == jnp.bfloat16
