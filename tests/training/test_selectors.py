"""Which groups are kept, and that runs refill, skip and replay accordingly."""

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.config import ConfigError
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.schedules import PiecewiseSchedule
from agentjax.training import TrainingError
from agentjax.training.journal import read_journal
from agentjax.training.metrics import read_metrics
from agentjax.training.selectors import (
  SelectionConfig,
  group_scores,
  keep_groups,
  select_groups,
)
from agentjax.trajectory.record import Reward, Segment, Status, Trajectory
from tests.training.stages import GROUP, SIZE, STEPS, run, staged_experiment, train_until_killed

GOLDEN = np.array([0.5, 0, 0.3, 0.45, 0.1, 0.49])


def kept(scores, **settings_):
  return np.flatnonzero(keep_groups(np.array(scores), SelectionConfig(**settings_))).tolist()


def test_golden_linear_top_p():
  assert kept(GOLDEN, rule="top_p", share=0.9) == [0, 2, 3, 5]


@pytest.mark.parametrize(
  "settings_, expected",
  [
    (dict(rule="all"), [0, 1, 2, 3, 4, 5]),
    (dict(rule="band", above=0.0), [0, 2, 3, 4, 5]),
    (dict(rule="band", above=0.1, below=0.49), [2, 3]),
    (dict(rule="top_k", share=0.5), [0, 5]),  # of the five that are not 0
    (dict(rule="top_k", share=0.5, keep_zeros=True), [0, 3, 5]),
    (dict(rule="top_k", share=0.01), [0]),
    (dict(rule="top_k", share=0.4, prefer="smallest", keep_zeros=True), [1, 4]),
    (dict(rule="min_p", share=0.9), [0, 3, 5]),
    # The softmax is .199, .197, .189, .163, .133, .120 from the best to the worst.
    (dict(rule="top_p_softmax", share=0.7, keep_zeros=True), [0, 2, 3, 5]),
    (dict(rule="top_p_softmax", share=0.9, keep_zeros=True), [0, 1, 2, 3, 4, 5]),
    (dict(rule="top_p", share=0.3, prefer="smallest"), [2, 3, 4]),
  ],
)
def test_rules(settings_, expected):
  assert kept(GOLDEN, **settings_) == expected


@pytest.mark.parametrize("rule", ["top_p", "top_p_softmax", "top_k", "min_p"])
def test_groups_that_agree_with_themselves_leave_nothing(rule):
  assert kept([0.0, 0.0, 0.0], rule=rule) == []
  assert kept([], rule=rule) == []


@settings(max_examples=60, deadline=None)
@given(
  st.lists(st.floats(0, 5), min_size=1, max_size=12),
  st.sampled_from(["top_p", "top_p_softmax", "top_k", "min_p"]),
  st.floats(0.05, 1.0),
  st.randoms(use_true_random=False),
)
def test_what_is_kept_is_never_worse_than_what_is_not_and_order_does_not_matter(
  scores, rule, share, random
):
  config = SelectionConfig(rule=rule, share=share)
  scores = np.array(scores)
  mask = keep_groups(scores, config)
  if mask.any() and not mask.all():
    assert scores[mask].min() >= scores[~mask].max()
  order = np.array(random.sample(range(len(scores)), len(scores)))
  again = keep_groups(scores[order], config)
  np.testing.assert_array_equal(np.sort(scores[order][again]), np.sort(scores[mask]))


@pytest.mark.parametrize(
  "settings_, named",
  [
    (dict(rule="band"), r"selection\.above"),
    (dict(rule="band", above=1.0, below=0.5), r"selection\.above"),
    (dict(rule="top_p", above=0.0), r"selection\.above"),
    (dict(rule="top_p", refill=2), r"selection\.refill"),
    (dict(rule="top_p", share=0.0), r"selection\.share"),
    (dict(rule="top_p", patience=0), r"selection\.patience"),
  ],
)
def test_settings_without_a_meaning_are_refused(settings_, named):
  with pytest.raises(ConfigError, match=named):
    SelectionConfig(**settings_).validate()


def episode(task, sample, reward, *, status=Status.OK, entropy=0.5, drawn=3):
  ids, zeros = np.zeros(drawn + 2, np.int32), np.zeros(drawn + 2, np.float32)
  sampled = np.arange(drawn + 2) >= 2
  entropies = np.where(sampled, np.float32(entropy), 9)
  segment = Segment("assistant", ids, sampled, zeros, zeros, entropies, ids)
  value = Reward.invalid("broken") if reward is None else Reward(reward)
  return Trajectory(1, task, sample, "x", [segment], status=status, reward=value)


def test_scores_of_groups_leave_invalid_members_out():
  members = [
    episode(4, 0, 1.0, entropy=0.2, drawn=2),
    episode(4, 1, 0.0, entropy=0.6, drawn=4),
    episode(4, 2, None, status=Status.ENV_ERROR, entropy=5.0, drawn=50),
    episode(2, 0, 0.1),
    episode(2, 1, 0.1),
    episode(7, 0, 3.0),
  ]
  expected = {
    "reward_std": [0.0, 0.5**0.5, 0.0],
    "reward_mean": [0.1, 0.5, 3.0],
    "reward_sum": [0.2, 1.0, 3.0],
    "entropy": [0.5, 0.4, 0.5],
    "entropy_std": [0.0, 0.08**0.5, 0.0],
    "length": [3.0, 3.0, 3.0],
  }
  for score, values in expected.items():
    keys, scores = group_scores(members, score)
    assert keys == [(1, 2), (1, 4), (1, 7)]
    np.testing.assert_allclose(scores, values, rtol=1e-6, atol=1e-7)
  chosen, metrics = select_groups(members, SelectionConfig(rule="band", above=0.0))
  assert [t.task_id for t in chosen] == [4, 4, 4]
  assert metrics["selection/groups"] == 1.0


def test_the_loss_of_a_step_with_fewer_groups_may_shrink():
  factors = [SelectionConfig(rescale=r).loss_factor(2, 8) for r in ("none", "linear", "sqrt")]
  assert factors == [1.0, 0.25, 0.5]


# Whole runs: groups whose mean reward is above ``LEAST``, about half of them, are trained on.

LEAST = 0.07

BAND = SelectionConfig(rule="band", score="reward_mean", above=LEAST, refill=20)
SCHEDULES = {
  "sync": ScheduleConfig(),
  "one_step_off": ScheduleConfig("one_step_off"),
  "async": ScheduleConfig("async", 2),
}


def with_selection(selection, schedule="sync", **changes):
  rl = dataclasses.replace(staged_experiment(SCHEDULES[schedule]).rl, selection=selection)
  return dict(schedule=SCHEDULES[schedule], rl=dataclasses.replace(rl, **changes))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Directory of a run with refill under a schedule."""
  made = {}

  def finished(schedule):
    if schedule not in made:
      made[schedule] = tmp_path_factory.mktemp("runs") / schedule
      assert run(made[schedule], **with_selection(BAND, schedule)).train().finished
    return made[schedule]

  return finished


def recorded(directory):
  return {r.step: r for kind, r in read_journal(directory / "journal.log") if kind == "step"}


def groups_of(directory):
  """Mean reward of every group that was sampled, and the groups of every step."""
  rewards = collections.defaultdict(list)
  for kind, value in read_journal(directory / "journal.log"):
    if kind == "trajectory":
      rewards[value.address[:2]].append(value.reward.value)
  trained = [{a[:2] for a in r.episodes} for _, r in sorted(recorded(directory).items())]
  return {key: np.mean(values) for key, values in rewards.items()}, trained


_SLOW = pytest.mark.slow
_EACH = ["sync", pytest.param("one_step_off", marks=_SLOW), pytest.param("async", marks=_SLOW)]


@pytest.mark.parametrize("schedule", _EACH)
def test_refused_groups_are_replaced_and_every_step_is_full(finished, schedule):
  means, trained = groups_of(finished(schedule))
  assert [len(groups) for groups in trained] == [SIZE] * STEPS
  used = set().union(*trained)
  assert len(used) == SIZE * STEPS  # none twice
  assert all(means[key] > LEAST for key in used)
  refused = {key for key, mean in means.items() if mean <= LEAST}
  assert refused and not refused & used
  rows = read_metrics(finished(schedule) / "metrics.jsonl")
  assert 0 < sum(r["selection/refused_groups"] for r in rows) <= len(refused)
  assert all(r["selection/groups"] == SIZE for r in rows)
  # Rewards are reported of all that was sampled, not of what was kept alone.
  if schedule == "sync":
    expected = sum(means.values()) / len(means)
    episodes = [r["rollout/episodes"] for r in rows]
    assert sum(episodes) == len(means) * GROUP
    assert np.average([r["reward/mean"] for r in rows], weights=episodes) == pytest.approx(expected)
  assert run(finished(schedule), **with_selection(BAND, schedule)).replay(STEPS).identical


def test_in_sync_the_groups_are_the_first_in_order_that_pass(finished):
  means, trained = groups_of(finished("sync"))
  order = sorted(means)  # rounds, then tasks: as they begin
  passed = [key for key in order if means[key] > LEAST]
  assert [sorted(groups) for groups in trained] == [
    passed[i : i + SIZE] for i in range(0, SIZE * STEPS, SIZE)
  ]
  assert order[-1] == passed[-1]  # nothing began that was not needed


@pytest.mark.slow
@pytest.mark.parametrize("schedule", _EACH[:2])
def test_a_crash_changes_nothing(finished, tmp_path, schedule):
  train_until_killed(run(tmp_path / "run", **with_selection(BAND, schedule)), 6)
  assert run(tmp_path / "run", **with_selection(BAND, schedule)).train().finished
  assert recorded(tmp_path / "run") == recorded(finished(schedule))


@pytest.mark.parametrize("schedule", _EACH)
def test_without_any_group_steps_are_skipped_until_patience_ends(tmp_path, schedule):
  least = PiecewiseSchedule(values=(2.0, 3.0), at=(1,))
  nothing = SelectionConfig(rule="band", score="reward_mean", above=least, refill=1, patience=3)
  settings_ = with_selection(nothing, schedule)
  with pytest.raises(TrainingError, match=r"step 3: 3 steps in a row had no group"):
    run(tmp_path / "run", **settings_).train()
  done = recorded(tmp_path / "run")
  assert sorted(done) == [1, 2, 3] and len({r.fingerprint for r in done.values()}) == 1
  assert not any(r.episodes for r in done.values())
  assert run(tmp_path / "run", **settings_).replay(2).identical
  if schedule == "sync":
    means, _ = groups_of(tmp_path / "run")
    assert len(means) == 3 * 2 * SIZE  # each group had one in its place


def test_a_rule_over_groups_trains_on_a_part_of_them_as_its_schedule_says(tmp_path):
  share = PiecewiseSchedule(values=(0.5, 1.0), at=(4,))
  some = SelectionConfig(rule="top_k", share=share, keep_zeros=True)
  run(tmp_path / "run", **with_selection(some)).train()
  _, trained = groups_of(tmp_path / "run")
  assert [len(groups) for groups in trained] == [1] * 4 + [SIZE] * 2
  rewards = collections.defaultdict(list)
  for kind, value in read_journal(tmp_path / "run" / "journal.log"):
    if kind == "trajectory":
      rewards[value.address[:2]].append(value.reward.value)
  for step, groups in enumerate(trained[:4], 1):
    std = {key: np.std(v) for key, v in rewards.items() if key[0] == step}
    assert groups == {max(std, key=std.get)}
