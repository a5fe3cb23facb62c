"""What a run takes and leaves, as its watcher keeps it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentjax.sandbox.measure import Output


@given(st.integers(0, 9), st.lists(st.binary(max_size=12), max_size=8))
def test_head_and_tail_are_kept_whatever_the_parts_that_come(keep: int, parts: list[bytes]) -> None:
  output = Output(keep)
  for part in parts:
    output.add(part)
  whole, most, last = b"".join(parts), keep - keep // 2, keep // 2
  rest = whole[most:]
  assert output.total == len(whole)
  assert output.head == whole[:most]
  assert output.tail == (rest[-last:] if last else b"")
  assert b"".join(output.views()) == output.head + output.tail
  views = output.views()
  output.wipe()
  assert not any(byte for view in views for byte in view)
