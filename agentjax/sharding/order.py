"""Keeping programs apart that CPUs would run at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TypeVar

import jax

T = TypeVar("T")

_lock = threading.RLock()


def in_order(value: T) -> T:
  """``value``; where CPUs stand for several devices, not before it is computed.

  Call it on the result of a program that exchanges data between devices, before the next such
  program that does not depend on it. An accelerator runs programs in the order in which they were
  dispatched, and waits for nothing here. CPUs run them at once: then threads of one wait for those
  of another, or processes take them in different orders, and all wait for ever.
  """
  if jax.default_backend() == "cpu" and jax.device_count() > 1:
    jax.block_until_ready(value)
  return value


@contextlib.contextmanager
def dispatching() -> Iterator[None]:
  """Held while programs are dispatched that exchange data between devices, by any thread.

  Devices run programs in the order in which they come. Where two threads dispatched at once, one
  device could get them in another order than the next, and each would wait for the other for ever.
  """
  with _lock:
    yield
