"""Several processes, one run: who writes, what is shared, where they wait for each other.

Every process holds the same tasks, tokenizer and settings and executes the same steps. Episodes are
sampled by all, each its own share of the tasks, and exchanged before the update, so that every
process sees the whole batch; evaluations likewise. Each writes its own journal and its part of the
checkpoints, the first all other files.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from agentjax.engine.request import SharedLanesError
from agentjax.sharding import dispatching
from agentjax.sharding.hosts import key_value_store
from agentjax.trajectory.columns import core_fields
from agentjax.trajectory.record import Segment, Trajectory
from agentjax.trajectory.recordlog import decode_record, encode_record
from agentjax.trajectory.store import from_record, to_record

T = TypeVar("T")

_LOST = 4  # exit status where another process failed or is gone
_POLL, _LAST = 0.5, 3.0  # seconds
_AT_ONCE = 2**26  # bytes, of all processes; ours
_BORDERS = "agentjax/border/"  # keys: who has come to which border, with its name
_FAILED = f"{_BORDERS}failed"  # key: some process has
_calls, _borders = itertools.count(), itertools.count()


class ProcessLostError(RuntimeError):
  """What all processes do together failed; the message says what to do."""


def is_first() -> bool:
  """Whether this process writes the run's files."""
  return jax.process_index() == 0


def share(items: Sequence[T], together: int = 1) -> list[T]:
  """The items this process works on; all of them where it is alone.

  Of each ``together`` processes the first works for all (``EngineConfig.processes``).
  """
  group, place = divmod(jax.process_index(), together)
  return [] if place else list(items[group :: jax.process_count() // together])


def wait(name: str) -> None:
  """Returns when every process is here.

  The host waits, not a program of all devices, behind which lanes would stand still as well.

  Raises:
    JaxRuntimeError: another process has failed.
  """
  if jax.process_count() == 1:
    return
  store, number, pause = key_value_store(), next(_borders), 0.001
  store.key_value_set(f"{_BORDERS}{number}/{jax.process_index()}", name)
  while True:
    found = dict(store.key_value_dir_get(_BORDERS))
    names = [at for key, at in found.items() if key.startswith(f"{_BORDERS}{number}/")]
    if len(names) == jax.process_count():
      break
    if _FAILED in found:
      raise jax.errors.JaxRuntimeError(f"another process failed on its way to {name!r}")
    time.sleep(pause)
    pause = min(2 * pause, _POLL / 5)
  assert set(names) == {name}, f"processes wait at different borders: {names}"
  if number:  # which all have left
    store.key_value_delete(f"{_BORDERS}{number - 1}/{jax.process_index()}")


def all_agree(true: bool) -> bool:
  """Whether ``true`` holds on every process."""
  if jax.process_count() == 1:
    return true
  return bool(_gather(np.array([true])).all())


def any_asks(true: bool) -> bool:
  """Whether ``true`` holds on some process."""
  return not all_agree(not true)


class Call:
  """What one process tells the others at any moment, once. Made by all in the same order.

  Args:
    on_call: called in a thread of its own where another process has called.
  """

  def __init__(self, on_call: Callable[[], None]):
    self._on_call, self._key = on_call, f"agentjax/call/{next(_calls)}"
    self._closed = threading.Event()
    self._store = key_value_store()
    if jax.process_count() > 1:
      threading.Thread(target=self._listen, daemon=True, name="call").start()

  def call(self) -> None:
    """Tells the others; from any thread."""
    self._closed.set()
    if jax.process_count() > 1:
      self._store.key_value_set(self._key, "", allow_overwrite=True)

  def close(self) -> None:
    """Listens no longer."""
    self._closed.set()

  def _listen(self) -> None:
    while not self._closed.wait(_POLL):
      with contextlib.suppress(jax.errors.JaxRuntimeError):  # nobody has called
        self._store.key_value_try_get(self._key)
        return self._on_call()


def failed_together(error: BaseException) -> bool:
  """Whether an error of a library, or what it came from, says that what all do together failed."""
  cause: BaseException | None = error
  while cause is not None:
    if isinstance(cause, SharedLanesError):
      return True
    if type(cause).__module__.startswith("agentjax"):
      return False
    # What CPUs exchange by Gloo fails as a ValueError.
    if isinstance(cause, jax.errors.JaxRuntimeError) or "Gloo" in str(cause):
      return jax.process_count() > 1
    cause = cause.__cause__
  return False


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
  """Where one of several processes fails, its program ends without waiting for the others.

  They fail at the next border, or in what they do together. Else jax would wait for them at the end
  of the program, and they for it.

  Raises:
    ProcessLostError: what all do together failed.
  """
  try:
    yield
  except Exception as error:
    if jax.process_count() == 1:
      raise
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the first is gone, and the keys with it
      key_value_store().key_value_set(_FAILED, "", allow_overwrite=True)
    if not failed_together(error):
      ours = type(error).__module__.startswith("agentjax")
      atexit.register(_leave, 2 if ours else 1)  # as ``agentjax.command`` ends
      raise
    atexit.register(_leave, _LOST)
    raise ProcessLostError(
      f"process {jax.process_index()} of {jax.process_count()}: what all processes do together "
      f"failed ({' '.join(str(error).split())[:300]}). Mostly another process has ended: its log "
      "says why. Start the same command again on every host: the run goes on from its last "
      "checkpoint and its journals."
    ) from error


def _leave(status: int) -> None:
  if is_first():
    time.sleep(_LAST)  # the others are aborted as soon as this one is gone
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


def exchange(record: dict[str, Any]) -> list[dict[str, Any]]:
  """Everyone's records, by process; of what ``encode_record`` takes."""
  if jax.process_count() == 1:
    return [record]
  data = encode_record(record)
  sizes = _gather(np.array([len(data)], np.int64)).reshape(-1).tolist()
  (padded,) = _padded([np.frombuffer(data, np.uint8)], max(sizes))
  parts = [_gather(part) for part in padded]
  rows = np.concatenate([part.reshape(len(sizes), -1) for part in parts], axis=1)
  return [decode_record(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def send(parts: Sequence[np.ndarray], sizes: np.ndarray) -> list[np.ndarray]:
  """The bytes that each process has for this one; no other process receives them.

  Args:
    parts: uint8 [n] for each process.
    sizes: int [processes, processes], bytes that the first sends to the second. All processes know
      all of them.
  """
  count, own = len(parts), jax.process_index()
  if not sizes.any():
    return [np.zeros(0, np.uint8)] * count
  blocks = [_swap(block) for block in _padded(parts, int(sizes.max())).swapaxes(0, 1)]
  rows = np.concatenate(blocks, axis=1)
  return [row[:size] for row, size in zip(rows, sizes[:, own].tolist(), strict=True)]


def _padded(parts: Sequence[np.ndarray], largest: int) -> np.ndarray:
  """[parts, blocks, width]: zeros behind what is shorter than the largest, of all processes.

  There are few widths, as each is compiled, and a bound, as every device holds what all exchange at
  once.
  """
  width = min(1 << (largest - 1).bit_length(), _AT_ONCE // jax.process_count())
  padded = np.zeros((len(parts), -(-largest // width) * width), np.uint8)
  for row, part in zip(padded, parts, strict=True):
    row[: len(part)] = part
  return padded.reshape(len(parts), -1, width)


def _swap(block: np.ndarray) -> np.ndarray:
  """[processes, width] from each process, of what each has for each, [processes, width]."""
  count, width = block.shape
  mesh, program = _swapping()
  ways = mesh.shape["device"]
  padded = np.pad(block, ((0, 0), (0, -width % ways)))
  split = jax.sharding.NamedSharding(mesh, jax.P("process", None, "device"))

  def part(index: Any) -> np.ndarray:
    return padded[None, :, index[2]]

  wait("swap")
  with dispatching():  # a program of all devices
    sent = jax.make_array_from_callback((count, *padded.shape), split, part)
    shards = program(sent).addressable_shards
  ordered = sorted(shards, key=lambda shard: shard.index[2].start or 0)
  return np.concatenate([np.asarray(s.data)[:, 0] for s in ordered], axis=1)[:, :width]


@functools.cache
def _swapping() -> tuple[jax.sharding.Mesh, Callable[[jax.Array], jax.Array]]:
  """All devices by process, and a program [from, to, width] that moves rows to the second."""
  devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
  grid = np.array(devices).reshape(jax.process_count(), -1)
  mesh = jax.sharding.Mesh(grid, ("process", "device"))
  swap = jax.shard_map(
    lambda x: jax.lax.all_to_all(x, "process", 1, 0, tiled=True),
    mesh=mesh,
    in_specs=jax.P("process", None, "device"),
    out_specs=jax.P(None, "process", "device"),
  )
  return mesh, jax.jit(swap)


def gather_trajectories(own: Sequence[Trajectory]) -> list[Trajectory]:
  """Everyone's trajectories in the order of their addresses, the same on every process."""
  if jax.process_count() == 1:
    return list(own)
  parts = exchange({"trajectories": [to_record(t) for t in own]})
  parts[jax.process_index()] = {"trajectories": []}  # they are here
  every = [from_record(record) for part in parts for record in part["trajectories"]]
  return sorted([*own, *every], key=lambda t: t.address)


def gather_outcomes(own: Sequence[Trajectory]) -> list[Trajectory]:
  """As ``gather_trajectories``, of what is measured and not trained.

  Of tokens only ids and who drew them travel. All else that is known of single tokens has its fill,
  and further columns are gone, where there are several processes.
  """
  if jax.process_count() == 1:
    return list(own)
  records = [to_record(t) for t in own]
  for record in records:
    for segment in record["segments"]:
      segment["columns"] = {n: segment["columns"][n] for n in ("token_ids", "sampled")}
  every = [r for part in exchange({"records": records}) for r in part["records"]]
  for record in every:
    for segment in record["segments"]:
      columns, length = segment["columns"], len(segment["columns"]["token_ids"])
      segment["columns"] = {c.name: c.filled((length,)) for c in core_fields(Segment)} | columns
  return sorted(map(from_record, every), key=lambda t: t.address)


def _gather(own: np.ndarray) -> np.ndarray:
  """[processes, ...] of everyone's."""
  wait("gather")
  with dispatching():  # a program of all devices
    return np.asarray(multihost_utils.process_allgather(own))


def local_copy(tree: Any) -> Any:
  """Arrays this process can read whole: as they are, or gathered from all processes as numpy."""

  def whole(x: Any) -> Any:
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
      return x
    with dispatching():
      return multihost_utils.process_allgather(x, tiled=True)

  return jax.tree.map(whole, tree)
