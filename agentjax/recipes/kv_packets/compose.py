"""Packets in a row."""

from __future__ import annotations

from collections.abc import Sequence

from agentjax.models.cache import Cache
from agentjax.models.pieces import join_pieces
from agentjax.recipes.kv_packets.packet import Packet, PacketMaker


def compose(maker: PacketMaker, packets: Sequence[Packet], max_length: int) -> Cache:
  """One slot that holds packets one after the other, with room for ``max_length`` tokens.

  The tokens that follow (``models.extend``) stand behind them and see all of them. One packet
  without an adapter is a slot that took in the document, bit for bit.

  Raises:
    PacketError: a packet of another model, other weights or another adapter.
    ValueError: packets that leave no room.
  """
  for packet in packets:
    maker.check_own(packet)
  return join_pieces(maker.params, maker.config, [packet.piece for packet in packets], max_length)
