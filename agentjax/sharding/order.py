"""Keeps programs in order that CPUs would run at the same time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TypeVar

import jax

T = TypeVar("T")

_lock = threading.RLock()


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
def dispatching() -> Iterator[None]:
  """A lock for dispatching programs that exchange data between devices, for all threads.

  Devices run programs in the order of dispatch. If two threads dispatched at the same time, two
  devices could get different orders and wait for each other for ever.
  """
  with _lock:
    yield
