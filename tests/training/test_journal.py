"""The journal keeps what was finished, drops what a crash tore off, and tells what it lost."""

import os

import numpy as np
import pytest

from agentjax.training import journal as journal_module
from agentjax.training.journal import (
  MAGIC,
  VERSION,
  Journal,
  JournalReader,
  StepRecord,
  read_journal,
)
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Reward, ToolRecord
from agentjax.trajectory.recordlog import RecordReader, RecordWriter, StoreError
from agentjax.trajectory.store import from_record, to_record


def episode(step: int, task: int):
  builder = TrajectoryBuilder(step=step, task_id=task, sample=0, source="s")
  builder.append("user", [1, 2, 3])
  builder.append_sampled([4, 5], [-0.5, -0.25], [0.1, 0.2], step)
  tool = ToolRecord(0, "calculator", {"expression": "1+1"}, "ok", "2", 0.01)
  return builder.build(reward=Reward(1.0), tools=[tool], answer="2")


def _write(path, steps: int) -> None:
  journal = Journal(path)
  for step in range(1, steps + 1):
    for task in (7, 3):
      journal.add_trajectory(episode(step, task))
    journal.finish_step(StepRecord(step, "rl", ((step, 3, 0), (step, 7, 0)), f"hash{step}"))
  journal.close()


def test_reopened_journal_knows_its_steps_and_episodes_and_appends_none_twice(tmp_path):
  path = tmp_path / "journal.log"
  _write(path, 2)
  journal = Journal(path)
  assert journal.steps[2] == StepRecord(2, "rl", ((2, 3, 0), (2, 7, 0)), "hash2")
  episodes = journal.trajectories(lambda address: address[0] == 2)
  assert set(episodes) == {(2, 3, 0), (2, 7, 0)}
  np.testing.assert_array_equal(
    episodes[2, 3, 0].segments[1].behaviour_log_probs, np.float32([-0.5, -0.25])
  )
  assert episodes[2, 3, 0].tools[0].output == "2"
  journal.add_trajectory(episode(2, 3))
  journal.finish_step(StepRecord(2, "rl", (), "hash2"))
  journal.close()
  assert len(list(read_journal(path))) == 6


def test_every_torn_tail_is_dropped_and_writing_goes_on(tmp_path):
  path = tmp_path / "journal.log"
  _write(path, 2)
  whole = path.read_bytes()
  for cut in range(len(whole) - 300, len(whole), 7):
    path.write_bytes(whole[:cut])
    journal = Journal(path)
    assert journal.torn is not None and 1 in journal.steps
    journal.add_trajectory(episode(3, 1))
    journal.close()
    assert (3, 1, 0) in Journal(path).trajectories(lambda address: True)


def _record_ends(path) -> list[int]:
  """Offsets at which the records of a journal begin, and where the last one ends."""
  reader = RecordReader(path, MAGIC, VERSION)
  return [offset for offset, _ in reader.with_offsets()] + [path.stat().st_size - 16]


@pytest.mark.parametrize("kind", ["payload", "head", "header", "removed"])
def test_what_is_whole_of_a_damaged_journal_is_kept_and_the_loss_is_told(tmp_path, kind):
  path = tmp_path / "journal.log"
  _write(path, 3)
  starts, data = _record_ends(path), bytearray(path.read_bytes())
  fourth = starts[3]  # the first episode of step 2
  if kind == "removed":
    del data[fourth : starts[4]]
  else:
    data[{"payload": fourth + 40, "head": fourth + 2, "header": 9}[kind]] ^= 0x10
  path.write_bytes(bytes(data))
  journal = Journal(path)
  assert len(journal.faults) == 1
  assert journal.lost_steps(4) == ([4] if kind == "header" else [2, 4])
  assert set(journal.steps) == {1, 2, 3}
  journal.close()
  assert (tmp_path / "journal.log.damaged").read_bytes() == bytes(data)
  again = Journal(path)
  assert not again.faults and len(again.steps) == 3
  again.close()


@pytest.mark.parametrize("moves", [0, 1])
def test_a_kill_while_a_damaged_journal_is_mended_leaves_a_journal(tmp_path, monkeypatch, moves):
  path = tmp_path / "journal.log"
  _write(path, 3)
  data = bytearray(path.read_bytes())
  data[_record_ends(path)[3] + 40] ^= 0x10
  path.write_bytes(bytes(data))
  replace, left = os.replace, [moves]

  def killed(source, target):
    if not left[0]:
      raise KeyboardInterrupt
    left[0] -= 1
    replace(source, target)

  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(os, "replace", killed)
    Journal(path)
  assert path.read_bytes() == bytes(data)
  journal = Journal(path)
  assert journal.lost_steps(4) == [2, 4] and set(journal.steps) == {1, 2, 3}
  journal.close()


def test_every_flipped_bit_costs_at_most_a_record(tmp_path):
  path = tmp_path / "journal.log"
  _write(path, 3)
  whole = path.read_bytes()
  for bit in np.random.default_rng(0).integers(0, 8 * (len(whole) - 16), 60).tolist():
    data = bytearray(whole)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(data))
    journal = Journal(path)
    kept = len(journal.steps) + len(journal.trajectories(lambda address: True))
    assert kept >= 8 and (kept == 9 or journal.faults or journal.torn)
    journal.close()


def test_opening_a_journal_decodes_no_episode_and_reading_decodes_those_asked_for(
  tmp_path, monkeypatch
):
  path = tmp_path / "journal.log"
  _write(path, 3)
  decoded = []
  monkeypatch.setattr(journal_module, "from_record", lambda r: decoded.append(r) or from_record(r))
  journal = Journal(path)
  assert journal.lost_steps(3) == [] and not decoded
  assert list(journal.trajectories(lambda a: a == (2, 3, 0))) == [(2, 3, 0)] and len(decoded) == 1
  journal.add_trajectory(episode(4, 1))
  assert (4, 1, 0) in journal.trajectories(lambda a: a[0] == 4)
  journal.close()


def test_files_of_processes_that_are_no_more_belong_to_the_journal(tmp_path):
  path, other = tmp_path / "journal.log", tmp_path / "journal.3.log"
  _write(path, 2)
  with RecordWriter(other, MAGIC, VERSION) as writer:
    writer.append({"kind": "trajectory", "trajectory": to_record(episode(2, 9))})
  other.write_bytes(other.read_bytes()[:-20] + b"torn")
  journal = Journal(path)
  assert not journal.trajectories(lambda a: a == (2, 9, 0)) and journal.torn is not None
  journal.close()
  with RecordWriter(other, MAGIC, VERSION) as writer:
    writer.append({"kind": "trajectory", "trajectory": to_record(episode(2, 9))})
  for reader in (JournalReader(path), Journal(path)):
    assert list(reader.trajectories(lambda a: a == (2, 9, 0))) == [(2, 9, 0)]
  kinds = [(kind, getattr(value, "address", None)) for kind, value in read_journal(path)]
  assert kinds[0] == ("trajectory", (2, 9, 0)) and len(kinds) == 7


def test_a_file_of_another_kind_is_refused_and_left_alone(tmp_path):
  path = tmp_path / "other.log"
  RecordWriter(path, b"OTHERLOG", 1).close()
  before = path.read_bytes()
  with pytest.raises(StoreError, match="not a AJXJRNL file"):
    Journal(path)
  assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_step_that_came_out_otherwise_is_recorded_anew(tmp_path):
  path = tmp_path / "journal.log"
  _write(path, 2)
  journal = Journal(path)
  journal.finish_step(StepRecord(2, "rl", ((2, 3, 0), (2, 7, 0)), "another machine's"))
  journal.close()
  assert Journal(path).steps[2].fingerprint == "another machine's"
