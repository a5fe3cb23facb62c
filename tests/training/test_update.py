"""The update step: micro-batches only add up, skipped updates change nothing, few shapes."""

import jax
import numpy as np
import pytest

from agentjax.models import ModelConfig
from agentjax.models.spec import decay_mask
from agentjax.objectives.objective import ObjectiveConfig, policy_objective, prepare
from agentjax.sharding import MeshConfig, make_mesh
from agentjax.training.fingerprint import fingerprint
from agentjax.training.optimizer import OptimizerConfig, build_optimizer
from agentjax.training.state import init_state, network_specs, state_shardings
from agentjax.training.update import (
  UpdateBatch,
  UpdateSettings,
  make_update,
  micro_rows,
  split_rows,
  used_micro_batches,
)
from agentjax.trajectory.packing import PackedSequence, pack

_MODEL = ModelConfig(vocab_size=16, d_model=8, pattern="*", num_heads=2, num_kv_heads=1, head_dim=4)


@pytest.fixture(scope="module")
def machinery():
  """(fresh state, update) of a one-block policy."""
  specs = network_specs(_MODEL, critic=False)
  optimizer = build_optimizer(OptimizerConfig(learning_rate=0.1), 10, decay_mask(specs))
  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  placed = state_shardings(_MODEL, optimizer, mesh, critic=False, reference=False)
  objective = policy_objective(ObjectiveConfig())
  update = make_update(_MODEL, optimizer, objective, UpdateSettings(), placed)
  return lambda: init_state(_MODEL, optimizer, jax.random.key(0), placed), update


def _batch(rows: int):
  rng = np.random.default_rng(0)
  sequences = [
    PackedSequence(
      name=str(i),
      token_ids=rng.integers(0, 16, 6).astype(np.int32),
      weights=np.ones(6, np.float32),
      log_probs=np.full(6, -2.0, np.float32),
      entropies=np.zeros(6, np.float32),
      versions=np.zeros(6, np.int32),
      turns=np.zeros(6, np.int32),
      reward=float(i % 2),
      group=i // 4,
    )
    for i in range(8)
  ]
  batch = pack(sequences, row_length=12, pad_id=0, rows=rows)
  prepared, _ = prepare(batch, ObjectiveConfig())
  return batch, UpdateBatch(batch.token_ids, batch.positions, jax.tree.map(np.asarray, prepared))


@pytest.mark.parametrize(("rows", "padded"), [(1, 4), (2, 8)])
def test_the_number_of_micro_batches_changes_no_gradient(machinery, rows, padded):
  fresh, update = machinery
  batch, whole = _batch(4)
  one, metrics = update(fresh(), split_rows(whole, 4), used_micro_batches(batch.segment_ids, 4))
  batch, whole = _batch(padded)  # rows without tokens follow
  many, others = update(
    fresh(), split_rows(whole, rows), used_micro_batches(batch.segment_ids, rows)
  )
  assert used_micro_batches(batch.segment_ids, rows) == 4 // rows
  assert float(others["grad_norm"]) == pytest.approx(float(metrics["grad_norm"]), rel=1e-5)
  assert float(others["loss"]) == pytest.approx(float(metrics["loss"]), abs=1e-6)
  for a, b in zip(jax.tree.leaves(one.networks), jax.tree.leaves(many.networks), strict=True):
    # Adam divides by the gradient's size, so that its rounding shows in full.
    np.testing.assert_allclose(a, b, atol=1e-4)
  assert fingerprint(one.networks) != fingerprint(fresh().networks)


def test_rows_are_bucketed_by_powers_of_four():
  assert [micro_rows(n, 8) for n in (1, 8, 9, 32, 33, 128, 129)] == [8, 8, 32, 32, 128, 128, 512]
