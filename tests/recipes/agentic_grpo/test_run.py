"""Agentic GRPO in a run: two updates a step, of turns compared with turns of one number."""

import dataclasses

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives import ObjectiveConfig
from agentjax.recipes.agentic_grpo import StagedConfig
from agentjax.recipes.agentic_grpo.rewards import StageRewards
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.signals.signal import BatchContext, StepContext, order_signals
from agentjax.training import Experiment, Run
from agentjax.training.journal import JournalReader
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.packing import PackingError, pack, to_sequences
from agentjax.trajectory.record import Reward
from tests.signals.tracing import trace
from tests.training.stages import (
  GROUP,
  PaidDigits,
  fingerprints,
  run,
  staged_experiment,
  train_until_killed,
)

_SYNC = ScheduleConfig()


def _episode(paid, total, sample=0):
  builder = TrajectoryBuilder(step=1, task_id=0, sample=sample, source="x")
  builder.append("user", [1, 2])
  rewards: list[float | None] = [None]
  for reward in paid:
    builder.append_sampled([4, 5], [-1.0, -1.0], [0.5, 0.5], 0)
    builder.append("user", [6])
    rewards += [reward, None]
  value = Reward.invalid("no verdict") if total is None else Reward(total)
  return builder.build(reward=value, turn_rewards={"x": rewards})


def _staged_batch():
  """A signal of four stages, and the context and batch of three episodes that it has seen."""
  signal = StageRewards("x", 4)
  order_signals([signal])  # registers its columns
  episodes = [
    _episode([0.1, None, 0.3], 9.0),
    _episode([0.5], 7.0, sample=1),
    _episode([0.2, 0.4], None, sample=2),
  ]
  sequences = to_sequences(signal.observe(StepContext(1, None), episodes)[0])
  batch = pack(sequences, row_length=32, pad_id=0)
  return signal, BatchContext(1, None, sequences, batch, None, None), batch


def test_the_last_turn_is_the_last_stage_however_many_there_were():
  signal, context, batch = _staged_batch()
  rewards, known, stages = signal(context, {}, batch).columns.values()
  np.testing.assert_allclose(rewards[0], [0.1, 0, 0, 9], atol=1e-7)
  np.testing.assert_array_equal(known[0], [True, False, False, True])
  np.testing.assert_array_equal(known[1], [False, False, False, True])
  np.testing.assert_array_equal(known[2], [True, False, False, False])
  own = np.asarray(stages)[np.asarray(batch.segment_ids) == 1]
  np.testing.assert_array_equal(own, [-1, -1, 0, 0, -1, 1, 1, -1, 3, 3, -1])
  with pytest.raises(PackingError, match="3 turns for 2 stages"):
    StageRewards("x", 2)(context, {}, batch)


def test_stages_are_computed_where_the_batch_is():
  signal, context, batch = _staged_batch()
  traced = trace(lambda given: signal(context, {}, given).columns, batch)
  assert {k: (v.shape, v.dtype.name) for k, v in traced.items()} == {
    "stage_rewards": ((3, 4), "float32"),
    "stages_known": ((3, 4), "bool"),
    "stages": (batch.token_ids.shape, "int32"),
  }


def _settings(**staged):
  rl = dataclasses.replace(
    staged_experiment(_SYNC).rl,
    steps=2,
    objective=ObjectiveConfig(),
    passes=StagedConfig(**staged),
  )
  return dict(world=PaidDigits, rl=rl)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Directory of a run; (addresses, stages by name of the update, advantages) of its first step."""
  directory, seen = tmp_path_factory.mktemp("staged") / "run", {}
  with run(directory, _SYNC, **_settings())._session() as session:
    apply, step = session.learner._apply, session.learner.rl_step

    def looking(update, state, one, number):
      name, prepared = ("immediate", "correction")[number], one.ready[number].prepared
      values = np.asarray(prepared.advantages), np.asarray(prepared.weights)
      seen[name, len(seen) // 2] = (one.packed, *values)
      return apply(update, state, one, number)

    order = []

    def noting(state, trajectories, number):
      order.append([t.address for t in trajectories])
      return step(state, trajectories, number)

    session.learner._apply, session.learner.rl_step = looking, noting
    state = session.train()
    assert state.finished
  return directory, order, seen


def _by_hand(values):
  spread = max(values) > min(values)
  return (np.array(values) - np.mean(values)) / (np.std(values, ddof=1) + 1e-6) * spread


def test_a_first_turn_learns_from_what_it_earned_and_then_from_what_it_led_to(finished):
  directory, order, seen = finished
  assert set(seen) == {(n, s) for n in ("immediate", "correction") for s in (0, 1)}
  episodes = JournalReader(directory / "journal.log").trajectories(lambda _: True)
  told_apart = 0
  for first in range(0, len(order[0]), GROUP):
    addresses = order[0][first : first + GROUP]
    paid = {}
    for i, address in enumerate(addresses):
      t = episodes[address]
      turns = [k for k, s in enumerate(t.segments) if s.sampled.any()]
      if len(turns) == 2:
        paid[i] = t.turn_rewards["environment"][turns[0]], t.reward.value
    if len(paid) < 2:
      continue
    at_once = _by_hand([r for r, _ in paid.values()])
    later = _by_hand([final - r for r, final in paid.values()])
    for name, expected in (("immediate", at_once), ("correction", later)):
      batch, advantages, weights = seen[name, 0]
      for i, value in zip(paid, expected, strict=True):
        inside = (np.asarray(batch.segment_ids) == first + i + 1) & (np.asarray(batch.turns) == 0)
        inside &= np.asarray(batch.versions) >= 0
        np.testing.assert_allclose(advantages[inside], value, atol=2e-4)
        assert (weights[inside] > 0).all()
        told_apart += abs(value) > 0.1
  assert told_apart > 4


def test_two_updates_a_step_are_reported_and_replayed(finished):
  directory, *_ = finished
  row = read_metrics(directory / "metrics.jsonl")[1]
  assert row["grad_norm"] > 0 and row["correction/grad_norm"] > 0
  assert row["correction/advantage/mean_abs"] != row["advantage/mean_abs"]
  # The second update sees the policy that the first has moved.
  assert row["correction/policy/kl_old"] != row["policy/kl_old"]
  made = run(directory, _SYNC, **_settings())
  assert made.replay(2).identical


@pytest.mark.slow
def test_killed_before_an_update_it_does_both_again_to_the_same_bits(finished, tmp_path):
  made = run(tmp_path / "run", _SYNC, **_settings())
  train_until_killed(made, 2)
  assert made.train().finished
  assert fingerprints(tmp_path / "run") == fingerprints(finished[0])


@pytest.mark.slow
def test_bounds_are_settings_that_change_the_second_update(finished, tmp_path):
  narrow = _settings(correction_clip_low=0.0, correction_clip_high=0.0)
  run(tmp_path / "narrow", _SYNC, **narrow).train()
  ours, theirs = (
    read_metrics(d / "metrics.jsonl")[0]["correction/policy/clip_fraction"]
    for d in (finished[0], tmp_path / "narrow")
  )
  assert theirs > ours


def test_settings_that_leave_no_stage_are_refused():
  experiment = staged_experiment(_SYNC)
  experiment.rl.objective, experiment.rl.passes = ObjectiveConfig(), StagedConfig()
  experiment.validate()
  experiment.rl.passes.part = "exact_match"
  with pytest.raises(ConfigError, match=r"passes\.part='exact_match'; allowed: one of"):
    experiment.validate()
  experiment.rl.passes.part = "environment"
  experiment.rollout.max_turns = 1
  with pytest.raises(ConfigError, match=r"max_turns=1; allowed: >= 2"):
    experiment.validate()


def test_passes_of_ones_own_and_an_objective_of_ones_own_do_not_go_together(tmp_path):
  experiment = staged_experiment(_SYNC)
  experiment.rl.passes = StagedConfig()
  with pytest.raises(ConfigError, match=r"config\.rl\.passes"):
    Run(experiment, tmp_path / "run", objective=lambda inputs: (inputs.log_probs.sum(), {}))


def test_the_passes_are_chosen_by_flag_and_saved_by_name():
  chosen = Experiment.from_dict({"rl": {"passes": "agentjax.recipes.agentic_grpo:StagedConfig"}})
  assert chosen.rl.passes == StagedConfig()
  assert Experiment.from_dict(chosen.to_dict()).rl.passes == StagedConfig()
