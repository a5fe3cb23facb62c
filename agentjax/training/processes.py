"""Several processes, one run: who writes, what is shared, where they wait for each other.

Every process holds the same tasks, tokenizer and settings and executes the same steps. Episodes are
sampled by all, each its own share of the tasks, and exchanged before the update, so that every
process sees the whole batch; evaluations likewise. Files are written by the first alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from agentjax.trajectory.record import Trajectory
from agentjax.trajectory.recordlog import decode_record, encode_record
from agentjax.trajectory.store import from_record, to_record

T = TypeVar("T")


def is_first() -> bool:
  """Whether this process writes the run's files."""
  return jax.process_index() == 0


def share(items: Sequence[T]) -> list[T]:
  """The items this process works on; all of them where it is alone."""
  return list(items[jax.process_index() :: jax.process_count()])


def wait(name: str) -> None:
  """Returns when every process is here."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def all_agree(true: bool) -> bool:
  """Whether ``true`` holds on every process."""
  if jax.process_count() == 1:
    return true
  return bool(np.asarray(multihost_utils.process_allgather(np.array([true]))).all())


def any_asks(true: bool) -> bool:
  """Whether ``true`` holds on some process."""
  return not all_agree(not true)


def exchange(record: dict[str, Any]) -> list[dict[str, Any]]:
  """Everyone's records, by process; of what ``encode_record`` takes."""
  if jax.process_count() == 1:
    return [record]
  data = encode_record(record)
  sizes = np.asarray(multihost_utils.process_allgather(np.array([len(data)], np.int64)))
  padded = np.zeros(int(sizes.max()), np.uint8)
  padded[: len(data)] = np.frombuffer(data, np.uint8)
  rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(sizes.size, -1)
  sizes = sizes.reshape(-1).tolist()
  return [decode_record(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def gather_trajectories(own: Sequence[Trajectory]) -> list[Trajectory]:
  """Everyone's trajectories in the order of their addresses, the same on every process."""
  if jax.process_count() == 1:
    return list(own)
  parts = exchange({"trajectories": [to_record(t) for t in own]})
  every = [from_record(record) for part in parts for record in part["trajectories"]]
  return sorted(every, key=lambda t: t.address)


def local_copy(tree: Any) -> Any:
  """Arrays this process can read whole: as they are, or gathered from all processes as numpy."""

  def whole(x: Any) -> Any:
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
      return x
    return multihost_utils.process_allgather(x, tiled=True)

  return jax.tree.map(whole, tree)
