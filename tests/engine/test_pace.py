"""Whether to dispatch ahead, and how long the device worked and waited."""

from __future__ import annotations

import time

from agentjax.engine.pace import Pace


def test_a_dispatch_ahead_must_save_more_than_it_costs():
  pace = Pace()
  pace.begin()
  assert pace.ahead  # nothing is known yet
  assert pace.note_cycle(10.0, 11.0, ahead=False) == (1.0, 0.0)
  assert pace.note_cycle(11.25, 12.25, ahead=False) == (1.0, 0.25)
  assert pace.note_cycle(12.0, 13.25, ahead=True) == (1.0, 0.0)
  assert (pace.host_seconds, pace.dispatch_seconds) == (0.25, 1.0)
  # A cycle without a chunk is counted with the one after it.
  assert pace.note_cycle(13.5, None, ahead=False) == (0.0, 0.25)
  assert pace.note_cycle(13.75, 15.5, ahead=False) == (2.0, 0.0)
  for _ in range(100):
    pace.note_rows(4, 1)
  assert pace.ahead  # a fifth of a dispatch costs less than the device would wait
  for _ in range(100):
    pace.note_rows(0, 5)  # all ended at once: none could have gone on
  assert pace.ahead
  for _ in range(100):
    pace.note_rows(2, 2)
  assert not pace.ahead
  pace.begin()
  assert pace.note_cycle(99.0, 100.0, ahead=False) == (1.0, 0.0)


def test_newcomers_may_join_until_half_of_a_chunk_is_over():
  pace = Pace()
  assert pace.hold_back(time.perf_counter()) == 0.0  # nothing is known yet
  pace.note_cycle(10.0, 50.0, ahead=False)
  assert 19.0 < pace.hold_back(time.perf_counter()) <= 20.0
  assert pace.hold_back(time.perf_counter() - 21.0) == 0.0
