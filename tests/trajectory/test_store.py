import dataclasses
import errno
import os
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Flag, Outcome, Reward, Status, ToolRecord, Trajectory
from agentjax.trajectory.recordlog import (
  RecordReader,
  RecordWriter,
  StoreError,
  decode_record,
  encode_record,
)
from agentjax.trajectory.store import (
  MAGIC,
  VERSION,
  StoreWriter,
  from_record,
  read_store,
  to_record,
)

KIND = b"TESTLOG\0"


def _records(count: int) -> list[dict]:
  return [
    {"n": i, "text": "x" * (5 * i), "ids": np.arange(i, dtype=np.int32)} for i in range(count)
  ]


def _write(path: Path, records: list[dict], *, close: bool = True) -> list[int]:
  """Writes and returns the offset of every record, then that of the end mark."""
  writer = RecordWriter(path, KIND)
  offsets = [writer.append(r) for r in records]
  writer.flush()
  offsets.append(path.stat().st_size)
  if close:
    writer.close()
  else:
    writer.abandon()
  return offsets


def _same(a, b) -> bool:
  """Equal values of equal types, arrays bit for bit."""
  if type(a) is not type(b):
    return False
  if isinstance(a, np.ndarray | np.generic):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
  if dataclasses.is_dataclass(a):
    return all(_same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
  if isinstance(a, dict):
    return list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
  if isinstance(a, list | tuple):
    return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
  if isinstance(a, float):
    return np.float64(a).tobytes() == np.float64(b).tobytes()
  return a == b


VALUES: st.SearchStrategy = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-(2**200), 2**200)
  | st.floats()
  | st.binary(max_size=5)
  | st.text(st.characters(), max_size=5)
  | st.text(st.characters(categories=["Cs"]), max_size=3)
  | hnp.arrays(
    st.sampled_from([np.dtype(t) for t in ("i4", "f4", "f8", "?", "u1", "i8", ">f4")]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
  )
  | st.builds(np.float32, st.floats(width=32))
  | st.builds(np.int64, st.integers(-(2**63), 2**63 - 1)),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=3) | st.integers(-5, 5), inner, max_size=3)
  ),
  max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(record=st.dictionaries(st.text(max_size=3), VALUES, max_size=4))
def test_a_record_comes_back_bit_for_bit(record):
  assert _same(decode_record(encode_record(record)), record)


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()]), 1j])
def test_what_cannot_be_stored_is_refused_and_nothing_written(tmp_path, value):
  path = tmp_path / "log"
  with RecordWriter(path, KIND) as writer:
    writer.append({"a": 1})
    size = path.stat().st_size
    with pytest.raises(TypeError, match="cannot store"):
      writer.append({"a": [value]})
    assert path.stat().st_size == size
  assert list(RecordReader(path, KIND)) == [{"a": 1}]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_trajectory_comes_back_bit_for_bit(data):
  texts = st.text(st.characters(), max_size=6)
  builder = TrajectoryBuilder(
    step=data.draw(st.integers(0, 2**40)),
    task_id=data.draw(st.integers(0, 2**40)),
    sample=data.draw(st.integers(0, 99)),
    source=data.draw(texts),
    group=data.draw(texts),
  )
  for index in range(data.draw(st.integers(0, 5))):
    n = data.draw(st.integers(0, 4))
    ids = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n))
    parent = data.draw(st.none() | st.integers(0, index - 1)) if index else None
    flags = data.draw(st.frozensets(st.sampled_from(list(Flag))))
    if data.draw(st.booleans()):
      numbers = st.lists(st.floats(0, 50, width=32), min_size=n, max_size=n)
      log_probs = [-x for x in data.draw(numbers)]
      builder.append_sampled(ids, log_probs, data.draw(numbers), 3, parent=parent, flags=flags)
    else:
      seconds = data.draw(st.floats(0, 1e9))
      seen = ("a", "b")
      builder.append("tool", ids, parent=parent, seconds=seconds, visible_to=seen, flags=flags)
  rewards = st.floats(allow_nan=False, allow_infinity=False).map(Reward) | st.just(
    Reward.invalid("judge down")
  )
  tool = ToolRecord(1, data.draw(texts), {"x": data.draw(VALUES)}, "ok", data.draw(texts), 0.125)
  trajectory = builder.build(
    status=data.draw(st.sampled_from(list(Status))),
    reward=data.draw(rewards),
    tools=[tool] * data.draw(st.integers(0, 2)),
    answer=data.draw(st.none() | texts),
    metadata={"value": data.draw(VALUES)},
  )
  trajectory.reward_parts = data.draw(st.dictionaries(texts, rewards, max_size=3))
  back = from_record(decode_record(encode_record(to_record(trajectory))))
  assert _same(back, trajectory)


def test_every_field_is_stored():
  agents = {"left": Outcome(True, Reward(1.0), {"environment": Reward(1.0)})}
  trajectory = Trajectory(0, 0, 0, "s", segments=[], agents=agents)
  assert set(to_record(trajectory)) == {f.name for f in dataclasses.fields(Trajectory)}


def test_a_store_keeps_order_across_writers(tmp_path):
  path = tmp_path / "deeper" / "trajectories"
  written = []
  for sample in range(3):
    with StoreWriter(path) as writer:
      assert writer.count == 2 * sample and writer.torn is None
      for task in range(2):
        builder = TrajectoryBuilder(step=0, task_id=task, sample=sample, source="s")
        builder.append("user", [task, sample])
        written.append(builder.build())
        writer.append_trajectory(written[-1])
  assert _same(list(read_store(path)), written)


def test_one_flipped_byte_anywhere_is_refused_at_its_place(tmp_path):
  path = tmp_path / "log"
  records = _records(3)
  starts = [0, *_write(path, records)]
  whole = path.read_bytes()
  for at in range(len(whole)):
    for flip in (0x01, 0x80, 0xFF):
      damaged = bytearray(whole)
      damaged[at] ^= flip
      path.write_bytes(damaged)
      start = max(s for s in starts if s <= at)
      for recover in (False, True):
        seen = []
        reader = RecordReader(path, KIND, recover_tail=recover)
        try:
          for record in reader:
            seen.append(record)
        except StoreError as error:
          assert error.offset in (start, 8), (at, error)  # 8: the version in the header
          assert str(path) in str(error) and f"byte {error.offset}:" in str(error)
        else:
          # Only the end mark being damaged can be taken for a write that was not finished.
          assert recover and reader.torn is not None and reader.torn.offset == start == starts[-1]
        assert _same(seen, records[: sum(s < start for s in starts[1:])])


def test_a_file_cut_anywhere_is_refused_or_read_up_to_the_cut(tmp_path):
  path = tmp_path / "log"
  records = _records(4)
  starts = _write(path, records)
  whole = path.read_bytes()
  for size in range(len(whole)):
    for tail in (b"", bytes(9), bytes(4096)):  # a machine that dies may also leave zeros
      content = whole[:size] + tail
      path.write_bytes(content)
      # Zeros may happen to be what was cut off.
      right = next(
        (i for i, (x, y) in enumerate(zip(content, whole, strict=False)) if x != y), size
      )
      complete = sum(s <= max(right, size) for s in starts[1:])
      offset = starts[complete] if size >= starts[0] else 0
      with pytest.raises(StoreError) as caught:
        list(RecordReader(path, KIND))
      assert caught.value.offset == offset
      if size >= starts[0] or not tail:
        reader = RecordReader(path, KIND, recover_tail=True)
        assert _same(list(reader), records[:complete])
        assert reader.torn is not None and reader.torn.offset == offset


@pytest.mark.parametrize("tail", [b"", b"\0" * 4096])
def test_writing_goes_on_after_a_crash_at_any_byte(tmp_path, tail):
  path = tmp_path / "log"
  records = _records(3)
  _write(path, records)
  whole = path.read_bytes()
  for size in range(16 if tail else 0, len(whole)):
    path.write_bytes(whole[:size] + tail)
    with RecordWriter(path, KIND) as writer:
      assert writer.torn is not None
      for record in records[writer.count :]:
        writer.append(record)
    assert path.read_bytes() == whole


def test_a_writer_never_touches_a_damaged_or_foreign_file(tmp_path):
  path = tmp_path / "log"
  starts = _write(path, _records(3))
  damaged = bytearray(path.read_bytes())
  damaged[starts[1] + 18] ^= 1
  for content in (bytes(damaged), b"a letter to my aunt, which is longer", b"a lett"):
    path.write_bytes(content)
    with pytest.raises(StoreError):
      RecordWriter(path, KIND)
    assert path.read_bytes() == content


def test_lost_and_doubled_records_are_seen(tmp_path):
  path = tmp_path / "log"
  starts = _write(path, _records(4))
  whole = path.read_bytes()
  lost = whole[: starts[1]] + whole[starts[2] :]
  doubled = whole[: starts[2]] + whole[starts[1] :]
  for content, at in ((lost, starts[1]), (doubled, starts[2])):
    path.write_bytes(content)
    with pytest.raises(StoreError, match="stands where") as caught:
      list(RecordReader(path, KIND, recover_tail=True))
    assert caught.value.offset == at


def test_bytes_after_the_end_mark_are_refused(tmp_path):
  path = tmp_path / "log"
  _write(path, _records(2))
  path.write_bytes(path.read_bytes() + b"more")
  with pytest.raises(StoreError, match="bytes follow the end mark"):
    list(RecordReader(path, KIND, recover_tail=True))


def test_a_file_that_is_still_written_reads_up_to_now(tmp_path):
  path = tmp_path / "log"
  writer = RecordWriter(path, KIND)
  for count, record in enumerate(_records(3), start=1):
    writer.append(record)
    reader = RecordReader(path, KIND, recover_tail=True)
    assert len(list(reader)) == count
    assert reader.torn is not None and "never closed" in reader.torn.reason
  writer.close()
  assert len(list(reader)) == 3 and reader.torn is None


def test_an_unknown_version_is_refused(tmp_path):
  path = tmp_path / "log"
  with RecordWriter(path, KIND, version=2) as writer:
    writer.append({})
  for recover in (False, True):
    with pytest.raises(StoreError, match="version 2.*version 1"):
      list(RecordReader(path, KIND, version=1, recover_tail=recover))
  with pytest.raises(StoreError, match="format version 2"):
    RecordWriter(path, KIND, version=3)


def test_a_missing_or_other_file_is_named(tmp_path):
  with pytest.raises(StoreError, match="none.*No such file"):
    list(read_store(tmp_path / "none"))
  _write(tmp_path / "log", _records(1))
  with pytest.raises(StoreError, match="not a AJXTRAJ file"):
    list(read_store(tmp_path / "log"))
  with RecordWriter(tmp_path / "odd", MAGIC, VERSION) as writer:
    writer.append({"step": 3})
  with pytest.raises(StoreError, match="byte 16: not the record of a trajectory"):
    list(read_store(tmp_path / "odd"))


def test_a_payload_that_is_no_record_is_refused(tmp_path):
  path = tmp_path / "log"
  starts = _write(path, [{"a": 1}])
  whole = path.read_bytes()
  payload = b"\xc1" * (starts[1] - starts[0] - 16)
  head = whole[16:24] + zlib.crc32(payload).to_bytes(4, "little")
  head += zlib.crc32(head).to_bytes(4, "little")
  path.write_bytes(whole[:16] + head + payload + whole[starts[1] :])
  with pytest.raises(StoreError, match="byte 16: the record is no msgpack"):
    list(RecordReader(path, KIND))


def test_a_full_disk_leaves_the_records_before(tmp_path, monkeypatch):
  path = tmp_path / "log"
  writer = RecordWriter(path, KIND)
  writer.append({"n": 0})
  before = path.read_bytes()
  real, room = os.pwrite, [7]

  def full(descriptor, data, offset):
    if not room[0]:
      raise OSError(errno.ENOSPC, "No space left on device")
    written = real(descriptor, bytes(data[: room[0]]), offset)
    room[0] -= written
    return written

  monkeypatch.setattr(os, "pwrite", full)
  with pytest.raises(OSError, match="No space left"):
    writer.append({"n": 1})
  assert path.read_bytes() == before
  monkeypatch.undo()
  writer.append({"n": 2})  # the disk has room again
  writer.close()
  assert list(RecordReader(path, KIND)) == [{"n": 0}, {"n": 2}]


def test_short_writes_are_finished(tmp_path, monkeypatch):
  real = os.pwrite
  monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, bytes(data[:3]), at))
  _write(tmp_path / "log", _records(3))
  assert _same(list(RecordReader(tmp_path / "log", KIND)), _records(3))


def test_an_error_inside_the_block_leaves_no_end_mark(tmp_path):
  path = tmp_path / "log"
  with pytest.raises(RuntimeError), RecordWriter(path, KIND) as writer:
    writer.append({"n": 0})
    raise RuntimeError
  with pytest.raises(StoreError, match="end mark is missing"):
    list(RecordReader(path, KIND))
  with pytest.raises(ValueError, match="is closed"):
    writer.append({"n": 1})


def test_magic_is_eight_bytes(tmp_path):
  with pytest.raises(ValueError, match="8 bytes"):
    RecordWriter(tmp_path / "log", b"short")
  assert not (tmp_path / "log").exists()


def test_records_need_no_jax():
  program = (
    "import agentjax.trajectory.store, agentjax.trajectory.builder, agentjax.trajectory.weights,"
    "agentjax.text, sys;"
    "sys.exit(', '.join(m for m in ('jax', 'flax') if m in sys.modules) or None)"
  )
  subprocess.run([sys.executable, "-c", program], check=True)
