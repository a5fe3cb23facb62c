"""Seconds that this process spent on tracing, lowering and compiling, as jax reports them."""

from __future__ import annotations

import threading
import time

from jax import monitoring

_PREFIX = "/jax/core/compile/"
_lock = threading.Lock()
_spans: list[tuple[float, float]] = []  # apart from each other, the latest last
_closed = 0.0  # seconds of spans that are no longer kept
_KEPT = 1000  # spans that a later event may still contain


def seconds() -> float:
  """Seconds since this module was imported; simultaneous work counts once."""
  with _lock:
    return _closed + sum(end - start for start, end in _spans)


def clock() -> float:
  """Seconds that pass while nothing is compiled."""
  return time.monotonic() - seconds()


def _note(event: str, duration_secs: float, **_: str | int) -> None:
  if not event.startswith(_PREFIX):
    return
  global _closed
  end = time.monotonic()
  start = end - duration_secs
  with _lock:
    # A nested function reports its time first; the outer function's time includes it.
    while _spans and _spans[-1][1] > start:
      start = min(start, _spans.pop()[0])
    _spans.append((start, end))
    while len(_spans) > _KEPT:
      first = _spans.pop(0)
      _closed += first[1] - first[0]


monitoring.register_event_duration_secs_listener(_note)
