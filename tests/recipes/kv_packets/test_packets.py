"""Packets: what makes them equal, what an adapter adds, and where they are kept."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.recipes.kv_packets import (
  Adapter,
  PacketError,
  PacketMaker,
  PacketStore,
  compose,
  init_adapter,
)
from tests.models.rows import TINY, draw
from tests.sharding.test_families_on_eight_devices import FAMILIES

HYBRID = dataclasses.replace(TINY, pattern="M*-")
NARROW = dataclasses.replace(HYBRID, compute_dtype="bfloat16")
ROOM = 64
_extend = jax.jit(models.extend, static_argnums=1)


def maker_of(config=HYBRID, seed: int = 0, adapter: Adapter | None = None) -> PacketMaker:
  params = models.prepare_decode_params(draw(config, seed), config)
  return PacketMaker(params, config, adapter)


def adapter_of(config=HYBRID, seed: int = 0) -> Adapter:
  return init_adapter(draw(config, 0), jax.random.key(seed), header=3, trailer=2)


def ids_of(length: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, TINY.vocab_size, length).astype(np.int32)


def behind(maker: PacketMaker, cache, tail: np.ndarray):
  zero, count = jnp.zeros(1, jnp.int32), np.array([len(tail)], np.int32)
  return _extend(maker.params, maker.config, cache, zero, tail[None], count)


def same(one, other) -> None:
  assert jax.tree.structure(one) == jax.tree.structure(other)
  jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_key_says_all_that_a_packet_depends_on():
  maker, ids = maker_of(), ids_of(9)
  base = maker.key(ids)
  assert maker_of().key(list(ids)) == base
  others = {
    "tokens": maker.key(ids[:-1]),
    "adapter": maker_of(adapter=adapter_of()).key(ids),
    "weights": maker_of(seed=1).key(ids),
  }
  for field, key in others.items():
    assert [
      f.name for f in dataclasses.fields(key) if getattr(key, f.name) != getattr(base, f.name)
    ] == [field]
    assert key.name != base.name
  assert maker_of(dataclasses.replace(HYBRID, rope_theta=77.0)).key(ids).model != base.model
  one, other = (maker_of(adapter=adapter_of(seed=n)).key(ids) for n in (0, 1))
  assert one.adapter != other.adapter


def test_one_packet_without_an_adapter_is_the_prefix():
  maker, ids = maker_of(), ids_of(17)
  packet = maker.make(ids)
  assert len(packet) == 17 and packet.nbytes > 0
  padded = np.zeros((1, 32), np.int32)
  padded[0, :17] = ids
  taken = _extend(
    maker.params,
    maker.config,
    models.init_cache(maker.config, 1, 32),
    jnp.zeros(1, jnp.int32),
    padded,
    np.array([17], np.int32),
  )
  same(compose(maker, [packet], 32), taken.cache)
  same(maker.make(ids).piece, packet.piece)


@pytest.mark.slow
def test_an_adapter_is_embeddings_around_the_document():
  """That of tokens is those tokens; and the model that reads the packet has the old table."""
  config = HYBRID
  table = maker_of().params.embedding
  header, trailer = ids_of(3, seed=5), ids_of(2, seed=6)
  adapter = Adapter(header=table[header], trailer=table[trailer])
  ids, tail = ids_of(9), ids_of(4, seed=7)
  maker = maker_of(adapter=adapter)
  wrapped = maker.make(ids)
  plain = maker_of().make(np.concatenate([header, ids, trailer]))
  assert len(wrapped) == 14
  same(wrapped.piece, plain.piece)
  logits = behind(maker, compose(maker, [wrapped, maker.make(ids[:4])], ROOM), tail).logits
  assert logits.shape == (1, config.vocab_size)
  own = adapter_of()
  assert own.header.shape == (3, config.d_model) and own.trailer.shape == (2, config.d_model)
  drawn = init_adapter(draw(config, 0), jax.random.key(0), header=400, trailer=400).header
  np.testing.assert_allclose(jnp.std(drawn), jnp.std(table), rtol=0.1)


def test_packets_of_other_weights_or_adapters_are_refused():
  maker, ids = maker_of(), ids_of(9)
  compose(maker, [maker.make(ids)], ROOM)
  for other, what in ((maker_of(seed=1), "weights"), (maker_of(adapter=adapter_of()), "adapter")):
    with pytest.raises(PacketError, match=f"is of other {what} than those in use"):
      compose(maker, [maker.make(ids), other.make(ids)], ROOM)
  with pytest.raises(ValueError, match="leave room in max_length=16"):
    compose(maker, [maker.make(ids), maker.make(ids)], 16)


@pytest.mark.parametrize("ids", [[], [[1]], [-1], [TINY.vocab_size]])
def test_ids_that_are_none_are_refused(ids):
  with pytest.raises(ValueError, match="flat run of ids in 0..40"):
    maker_of().make(ids)


def test_models_that_cannot_have_packets_are_refused():
  with pytest.raises(ConfigError, match="S in model.pattern"):
    maker_of(FAMILIES["longcat_flash"])
  gemma = FAMILIES["gemma4_e2b"]
  with pytest.raises(ConfigError, match="whose layers read the ids as well"):
    maker_of(gemma, adapter=adapter_of(gemma))


@pytest.mark.parametrize("config", [HYBRID, NARROW], ids=["float32", "bfloat16"])
def test_a_packet_comes_back_from_its_file_to_the_bit(config, tmp_path):
  maker, ids = maker_of(config), ids_of(9)
  store = PacketStore(10**8, tmp_path)
  made = store.get(maker, ids)
  assert (store.stats.made, store.get(maker, ids) is made, store.stats.found) == (1, True, 1)
  other = PacketStore(10**8, tmp_path)
  loaded = other.get(maker, ids)
  assert (other.stats.loaded, other.stats.made) == (1, 0)
  assert loaded.key == made.key and len(loaded) == len(made)
  same(loaded.piece, made.piece)
  dtypes = {leaf.dtype for leaf in jax.tree.leaves(loaded.piece)}
  assert jnp.dtype(config.compute_dtype) in dtypes


def damaged(path, how: str) -> None:
  data = bytearray(path.read_bytes())
  if how == "a bit":
    data[-5] ^= 1
  elif how == "cut":
    data = data[:-40]
  else:
    data = b""
  path.write_bytes(bytes(data))


@pytest.mark.parametrize("how", ["a bit", "cut", "empty"])
def test_a_damaged_file_is_refused_and_made_anew(how, tmp_path):
  maker, ids = maker_of(), ids_of(9)
  made = PacketStore(10**8, tmp_path).get(maker, ids)
  (path,) = tmp_path.iterdir()
  damaged(path, how)
  store = PacketStore(10**8, tmp_path)
  same(store.get(maker, ids).piece, made.piece)
  assert (store.stats.refused, store.stats.made, store.stats.loaded) == (1, 1, 0)
  again = PacketStore(10**8, tmp_path)
  again.get(maker, ids)
  assert (again.stats.loaded, again.stats.refused) == (1, 0)


def test_a_file_under_another_name_is_refused(tmp_path):
  """As a packet of old weights would be, if its file were kept under the name of the new."""
  old, new, ids = maker_of(), maker_of(seed=1), ids_of(9)
  PacketStore(10**8, tmp_path).get(old, ids)
  (path,) = tmp_path.iterdir()
  path.rename(tmp_path / f"{new.key(ids).name}.packet")
  store = PacketStore(10**8, tmp_path)
  same(store.get(new, ids).piece, new.make(ids).piece)
  assert (store.stats.refused, store.stats.made) == (1, 1)


def test_memory_is_bounded_and_new_weights_empty_it():
  maker = maker_of()
  runs = [ids_of(9, seed=n) for n in range(4)]
  size = maker.make(runs[0]).nbytes
  store = PacketStore(2 * size)
  for run in runs[:2]:
    store.get(maker, run)
  store.get(maker, runs[0])  # used again, so the other goes first
  store.get(maker, runs[2])
  assert len(store) == 2 and store.used_bytes == 2 * size
  store.get(maker, runs[0])
  assert store.stats.made == 3 and store.stats.found == 2
  store.get(maker, runs[1])
  assert store.stats.made == 4
  new = maker_of(seed=1)
  store.get(new, runs[3])
  store.drop_others(new)
  assert len(store) == 1 and store.used_bytes == size
  store.drop_others(maker)
  assert len(store) == 0 and store.used_bytes == 0
  with pytest.raises(ValueError, match="memory_bytes=-1"):
    PacketStore(-1)
