"""What a run takes and leaves, as its watcher keeps it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjax.sandbox.measure import Disk, Output


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


def _disk(folder: Path, **limits: int) -> Disk:
  """One whose next look is due."""
  whole = {"files": 100, "disk_bytes": 2**20, "file_bytes": 2**21, "wall_seconds": 9, **limits}
  disk = Disk(str(folder), whole)
  time.sleep(0.11)
  return disk


def test_a_look_at_the_files_ends_with_the_run(tmp_path: Path) -> None:
  for n in range(101):
    (tmp_path / str(n)).touch()
  disk = _disk(tmp_path)
  assert "more than 100 files" in str(disk.too_much([]))
  disk = _disk(tmp_path)
  disk.deadline = time.monotonic()
  assert disk.too_much([]) is None


def test_room_that_the_file_system_loses_calls_for_a_look_at_once(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  free = 2**30
  monkeypatch.setattr("agentjax.sandbox.measure._free_bytes", lambda folder: free)
  disk = _disk(tmp_path, files=0)
  disk._next = time.monotonic() + 60
  (tmp_path / "f").touch()
  assert disk.too_much([]) is None
  free -= 2**21
  assert "more than 0 files" in str(disk.too_much([]))
