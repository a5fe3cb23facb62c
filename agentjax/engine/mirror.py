"""Lanes whose devices belong to several processes: the first decides, the others repeat.

The first process plays the episodes and calls its lanes' ``LaneDevice``. Every call goes to the
others as a message and is done there again, on arrays that were made by the same calls before, so
that all of them dispatch the same programs in the same order.
"""

from __future__ import annotations

import collections
import functools
import io
import itertools
import os
import pickle
import secrets
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import jax

from agentjax.engine.device import LaneDevice
from agentjax.engine.home import Home
from agentjax.engine.programs import Programs
from agentjax.engine.publish import Weights
from agentjax.engine.request import SharedLanesError
from agentjax.sharding import dispatching
from agentjax.sharding.hosts import key_value_store, own_address
from agentjax.sharding.order import BORDERS

_groups = itertools.count()
_MEET, _LEAVE = 600.0, 10.0  # seconds
_FAILED = 4  # exit status, as where another process is lost
_BORDER = "border"
_Key = tuple[int, ...]  # of weights: versions and publications


def make_mirror(homes: Sequence[Home]) -> Mirror | None:
  """What keeps the lanes of several processes alike; None where each has its own.

  Processes that share lanes call this for the same lanes in the same order.
  """
  processes = homes[0].processes
  if len(processes) == 1:
    return None
  key = f"agentjax/lanes/{next(_groups)}/{processes[0]}"
  if jax.process_index() == processes[0]:
    return Leader(key, len(processes) - 1)
  return Follower(key)


class Mirror:
  """What both sides know: the arrays that calls gave, by number. A ``sharding.order.Border``.

  Attributes:
    leads: whether this process decides.
  """

  leads: bool

  def __init__(self) -> None:
    self._numbers = itertools.count()

  def begin(self, devices: Sequence[LaneDevice]) -> None:
    """Calls of ``devices`` are repeated from here on; all processes are here."""
    BORDERS.append(self)

  def close(self) -> None:
    """Repeats nothing any more."""
    if self in BORDERS:
      BORDERS.remove(self)

  def tell(self, lane: int, name: str, arguments: tuple[Any, ...]) -> None:
    """Announces a call of a lane's device, right before it is made."""

  def know(self, result: Any) -> None:
    """Numbers the arrays that a call gave."""

  def published(self, weights: Sequence[Weights]) -> None:
    """Takes note of new weights of all lanes."""

  def approach(self) -> None:
    """See ``Border``."""

  def enter(self) -> None:
    """See ``Border``."""

  def leave(self) -> None:
    """See ``Border``."""

  def _numbered(self, result: Any) -> Iterator[tuple[int, jax.Array]]:
    """The arrays that a call gave, with the numbers that they have from now on."""
    for array in jax.tree.leaves(result):
      yield next(self._numbers), array


class Leader(Mirror):
  """The side that decides."""

  leads = True

  def __init__(self, key: str, others: int) -> None:
    super().__init__()
    self._by_id: dict[int, int] = {}  # numbers of arrays that are alive
    self._freed: collections.deque[int] = collections.deque()
    secret = secrets.token_bytes(32)
    with Listener(("", 0), authkey=secret) as listener:
      address = f"{own_address()} {listener.address[1]} {secret.hex()}"
      key_value_store().key_value_set(key, address)
      self._others = [listener.accept() for _ in range(others)]
    key_value_store().key_value_delete(key)
    self._begun = False

  def begin(self, devices: Sequence[LaneDevice]) -> None:
    super().begin(devices)
    self._begun = True

  def close(self) -> None:
    super().close()
    if self._begun:
      self._begun = False
      for other in self._others:
        other.close()

  def tell(self, lane: int, name: str, arguments: tuple[Any, ...]) -> None:
    if self._begun:
      self._send(lane, name, arguments)

  def enter(self) -> None:
    self._send(0, _BORDER, ())

  def _send(self, lane: int, name: str, arguments: tuple[Any, ...]) -> None:
    freed = [self._freed.popleft() for _ in range(len(self._freed))]
    buffer = io.BytesIO()
    _Pickler(buffer, self._by_id).dump((name, arguments, freed))
    for other in self._others:
      try:
        other.send((lane, buffer.getvalue()))
      except OSError as error:
        raise SharedLanesError(
          f"a process that shares these lanes is gone ({error}); its log says why. Start the same "
          "command again on every host."
        ) from error

  def know(self, result: Any) -> None:
    for number, array in self._numbered(result):
      self._by_id[id(array)] = number
      weakref.finalize(array, self._forget, id(array), number).atexit = False

  def _forget(self, identity: int, number: int) -> None:
    if self._by_id.get(identity) == number:
      del self._by_id[identity]
    self._freed.append(number)


class Follower(Mirror):
  """The side that repeats, in a thread of its own."""

  leads = False

  def __init__(self, key: str) -> None:
    super().__init__()
    text = key_value_store().blocking_key_value_get(key, int(1000 * _MEET))
    address, port, secret = text.split()
    self._leader: Connection = Client((address, int(port)), authkey=bytes.fromhex(secret))
    self._arrays: dict[int, jax.Array] = {}
    self._weights: dict[_Key, Sequence[Weights]] = {}  # of all lanes, as they were published
    self._used: dict[int, _Key | None] = {}  # by lane
    self._changed = threading.Condition()
    self._met = self._passed = self._approached = 0  # borders: by the thread, by the main thread
    self._error: Exception | None = None
    self._closed = False
    self._thread: threading.Thread | None = None

  def begin(self, devices: Sequence[LaneDevice]) -> None:
    super().begin(devices)
    self._thread = threading.Thread(target=self._follow, args=(devices,), daemon=True, name="lanes")
    self._thread.start()

  def close(self) -> None:
    super().close()
    if self._thread is not None:
      with self._changed:
        self._closed = True
        self._changed.notify_all()
      self._thread.join(_LEAVE)
      self._leader.close()

  def published(self, weights: Sequence[Weights]) -> None:
    with self._changed:
      self._weights[_key(weights[0])] = weights
      self._changed.notify_all()

  def approach(self) -> None:
    with self._changed:
      self._approached += 1
      self._changed.wait_for(lambda: self._error or self._met >= self._approached)
      self._check()

  def leave(self) -> None:
    with self._changed:
      self._passed += 1
      self._changed.notify_all()

  def _check(self) -> None:
    if self._error is not None:
      raise SharedLanesError(
        f"the process that decides for these lanes is gone ({self._error}); its log says why. "
        "Start the same command again on every host."
      ) from self._error

  def know(self, result: Any) -> None:
    self._arrays.update(self._numbered(result))

  def _follow(self, devices: Sequence[LaneDevice]) -> None:
    try:
      while True:
        lane, data = self._leader.recv()
        known = functools.partial(self._weights_of, lane)
        name, arguments, freed = _Unpickler(data, self._arrays, known).load()
        if name == _BORDER:
          self._wait_at_border()
        else:
          getattr(devices[lane], name)(*arguments)
        if name == "use":
          self._let_go(lane, arguments[0])
        for number in freed:
          del self._arrays[number]
    except (EOFError, OSError) as error:  # the leader has closed, or is gone
      with self._changed:
        self._error = error
        self._changed.notify_all()
    except BaseException:
      # The leader waits for this process in the middle of a program, and nothing else tells it.
      traceback.print_exc()
      sys.stderr.flush()
      os._exit(_FAILED)

  def _wait_at_border(self) -> None:
    with self._changed:
      self._met += 1
      self._changed.notify_all()
      self._changed.wait_for(lambda: self._closed or self._passed >= self._met)

  def _weights_of(self, lane: int, key: _Key) -> Weights:
    """Weights that this process has published, or is about to."""
    with self._changed:
      self._changed.wait_for(lambda: self._closed or key in self._weights)
      if key not in self._weights:
        raise EOFError("closed before these weights were published here")
      return self._weights[key][lane]

  def _let_go(self, lane: int, weights: Weights | None) -> None:
    """Forgets weights that no lane will use again, now that one has switched."""
    before, key = self._used.get(lane), None if weights is None else _key(weights)
    self._used[lane] = key
    with self._changed:
      for known in list(self._weights):
        if known == key:
          return
        if known not in self._used.values() and (key is not None or known == before):
          del self._weights[known]


class _Pickler(pickle.Pickler):
  """Puts marks in the place of arrays and weights that all sides have."""

  def __init__(self, buffer: io.BytesIO, numbers: dict[int, int]) -> None:
    super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
    self._by_id = numbers

  def persistent_id(self, value: Any) -> int | _Key | None:
    if isinstance(value, Weights):
      return _key(value)
    return self._by_id[id(value)] if isinstance(value, jax.Array) else None


class _Unpickler(pickle.Unpickler):
  """Inverse of ``_Pickler``."""

  def __init__(
    self, data: bytes, arrays: dict[int, jax.Array], weights: Callable[[_Key], Weights]
  ) -> None:
    super().__init__(io.BytesIO(data))
    self._arrays, self._weights = arrays, weights

  def persistent_load(self, mark: Any) -> Any:
    return self._arrays[mark] if isinstance(mark, int) else self._weights(mark)


def _key(weights: Weights) -> _Key:
  return (*weights.versions, *weights.publications)


def _repeated(name: str, *, gives: bool = False) -> Any:
  """A method of ``LaneDevice`` that is called in all processes; ``gives`` arrays of the devices."""
  method = getattr(LaneDevice, name)

  @functools.wraps(method)
  def call(self: SharedDevice, *arguments: Any) -> Any:
    with dispatching(of_lane=True):
      self.mirror.tell(self.lane, name, arguments)
      result = method(self, *arguments)
      if gives:
        self.mirror.know(result)
    return result

  return call


class SharedDevice(LaneDevice):
  """The device of a lane in several processes.

  Args:
    programs, home: of the lane.
    mirror: what tells the other processes.
    lane: number of the lane.
  """

  def __init__(self, programs: Programs, home: Home, mirror: Mirror, lane: int) -> None:
    super().__init__(programs, home)
    self.mirror, self.lane = mirror, lane

  use = _repeated("use")
  put = _repeated("put", gives=True)
  fetch = _repeated("fetch")
  read = _repeated("read", gives=True)
  place = _repeated("place")
  copy = _repeated("copy")
  write = _repeated("write")
  read_pages = _repeated("read_pages", gives=True)
  extend = _repeated("extend")
  decode = _repeated("decode")
