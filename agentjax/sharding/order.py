"""Keeps programs in order that CPUs would run at the same time, and those of several processes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol, TypeVar

import jax

T = TypeVar("T")

_lock = threading.RLock()
_held = threading.local()  # depth: how often this thread holds the lock


class Border(Protocol):
  """Where lanes of several processes and programs of all processes get one order.

  All processes come to the same borders, in one order, each in its main thread.
  """

  def approach(self) -> None:
    """Waits until this process has dispatched what others have before the border."""

  def enter(self) -> None:
    """Called under the lock: what lanes dispatch from here on comes later."""

  def leave(self) -> None:
    """The programs of all processes are dispatched."""


BORDERS: list[Border] = []  # of the lanes that span processes


def in_order(value: T) -> T:
  """``value``; if CPUs stand for several devices, waits until it is computed.

  Call it on the result of a program that exchanges data between devices, before the next such
  program that does not depend on it. An accelerator runs programs in the order of dispatch, so
  there is no wait. CPUs run them at the same time: threads of one program may wait for those of
  another, or processes may run them in different orders, and all wait for ever.
  """
  if jax.default_backend() == "cpu" and jax.device_count() > 1:
    jax.block_until_ready(value)
  return value


@contextlib.contextmanager
def dispatching(*, of_lane: bool = False) -> Iterator[None]:
  """A lock for dispatching programs that exchange data between devices, for all threads.

  Devices run programs in the order of dispatch. If two threads dispatched at the same time, two
  devices could get different orders and wait for each other for ever.

  Args:
    of_lane: programs of one lane alone. Others may be of all processes, which then come here in one
      order; where lanes span processes, these programs have one place among those of the lanes.
  """
  depth = getattr(_held, "depth", 0)
  borders = [] if of_lane or depth else list(BORDERS)
  for border in borders:
    border.approach()
  with _lock:
    _held.depth = depth + 1
    try:
      for border in borders:
        border.enter()
      yield
    finally:
      _held.depth = depth
      for border in borders:
        border.leave()
