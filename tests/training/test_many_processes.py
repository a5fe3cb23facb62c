"""Whole runs of several processes: figures of one, stopped, killed, delayed, with nothing to do."""

import json
import shutil
import signal

import pytest

from agentjax.training.journal import journal_files, read_journal
from agentjax.training.metrics import read_metrics
from tests.training.figures import assert_same_figures, without_times
from tests.training.many import Group
from tests.training.stages import fingerprints

pytestmark = pytest.mark.slow
STEPS = 4
INTERLEAVED = {"evaluation.interleaved": True}
ROUTED = {
  "model.pattern": "*E",
  "model.num_experts": 4,
  "model.experts_per_token": 2,
  "model.d_expert": 8,
  "model.d_shared_expert": 8,
  "rl.replay_experts": True,
  "rl.minibatches": 2,
  "evaluation.tasks": 0,
}
LOST = (4, -signal.SIGABRT)  # in a program of all, or by jax's heartbeat while the host waits


def rows(directory):
  return without_times(read_metrics(directory / "metrics.jsonl"))


def done(directory, count):
  return lambda: len(read_metrics(directory / "metrics.jsonl")) >= count


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
  """Directory of a run of one process."""
  directory = tmp_path_factory.mktemp("alone") / "run"
  Group(directory, 1, changes=INTERLEAVED).assert_ended()
  return directory


@pytest.fixture(scope="module")
def two(tmp_path_factory):
  """Directory of an uninterrupted run of two processes."""
  directory = tmp_path_factory.mktemp("two") / "run"
  Group(directory, 2, changes=INTERLEAVED).assert_ended()
  return directory


def test_two_processes_give_the_figures_of_one_and_each_writes_what_it_played(alone, two):
  assert_same_figures(two, alone, STEPS)
  journal = two / "journal.log"
  assert list(journal_files(journal)) == [0, 1]
  played = [t.address for kind, t in read_journal(journal) if kind == "trajectory"]
  assert len(played) == len(set(played)) == STEPS * 2 * 4
  assert sorted(played) == sorted(
    t.address for kind, t in read_journal(alone / "journal.log") if kind == "trajectory"
  )


def test_four_processes_two_of_them_without_tasks_and_one_late_give_the_figures_of_one(
  alone, tmp_path
):
  mesh = {"data": 2, "fsdp": 2}
  group = Group(tmp_path / "run", 4, mesh=mesh, delay=0.2, changes=INTERLEAVED)
  group.assert_ended()
  assert_same_figures(tmp_path / "run", alone, STEPS)
  sizes = {n: f.stat().st_size for n, f in journal_files(tmp_path / "run" / "journal.log").items()}
  assert sizes[2] == sizes[3] == 32 < sizes[1]  # a header and the end mark


def test_two_processes_measure_a_checkpoint_together_and_get_the_figures_of_its_run(two):
  Group(two, 2, measures=True).assert_ended()
  after = json.loads((two / "report.json").read_text())["after"]
  for index in range(2):
    found = json.loads((two / f"measured.{index}.json").read_text())
    assert {k: v for k, v in found.items() if "seconds" not in k} == {
      k: after[k] for k in found if "seconds" not in k
    }


@pytest.mark.parametrize("processes", [2, 4])  # two of four have no tasks
def test_routers_choices_reach_who_trains_the_tokens_and_the_figures_are_those_of_one(
  tmp_path, processes
):
  Group(tmp_path / "one", 1, changes=ROUTED).assert_ended()
  Group(tmp_path / "run", processes, 4 // processes, changes=ROUTED).assert_ended()
  assert_same_figures(tmp_path / "run", tmp_path / "one", STEPS)


def test_a_signal_to_one_stops_both_at_the_same_step_and_the_bits_go_on(two, tmp_path):
  group = Group(tmp_path / "run", 2, delay=0.3, changes=INTERLEAVED)
  group.wait_until(done(tmp_path / "run", 1))
  group.children[1].send_signal(signal.SIGTERM)
  group.assert_ended(3)
  stopped = len(rows(tmp_path / "run"))
  assert stopped < STEPS and (tmp_path / "run" / "checkpoints" / str(stopped)).is_dir()
  Group(tmp_path / "run", 2, changes=INTERLEAVED).assert_ended()
  assert fingerprints(tmp_path / "run") == fingerprints(two)
  assert rows(tmp_path / "run") == rows(two)


def test_where_one_is_killed_the_other_ends_and_the_run_goes_on_with_the_same_bits(two, tmp_path):
  group = Group(tmp_path / "run", 2, delay=0.3, changes=INTERLEAVED)
  group.wait_until(done(tmp_path / "run", 2))
  group.children[1].kill()
  survivor, killed = group.wait(120)
  assert survivor in LOST and killed == -signal.SIGKILL, group.output(0)[-3000:]
  Group(tmp_path / "run", 2, changes=INTERLEAVED).assert_ended()
  assert fingerprints(tmp_path / "run") == fingerprints(two)
  assert rows(tmp_path / "run") == rows(two)


def test_a_run_of_two_goes_on_with_one_that_reads_both_journals(alone, two, tmp_path):
  shutil.copytree(two, tmp_path / "run")
  (tmp_path / "run" / "metrics.jsonl").unlink()
  for step in (2, STEPS):
    shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
  Group(tmp_path / "run", 1, changes=INTERLEAVED).assert_ended()
  assert_same_figures(tmp_path / "run", alone, STEPS)
  journal = tmp_path / "run" / "journal.log"
  played = [t.address for kind, t in read_journal(journal) if kind == "trajectory"]
  assert len(played) == len(set(played)) == STEPS * 2 * 4  # none was played again


@pytest.mark.parametrize("schedule", [("one_step_off",), ("async", 1)])
@pytest.mark.parametrize("processes", [1, 2, 4])  # two of four have no tasks
def test_lanes_of_two_devices_that_train_as_well_never_wait_for_each_other(
  tmp_path, processes, schedule
):
  changes = {**INTERLEAVED, "engine.mesh.tensor": 2, "engine.lanes": 2 if processes == 1 else 1}
  mesh = {"data": 2, "fsdp": max(2, processes)}
  devices = 4 if processes == 1 else 2
  where = {"mesh": mesh, "schedule": schedule, "changes": changes, "delay": 0.1}
  Group(tmp_path / "run", processes, devices, **where).assert_ended()
  assert len(rows(tmp_path / "run")) == STEPS
  if schedule == ("one_step_off",):
    Group(tmp_path / "one", 1, schedule=schedule, changes=INTERLEAVED).assert_ended()
    assert_same_figures(tmp_path / "run", tmp_path / "one", STEPS)


def test_two_processes_with_such_lanes_go_on_after_one_was_killed_in_the_middle(tmp_path):
  changes = {**INTERLEAVED, "engine.mesh.tensor": 2}
  where = {"schedule": ("async", 1), "changes": changes}
  group = Group(tmp_path / "run", 2, 2, delay=0.3, **where)
  group.wait_until(done(tmp_path / "run", 2))
  group.children[1].kill()
  assert group.wait(120)[0] in LOST, group.output(0)[-3000:]
  Group(tmp_path / "run", 2, 2, **where).assert_ended()
  assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("schedule", [("sync",), ("one_step_off",), ("async", 1)])
@pytest.mark.parametrize("processes", [2, 4])
def test_a_lane_of_two_processes_gives_the_figures_of_one(alone, tmp_path, processes, schedule):
  changes = {**INTERLEAVED, "engine.processes": 2, "engine.mesh.tensor": 4}
  mesh = {"data": 2, "fsdp": processes}
  where = {"mesh": mesh, "schedule": schedule, "changes": changes, "delay": 0.1}
  Group(tmp_path / "run", processes, 2, **where).assert_ended()
  assert len(rows(tmp_path / "run")) == STEPS
  if schedule == ("sync",):
    assert_same_figures(tmp_path / "run", alone, STEPS)
  files = journal_files(tmp_path / "run" / "journal.log")
  sizes = {number: file.stat().st_size for number, file in files.items()}
  assert all((size == 32) == (number % 2 == 1) for number, size in sizes.items())


def test_a_lane_of_two_processes_beside_the_devices_that_train_gives_the_figures_of_one(
  alone, tmp_path
):
  changes = {**INTERLEAVED, "engine.processes": 2, "engine.mesh.tensor": 2, "devices.rollout": (1,)}
  where = {"mesh": {"data": 1, "fsdp": 2}, "changes": changes}
  Group(tmp_path / "run", 2, 2, **where).assert_ended()
  assert_same_figures(tmp_path / "run", alone, STEPS)


@pytest.mark.parametrize("killed", [0, 1], ids=["the one that plays", "the one that repeats"])
def test_where_a_process_of_such_a_lane_is_killed_the_run_goes_on_with_the_same_bits(
  tmp_path, killed
):
  changes = {**INTERLEAVED, "engine.processes": 2, "engine.mesh.tensor": 2}
  Group(tmp_path / "whole", 2, changes=changes).assert_ended()
  group = Group(tmp_path / "run", 2, delay=0.3, changes=changes)
  group.wait_until(done(tmp_path / "run", 2))
  group.children[killed].kill()
  assert group.wait(120)[1 - killed] in LOST, group.output(1 - killed)[-3000:]
  Group(tmp_path / "run", 2, changes=changes).assert_ended()
  assert fingerprints(tmp_path / "run") == fingerprints(tmp_path / "whole")
  assert rows(tmp_path / "run") == rows(tmp_path / "whole")


def test_where_what_is_repeated_fails_its_process_ends_and_so_does_the_one_that_plays(tmp_path):
  changes = {"engine.processes": 2, "engine.mesh.tensor": 2}
  group = Group(tmp_path / "run", 2, changes=changes, breaks=True)
  plays, repeats = group.wait(180)
  assert repeats == 4 and "RuntimeError: no room" in group.output(1)
  assert plays in LOST, group.output(0)[-3000:]
