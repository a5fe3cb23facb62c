"""Whole runs under every schedule: what must be equal to the bit, what must be bounded."""

import collections
import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from agentjax.rollout.schedule import ScheduleConfig
from agentjax.training import HeldOutConfig
from agentjax.training.journal import read_journal
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.store import to_record
from tests.training import stages
from tests.training.figures import without_times
from tests.training.stages import GROUP, SIZE, STEPS, run, train_until_killed

_ROOT = pathlib.Path(__file__).parents[2]
SYNC = ScheduleConfig()
ZERO = ScheduleConfig("async", 0)
ONE = ScheduleConfig("one_step_off")
ASYNC = ScheduleConfig("async", 2)


def rows(directory):
  return without_times(read_metrics(directory / "metrics.jsonl"))


def recorded(directory):
  return {r.step: r for kind, r in read_journal(directory / "journal.log") if kind == "step"}


def episodes(directory):
  """All journalled trajectories by address; no address twice."""
  found = [t for kind, t in read_journal(directory / "journal.log") if kind == "trajectory"]
  by_address = {t.address: t for t in found}
  assert len(by_address) == len(found)
  return by_address


def content(trajectory):
  segments = [dataclasses.replace(s, seconds=0.0) for s in trajectory.segments]
  return to_record(dataclasses.replace(trajectory, segments=segments))


def versions_of(trajectory):
  return np.concatenate([s.versions[s.sampled] for s in trajectory.segments])


def trained(directory):
  """(step, trajectory) of every episode a step was trained on."""
  known = episodes(directory)
  return [(r.step, known[a]) for r in recorded(directory).values() for a in r.episodes]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Directory of an uninterrupted run of a schedule."""
  made = {}

  def finished(schedule):
    if schedule not in made:
      directory = tmp_path_factory.mktemp("runs") / "run"
      assert run(directory, schedule).train().finished
      made[schedule] = directory
    return made[schedule]

  return finished


def assert_same_run(directory, other):
  assert rows(directory) == rows(other)
  assert recorded(directory) == recorded(other)
  ours, theirs = episodes(directory), episodes(other)
  assert ours.keys() == theirs.keys()
  for address, trajectory in ours.items():
    np.testing.assert_equal(content(trajectory), content(theirs[address]))


def assert_each_group_once(directory):
  """Every sample of every round was trained on, exactly once."""
  counts = collections.Counter(t.address for _, t in trained(directory))
  assert set(counts.values()) == {1} and len(counts) == STEPS * SIZE * GROUP
  groups = {address[:2] for address in counts}
  assert collections.Counter(number for number, _ in groups) == dict.fromkeys(
    range(1, STEPS + 1), SIZE
  )
  assert counts.keys() == {(*group, sample) for group in groups for sample in range(GROUP)}


def test_asynchronous_with_staleness_zero_is_synchronous_to_the_bit(finished):
  assert_same_run(finished(ZERO), finished(SYNC))
  fingerprints = [r.fingerprint for r in recorded(finished(SYNC)).values()]
  assert len(set(fingerprints)) == STEPS
  assert {r["schedule/staleness_max"] for r in rows(finished(SYNC))} == {0.0}


def test_one_step_off_samples_a_whole_step_with_the_weights_before(finished):
  for step, trajectory in trained(finished(ONE)):
    assert set(versions_of(trajectory).tolist()) == {max(step - 1, 1)}
    assert trajectory.step == step
  ages = [r["schedule/staleness_max"] for r in rows(finished(ONE))]
  assert ages == [0.0] + [1.0] * (STEPS - 1)
  assert recorded(finished(ONE))[1] == recorded(finished(SYNC))[1]
  assert recorded(finished(ONE))[3].fingerprint != recorded(finished(SYNC))[3].fingerprint


def test_one_step_off_gives_the_same_bits_again(finished, tmp_path):
  run(tmp_path / "again", ONE).train()
  assert_same_run(tmp_path / "again", finished(ONE))


class Slow(stages.Digits):
  """So slow beside an update that some episodes are always under way when one ends."""

  SECONDS = 0.3


def test_asynchronous_tokens_keep_the_bound_and_cross_updates(tmp_path):
  directory = tmp_path / "run"
  assert run(directory, ASYNC, world=Slow).train().finished
  ages = np.concatenate([step - versions_of(t) for step, t in trained(directory)])
  assert ages.min() >= 0 and ages.max() <= ASYNC.bound and ages.max() > 0
  assert_each_group_once(directory)
  assert any(r["schedule/carried_share"] > 0 for r in rows(directory))
  for row in rows(directory):
    assert 0 <= row["schedule/staleness_mean"] <= row["schedule/staleness_max"] <= ASYNC.bound


@pytest.mark.parametrize(
  "schedule",
  [
    pytest.param(ONE, id="one_step_off"),
    pytest.param(ASYNC, id="async", marks=pytest.mark.slow),
  ],
)
def test_recorded_steps_replay_to_the_same_hash(finished, schedule):
  for step in (2, STEPS):
    assert run(finished(schedule), schedule).replay(step).identical


def start(directory, schedule):
  given = {k: v for k, v in schedule.to_dict().items() if v is not None}
  return subprocess.Popen(
    [sys.executable, "-m", "tests.training.stages", str(directory), json.dumps(given)],
    cwd=_ROOT,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
  )


def wait_for(child, condition, seconds=240.0):
  deadline = time.monotonic() + seconds
  while not condition():
    assert child.poll() is None, child.stderr.read().decode()[-3000:]
    assert time.monotonic() < deadline, "the child never got there"
    time.sleep(0.005)


def interrupted(directory, schedule, step, number):
  """A child that gets a signal once ``step`` steps are written."""
  child = start(directory, schedule)
  wait_for(child, lambda: len(read_metrics(directory / "metrics.jsonl")) >= step)
  child.send_signal(number)
  assert child.wait(timeout=120) == (-number if number == signal.SIGKILL else 0)


def crashed(directory, schedule, step):
  """Nothing is saved, the journal stays."""
  train_until_killed(run(directory, schedule), step)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_one_step_off_crashed_in_an_update_ends_with_the_same_bits(finished, tmp_path, step):
  crashed(tmp_path / "run", ONE, step)
  assert run(tmp_path / "run", ONE).train().finished
  assert_same_run(tmp_path / "run", finished(ONE))


@pytest.mark.parametrize("step", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_asynchronous_crashed_in_an_update_goes_on_from_what_is_recorded(tmp_path, step):
  crashed(tmp_path / "run", ASYNC, step)
  assert_it_goes_on(tmp_path / "run")


def assert_it_goes_on(directory):
  """The run ends; recorded steps and episodes stay; each group is trained on once, in time."""
  before, kept = recorded(directory), episodes(directory)
  assert run(directory, ASYNC).train().finished
  after, now = recorded(directory), episodes(directory)
  assert {s: r for s, r in after.items() if s in before} == before
  assert_each_group_once(directory)
  for address, trajectory in kept.items():
    np.testing.assert_equal(content(now[address]), content(trajectory))
  ages = np.concatenate([s - versions_of(t) for s, t in trained(directory)])
  assert ages.min() >= 0 and ages.max() <= ASYNC.bound
  assert [r["step"] for r in rows(directory)] == list(range(1, STEPS + 1))
  assert run(directory, ASYNC).replay(STEPS).identical


@pytest.mark.slow
@pytest.mark.parametrize(
  "step, number", [(2, signal.SIGKILL), (5, signal.SIGKILL), (3, signal.SIGTERM)]
)
def test_one_step_off_interrupted_ends_with_the_bits_of_an_uninterrupted_run(
  finished, tmp_path, step, number
):
  interrupted(tmp_path / "run", ONE, step, number)
  assert run(tmp_path / "run", ONE).train().finished
  assert_same_run(tmp_path / "run", finished(ONE))


@pytest.mark.slow
@pytest.mark.parametrize(
  "step, number", [(2, signal.SIGKILL), (5, signal.SIGKILL), (3, signal.SIGTERM)]
)
def test_asynchronous_interrupted_loses_nothing_and_trains_nothing_twice(tmp_path, step, number):
  interrupted(tmp_path / "run", ASYNC, step, number)
  assert_it_goes_on(tmp_path / "run")


@pytest.mark.slow
def test_evaluations_between_steps_leave_one_step_off_as_it_was(finished, tmp_path):
  held_out = HeldOutConfig(
    tasks=2, every=2, samples=0, pass_at=(), success_part="environment", resamples=10
  )
  run(tmp_path / "run", ONE, evaluation=held_out).train()
  assert recorded(tmp_path / "run") == recorded(finished(ONE))


def test_evaluations_run_beside_asynchronous_episodes(tmp_path):
  held_out = HeldOutConfig(
    tasks=2, every=2, samples=0, pass_at=(), success_part="environment", resamples=10
  )
  run(tmp_path / "run", ASYNC, evaluation=held_out).train()
  assert_each_group_once(tmp_path / "run")
  assert sum("eval/greedy" in r for r in rows(tmp_path / "run")) == STEPS // 2


@pytest.mark.parametrize("stale", [pytest.param("mask", marks=pytest.mark.slow), "drop"])
def test_other_rules_for_stale_groups_keep_the_bound(tmp_path, monkeypatch, stale):
  monkeypatch.setattr(stages.Digits, "SECONDS", 0.2)
  schedule = ScheduleConfig("async", 1, stale)
  assert run(tmp_path / "run", schedule).train().finished  # bound_staleness raises otherwise
  counts = collections.Counter(t.address for _, t in trained(tmp_path / "run"))
  assert set(counts.values()) == {1} and len(counts) == STEPS * SIZE * GROUP
  assert run(tmp_path / "run", schedule).replay(STEPS).identical


def test_updates_and_sampling_overlap(tmp_path):
  """With staleness, episodes go on while the training thread is in an update."""
  sampled_meanwhile = []
  made = run(tmp_path / "run", ASYNC)
  with made._session() as session:
    update = session.learner.rl_step

    def watched(*arguments):
      before = session.engine.stats.sampled_tokens
      time.sleep(0.2)
      sampled_meanwhile.append(session.engine.stats.sampled_tokens - before)
      assert threading.current_thread() is threading.main_thread()
      return update(*arguments)

    session.learner.rl_step = watched
    session.train()
  # Not in every update: the bound may make the episodes wait for this one.
  assert len(sampled_meanwhile) == STEPS and max(sampled_meanwhile) > 0
