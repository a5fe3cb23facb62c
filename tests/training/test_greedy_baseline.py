"""ReMax: one greedy episode a group, compared with and never trained on."""

import dataclasses

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives import ObjectiveConfig, preset
from agentjax.rollout.keys import BASELINE
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.rollout.statistics import apart
from agentjax.signals.baseline import GreedyBaseline, _with_baseline
from agentjax.signals.signal import StepContext
from agentjax.training.journal import JournalReader
from agentjax.training.metrics import read_metrics
from agentjax.training.selectors import SelectionConfig
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Reward
from tests.training.stages import GROUP, SIZE, run, staged_experiment

_STEPS = 3


_SYNC = ScheduleConfig()


def _make(directory, schedule=_SYNC, objective=None, **changes):
  rl = dataclasses.replace(
    staged_experiment(schedule).rl,
    steps=_STEPS,
    objective=preset("remax") if objective is None else objective,
    **changes,
  )
  return run(directory, schedule, rl=rl)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Directory of a run, and (rewards, baselines, advantages) of every update."""
  directory, seen = tmp_path_factory.mktemp("remax") / "run", []
  with _make(directory)._session() as session:
    phase = session.learner._phases["policy"][0]

    def looking(batch, numbers):
      prepared, metrics = phase.passes[0].prepare(batch, numbers)
      drawn = np.asarray(prepared.weights) > 0
      segments = np.asarray(batch.segment_ids)
      one = [np.asarray(prepared.advantages)[drawn & (segments == i + 1)] for i in range(8)]
      assert all((a == a[0]).all() for a in one)
      baselines = np.asarray(batch.columns["baselines"])
      seen.append((np.array(batch.rewards), baselines, np.array([a[0] for a in one])))
      return prepared, metrics

    passes = (phase.passes[0]._replace(prepare=looking),)
    session.learner._phases["policy"][0] = phase._replace(passes=passes)
    assert session.train().finished
  return directory, seen


def _episodes(directory):
  return JournalReader(directory / "journal.log").trajectories(lambda _: True)


def _fingerprints(directory):
  return {k: r.fingerprint for k, r in JournalReader(directory / "journal.log").steps.items()}


def test_every_group_has_one_greedy_episode_whose_reward_is_what_its_members_are_compared_with(
  finished,
):
  directory, seen = finished
  episodes = _episodes(directory)
  sampled, greedy = apart(list(episodes.values()))
  assert len(greedy) == _STEPS * SIZE and len(sampled) == _STEPS * SIZE * GROUP
  rewards, baselines, advantages = seen[0]
  order = sorted(a for a in episodes if a[0] == 1 and a[2] != BASELINE)
  expected = [episodes[(*a[:2], BASELINE)].reward.value for a in order]
  np.testing.assert_allclose(baselines, expected, rtol=1e-6)
  np.testing.assert_allclose(advantages, rewards - baselines, atol=1e-6)
  # Plain GRPO's advantages of a group add up to nothing.
  assert np.abs(advantages.reshape(SIZE, GROUP).sum(axis=1)).max() > 0.01
  row = read_metrics(directory / "metrics.jsonl")[0]
  assert row["baseline/episodes"] == SIZE and row["rollout/episodes"] == SIZE * GROUP
  assert row["baseline/reward"] == pytest.approx(np.mean(expected[::GROUP]))
  assert row["reward/mean"] == pytest.approx(rewards.mean(), rel=1e-5)


def test_the_greedy_episode_takes_the_likeliest_tokens(finished):
  directory, _ = finished
  sampled, greedy = apart(list(_episodes(directory).values()))

  def log_probs(trajectories):
    return np.concatenate(
      [s.behaviour_log_probs[s.sampled] for t in trajectories for s in t.segments]
    )

  # Of 264 ids, nearly uniform: the likeliest is likelier than most that are drawn.
  assert np.mean(log_probs(sampled) < log_probs(greedy).min()) > 0.6


def test_a_replay_has_the_baselines_of_the_journal(finished):
  directory, _ = finished
  assert _make(directory).replay(_STEPS).identical


@pytest.mark.slow
def test_without_its_baselines_a_replay_has_other_bits(finished, monkeypatch):
  directory, _ = finished
  monkeypatch.setattr(
    "agentjax.signals.baseline._with_baseline", lambda t, greedy: _with_baseline(t, 0.0)
  )
  assert not _make(directory).replay(1).identical


class Crash(Exception):
  """Stands for a death in the middle of a rollout."""


@pytest.mark.slow
def test_a_crash_among_the_episodes_of_a_group_changes_nothing(finished, tmp_path):
  made, count = _make(tmp_path / "run"), 0
  with pytest.raises(Crash), made._session() as session:
    keep = session.journal.add_trajectory

    def dies(trajectory):
      nonlocal count
      keep(trajectory)
      count += 1
      if count == 14:
        raise Crash

    session.stream._playing.on_finish = dies
    session.train()
  assert _make(tmp_path / "run").train().finished
  assert _fingerprints(tmp_path / "run") == _fingerprints(finished[0])
  assert len(_episodes(tmp_path / "run")) == _STEPS * SIZE * (GROUP + 1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one_step_off", "async"])
def test_it_goes_with_other_schedules_and_with_selection(tmp_path, mode):
  schedule = ScheduleConfig(mode, 2 if mode == "async" else None)
  band = SelectionConfig(rule="band", score="reward_mean", above=0.07, refill=20)
  made = _make(tmp_path / "run", schedule, selection=band)
  assert made.train().finished and made.replay(_STEPS).identical
  rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
  assert all(r["rollout/episodes"] == GROUP * r["baseline/episodes"] for r in rows)


def test_a_group_whose_greedy_episode_failed_teaches_nothing():
  builder = TrajectoryBuilder(step=1, task_id=0, sample=0, source="x")
  builder.append_sampled([1, 2], [-1.0, -1.0], [0.5, 0.5], 0)
  member = builder.build(reward=Reward(1.0))
  failed = dataclasses.replace(member, sample=BASELINE, reward=Reward.invalid("no verdict"))
  for beside in ((), (failed,)):
    context = StepContext(1, lambda: None, beside)
    (learnt,), _ = GreedyBaseline().observe(context, [member])
    assert not learnt.reward.valid
  assert member.reward.value == 1.0


def test_stored_episodes_have_no_greedy_one():
  experiment = staged_experiment(ScheduleConfig())
  experiment.rl.objective = ObjectiveConfig.from_dict(preset("remax").to_dict())
  experiment.rl.rollouts, experiment.rl.old_log_probs = "somewhere", "recomputed"
  with pytest.raises(ConfigError, match=r"advantage\.centre=.baseline."):
    experiment.validate()
