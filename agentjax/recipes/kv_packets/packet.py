"""A packet, what it depends on, and the maker of packets of one model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.config import check
from agentjax.models.config import ModelConfig
from agentjax.models.pieces import Piece, run_piece, unjoinable
from agentjax.models.stack import DecodeParams, stream_kind
from agentjax.recipes.kv_packets.adapter import Adapter, with_adapter, wrapped
from agentjax.sharding import dispatching, fingerprint

_FORMAT = 1  # of what a packet holds; another number makes other keys


class PacketError(RuntimeError):
  """A packet is damaged, or is not of this model, these weights or this adapter."""


@dataclasses.dataclass(frozen=True)
class PacketKey:
  """All that a packet depends on: two packets of one key are equal to the bit on one machine.

  Attributes:
    tokens: SHA-256 of the document's ids.
    adapter: fingerprint of header and trailer; empty without.
    weights: fingerprint of the parameters that computed it.
    model: SHA-256 of the model's settings.
  """

  tokens: str
  adapter: str
  weights: str
  model: str

  @property
  def name(self) -> str:
    """SHA-256 of all of it."""
    text = json.dumps([_FORMAT, *dataclasses.astuple(self)])
    return hashlib.sha256(text.encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Packet:
  """A document as it drops into contexts.

  Attributes:
    key: what it depends on.
    piece: its content, in arrays of the host.
  """

  key: PacketKey
  piece: Piece

  def __len__(self) -> int:
    """Tokens, header and trailer included."""
    return self.piece.length

  @property
  def nbytes(self) -> int:
    """Size of its content."""
    return sum(v.nbytes for v in jax.tree.leaves(self.piece))


class PacketMaker:
  """Makes packets of one model, one set of weights and one adapter.

  Args:
    params: from ``prepare_decode_params``.
    config: of the params.
    adapter: header and trailer around every document; None is neither.

  Attributes:
    params, config: as given.
  """

  def __init__(
    self, params: DecodeParams, config: ModelConfig, adapter: Adapter | None = None
  ) -> None:
    reason = unjoinable(config)
    check(reason is None, "model", config.pattern, f"a model without {reason}, to make packets of")
    check(
      adapter is None or stream_kind(config) is None,
      "adapter",
      "header and trailer",
      f"none for a model whose layers read the ids as well (model.pattern={config.pattern!r})",
    )
    self.params, self.config = params, ModelConfig.from_dict(config.to_dict()).freeze()
    self._adapter = adapter
    self._params = params if adapter is None else with_adapter(params, adapter)
    settings = json.dumps(self.config.to_dict(), sort_keys=True)
    self._parts = (
      "" if adapter is None else fingerprint(adapter),
      fingerprint(params),
      hashlib.sha256(settings.encode()).hexdigest(),
    )

  def key(self, token_ids: Sequence[int] | np.ndarray) -> PacketKey:
    """That of a document.

    Raises:
      ValueError: no ids, or ids outside the vocabulary.
    """
    digest = hashlib.sha256(self._checked(token_ids).astype("<i4").tobytes())
    return PacketKey(digest.hexdigest(), *self._parts)

  def make(self, token_ids: Sequence[int] | np.ndarray) -> Packet:
    """Computes a packet.

    Raises:
      ValueError: no ids, or ids outside the vocabulary.
    """
    ids, key = self._checked(token_ids), self.key(token_ids)
    if self._adapter is not None:
      ids = np.asarray(wrapped(jnp.asarray(ids), self._adapter, self.config.vocab_size))
    with dispatching():  # the weights may be spread over devices that sample meanwhile
      return Packet(key, jax.device_get(run_piece(self._params, self.config, ids)))

  def wrong(self, key: PacketKey) -> list[str]:
    """In what a packet of another maker differs: the names of fields of its key."""
    found = zip(("adapter", "weights", "model"), self._parts, strict=True)
    return [name for name, own in found if getattr(key, name) != own]

  def check_own(self, packet: Packet) -> None:
    """Raises PacketError unless the packet is of this model, these weights and this adapter."""
    if wrong := self.wrong(packet.key):
      raise PacketError(
        f"packet {packet.key.name[:12]} is of other {' and '.join(wrong)} than those in use: make "
        "it again (PacketStore.get)."
      )

  def _checked(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    ids = np.asarray(token_ids, np.int32)
    most = self.config.vocab_size
    if ids.ndim != 1 or not ids.size or ids.min() < 0 or ids.max() >= most:
      raise ValueError(
        f"a packet is made of a flat run of ids in 0..{most - 1}, at least one; got shape "
        f"{ids.shape}{f' with {ids.min()}..{ids.max()}' if ids.size else ''}."
      )
    return ids
