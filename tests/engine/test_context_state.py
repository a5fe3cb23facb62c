"""What a context holds, and what it lets go of."""

from __future__ import annotations

import numpy as np

from agentjax.engine.context_state import ContextState
from agentjax.engine.store import Snapshot, Stored


def test_a_context_that_was_closed_in_the_middle_of_a_copy_holds_nothing():
  context = ContextState(())
  context.take(np.arange(10, dtype=np.int32), version=0)
  context.leave()
  context.lose("it was closed")
  context.parked(Snapshot(Stored(), (Stored(),), 10, 0))  # the copy of its slot arrives
  assert context.base is None and not context.parking
