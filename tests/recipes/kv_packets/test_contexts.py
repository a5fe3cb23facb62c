"""Episodes whose tools answer with documents that the policy reads as packets."""

from __future__ import annotations

import asyncio
import dataclasses
import gc

import jax
import numpy as np
import pytest

from agentjax import models
from agentjax.engine import (
  ContextLengthError,
  Engine,
  EngineConfig,
  SampleRequest,
  SamplingConfig,
)
from agentjax.recipes.kv_packets import (
  PacketMaker,
  PacketsConfig,
  PacketStore,
  init_adapter,
  write_adapter,
)
from agentjax.recipes.kv_packets.contexts import PacketEngine
from agentjax.recipes.kv_packets.library import Library
from agentjax.rollout.config import RolloutConfig
from agentjax.rollout.loop import collect
from agentjax.rollout.program import Player
from agentjax.text.chat import MarkedChat
from agentjax.trajectory.builder import token_paths
from agentjax.trajectory.packing import pack, to_sequences
from agentjax.trajectory.record import Message, Task
from agentjax.trajectory.recordlog import decode_record, encode_record
from agentjax.trajectory.store import from_record, to_record
from agentjax.world.environment import Environment, Observation, Step
from tests.models.rows import TINY, draw
from tests.rollout.conftest import REWARDS
from tests.rollout.scripted_engine import TOKENIZER

MANUAL = "manual: call search with a word"
DOCUMENTS = ["the lake is north of the hill", "the hill is made of old chalk"]
LONG = DOCUMENTS[0] + ", and it is cold"


def ids_of(text: str) -> list[int]:
  return list(TOKENIZER.encode(text))


class Search(Environment):
  """Every turn is a search, whose result is the next document."""

  def __init__(self):
    self._found = 0

  async def reset(self, task, key):
    return Observation((Message("system", MANUAL), *task.prompt))

  async def step(self, action):
    found = DOCUMENTS[self._found % 2]
    self._found += 1
    return Step(Observation((Message("tool", f"1. {found}"),)), terminated=self._found > 2)


def model(pattern: str) -> models.ModelConfig:
  return dataclasses.replace(TINY, pattern=pattern, vocab_size=TOKENIZER.vocab_size)


def packet_engine(
  config, *, adapter=None, recompute=False, memory_bytes=10**8, places=384, text_length=None
) -> PacketEngine:
  engine = Engine(
    config,
    EngineConfig(
      slots=4,
      max_length=places,
      chunk_tokens=4,
      extend_buckets=(32,),
      extend_rows=(4,),
      block_tokens=16,
      prefix_reuse="none",
      pieces=True,
      warmup=False,
    ),
    devices=jax.local_devices()[:1],
  )
  library = Library(ids_of(text) for text in (MANUAL, *DOCUMENTS))
  return PacketEngine(
    engine,
    library,
    PacketStore(memory_bytes),
    adapter,
    recompute=recompute,
    text_length=text_length,
  )


def play(config, params, *, adapter=None, recompute=False):
  """Trajectories of two groups of four, and what they were played on."""
  packets = packet_engine(config, adapter=adapter, recompute=recompute)
  packets.publish(params, 3)
  player = Player(
    engine=packets,
    chat=MarkedChat(TOKENIZER),
    sampling=SamplingConfig(),
    config=RolloutConfig(max_turns=4, max_tokens_per_turn=5, max_total_tokens=320),
    run_seed=3,
  )
  tasks = [Task(i, (Message("user", f"what is {i}?"),), "", "made") for i in (0, 1)]
  found = asyncio.run(
    collect(
      tasks,
      step=1,
      samples_per_task=4,
      player=player,
      make_environment=lambda task: Search(),
      rewards=REWARDS,
    )
  )
  packets.close()
  return found, packets


def text_of(trajectory) -> str:
  (path,) = token_paths(trajectory)
  return TOKENIZER.decode(path.token_ids.tolist())


def apart(config, params, trajectories, packets: PacketsConfig | None = None) -> float:
  """The largest difference of a sampled token's log-prob to that of the trainer; in full, unless
  ``packets`` are read."""
  batch = pack(to_sequences(trajectories), row_length=384, pad_id=0)
  rows = (batch.token_ids, batch.segment_ids, batch.positions)
  if packets is None:
    scores = jax.jit(models.score_tokens, static_argnums=1)(params, config, *rows)
  else:
    score = packets.episodes(config, MarkedChat(TOKENIZER))
    marks = np.asarray(packets.marks(batch))
    assert not batch.weights[marks >= 0].any()
    scores = jax.jit(score, static_argnums=1)(params, config, *rows, marks=marks)
  drawn = batch.versions >= 0
  assert drawn.sum() > 20
  return float(np.max(np.abs(np.asarray(scores.log_probs) - batch.behaviour_log_probs)[drawn]))


def test_documents_are_found_wherever_they_stand():
  library = Library(ids_of(text) for text in (*DOCUMENTS, LONG))
  text = f"a {DOCUMENTS[1]}{DOCUMENTS[0]}! {LONG} {DOCUMENTS[1][:-1]}"
  parts = [(TOKENIZER.decode(ids.tolist()), number) for ids, number in library.split(ids_of(text))]
  assert parts == [
    ("a ", None),
    (DOCUMENTS[1], 1),
    (DOCUMENTS[0], 0),
    ("! ", None),
    (LONG, 2),
    (f" {DOCUMENTS[1][:-1]}", None),
  ]
  with pytest.raises(ValueError, match="a document of 7 tokens"):
    library.add(ids_of("7 bytes"))


@pytest.mark.parametrize("pattern", [pytest.param("*-", marks=pytest.mark.slow), "M-"])
def test_where_nothing_is_approximate_episodes_are_those_that_compute_everything(pattern):
  config = model(pattern)
  params = draw(config, seed=0)
  found, packets = play(config, params)
  expected, plain = play(config, params, recompute=True)
  for one, other in zip(found, expected, strict=True):
    (path,), (computed,) = token_paths(one), token_paths(other)
    np.testing.assert_array_equal(path.token_ids, computed.token_ids)
    np.testing.assert_allclose(path.behaviour_log_probs, computed.behaviour_log_probs, atol=1e-5)
    assert "packets" not in computed.columns
  assert apart(config, params, found) < 1e-4
  # Each group has read the manual once, and each episode what its searches found.
  read = [text_of(trajectory).count(document) for trajectory in found for document in DOCUMENTS]
  assert sum(read) >= 4
  assert packets.saved_tokens == 2 * len(MANUAL) + np.dot(read, 8 * [*map(len, DOCUMENTS)])
  taken_in = [
    engine.stats.extended_tokens + engine.stats.reused_tokens for engine in (plain, packets)
  ]
  assert taken_in[0] - taken_in[1] == packets.saved_tokens and plain.saved_tokens == 0


def test_the_record_says_which_packet_stood_where_and_how_far_off_it_was():
  config = model("M*-*")
  params = draw(config, seed=0)
  adapter = init_adapter(params, jax.random.key(0), header=3, trailer=2)
  found, _ = play(config, params, adapter=adapter)
  maker = PacketMaker(models.prepare_decode_params(params, config), config, adapter)
  for trajectory in found:
    (path,) = token_paths(from_record(decode_record(encode_record(to_record(trajectory)))))
    names, versions = path.column("packets"), path.column("packet_versions")
    inside = path.column("packet_places")
    there = np.zeros(len(path), bool)
    for document in (MANUAL, *DOCUMENTS):
      ids = np.asarray(ids_of(document))
      places = [
        at for at in range(len(path)) if np.array_equal(path.token_ids[at : at + len(ids)], ids)
      ]
      assert len(places) == text_of(trajectory).count(document)
      name = bytes.fromhex(maker.key(ids).name)[:8]
      for at in places:
        own = slice(at, at + len(ids))
        there[own] = True
        assert all(row.astype(">u4").tobytes() == name for row in names[own])
        assert (versions[own] == 3).all() and not path.weights[own].any()
        np.testing.assert_array_equal(inside[own], np.arange(len(ids)))
    assert there.sum() >= len(MANUAL)
    assert not names[~there].any()
    assert (versions[~there] == -1).all() and (inside[~there] == -1).all()
  assert apart(config, params, found) > 1e-3
  computed, _ = play(config, params, adapter=adapter, recompute=True)
  assert apart(config, params, computed) < 1e-4


@pytest.mark.parametrize("pattern", ["*-*-", "M*-M*"])
def test_the_trainer_scores_with_packets_what_the_sampler_drew_with_them(pattern, tmp_path):
  config = model(pattern)
  params = draw(config, seed=0)
  adapter = init_adapter(params, jax.random.key(0), header=3, trailer=2)
  write_adapter(tmp_path / "adapter", adapter)
  found, _ = play(config, params, adapter=adapter)
  packets = PacketsConfig(least_tokens=16, adapter=str(tmp_path / "adapter"), train_on_packets=True)
  assert apart(config, params, found, packets) < 1e-4
  bare = dataclasses.replace(packets, adapter=None)
  assert min(apart(config, params, found, other) for other in (None, bare)) > 1e-3


def test_new_weights_on_the_way_make_a_packet_anew():
  config = model("M*-*")
  packets = packet_engine(config)
  packets.publish(draw(config, seed=0), 3)
  original = packets.packet

  async def packet(number):
    found = await original(number)
    if packets.version == 3:
      packets.publish(draw(config, seed=1), 4)
    return found

  packets.packet = packet

  async def read():
    context = await packets.open_ids(ids_of(f"x{MANUAL}y"))
    assert len(context) == len(MANUAL) + 2
    versions = context.columns["packet_versions"]
    context.close()
    return versions

  versions = asyncio.run(read())
  packets.close()
  assert set(versions.tolist()) == {-1, 4} and (versions == 4).sum() == len(MANUAL)
  assert packets.saved_tokens == len(MANUAL)


def test_a_text_that_does_not_fit_leaves_no_context_behind():
  config = model("M*-*")
  packets = packet_engine(config)
  packets.publish(draw(config, seed=0), 3)

  async def read():
    with pytest.raises(ContextLengthError):
      await packets.open_ids(ids_of(f"x{MANUAL}" + "y" * 400))
    return [*packets.scheduler.lanes[0].idle, *packets.scheduler.lanes[0].jobs]

  assert asyncio.run(read()) == []
  packets.close()


def ask(packets: PacketEngine, *texts: str):
  """Ids, log-probs, columns and room of a context that reads the texts one by one and samples."""

  async def run():
    context = await packets.open_ids(ids_of(texts[0]))
    for text in texts[1:]:
      await context.extend(ids_of(text))
    sample = await context.generate(SampleRequest((1, 2), 4))
    found = sample.token_ids, sample.behaviour_log_probs, context.columns, context.room
    context.close()
    return found

  return asyncio.run(run())


def test_a_text_that_ends_with_a_document_is_read_as_text_from_there():
  config = model("M*-*")
  params = draw(config, seed=0)
  adapter = init_adapter(params, jax.random.key(0), header=3, trailer=2)
  packets = packet_engine(config, adapter=adapter)
  plain = packet_engine(config, recompute=True)
  for engine in (packets, plain):
    engine.publish(params, 0)
  for texts in ([MANUAL], ["x", MANUAL]):
    ids, log_probs, columns, room = ask(packets, *texts)
    expected = ask(plain, *texts)
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_allclose(log_probs, expected[1], atol=1e-5)
    assert room == expected[3] and "packets" not in columns and packets.saved_tokens == 0
  _, _, columns, _ = ask(packets, f"x{MANUAL}", DOCUMENTS[0])
  assert (columns["packet_versions"] >= 0).sum() == packets.saved_tokens == len(MANUAL)

  async def prefix():  # what the forks go on with decides how the last document is read
    held = await packets.prefill(ids_of(f"x{MANUAL}"))
    assert len(held) == 1 + len(MANUAL)
    one, other = [await packets.open(held) for _ in range(2)]
    await one.extend(ids_of("y"))
    for context in (one, other):
      await context.generate(SampleRequest((1, 2), 4))
    found = ["packets" in context.columns for context in (one, other)]
    for context in (one, other, held.context):
      context.close()
    return found

  assert asyncio.run(prefix()) == [True, False]
  for engine in (packets, plain):
    engine.close()


def test_what_fits_as_text_fits_with_packets_too():
  config = model("M*-*")
  params = draw(config, seed=0)
  adapter = init_adapter(params, jax.random.key(0), header=20, trailer=20)
  packets = packet_engine(config, adapter=adapter, places=320, text_length=240)
  packets.publish(params, 0)
  assert packets.max_tokens == 240
  found = f"1. {DOCUMENTS[0]}\n"
  texts = [f"x{MANUAL}y", *[found] * 5]
  texts.append("z" * (236 - sum(map(len, texts))))
  _, _, columns, room = ask(packets, *texts)
  assert room == 0  # 236 and 4 drawn
  read = columns["packet_places"] == 0
  assert 0 < read.sum() < 6  # the rest is text
  with pytest.raises(ContextLengthError, match="240 tokens of text"):
    ask(packets, *texts, "zzzzz")
  packets.close()


@pytest.mark.slow
def test_packets_in_pages_do_not_grow_with_the_documents_that_were_read():
  config = model("M*-*")
  kept = []
  for memory_bytes in (10**8, 1):
    packets = packet_engine(config, memory_bytes=memory_bytes)
    packets.publish(draw(config, seed=0), 3)

    async def read(packets=packets):
      found = []
      for document in (MANUAL, *DOCUMENTS, MANUAL):
        context = await packets.open_ids(ids_of(f"x{document}y"))
        context.close()
        del context
        gc.collect()
        found.append(packets.stored_bytes[1])
      return found

    kept.append(asyncio.run(read()))
    packets.close()
  many, one = kept
  assert many[0] < many[1] < many[2] == many[3]
  assert one[0] == one[3] == many[0] and max(one) < many[1]
