"""Packets by key, in memory and in a folder."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
from absl import logging
from flax import serialization

from agentjax.files import write_atomically
from agentjax.models.pieces import Piece, piece_shapes
from agentjax.recipes.kv_packets.packet import Packet, PacketError, PacketKey, PacketMaker

_MAGIC = b"kv packet 1\n"
_DIGEST = hashlib.sha256().digest_size


@dataclasses.dataclass
class StoreStats:
  """Where packets came from since the store was made.

  Attributes:
    found: in memory.
    loaded: from the folder.
    made: computed.
    refused: files that were damaged, or of another key than their name says.
  """

  found: int = 0
  loaded: int = 0
  made: int = 0
  refused: int = 0


class PacketStore:
  """Keeps packets for several makers. What is not there is made, so any packet may be dropped.

  A file holds one packet and is named after its key: its content is checked against its SHA-256,
  its key and the shapes of the model before it is used. Files that fail are removed and made anew.

  Args:
    memory_bytes: most bytes in memory; beyond them the longest unused packets are dropped. One
      packet is kept whatever its size.
    folder: where packets are kept as well, and shared by processes; None is nowhere.

  Attributes:
    memory_bytes: as given.
    stats: counts.
  """

  def __init__(self, memory_bytes: int, folder: pathlib.Path | None = None) -> None:
    if memory_bytes < 0:
      raise ValueError(f"memory_bytes={memory_bytes}; allowed: 0 or more.")
    self.stats = StoreStats()
    self.memory_bytes, self._folder = memory_bytes, folder
    # The longest unused first.
    self._packets: collections.OrderedDict[PacketKey, Packet] = collections.OrderedDict()
    self._used = 0

  def __len__(self) -> int:
    """Packets in memory."""
    return len(self._packets)

  @property
  def used_bytes(self) -> int:
    """Bytes of the packets in memory."""
    return self._used

  def get(self, maker: PacketMaker, token_ids: Sequence[int] | np.ndarray) -> Packet:
    """The packet of a document: from memory, from the folder, or made and kept in both."""
    key = maker.key(token_ids)
    packet = self._packets.get(key)
    if packet is not None:
      self.stats.found += 1
      self._packets.move_to_end(key)
      return packet
    packet = self._load(maker, key)
    if packet is None:
      packet = maker.make(token_ids)
      self.stats.made += 1
      if self._folder is not None:
        write_atomically(self._path(key), _to_bytes(packet))
    self._keep(packet)
    return packet

  def drop_others(self, maker: PacketMaker) -> None:
    """Drops from memory what ``maker`` does not make, as after new weights."""
    for key in [key for key in self._packets if maker.wrong(key)]:
      self._used -= self._packets.pop(key).nbytes

  def _keep(self, packet: Packet) -> None:
    self._packets[packet.key] = packet
    self._used += packet.nbytes
    while self._used > self.memory_bytes and len(self._packets) > 1:
      self._used -= self._packets.popitem(last=False)[1].nbytes

  def _path(self, key: PacketKey) -> pathlib.Path:
    assert self._folder is not None
    return self._folder / f"{key.name}.packet"

  def _load(self, maker: PacketMaker, key: PacketKey) -> Packet | None:
    if self._folder is None:
      return None
    path = self._path(key)
    try:
      packet = _from_bytes(path.read_bytes(), key, maker)
    except FileNotFoundError:
      return None
    except PacketError as error:
      logging.warning("%s is not used, and is made anew: %s", path, error)
      self.stats.refused += 1
      path.unlink(missing_ok=True)
      return None
    self.stats.loaded += 1
    return packet


def _to_bytes(packet: Packet) -> bytes:
  leaves = jax.tree.leaves(packet.piece.entries)
  content = serialization.msgpack_serialize(
    {
      "key": dataclasses.asdict(packet.key),
      "length": packet.piece.length,
      "leaves": {str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)},
    }
  )
  return _MAGIC + hashlib.sha256(content).digest() + content


def _from_bytes(data: bytes, key: PacketKey, maker: PacketMaker) -> Packet:
  """The packet of a file.

  Raises:
    PacketError: it is not whole, not of this key, or not of this model.
  """
  start = len(_MAGIC) + _DIGEST
  digest, content = data[len(_MAGIC) : start], data[start:]
  if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(content).digest() != digest:
    raise PacketError(f"the file is damaged: {len(data)} bytes with a wrong SHA-256.")
  read = serialization.msgpack_restore(content)
  if read["key"] != dataclasses.asdict(key):
    wrong = [name for name, value in dataclasses.asdict(key).items() if read["key"][name] != value]
    raise PacketError(f"the file holds a packet of another key: {', '.join(wrong)}.")
  shapes = piece_shapes(maker.config, read["length"])
  leaves = [read["leaves"][str(i)] for i in range(len(read["leaves"]))]
  found = [(leaf.shape, leaf.dtype) for leaf in leaves]
  wanted = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes)]
  if found != wanted:
    raise PacketError(f"the file holds arrays {found}; the model has {wanted}.")
  entries = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
  return Packet(key, Piece(entries, read["length"]))
