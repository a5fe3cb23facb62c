"""Slots against the trainer's forward pass, and against each other."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.engine import (
  ContextLengthError,
  EngineConfig,
  EngineError,
  Finish,
  Sample,
  SamplingConfig,
  SlotEngine,
)
from agentjax.engine.store import Snapshot
from tests.engine.conftest import sizes
from tests.engine.generate import generate

pytestmark = pytest.mark.optimised

PROMPTS = [[1, 2, 3], [9] * 4, list(range(5, 27)), [7, 1], list(range(40, 20, -1))]


@functools.partial(jax.jit, static_argnums=1)
def _scores(params, config, ids, segments, positions, temperature):
  return models.score_tokens(params, config, ids, segments, positions, temperature=temperature)


def trainer_scores(params, config, ids, temperature=1.0) -> models.TokenScores:
  """The trainer's log-probs and entropies of one sequence, in a padded row of 64."""
  row = np.zeros((1, 64), np.int32)
  row[0, : len(ids)] = ids
  place = np.arange(64, dtype=np.int32)[None]
  scores = _scores(params, config, row, (place < len(ids)).astype(np.int32), place, temperature)
  return jax.tree.map(lambda v: v[:, : len(ids)] if v.ndim > 1 else v, scores)


def gap_to_trainer(engine: SlotEngine, params) -> float:
  """The largest difference of its log-probs from the trainer's, over some calls."""
  gap = 0.0
  results = generate(engine, PROMPTS, seed=0, max_tokens=20)
  for prompt, (sample,) in zip(PROMPTS, results, strict=True):
    scores = trainer_scores(params, engine.model_config, [*prompt, *sample.token_ids])
    apart = np.abs(sample.behaviour_log_probs - scores.log_probs[0, len(prompt) :])
    gap = max(gap, float(np.max(apart)))
  return gap


def assert_same_bits(a: Sample, b: Sample) -> None:
  for name in ("token_ids", "behaviour_log_probs", "entropies", "sampling_log_probs"):
    np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
  assert a.finish == b.finish


def arrays(engine: SlotEngine, snapshot: Snapshot) -> list[tuple[np.ndarray, ...]]:
  """All that a snapshot holds."""
  engine.copy_out(snapshot.stored)
  return [jax.device_get(part.arrays) for part in (snapshot.state, *snapshot.stored)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_entropies_are_those_of_the_trainer(
  slot_engine, params, model_config, temperature
):
  results = generate(
    slot_engine,
    PROMPTS,
    seed=0,
    max_tokens=20,
    sampling=SamplingConfig(temperature=temperature, top_p=0.9),
  )
  for prompt, (sample,) in zip(PROMPTS, results, strict=True):
    scores = trainer_scores(params, model_config, [*prompt, *sample.token_ids], temperature)
    start = len(prompt)
    np.testing.assert_allclose(sample.behaviour_log_probs, scores.log_probs[0, start:], atol=2e-5)
    np.testing.assert_allclose(sample.entropies, scores.entropies[0, start:], atol=2e-5)
    assert (sample.sampling_log_probs >= sample.behaviour_log_probs - 1e-5).all()


def test_greedy_is_the_trainers_argmax(slot_engine, params, model_config):
  [[sample]] = generate(
    slot_engine, [PROMPTS[0]], seed=0, max_tokens=12, sampling=SamplingConfig(temperature=0.0)
  )
  scores = trainer_scores(params, model_config, [*PROMPTS[0], *sample.token_ids])
  logits = models.compute_logits(params, model_config, scores.hidden[0])
  np.testing.assert_array_equal(np.argmax(logits, axis=-1)[2:-1], sample.token_ids)


@pytest.mark.parametrize("cut", [1, 4, 5, 13, 21])
def test_extending_a_live_context_equals_reading_it_at_once(slot_engine, params, model_config, cut):
  ids = np.random.default_rng(cut).integers(0, model_config.vocab_size, 22).astype(np.int32)
  tail = np.arange(11, dtype=np.int32)
  slot_engine.place(None, [2])
  slot_engine.extend([(2, ids[:cut])])
  slot_engine.extend([(2, ids[cut:]), (2, tail)])
  plan = slot_engine.idle_plan()
  plan.budget[2] = 8
  plan.filters.temperature[2] = 1.0
  chunk = slot_engine.decode(plan)
  scores = trainer_scores(params, model_config, [*ids, *tail, *chunk.token_ids[2]])
  np.testing.assert_allclose(chunk.behaviour_log_probs[2], scores.log_probs[0, 33:], atol=2e-5)
  assert slot_engine.lengths[2] == 41


def test_padding_at_the_end_of_a_full_context_overwrites_nothing(slot_engine, params, model_config):
  ids = (np.arange(64) * 7 % 48).astype(np.int32)
  slot_engine.place(None, [1])
  slot_engine.extend([(1, ids[:57])])
  slot_engine.extend([(1, ids[57:62])])  # five tokens in a bucket of 16, with room for seven
  plan = slot_engine.idle_plan()
  plan.budget[1] = 2
  plan.forced[1, :2] = ids[62:]
  plan.filters.temperature[1] = 1.0
  chunk = slot_engine.decode(plan)
  scores = trainer_scores(params, model_config, ids)
  np.testing.assert_allclose(chunk.behaviour_log_probs[1, :2], scores.log_probs[0, 62:], atol=2e-5)


def test_order_slots_and_neighbours_change_no_bit(slot_engine):
  together = generate(slot_engine, PROMPTS, seed=3, max_tokens=17)
  # The same prompts alone in the engine, with the key of their place in the list.
  for i, prompt in enumerate(PROMPTS):
    alone = generate(slot_engine, [[1]] * i + [prompt], seed=3, max_tokens=17)
    assert_same_bits(together[i][0], alone[i][0])


def test_a_forked_slot_samples_what_a_fresh_slot_would(slot_engine):
  plan = slot_engine.idle_plan()
  prompt = np.arange(9, dtype=np.int32)
  slot_engine.place(None, [0])
  slot_engine.extend([(0, prompt)])
  slot_engine.place(slot_engine.read(0), [1, 3])
  slot_engine.place(None, [2])
  slot_engine.extend([(2, prompt)])
  plan.budget[:] = 8
  plan.filters.temperature[:] = 1.0
  plan.key_data[:] = (5, 6)
  chunk = slot_engine.decode(plan)
  for slot in (1, 2, 3):
    np.testing.assert_array_equal(chunk.token_ids[slot], chunk.token_ids[0])
    np.testing.assert_array_equal(chunk.behaviour_log_probs[slot], chunk.behaviour_log_probs[0])


def test_idle_slots_are_left_bit_for_bit(slot_engine):
  slot_engine.place(None, [0, 1])
  slot_engine.extend([(0, np.arange(5, dtype=np.int32)), (1, np.arange(7, dtype=np.int32))])
  before = arrays(slot_engine, slot_engine.read(1))
  plan = slot_engine.idle_plan()
  plan.budget[0] = 8
  slot_engine.decode(plan)
  slot_engine.extend([(0, np.arange(5, dtype=np.int32))])
  jax.tree.map(np.testing.assert_array_equal, before, arrays(slot_engine, slot_engine.read(1)))


def test_a_context_comes_back_from_the_host_to_the_bit(slot_engine):
  ids = np.arange(23, dtype=np.int32)
  slot_engine.place(None, [0, 1])
  slot_engine.extend([(0, ids), (1, ids[::-1])])
  snapshot, other = slot_engine.read(0), slot_engine.read(1)
  before = arrays(slot_engine, snapshot)
  slot_engine.store.device_bytes = 0
  slot_engine.store.relieve_device()
  assert slot_engine.store.on_device == 0
  assert slot_engine.store.on_host > 0
  assert all(isinstance(v, np.ndarray) for v in snapshot.state.arrays)
  slot_engine.place(other, [0, 2])
  slot_engine.place(snapshot, [3])
  jax.tree.map(np.testing.assert_array_equal, before, arrays(slot_engine, slot_engine.read(3)))


def test_copies_of_a_context_share_the_pages_in_which_nothing_changes(slot_engine):
  """Pages of 8 tokens, one empty copy of which is stored from the start."""
  engine, (pool,) = slot_engine, slot_engine.pools
  free = pool.free
  engine.place(None, [0])
  engine.extend([(0, np.arange(20, dtype=np.int32))])
  assert free - pool.free == 3
  first = engine.read(0)
  assert len(first.stored) == 3 and free - pool.free == 4  # the third page still changes
  engine.extend([(0, np.arange(7, dtype=np.int32))])
  second = engine.read(0)
  assert second.stored[:2] == first.stored[:2] and free - pool.free == 6
  engine.place(second, [1, 2])
  assert free - pool.free == 8  # again the last page of each
  found = arrays(engine, second)
  for slot in (0, 1, 2):
    jax.tree.map(np.testing.assert_array_equal, found, arrays(engine, engine.read(slot)))
  for slot in (0, 1, 2):
    engine.release(slot)
  del first
  assert free - pool.free == 4  # of the second: three, and its last
  del second, found
  assert pool.free == free == pool.available


def test_pages_that_run_short_go_to_the_host_and_come_back_to_the_bit(model_config, params):
  engine = SlotEngine(model_config, sizes(cache_tokens=40))  # five pages, and one for a copy
  engine.publish(params, 0)
  (pool,) = engine.pools
  ids = np.arange(30, dtype=np.int32)
  engine.place(None, [0])
  engine.extend([(0, ids)])
  first = engine.leave(0)
  before = jax.device_get(first.state.arrays)
  engine.place(None, [1])
  engine.extend([(1, ids[:25])])  # has four pages: two of the first one's go
  assert [b.arrays is None for b in first.stored].count(False) > 0
  second = engine.leave(1)
  engine.store.device_bytes = 0
  engine.store.relieve_device()
  for snapshot in (first, second, first):
    engine.place(snapshot, [2])
    plan = engine.idle_plan()
    plan.budget[2], plan.filters.temperature[2] = 3, 1.0
    found = engine.decode(plan).behaviour_log_probs[2, :3]
  alone = SlotEngine(model_config, sizes())
  alone.publish(params, 0)
  alone.place(None, [2])
  alone.extend([(2, ids)])
  plan = alone.idle_plan()
  plan.budget[2], plan.filters.temperature[2] = 3, 1.0
  np.testing.assert_array_equal(alone.decode(plan).behaviour_log_probs[2, :3], found)
  jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(first.state.arrays))


def test_a_poisoned_slot_is_clean_for_the_next_context(slot_engine, params):
  expected = generate(slot_engine, [PROMPTS[2]], seed=0, max_tokens=6)
  slot_engine.publish(jax.tree.map(lambda v: v * np.nan, params), 1)
  generate(slot_engine, PROMPTS, seed=0, max_tokens=6)
  slot_engine.publish(params, 2)
  found = generate(slot_engine, [PROMPTS[2]], seed=0, max_tokens=6)
  assert_same_bits(expected[0][0], found[0][0])


def test_samples_of_a_group_differ(slot_engine):
  [group] = generate(slot_engine, [PROMPTS[0]], seed=0, max_tokens=10, samples=9)
  assert len({tuple(s.token_ids) for s in group}) == 9


def test_a_stop_id_ends_the_call_and_stays_in_the_context(slot_engine):
  [[free]] = generate(slot_engine, [PROMPTS[0]], seed=1, max_tokens=20)
  stop = int(free.token_ids[9])
  first = int(np.flatnonzero(free.token_ids == stop)[0])
  [[sample]] = generate(slot_engine, [PROMPTS[0]], seed=1, max_tokens=20, stop_ids=(stop,))
  assert sample.finish == Finish.STOP
  np.testing.assert_array_equal(sample.token_ids, free.token_ids[: first + 1])
  assert slot_engine.lengths[0] == len(PROMPTS[0]) + first + 1


def test_a_full_context_ends_the_call(slot_engine):
  [[sample], [none]] = generate(slot_engine, [[1] * 60, [1] * 64], seed=0, max_tokens=20)
  assert (len(sample.token_ids), sample.finish) == (4, Finish.CONTEXT_FULL)
  assert (len(none.token_ids), none.finish) == (0, Finish.CONTEXT_FULL)


def test_a_prompt_longer_than_the_context_names_both_lengths(slot_engine):
  with pytest.raises(ContextLengthError, match=r"65.*engine\.max_length=64"):
    generate(slot_engine, [[1] * 65], seed=0, max_tokens=1)


@pytest.mark.parametrize("ids", [[], [48], [-1], [[1, 2]], [2**40], [1.5]], ids=str)
def test_ids_outside_the_vocabulary_are_refused(slot_engine, ids):
  with pytest.raises(ValueError, match="token ids must be"):
    generate(slot_engine, [ids], seed=0, max_tokens=1)


def test_sampling_before_weights_is_an_error(model_config):
  engine = SlotEngine(model_config, EngineConfig(slots=4))
  with pytest.raises(EngineError, match="publish"):
    generate(engine, [[1]], seed=0, max_tokens=1)


def test_the_cache_is_updated_in_place(slot_engine):
  before = slot_engine.device.state
  slot_engine.extend([(0, np.arange(3, dtype=np.int32))])
  assert all(v.is_deleted() for v in jax.tree.leaves(before))


def test_weights_are_a_copy_that_the_trainer_may_donate(slot_engine, params):
  mine = jax.tree.map(lambda v: v.copy(), params)
  slot_engine.publish(mine, 1)
  expected = generate(slot_engine, [PROMPTS[1]], seed=0, max_tokens=5)
  jax.tree.map(lambda v: v.delete(), mine)
  assert_same_bits(expected[0][0], generate(slot_engine, [PROMPTS[1]], seed=0, max_tokens=5)[0][0])


def test_compilation_is_bounded_by_the_listed_programs(slot_engine, params):
  engine = slot_engine
  engine.warmup()
  compiled = dict(engine.programs.traces)
  moving = {"place", "copy", "write", "read", "read_blocks"}
  assert set(engine.executables()) == {*moving, "decode", "extend_4x4", "extend_2x16"}
  assert set(compiled) == {*engine.executables(), "initial", "prepare"}
  rng = np.random.default_rng(0)
  for length in (1, 3, 4, 5, 16, 17, 31):
    prompts = [rng.integers(0, 48, length).tolist() for _ in range(rng.integers(1, 7))]
    generate(
      engine,
      prompts,
      seed=0,
      max_tokens=int(rng.integers(1, 20)),
      samples=int(rng.integers(1, 3)),
      sampling=SamplingConfig(temperature=float(rng.random()), top_k=length),
      stop_ids=tuple(range(length % 4)),
    )
  engine.publish(params, 1)
  assert dict(engine.programs.traces) == compiled


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"slots": 0}, "engine.slots"),
    ({"slots": 6, "lanes": 4}, "engine.lanes"),
    ({"extend_buckets": (16, 4)}, "engine.extend_buckets"),
    ({"extend_buckets": (4, 16)}, "engine.extend_rows"),
    ({"extend_rows": (4, 2, 0)}, "engine.extend_rows"),
    ({"chunk_tokens": 2.5}, "engine.chunk_tokens"),
    ({"block_tokens": 0}, "engine.block_tokens"),
    ({"cache_tokens": 63}, "engine.cache_tokens"),
    ({"host_store_mb": -1}, "engine.host_store_mb"),
    ({"prefix_reuse": "all"}, "engine.prefix_reuse"),
  ],
)
def test_impossible_sizes_name_the_field(changes, field):
  with pytest.raises(ConfigError, match=field):
    EngineConfig(**changes).validate()


@pytest.mark.parametrize("dtype", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_narrow_keys_and_values_take_a_third_and_round_log_probs(dtype):
  """Of an attention model; whoever reads them, and in whichever pieces, reads the same."""
  config = models.ModelConfig(
    vocab_size=48, d_model=32, pattern="*-*-", num_heads=2, num_kv_heads=1, head_dim=16,
    rope_theta=100.0, d_mlp=32,
  )  # fmt: skip
  params = models.init(config, jax.random.key(0))
  engines = {name: SlotEngine(config, sizes(cache_dtype=name)) for name in (None, dtype)}
  gaps = {}
  for name, engine in engines.items():
    engine.publish(params, 0)
    gaps[name] = gap_to_trainer(engine, params)
  assert gaps[None] < 2e-5 < gaps[dtype] < (0.02 if dtype == "int8" else 0.1)
  narrow = engines[dtype]
  # 16 bytes and a scale in the place of 16 float32 numbers.
  (layers,), (wide,) = narrow.programs.layers, engines[None].programs.layers
  assert layers.block_bytes * 64 == wide.block_bytes * 20

  ids = np.asarray(PROMPTS[2], np.int32)
  logits = []
  for pieces in ([ids], [ids[:5], ids[5:9], ids[9:]]):
    narrow.place(None, [1])
    for piece in pieces:
      narrow.extend([(1, piece)])
    logits.append(np.asarray(narrow.device.state.logits[1]))
  np.testing.assert_allclose(logits[0], logits[1], atol=1e-5)
  kept = narrow.read(1)
  before = arrays(narrow, kept)
  narrow.place(None, [1])
  narrow.place(kept, [3])
  np.testing.assert_array_equal(narrow.device.state.logits[3], logits[1])
  again = arrays(narrow, narrow.read(3))
  for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(before), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"pattern": "*-", "exact_chunk": 8}, "None with exact log-probs"),
    ({"pattern": "M-"}, "None for a model that keeps no keys and values"),
  ],
)
def test_narrow_keys_are_refused_where_there_are_none_or_log_probs_are_exact(
  model_config, changes, message
):
  with pytest.raises(ConfigError, match=rf"engine\.cache_dtype.*int8(.|\n)*{message}"):
    SlotEngine(dataclasses.replace(model_config, **changes), sizes(cache_dtype="int8"))
