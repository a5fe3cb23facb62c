"""What a context holds, and what it lets go of."""

from __future__ import annotations

import numpy as np

from agentjax.engine.context_state import ContextState
from agentjax.engine.store import Stored


def test_a_context_that_was_closed_in_the_middle_of_a_copy_holds_no_block():
  context = ContextState((), block_tokens=4)
  context.take(np.arange(10, dtype=np.int32), version=0)
  blocks = [Stored(()) for _ in range(3)]
  context.keep_blocks(blocks)
  assert context.blocks == tuple(blocks[:2])  # the third is not full
  context.lose("it was closed")
  context.keep_blocks(blocks)  # the copy of its slot arrives
  assert context.blocks == ()
