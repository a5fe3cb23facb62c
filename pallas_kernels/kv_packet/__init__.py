"""Reading pieces of contexts that were computed apart, each from an empty context."""

from pallas_kernels.kv_packet.api import (
  IMPLEMENTATIONS,
  STATE_IMPLEMENTATIONS,
  PageTable,
  compose_states,
  packet_attention,
)
from pallas_kernels.kv_packet.rotary import Rotary, turn

__all__ = [
  "IMPLEMENTATIONS",
  "STATE_IMPLEMENTATIONS",
  "PageTable",
  "Rotary",
  "compose_states",
  "packet_attention",
  "turn",
]
