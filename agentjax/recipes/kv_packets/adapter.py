"""Header and trailer: input embeddings around every document of a model."""

from __future__ import annotations

import dataclasses
import pathlib

import flax.struct
import jax
import jax.numpy as jnp
from flax import serialization
from jaxtyping import Int

from agentjax.files import write_atomically
from agentjax.models.stack import DecodeParams, Params

Array = jax.Array


@flax.struct.dataclass
class Adapter:
  """Input embeddings before and after a document; the model itself stays as it is."""

  header: Array  # float32 [header tokens, embed]
  trailer: Array  # float32 [trailer tokens, embed]


def init_adapter(params: Params, key: Array, *, header: int = 8, trailer: int = 8) -> Adapter:
  """Normal embeddings with the mean and the deviation of each channel of the model's table.

  By the channel is our choice; 8 and 8 are the main setting of the paper.
  """
  table = params.embedding.astype(jnp.float32)
  drawn = jax.random.normal(key, (header + trailer, table.shape[1]))
  drawn = jnp.mean(table, axis=0) + jnp.std(table, axis=0) * drawn
  return Adapter(header=drawn[:header], trailer=drawn[header:])


def write_adapter(path: pathlib.Path, adapter: Adapter) -> None:
  """Keeps an adapter in a file."""
  write_atomically(path, serialization.to_bytes(jax.device_get(adapter)))


def read_adapter(path: pathlib.Path) -> Adapter:
  """An adapter from the file of ``write_adapter``."""
  read = serialization.msgpack_restore(path.read_bytes())
  return Adapter(header=jnp.asarray(read["header"]), trailer=jnp.asarray(read["trailer"]))


def with_adapter(params: DecodeParams, adapter: Adapter) -> DecodeParams:
  """Parameters whose table has the header and the trailer behind the vocabulary."""
  table = params.embedding
  rows = jnp.concatenate([adapter.header, adapter.trailer]).astype(table.dtype)
  return dataclasses.replace(params, embedding=jnp.concatenate([table, rows]))


def wrapped(
  token_ids: Int[Array, "*lead tokens"], adapter: Adapter, vocab_size: int
) -> Int[Array, "*lead wrapped"]:
  """Ids of header, document and trailer, for the table of ``with_adapter``."""
  header, trailer = len(adapter.header), len(adapter.trailer)
  behind = vocab_size + jnp.arange(header + trailer, dtype=jnp.int32)
  parts = jnp.split(behind, [header])
  before, after = (jnp.broadcast_to(v, (*token_ids.shape[:-1], len(v))) for v in parts)
  return jnp.concatenate([before, token_ids, after], axis=-1)
