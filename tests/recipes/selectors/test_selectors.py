"""Selectors of episodes: what a step trains on, by hand and through saved states."""

import collections
import dataclasses
import json

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, prepare
from agentjax.recipes.credit import EntropyTerm, ToolSuccessTerm
from agentjax.recipes.selectors import KeepConfig, PriorityConfig, QuotasConfig, SuccessesConfig
from agentjax.recipes.selectors.fifo import Successes
from agentjax.recipes.selectors.keep import Keep, shares
from agentjax.recipes.selectors.priority import PriorityReplay
from agentjax.recipes.selectors.quotas import Quotas
from agentjax.rollout import RolloutConfig
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.schedules import LinearSchedule
from agentjax.signals.signal import StepContext
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.experiment import Experiment, RLStage
from agentjax.training.metrics import read_metrics
from agentjax.training.selectors import SelectionConfig
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.packing import pack, to_sequences
from agentjax.trajectory.record import Reward, Status
from tests.training.stages import fingerprints, run, staged_experiment, train_until_killed


def episode(reward, sample=0, *, step=1, task=0, source="x", length=2, version=0, **parts):
  builder = TrajectoryBuilder(step=step, task_id=task, sample=sample, source=source)
  builder.append("user", [1, 2])
  builder.append_sampled([3] * length, [-0.5] * length, [0.5] * length, version)
  made = builder.build(reward=Reward(reward))
  made.reward_parts = {name: Reward(value) for name, value in parts.items()}
  return made


def group(rewards, **settings):
  return [episode(r, i, **settings) for i, r in enumerate(rewards)]


def observe(signal, episodes, step=1):
  return signal.observe(StepContext(step, None), episodes)


def advantages(episodes):
  batch = pack(to_sequences(episodes), row_length=128, pad_id=0)
  found = np.asarray(prepare(batch, ObjectiveConfig())[0].advantages)
  ids = np.asarray(batch.segment_ids)
  return [found[ids == i + 1].max(where=True, initial=-9) for i in range(len(episodes))], batch


# Successes in the place of failures.


def test_a_stored_success_gives_a_failed_group_a_gradient():
  """Eight failures have the advantage 0; with one injected success 2.475 and -.354 (ddof 1)."""
  signal = Successes(SuccessesConfig())
  observe(signal, group([1.0, 0.0], step=1))
  failed = group([0.0] * 8, step=2, version=5)
  assert advantages(failed)[0] == [0.0] * 8
  mixed, metrics = observe(signal, failed, 2)
  assert metrics == {"successes/kept": 1.0, "successes/given": 1.0, "successes/failed": 1.0}
  found, batch = advantages(mixed)
  values = np.array([1.0] + [0.0] * 7)
  standard = (values - values.mean()) / values.std(ddof=1)
  np.testing.assert_allclose(found[0], standard[0], rtol=1e-4)
  assert mixed[0].address == (2, 0, 0) and mixed[0].columns["replayed"]
  # Its tokens are those of the weights that sampled them, and so are their log-probs.
  assert mixed[0].segments[-1].versions.tolist() == [0, 0]
  assert len(set(np.asarray(batch.groups)[:8].tolist())) == 1


@pytest.mark.parametrize(
  "rewards", [[0.0] * 7 + [1.0], [0.15] * 8, [0.0] * 31 + [0.11], [0.5, 0.5]]
)
def test_nothing_is_given_to_a_group_with_a_success(rewards):
  signal = Successes(SuccessesConfig())
  observe(signal, group([1.0], step=1))
  made = group(rewards, step=2)
  mixed, metrics = observe(signal, made, 2)
  assert metrics["successes/given"] == 0 and all(a is b for a, b in zip(mixed, made, strict=True))


def test_a_success_goes_to_its_own_task_and_the_oldest_is_forgotten():
  signal = Successes(SuccessesConfig(capacity=2))
  for step, length in enumerate((2, 3, 4)):
    observe(signal, group([1.0], step=step, length=length))
  other, metrics = observe(signal, group([0.0] * 4, step=9, task=1), 9)
  assert metrics["successes/given"] == 0 and not any(t.columns for t in other)
  lengths = set()
  for step in range(10, 20):
    mixed, _ = observe(signal, group([0.0] * 4, step=step), step)
    lengths.add(len(mixed[0].segments[-1]))
  assert lengths == {3, 4}


def test_successes_are_state_and_the_choice_has_an_address():
  signal = Successes(SuccessesConfig())
  observe(signal, [episode(1.0, i, length=2 + i) for i in range(5)])
  again = Successes(SuccessesConfig())
  again.set_state(json.loads(json.dumps(signal.get_state())))
  for step in (3, 4, 5):
    failed = group([0.0] * 4, step=step)
    ours, theirs = (observe(s, failed, step)[0][0] for s in (signal, again))
    assert len(ours.segments[-1]) == len(theirs.segments[-1])


def test_a_run_that_would_drop_failed_groups_or_forget_log_probs_is_refused():
  config = SuccessesConfig()
  stage = RLStage(selection=SelectionConfig(rule="band", above=0.0))
  with pytest.raises(ConfigError, match=r"rl\.selection\.rule='band'.*'all'"):
    config.check_run(Experiment(rl=stage), "config.rl.signals[0]")
  stage = RLStage(old_log_probs="recomputed")
  with pytest.raises(ConfigError, match=r"rl\.old_log_probs='recomputed'"):
    config.check_run(Experiment(rl=stage), "config.rl.signals[0]")


# Groups of earlier steps.


def test_a_group_returns_whole_and_has_the_advantages_that_it_had():
  signal = PriorityReplay(PriorityConfig(groups=1))
  first = group([1.0, 0.0, 0.0], step=1)
  before, _ = advantages(first)
  assert observe(signal, first)[0] == first
  new = group([0.0, 1.0], step=2, task=7)
  mixed, metrics = observe(signal, new, 2)
  assert metrics["priority/given"] == 1 and metrics["priority/age"] == 1
  assert [t.address for t in mixed[2:]] == [(1, 0, 0), (1, 0, 1), (1, 0, 2)]
  np.testing.assert_allclose(advantages(mixed)[0][2:], before)
  assert all(t.columns["replayed"] for t in mixed[2:])
  # Once only: the next step has the group of step 2 alone.
  later, _ = observe(signal, group([0.0, 1.0], step=3, task=8), 3)
  assert [t.address[:2] for t in later[2:]] == [(2, 7), (2, 7)]


def _drawn(settings, groups, at, times=300):
  """How often each task is drawn, each time by another seed from the same memory."""
  counts = collections.Counter()
  for seed in range(times):
    signal = PriorityReplay(PriorityConfig(groups=1, seed=seed, **settings))
    signal.set_state(_memory(groups))
    mixed, _ = observe(signal, [], at)
    counts[mixed[0].task_id] += 1
  return counts


def _memory(groups):
  """The state after steps none of which trained on a group again."""
  found = []
  for step, task, rewards in groups:
    signal = PriorityReplay(PriorityConfig())
    observe(signal, group(rewards, step=step, task=task), step)
    found += signal.get_state()
  return found


def test_large_advantages_and_young_groups_come_first():
  sizes = [(1, 1, [0.0, 2.0]), (1, 2, [0.0, 8.0])]  # mean |A| of 1 and of 4
  counts = _drawn({"decay": 1.0}, sizes, 2)
  assert counts[2] / counts.total() == pytest.approx(0.8, abs=0.07)
  counts = _drawn({"decay": 1.0, "exponent": 0.0}, sizes, 2)
  assert counts[2] / counts.total() == pytest.approx(0.5, abs=0.09)


def test_age_lowers_the_chance_and_then_ends_it():
  """Of equal groups of ages 3 and 1 with decay 1/2 the younger has four times the chance."""
  two = [(1, 1, [0.0, 1.0]), (3, 2, [0.0, 1.0])]
  counts = _drawn({"decay": 0.5}, two, 4)
  assert counts[2] / counts.total() == pytest.approx(0.8, abs=0.07)
  late = PriorityReplay(PriorityConfig(most_age=3))
  observe(late, group([0.0, 1.0], step=1), 1)
  assert len(observe(late, [], 4)[0]) == 2
  late = PriorityReplay(PriorityConfig(most_age=3))
  observe(late, group([0.0, 1.0], step=1), 1)
  assert observe(late, [], 5)[0] == []


def test_the_least_is_forgotten_where_the_memory_is_full():
  signal = PriorityReplay(PriorityConfig(capacity=1))
  large, small = group([0.0, 8.0], task=1), group([0.0, 1.0], task=2)
  _, metrics = observe(signal, [*large, *small])
  assert metrics["priority/kept"] == 1
  assert {t.task_id for t in observe(signal, [], 2)[0]} == {1}


def test_equal_rewards_are_not_kept_and_states_come_back():
  signal = PriorityReplay(PriorityConfig(groups=2))
  masked = group([0.0, 1.0], task=3)
  masked[0].status = Status.ENV_ERROR
  _, metrics = observe(signal, [*group([1.0, 1.0]), *group([0.0, 1.0], task=2), *masked])
  assert metrics["priority/kept"] == 1
  again = PriorityReplay(PriorityConfig(groups=2))
  again.set_state(json.loads(json.dumps(signal.get_state())))
  ours, theirs = (observe(s, [], 2)[0] for s in (signal, again))
  assert [t.address for t in ours] == [t.address for t in theirs] == [(1, 2, 0), (1, 2, 1)]


# Quotas.


def test_a_source_keeps_its_most_telling_groups():
  made = [
    *group([0.0, 0.1], task=0, source="easy"),
    *group([0.0, 1.0], task=1, source="easy"),
    *group([0.0, 0.5], task=2, source="easy"),
    *group([1.0, 1.0], task=3, source="hard"),
  ]
  kept, metrics = observe(Quotas(QuotasConfig(most={"easy": 2})), made)
  assert [t.task_id for t in kept] == [1, 1, 2, 2, 3, 3]
  assert metrics == {"quotas/easy": pytest.approx(2 / 3)}
  assert [t.source for t in observe(Quotas(QuotasConfig(most={"easy": 0})), made)[0]] == [
    "hard"
  ] * 2


def test_a_quota_may_be_a_schedule():
  config = QuotasConfig(most={"easy": LinearSchedule(start=2.0, end=1.0, steps=10)})
  config.validate()
  made = [*group([0.0, 1.0], task=0, source="easy"), *group([0.0, 0.5], task=1, source="easy")]

  def at(step):
    now = QuotasConfig(most={"easy": config.most["easy"].number(step, None)})
    context = StepContext(step, None, at=lambda settings: now)
    return len(Quotas(config).observe(context, made)[0])

  assert (at(0), at(10)) == (4, 2)
  with pytest.raises(ConfigError, match=r"most\['easy'\]"):
    QuotasConfig(most={"easy": LinearSchedule(start=2.0, end=-1.0, steps=10)}).validate()


# Strata and ranks.


@pytest.mark.parametrize(
  ("sizes", "keep", "floor", "expected"),
  [
    ([16, 16], 16, 1, [8, 8]),
    ([30, 2], 16, 0, [15, 1]),
    ([31, 1], 16, 1, [15, 1]),
    ([30, 1, 1], 8, 2, [6, 1, 1]),
    ([3, 3, 3], 2, 1, [1, 1, 0]),
    ([5], 2, 1, [2]),
  ],
)
def test_strata_keep_their_share_and_a_floor(sizes, keep, floor, expected):
  assert shares(np.array(sizes), keep, floor) == expected


def test_the_mean_reward_stays_and_the_errors_fall():
  """GRPO-RoC's effect: the kept successes made fewer errors at the same mean reward."""
  random = np.random.default_rng(0)
  errors = random.random(32)
  made = [episode(float(i % 2), i, errors=float(e)) for i, e in enumerate(errors)]
  signal = Keep(KeepConfig(keep=16, order="errors if reward > 0 else 0"))
  kept, metrics = observe(signal, made)
  rewards = [t.reward.value for t in kept]
  assert len(kept) == 16 and np.mean(rewards) == 0.5
  good = [t.reward_parts["errors"].value for t in kept if t.reward.value]
  assert np.mean(good) < 0.7 * errors[1::2].mean()
  # Failures are the first ones, without regard to errors.
  assert [t.sample for t in kept if not t.reward.value] == list(range(0, 16, 2))
  assert metrics["keep/order_kept"] < metrics["keep/order"]


def test_short_successes_stand_against_long_failures():
  """Covariance of advantage and length: 0 for the whole group, below 0 for what is kept."""
  made = [episode(float(i < 5), i, length=2 + i % 5) for i in range(10)]
  signal = Keep(KeepConfig(keep=4, order="tokens if reward > 0 else -tokens"))
  kept, _ = observe(signal, made)
  assert [(t.reward.value, len(t.segments[-1])) for t in kept] == [(1, 2), (1, 3), (0, 5), (0, 6)]


def test_ranks_keep_the_extremes_and_a_draw_prefers_low_orders():
  made = group([0.0, 0.4, 0.5, 0.6, 1.0])
  signal = Keep(KeepConfig(keep=2, strata="", order="-max(reward - 0.5, 0.5 - reward)"))
  assert [t.reward.value for t in observe(signal, made)[0]] == [0.0, 1.0]
  counts = collections.Counter()
  for seed in range(300):
    drawn = Keep(KeepConfig(keep=1, strata="", order="errors", choose="drawn", seed=seed))
    two = [episode(0.0, 0, errors=0.0), episode(0.0, 1, errors=0.9)]
    counts[observe(drawn, two)[0][0].sample] += 1
  assert counts[0] / 300 == pytest.approx(10 / 11, abs=0.05)


def test_groups_without_a_verdict_are_never_kept():
  made = group([0.0, 1.0, 1.0, 0.0])
  made[1].status = Status.VERIFIER_ERROR
  kept, _ = observe(Keep(KeepConfig(keep=2)), made)
  assert 1 not in [t.sample for t in kept] and len(kept) == 2


def test_a_formula_of_unknown_parts_is_refused():
  experiment = Experiment(rollout=RolloutConfig(group_size=16))
  with pytest.raises(ConfigError, match=r"order='mistakes'.*calls, exact_match"):
    KeepConfig(order="mistakes").check_run(experiment, "config.rl.signals[0]")
  with pytest.raises(ConfigError, match=r"keep=16.*less than"):
    KeepConfig(keep=16).check_run(experiment, "config.rl.signals[0]")


# In a run.


def _run(directory, **changes):
  signals = (KeepConfig(keep=3, strata="", order="tokens"), PriorityConfig(groups=1))
  objective = ObjectiveConfig(AdvantageConfig(terms=(EntropyTerm(), ToolSuccessTerm())))
  rl = dataclasses.replace(
    staged_experiment(ScheduleConfig()).rl, signals=signals, objective=objective, **changes
  )
  return run(directory, ScheduleConfig(), rl=rl, checkpoint=CheckpointConfig(every=2))


def test_a_run_keeps_three_of_four_trains_on_groups_again_and_replays(tmp_path):
  made = _run(tmp_path / "run", steps=3)
  assert made.train().finished
  rows = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "priority/given" in r]
  assert [r["priority/given"] for r in rows] == [0, 1, 1]
  assert [r["keep/share"] for r in rows] == [0.75] * 3
  assert [r["tokens/replayed"] > 0 for r in rows if "tokens/replayed" in r] == [True, True]
  assert made.replay(3).identical


@pytest.mark.slow
def test_a_run_that_died_goes_on_with_what_it_had_kept(tmp_path, monkeypatch):
  assert _run(tmp_path / "straight", steps=5).train().finished
  train_until_killed(_run(tmp_path / "cut", steps=5), 4)
  assert _run(tmp_path / "cut", steps=5).train().finished
  assert fingerprints(tmp_path / "cut") == fingerprints(tmp_path / "straight")
  monkeypatch.setattr(PriorityReplay, "set_state", lambda signal, state: None)
  assert not _run(tmp_path / "cut", steps=5).replay(5).identical
