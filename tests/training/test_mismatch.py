"""The report of sampler against trainer: its figures, its worst token, and what mixed ages do."""

import logging

import numpy as np
import pytest

from agentjax.objectives import MismatchConfig
from agentjax.objectives.objective import ObjectiveConfig
from agentjax.objectives.preparation import prepare
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.training.metrics import read_metrics
from agentjax.training.mismatch import mismatch_report, warn_of_mismatch
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.packing import pack, to_sequences
from agentjax.trajectory.record import Reward
from tests.training import stages


def episode(sample, log_probs, versions):
  builder = TrajectoryBuilder(step=7, task_id=3, sample=sample, source="made")
  builder.append("user", [1, 2])
  n = len(log_probs)
  builder.append_sampled(list(range(n)), log_probs, [0.5] * n, versions)
  return builder.build(reward=Reward(float(sample)))


@pytest.fixture
def packed():
  """Two episodes in one row: 2 + 3 and 2 + 2 tokens, of which the policy drew 3 and 2."""
  sequences = to_sequences(
    [episode(0, [-1.0, -2.0, -3.0], [5, 6, 7]), episode(1, [-0.5, -0.25], [7, 7])]
  )
  return sequences, pack(sequences, row_length=12, pad_id=0)


def trainer_of(batch, differences):
  """The sampler's log-probs plus ``differences`` on the weighted tokens, nonsense elsewhere."""
  scored = np.full(batch.token_ids.shape, -9.0, np.float32)
  scored[batch.weights > 0] = batch.behaviour_log_probs[batch.weights > 0] + np.float32(differences)
  return scored


def test_figures_are_over_the_weighted_tokens_alone(packed):
  _, batch = packed
  gaps = [0.1, -0.2, 0.0, 0.3, -0.4]
  report = mismatch_report([batch], [trainer_of(batch, gaps)], 0.25)
  apart = np.abs(gaps)
  assert report.quantiles[50] == pytest.approx(np.median(apart), abs=1e-6)
  for q in (95, 99, 100):
    assert report.quantiles[q] == pytest.approx(np.percentile(apart, q), abs=1e-6)
  assert report.alarmed == pytest.approx(2 / 5)
  assert report.multiplicative_error == pytest.approx(np.exp(apart).mean(), abs=1e-6)
  assert report.kl == pytest.approx((np.expm1(gaps) - gaps).mean(), abs=1e-6)
  assert report.metrics()["mismatch/max"] == pytest.approx(0.4, abs=1e-6)


def test_replayed_episodes_are_not_compared(packed):
  """The policy has learnt since they were sampled: that is no fault of the sampler."""
  _, batch = packed
  scored = trainer_of(batch, [0.1, -0.2, 0.0, 7.0, -8.0])
  marked = batch.with_columns({"replayed": np.array([False, True])})
  report = mismatch_report([marked], [scored], 0.25)
  assert report.quantiles[100] == pytest.approx(0.2, abs=1e-6) and report.alarmed == 0
  every = batch.with_columns({"replayed": np.array([True, True])})
  assert mismatch_report([every], [scored], 0.25) is None


def test_the_worst_token_is_named_once_it_passes_the_alarm(packed, caplog):
  sequences, batch = packed
  scored = trainer_of(batch, [0.0, -0.75, 0.0, 0.1, 0.2])
  report = mismatch_report([batch, batch], [trainer_of(batch, 0.0), scored], 0.5)
  assert (report.worst.batch, report.worst.sequence, report.worst.position) == (1, 0, 3)
  with caplog.at_level(logging.WARNING):
    warn_of_mismatch(report, [sequences, sequences], 8, alarm=1.0)
    assert not caplog.records
    warn_of_mismatch(report, [sequences, sequences], 8, alarm=0.5)
  (record,) = caplog.records
  assert "step 8" in record.message and "token 3 of the episode (step=7, task=3, sample=0" in (
    record.message
  )
  assert "-2.0000 under the sampler, with weights of version 6" in record.message
  assert "-2.7500 under the trainer, with version 8" in record.message


def test_nothing_with_weight_gives_no_report(packed):
  _, batch = packed
  empty = batch.replace(weights=np.zeros_like(batch.weights))
  assert mismatch_report([empty], [empty.behaviour_log_probs], 1.0) is None


def test_tokens_of_mixed_versions_are_weighted_by_what_each_was_sampled_with(packed):
  """Importance is pi_old / pi_behaviour of each token, whichever weights drew it."""
  _, batch = packed
  gaps = np.float32([0.3, -0.1, 0.0, 0.2, -0.6])
  config = ObjectiveConfig()
  config.policy_loss.mismatch = MismatchConfig(weight_level="token", weight_cap=None)
  old = trainer_of(batch, gaps)
  prepared, _ = prepare(batch, config, old_log_probs=old)
  bare, _ = prepare(batch, ObjectiveConfig(), old_log_probs=old)
  inside = batch.weights > 0
  ratio = np.asarray(prepared.advantages)[inside] / np.asarray(bare.advantages)[inside]
  np.testing.assert_allclose(ratio, np.exp(gaps), rtol=1e-5)
  np.testing.assert_array_equal(np.asarray(prepared.old_log_probs)[inside], old[inside])
  np.testing.assert_array_equal(
    np.asarray(prepared.behaviour_log_probs)[inside], batch.behaviour_log_probs[inside]
  )


def test_a_run_reports_older_tokens_apart_and_recomputes_their_old_log_probs(tmp_path, caplog):
  """One step off, the trainer's log-probs are those of newer weights than the sampler's."""
  made = stages.run(tmp_path / "run", ScheduleConfig("one_step_off"))
  made.experiment = stages.staged_experiment(ScheduleConfig("one_step_off"))
  made.experiment.rl.old_log_probs = "recomputed"
  made.experiment.rl.mismatch_alarm = 1e-3
  made.experiment.rl.steps = 3
  mismatch = MismatchConfig(weight_level="token", weight_cap=2.0)
  made.experiment.rl.objective.policy_loss.mismatch = mismatch
  with caplog.at_level(logging.WARNING):
    made.train()
  first, second, third = read_metrics(tmp_path / "run" / "metrics.jsonl")
  assert first["mismatch/max"] < 2e-5 and first["mismatch/alarmed"] == 0
  for row in (second, third):
    assert row["mismatch/max"] > 1e-3 and 0 < row["mismatch/alarmed"] <= 1
    assert row["mismatch/p50"] <= row["mismatch/p95"] <= row["mismatch/p99"] <= row["mismatch/max"]
    # The policy ratio starts from the recomputed ones, so the first update sees 1.
    assert row["policy/ratio"] == pytest.approx(1.0, abs=1e-4)
    assert row["mismatch/importance"] != 1.0
  warned = [r.message for r in caplog.records if "mismatch_alarm" in r.message]
  assert len(warned) == 2 and "step 2" in warned[0] and "version 1" in warned[0]


def test_groups_of_identical_samples_raise_a_warning(tmp_path, caplog, monkeypatch):
  monkeypatch.setattr(
    "agentjax.rollout.keys.turn_key", lambda seed, address, turn: np.array([1, 2], np.uint32)
  )
  made = stages.run(tmp_path / "run", ScheduleConfig())
  made.experiment = stages.staged_experiment(ScheduleConfig())
  made.experiment.rl.steps = 1
  with caplog.at_level(logging.WARNING):
    made.train()
  assert any(
    "in each of its 2 groups all samples are the same" in r.message for r in caplog.records
  )
