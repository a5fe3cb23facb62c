"""Whole runs with schedules of the objective, the reward and the rollout."""

import dataclasses
import json

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.rewards import RewardConfig
from agentjax.rewards.formula import TERMS
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.schedules import (
  LinearSchedule,
  PiecewiseSchedule,
  Schedule,
  ThresholdSchedule,
)
from agentjax.training.checkpoint import CheckpointStore
from agentjax.training.journal import read_journal
from agentjax.training.metrics import read_metrics
from tests.training import stages
from tests.training.figures import without_times
from tests.training.stages import STEPS, fingerprints, train_until_killed

SYNC, ONE = ScheduleConfig(), ScheduleConfig("one_step_off")
LOSS = "scheduled/rl.objective.policy_loss"


@dataclasses.dataclass(unsafe_hash=True)
class Follow(Schedule):
  """The moving average of the mean reward itself: another number at every step."""

  metric: str = "reward/mean"

  def ends(self):
    return -1.0, 1.0

  def number(self, step, state):
    return 0.01 if state is None else state

  def observe(self, state, value):
    return value if state is None else 0.7 * state + 0.3 * value


def scheduled_run(directory, schedule=SYNC, *, high=0.4, metric="policy/entropy"):
  reward = RewardConfig(
    parts=("environment", "sampled_tokens"),
    formula="environment - w * sampled_tokens / 24",
    numbers={"w": LinearSchedule(start=0.5, steps=4)},
  )
  experiment = stages.staged_experiment(schedule)
  loss = dataclasses.replace(
    experiment.rl.objective.policy_loss,
    entropy_coefficient=Follow(),
    positive_nll_coefficient=PiecewiseSchedule(values=(0.0, high), at=(3,)),
  )
  advantage = dataclasses.replace(
    experiment.rl.objective.advantage,
    multiplier=ThresholdSchedule(metric=metric, values=(1.0, 2.0), at=(1.0,), decay=0.5),
  )
  objective = dataclasses.replace(experiment.rl.objective, policy_loss=loss, advantage=advantage)
  rl = dataclasses.replace(experiment.rl, objective=objective, minibatches=2)
  rollout = dataclasses.replace(
    experiment.rollout, max_tokens_per_turn=PiecewiseSchedule(values=(6, 12), at=(2,))
  )
  return stages.run(directory, schedule, rl=rl, rollout=rollout, reward=reward)


def rows(directory):
  return without_times(read_metrics(directory / "metrics.jsonl"))


def episodes(directory):
  found = [t for kind, t in read_journal(directory / "journal.log") if kind == "trajectory"]
  return sorted(found, key=lambda t: t.address)


def states(directory):
  steps = {r.step: r for kind, r in read_journal(directory / "journal.log") if kind == "step"}
  return [steps[i].schedules for i in sorted(steps)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Directory of an uninterrupted run of a mode; and how often its programs were compiled."""
  made = {}

  def finished(schedule):
    if schedule not in made:
      directory = tmp_path_factory.mktemp("runs") / "run"
      with scheduled_run(directory, schedule)._session() as session:
        assert session.train().finished
        (only,) = session.learner._phases["policy"][0].passes
        made[schedule] = directory, (only.prepare._cache_size(), only.update._cache_size())
    return made[schedule]

  return finished


def test_every_step_has_the_numbers_of_its_schedules_and_no_program_is_compiled_for_them(finished):
  directory, compiled = finished(SYNC)
  assert compiled == (1, 1)
  found = rows(directory)
  for name, expected in (
    (f"{LOSS}.positive_nll_coefficient", [0.0] * 3 + [0.4] * 3),
    ("scheduled/reward.numbers.w", [0.5, 0.375, 0.25, 0.125, 0.0, 0.0]),
    ("scheduled/rollout.max_tokens_per_turn", [6.0] * 2 + [12.0] * 4),
  ):
    assert [row[name] for row in found] == pytest.approx(expected), name
  follow = Follow()
  state = None
  for row in found:
    assert row[f"{LOSS}.entropy_coefficient"] == follow.number(0, state)
    state = follow.observe(state, row["reward/mean"])
  assert len({row[f"{LOSS}.entropy_coefficient"] for row in found}) == STEPS
  multipliers = [row["scheduled/rl.objective.advantage.multiplier"] for row in found]
  assert multipliers == [1.0] + [2.0] * (STEPS - 1)  # bytes of an untrained policy: 5.5 nats


def test_episodes_are_played_and_paid_with_the_numbers_of_their_step(finished):
  directory, _ = finished(SYNC)
  drawn = {step: [] for step in range(1, STEPS + 1)}
  for one in episodes(directory):
    weight = (0.5, 0.375, 0.25, 0.125, 0.0, 0.0)[one.step - 1]
    terms, tokens = dict(one.metadata[TERMS]), one.reward_parts["sampled_tokens"].value
    assert sum(terms.values()) == one.reward.value
    assert terms["environment"] == one.reward_parts["environment"].value
    assert terms["-(w * sampled_tokens / 24)"] == pytest.approx(-weight * tokens / 24)
    drawn[one.step].append(max(int(s.sampled.sum()) for s in one.segments))
  assert max(drawn[1] + drawn[2]) <= 6 < max(np.concatenate([drawn[s] for s in (3, 4, 5, 6)]))


def test_a_number_acts_on_the_update_from_its_step_on(finished, tmp_path):
  directory, _ = finished(SYNC)
  scheduled_run(tmp_path / "run", high=0.3).train()
  ours, theirs = fingerprints(tmp_path / "run"), fingerprints(directory)
  assert ours[:3] == theirs[:3] and ours[3] != theirs[3]


@pytest.mark.parametrize(
  ("schedule", "step"),
  [
    pytest.param(SYNC, 6, id="sync, from step 4"),
    pytest.param(ONE, 4, id="one step off, from 0", marks=pytest.mark.slow),
  ],
)
def test_a_run_that_crashed_in_the_middle_of_schedules_ends_with_the_same_bits(
  finished, tmp_path, schedule, step
):
  straight, _ = finished(schedule)
  train_until_killed(scheduled_run(tmp_path / "run", schedule), step)
  assert scheduled_run(tmp_path / "run", schedule).train().finished
  assert fingerprints(tmp_path / "run") == fingerprints(straight)
  assert rows(tmp_path / "run") == rows(straight)
  assert states(tmp_path / "run") == states(straight)
  assert [t.reward for t in episodes(tmp_path / "run")] == [t.reward for t in episodes(straight)]


def test_a_run_goes_on_from_a_checkpoint_that_is_older_than_schedules(tmp_path, monkeypatch):
  begin_save = CheckpointStore.begin_save

  def without(store, step, state, host, *pending):
    host.pop("schedules")
    begin_save(store, step, state, host, *pending)

  monkeypatch.setattr(CheckpointStore, "begin_save", without)
  train_until_killed(stages.run(tmp_path / "run", SYNC), 5)  # the checkpoint is of step 4
  assert stages.run(tmp_path / "run", SYNC).train().finished


@pytest.mark.parametrize("step", [3, STEPS])
def test_a_step_is_replayed_with_the_numbers_that_it_had(finished, step):
  directory, _ = finished(SYNC)
  assert scheduled_run(directory).replay(step).identical


def test_the_journal_holds_the_moving_averages(finished):
  directory, _ = finished(SYNC)
  found, average = rows(directory), None
  for i, state in enumerate(states(directory)):
    entropy = found[i]["policy/entropy"]
    average = entropy if average is None else 0.5 * average + 0.5 * entropy
    assert state["rl.objective.advantage.multiplier"] == {"average": average, "range": 1}
    if i + 1 < STEPS:
      follow = state["rl.objective.policy_loss.entropy_coefficient"]
      assert follow == found[i + 1][f"{LOSS}.entropy_coefficient"]


def test_a_metric_that_no_step_has_is_refused_with_the_field_and_near_names(tmp_path):
  with pytest.raises(ConfigError, match=r"multiplier\.metric='policy/entrophy'.*policy/entropy"):
    scheduled_run(tmp_path / "run", metric="policy/entrophy").train()


def test_a_run_does_not_go_on_with_another_schedule(finished):
  directory, _ = finished(SYNC)
  with pytest.raises(ConfigError, match=r"positive_nll_coefficient\.values is .*0\.3.* here"):
    scheduled_run(directory, high=0.3).train()


def test_a_saved_config_of_schedules_gives_the_same_experiment(finished):
  directory, _ = finished(SYNC)
  saved = json.loads((directory / "config.json").read_text())
  assert saved["reward"]["numbers"] == {"w": {"use": "linear", "start": 0.5, "steps": 4}}
  assert saved["rollout"]["max_tokens_per_turn"] == {
    "use": "piecewise", "values": [6, 12], "at": [2]
  }  # fmt: skip
