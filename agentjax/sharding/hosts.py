"""What the processes of a run tell each other outside of programs."""

from __future__ import annotations

import socket
from typing import Any

from jax._src import distributed  # the key-value store of the processes has no public name


def key_value_store() -> Any:
  """The keys and values of all processes; None where this one is alone."""
  return distributed.global_state.client


def own_address() -> str:
  """The address at which the other processes can reach this one: that towards the coordinator."""
  host, _, port = str(distributed.global_state.coordinator_address).rpartition(":")
  family, _, _, _, where = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
  with socket.socket(family, socket.SOCK_DGRAM) as probe:
    probe.connect(where)  # sends nothing
    return probe.getsockname()[0]
