"""The update step: micro-batches only add up, skipped updates change nothing, few shapes."""

import dataclasses

import jax
import numpy as np
import pytest

from agentjax.adapters.model_families.parcae import Draws
from agentjax.config import ConfigError
from agentjax.models.config import LoopConfig, MtpConfig
from agentjax.sharding import fingerprint, split_rows
from agentjax.training.experiment import RLStage, SupervisedStage
from agentjax.training.optimizer import OptimizerConfig
from agentjax.training.update import (
  UpdateSettings,
  micro_rows,
  used_micro_batches,
)
from tests.training.machine import ATTENTION, MIXTURE, machine, sequences, step, update_batch
from tests.training.smoke import smoke_experiment

# Plain descent: a step is the gradient times the rate, its rounding too.
_PLAIN = OptimizerConfig(learning_rate=0.1, eps=1e6, clip_norm=None)


@pytest.fixture(scope="module")
def machinery():
  """(fresh state, update) of a one-block policy."""
  return machine(ATTENTION)


@pytest.mark.parametrize(("rows", "padded"), [(1, 4), (2, 8)])
def test_the_number_of_micro_batches_changes_no_gradient(machinery, rows, padded):
  fresh, update = machinery
  batch, whole = update_batch(sequences(), 4)
  one, metrics, _ = update(fresh(), split_rows(whole, 4), used_micro_batches(batch.segment_ids, 4))
  batch, whole = update_batch(sequences(), padded)  # rows without tokens follow
  many, others, _ = update(
    fresh(), split_rows(whole, rows), used_micro_batches(batch.segment_ids, rows)
  )
  assert used_micro_batches(batch.segment_ids, rows) == 4 // rows
  assert float(others["grad_norm"]) == pytest.approx(float(metrics["grad_norm"]), rel=1e-5)
  assert float(others["loss"]) == pytest.approx(float(metrics["loss"]), abs=1e-6)
  for a, b in zip(jax.tree.leaves(one.weights), jax.tree.leaves(many.weights), strict=True):
    # Adam divides by the gradient's size, so that its rounding shows in full.
    np.testing.assert_allclose(a, b, atol=1e-4)
  assert fingerprint(one.weights) != fingerprint(fresh().weights)


def test_rows_are_bucketed_by_powers_of_four():
  assert [micro_rows(n, 8) for n in (1, 8, 9, 32, 33, 128, 129)] == [8, 8, 32, 32, 128, 128, 512]


@pytest.mark.slow
def test_no_auxiliary_loss_depends_on_the_number_of_micro_batches():
  settings = UpdateSettings(
    balance_coefficient=0.5,
    sequence_balance_coefficient=0.5,
    router_z_coefficient=0.5,
    z_loss_coefficient=0.5,
    mtp_coefficient=0.5,
  )
  model = dataclasses.replace(MIXTURE, mtp=MtpConfig(depths=2, pattern="E"))
  # Adam's first moment is a tenth of the gradient: compare that.
  made = machine(model, settings, _PLAIN)
  members = sequences(7)  # unequal micro-batches: the last row has one sequence, not two
  _, whole = update_batch(members, 4)
  (one, metrics), (many, others) = (step(made, made.fresh(), whole, rows) for rows in (4, 1))
  names = {"balance", "sequence_balance", "router_z", "z", "mtp"}
  assert {k.removeprefix("auxiliary/") for k in metrics if k.startswith("auxiliary/")} == names
  added = sum(0.5 * metrics[f"auxiliary/{name}"] for name in names)
  assert metrics["loss"] == pytest.approx(metrics["policy_loss"] + added, abs=1e-5)
  for name in ("loss", *(k for k in metrics if k.startswith(("auxiliary/", "mtp/")))):
    assert others[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name
  for a, b in zip(_moments(one), _moments(many), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-7)


@pytest.mark.slow
def test_a_frozen_router_keeps_its_weights_while_its_bias_moves():
  model = dataclasses.replace(MIXTURE, frozen_router=True)
  made = machine(
    model,
    UpdateSettings(router_bias_rate=1e-3, router_z_coefficient=1.0),
    OptimizerConfig(learning_rate=0.1, weight_decay=0.1),
  )
  before = made.fresh().weights.policy.groups[0][1].mixer
  _, whole = update_batch(sequences(), 4)
  state, metrics = step(made, made.fresh(), whole, 2)
  after = state.weights.policy.groups[0][1].mixer
  np.testing.assert_array_equal(after.router, before.router)
  np.testing.assert_allclose(np.abs(after.router_bias - before.router_bias), 1e-3, rtol=1e-4)
  assert np.abs(after.expert_up - before.expert_up).max() > 1e-3
  assert metrics["router_dropped"] == 0 and metrics["router_imbalance"] > 1


@pytest.mark.parametrize(
  ("stage", "change", "message"),
  [
    (RLStage, {"mtp_coefficient": 0.3}, "mtp_coefficient=0.3; allowed: 0 unless config.model.mtp"),
    (RLStage, {"qk_clip": 0.0}, r"config\.rl\.qk_clip=0.0"),
    (SupervisedStage, {"z_loss_coefficient": -1.0}, r"supervised\.z_loss_coefficient=-1.0"),
  ],
)
def test_coefficients_that_cannot_be_used_name_the_field(stage, change, message):
  name = "rl" if stage is RLStage else "supervised"
  with pytest.raises(ConfigError, match=message):
    smoke_experiment(**{name: stage(steps=1, **change)}).validate()


def _moments(state):
  """Adam's first moments."""
  moments = state.networks["policy"].opt_state.inner_state[0].inner_states["adam"]
  return jax.tree.leaves(moments.inner_state.mu)


@pytest.mark.slow
def test_sampled_depths_reach_a_looped_core():
  """Every sequence runs as deep as it is told, from the states of its salt; None is fixed."""
  looped = dataclasses.replace(
    ATTENTION, pattern="*-*-*-", d_mlp=8, loop=LoopConfig(prelude=2, coda=2, mean_depth=2)
  )
  fresh, update = machine(looped, optimizer=OptimizerConfig(learning_rate=1e-3))
  _, batch = update_batch(sequences(4), 2)

  def slope(depths, salt=None):
    told, shape = None, batch.token_ids.shape
    if depths is not None:
      salts = None if salt is None else np.full(shape, salt, np.uint32)
      told = Draws(np.full(shape, depths, np.int32), salts)
    micro = split_rows(dataclasses.replace(batch, drawn=told), 2)
    return float(update(fresh(), micro, 1)[1]["grad_norm"])

  assert slope(2) == slope(None)
  assert len({slope(1), slope(2), slope(3), slope(2, 5), slope(2, 6)}) == 5
