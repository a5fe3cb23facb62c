"""What the processes of a run tell each other outside of programs."""

from __future__ import annotations

import socket
from typing import Any

import jax
from jax._src import distributed  # the key-value store of the processes has no public name


def key_value_store() -> Any:
  """The keys and values of all processes; None where this one is alone."""
  return distributed.global_state.client


def own_address() -> str:
  """The address at which the other processes can reach this one."""
  host, _, port = str(distributed.global_state.coordinator_address).rpartition(":")
  if jax.process_index() == 0:
    return host  # the coordinator is here
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    probe.connect((host, int(port)))  # sends nothing, and chooses the way to the coordinator
    return probe.getsockname()[0]
