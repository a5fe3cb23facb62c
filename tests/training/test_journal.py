"""The journal keeps what was finished, drops what a crash tore off, refuses damage."""

import numpy as np
import pytest

from agentjax.training.journal import Journal, StepRecord, read_journal
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Reward, ToolRecord
from agentjax.trajectory.recordlog import StoreError


def _trajectory(step: int, task: int):
  builder = TrajectoryBuilder(step=step, task_id=task, sample=0, source="s")
  builder.append("user", [1, 2, 3])
  builder.append_sampled([4, 5], [-0.5, -0.25], [0.1, 0.2], step)
  tool = ToolRecord(0, "calculator", {"expression": "1+1"}, "ok", "2", 0.01)
  return builder.build(reward=Reward(1.0), tools=[tool], answer="2")


def _write(path, steps: int) -> None:
  journal = Journal(path)
  for step in range(1, steps + 1):
    for task in (7, 3):
      journal.add_trajectory(_trajectory(step, task))
    journal.finish_step(StepRecord(step, "rl", ((step, 3, 0), (step, 7, 0)), f"hash{step}"))
  journal.close()


def test_reopened_journal_knows_its_steps_and_episodes_and_appends_none_twice(tmp_path):
  path = tmp_path / "journal.log"
  _write(path, 2)
  journal = Journal(path)
  assert journal.steps[2] == StepRecord(2, "rl", ((2, 3, 0), (2, 7, 0)), "hash2")
  episodes = journal.trajectories(lambda address: address[0] == 2)
  assert set(episodes) == {(2, 3, 0), (2, 7, 0)}
  np.testing.assert_array_equal(episodes[2, 3, 0].segments[1].log_probs, np.float32([-0.5, -0.25]))
  assert episodes[2, 3, 0].tools[0].output == "2"
  journal.add_trajectory(_trajectory(2, 3))
  journal.finish_step(StepRecord(2, "rl", (), "other"))
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
    journal.add_trajectory(_trajectory(3, 1))
    journal.close()
    assert (3, 1, 0) in Journal(path).trajectories(lambda address: True)


def test_damage_in_the_middle_is_refused_with_its_offset(tmp_path):
  path = tmp_path / "journal.log"
  _write(path, 2)
  damaged = bytearray(path.read_bytes())
  damaged[60] ^= 0xFF
  path.write_bytes(bytes(damaged))
  with pytest.raises(StoreError, match=r"journal\.log: byte \d+"):
    Journal(path)
