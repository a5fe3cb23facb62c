"""When a lane dispatches its next cycle: before the results of the last are read, or after."""

from __future__ import annotations

import collections
import time

_WEIGHT = 0.2  # of the newest in a mean; ours


class Pace:
  """Weighs what a dispatch ahead saves against what it costs, by what was seen so far.

  It saves the time in which the device would wait for the host. It costs the slots of calls that
  end in the dispatch under way, where newcomers would take them at once: these wait for one more
  dispatch. So long calls, and batches that run empty, are dispatched ahead; short calls that follow
  each other are not.

  Attributes:
    dispatch_seconds: of the device for a cycle that decodes, a mean.
    host_seconds: in which the device waits where nothing is dispatched ahead, a mean.
    newcomers: share of the slots at work that have other calls than a cycle before, a mean.
  """

  def __init__(self) -> None:
    self.dispatch_seconds = self.host_seconds = self.newcomers = 0.0
    self._recent: collections.deque[float] = collections.deque(maxlen=8)  # of dispatch_seconds
    self._busy_since: float | None = None
    self._last_end: float | None = None

  @property
  def ahead(self) -> bool:
    """Whether the next cycle should come before the results of the last."""
    return self.newcomers * self.dispatch_seconds <= self.host_seconds

  def begin(self) -> None:
    """Work begins after a time without any, in which nobody waited."""
    self._busy_since = self._last_end = None

  def note_rows(self, staying: int, new: int) -> None:
    """A cycle decodes for so many calls of the cycle before, and for so many others."""
    if staying:  # else nothing could have been dispatched ahead
      self.newcomers += _WEIGHT * (new / (staying + new) - self.newcomers)

  def note_cycle(self, start: float, end: float | None, *, ahead: bool) -> tuple[float, float]:
    """Seconds in which the device worked, and those in which it waited before.

    Args:
      start: ``time.perf_counter`` when the first program of the cycle was dispatched.
      end: when the last had ended; None is not known, and counted with the cycle after it.
      ahead: it was dispatched ahead.
    """
    idle = 0.0 if self._last_end is None else max(0.0, start - self._last_end)
    if self._last_end is not None and not ahead:
      self.host_seconds = _mean(self.host_seconds, idle)
    if self._busy_since is None:
      self._busy_since = max(start, self._last_end or start)
    self._last_end = end
    if end is None:
      return 0.0, idle
    busy, self._busy_since = end - self._busy_since, None
    self.dispatch_seconds = _mean(self.dispatch_seconds, busy)
    self._recent.append(busy)
    return busy, idle

  def hold_back(self, start: float) -> float:
    """Seconds to wait for more calls before a dispatch ahead of one that began at ``start``.

    Until half of that one's time is over: calls that come before need not wait for the dispatch
    after, and the host has the other half to prepare it. Its time is taken to be that of the
    shortest of late.
    """
    begun = max(start, self._last_end or start)
    half = 0.5 * min(self._recent, default=0.0)
    return max(0.0, begun + half - time.perf_counter())


def _mean(mean: float, new: float) -> float:
  return mean + _WEIGHT * (new - mean) if mean else new
