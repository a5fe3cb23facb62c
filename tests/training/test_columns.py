"""A column that a user registers reaches a loss in training, from the journal too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.objectives.objective import ObjectiveConfig, policy_objective
from agentjax.objectives.preparation import abstract_inputs, prepare
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.testing import check_advantage, check_objective
from agentjax.training import OptimizerConfig
from agentjax.training.build import build_parts
from agentjax.training.experiment import resolve
from agentjax.training.journal import Journal, read_journal
from agentjax.training.learner import Learner
from agentjax.training.nonfinite import count_nonfinite, describe_nonfinite
from agentjax.trajectory import columns as table
from agentjax.trajectory.columns import Column, register_column
from agentjax.trajectory.packing import pack, to_sequences
from tests.training.stages import extensions, staged_experiment
from tests.training.teachers import MODEL, episodes


@pytest.fixture(autouse=True)
def new_columns(monkeypatch):
  monkeypatch.setattr(table, "_REGISTRY", dict(table._REGISTRY))
  register_column(Column("surprise", "float32", "How little it was expected.", shape=(2,)))
  register_column(Column("effort", "float32", "Of a turn.", level="turn"))
  register_column(Column("mood", "float32", "Of the user.", level="sequence"))


def told(trajectory, number):
  """Every turn of it with an effort, every second token with a surprise, and a mood."""
  segments = []
  for i, segment in enumerate(trajectory.segments):
    surprise = np.zeros((len(segment), 2), np.float32)
    surprise[::2] = number + 1, i
    values = {"effort": np.float32(10 * number + i), "surprise": surprise}
    segments.append(segment.with_columns(values) if segment.sampled.any() else segment)
  mood = {"mood": np.float32(number)}
  return dataclasses.replace(trajectory, segments=segments, columns=mood)


def weighted(inputs):
  """A surrogate that uses all three, and shows them as metrics."""
  seen = {
    "surprise": inputs.column("surprise")[..., 0],
    "second": inputs.column("surprise")[..., 1],
    "effort": inputs.column("effort"),
    "mood": inputs.column("mood"),
  }
  factor = 1 + seen["surprise"] + seen["effort"] * seen["mood"]
  ratio = jnp.exp(inputs.log_probs - inputs.old_log_probs)
  return -ratio * inputs.advantages * factor, seen


def test_three_levels_go_from_the_journal_through_an_update_to_the_loss(tmp_path):
  experiment = staged_experiment(ScheduleConfig())
  experiment.model = dataclasses.replace(MODEL)
  experiment.rollout.group_size = 2
  experiment.rl = dataclasses.replace(
    experiment.rl, microbatch_rows=2, optimizer=OptimizerConfig(learning_rate=1e-2)
  )
  journal = Journal(tmp_path / "journal.log")
  for number, trajectory in enumerate(episodes()):
    journal.add_trajectory(told(trajectory, number))
  journal.close()
  again = [trajectory for _, trajectory in read_journal(tmp_path / "journal.log")]
  parts = build_parts(resolve(experiment), tmp_path, extensions())
  learner = Learner(parts, policy_objective(experiment.rl.objective, weighted))
  _, metrics = learner.rl_step(learner.begin_rl(learner.initial_state("rl")), again, 1)

  drawn = [
    (segment.column("surprise"), segment.column("effort"), trajectory.columns["mood"])
    for trajectory in again
    for segment in trajectory.segments
    if segment.sampled.any()
  ]
  for name, values in {
    "surprise": [s[:, 0] for s, _, _ in drawn],
    "second": [s[:, 1] for s, _, _ in drawn],
    "effort": [np.full(len(s), e) for s, e, _ in drawn],
    "mood": [np.full(len(s), m) for s, _, m in drawn],
  }.items():
    expected = np.concatenate(values).mean()
    assert expected > 0 and metrics[f"policy/{name}"] == pytest.approx(expected, rel=1e-5)


def test_a_loss_is_traced_with_the_fill_and_checked_with_values():
  shapes = abstract_inputs(ObjectiveConfig(), 2, 6)
  per_token, seen = jax.eval_shape(weighted, shapes)
  assert per_token.shape == (2, 6) and seen["mood"].shape == (2, 6)
  check_objective(weighted, seed=0)

  def leaks(inputs):
    level = jnp.sum(inputs.column("mood"))  # padding and siblings, too
    return jnp.sum(inputs.coefficients * inputs.log_probs) * level, {}

  with pytest.raises(AssertionError, match="sibling exclusion|padding"):
    check_objective(leaks, seed=0)


def test_an_advantage_function_is_given_columns_too():
  check_advantage(
    lambda inputs: inputs.column("effort") + inputs.column("surprise")[..., 0], seed=0
  )
  batch = pack(to_sequences([told(episodes()[0], 3)]), row_length=32, pad_id=0)
  prepared, _ = prepare(batch, ObjectiveConfig(), advantage=lambda inputs: inputs.column("effort"))
  inside = np.asarray(prepared.weights) > 0
  np.testing.assert_array_equal(
    np.asarray(prepared.advantages)[inside], batch.columns["effort"][inside]
  )


def test_a_column_that_is_not_finite_is_named():
  batch = pack(to_sequences([told(episodes()[0], 3)]), row_length=32, pad_id=0)
  batch.columns["surprise"][0, 12, 1] = np.nan
  prepared, _ = prepare(batch, ObjectiveConfig())
  inputs = prepared.with_scores(batch.behaviour_log_probs, batch.entropies)
  counts = {k: float(v) for k, v in count_nonfinite(inputs, jnp.float32(np.nan)).items()}
  assert "loss input surprise is the first array" in describe_nonfinite(counts)
