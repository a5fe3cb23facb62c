"""A tiny policy with its update, and packed rows for it, that the tests of updates share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from agentjax.models import ModelConfig
from agentjax.objectives.objective import ObjectiveConfig, policy_objective
from agentjax.objectives.preparation import prepare
from agentjax.sharding import MeshConfig, make_mesh, split_rows
from agentjax.training.optimizer import OptimizerConfig, build_optimizer
from agentjax.training.state import StateSpec, TrainState, network_specs
from agentjax.training.update import Update, UpdateBatch, UpdateSettings, make_update
from agentjax.trajectory.packing import PackedSequence, pack

ATTENTION = ModelConfig(
  vocab_size=16, d_model=8, pattern="*", num_heads=2, num_kv_heads=1, head_dim=4
)
MIXTURE = dataclasses.replace(
  ATTENTION,
  pattern="*E",
  num_experts=4,
  experts_per_token=2,
  d_expert=4,
  d_shared_expert=4,
  expert_block=4,
)


class Machine(NamedTuple):
  """What makes a fresh state, and what updates it."""

  fresh: Callable[[], TrainState]
  update: Update


def machine(
  model: ModelConfig,
  settings: UpdateSettings | None = None,
  optimizer: OptimizerConfig | None = None,
) -> Machine:
  """On one device, with the default objective; adapters where ``settings`` has them."""
  settings = settings or UpdateSettings()
  specs = network_specs(model, critic=False, lora=settings.lora)
  transform = build_optimizer(optimizer or OptimizerConfig(learning_rate=0.1), 10, specs)
  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  spec = StateSpec(model, transform, mesh, lora=settings.lora)
  update = make_update(model, transform, policy_objective(ObjectiveConfig()), settings, spec.placed)
  return Machine(lambda: spec.create(jax.random.key(0)), update)


def sequences(count: int = 8, length: int = 6) -> list[PackedSequence]:
  """Random ids, groups of four, every second one rewarded."""
  rng = np.random.default_rng(0)
  return [
    PackedSequence(
      name=str(i),
      token_ids=rng.integers(0, 16, length).astype(np.int32),
      weights=np.ones(length, np.float32),
      behaviour_log_probs=np.full(length, -2.0, np.float32),
      entropies=np.zeros(length, np.float32),
      versions=np.zeros(length, np.int32),
      turns=np.zeros(length, np.int32),
      reward=float(i % 2),
      group=i // 4,
    )
    for i in range(count)
  ]


def update_batch(members: list[PackedSequence], rows: int) -> tuple[Any, UpdateBatch]:
  """Rows of 12 tokens as a Batch, and what an update reads of it, not yet split."""
  batch = pack(members, row_length=12, pad_id=0, rows=rows)
  prepared, _ = prepare(batch.for_loss(), ObjectiveConfig())
  prepared = jax.tree.map(np.asarray, prepared)
  experts = batch.columns.get("experts")
  return batch, UpdateBatch(batch.token_ids, batch.positions, prepared, experts)


def step(
  made: Machine, state: TrainState, whole: UpdateBatch, rows: int
) -> tuple[TrainState, dict[str, float]]:
  """One update in micro-batches of ``rows`` rows, all of them with tokens.

  Beside its metrics there are the mean and the largest gap between sampler and trainer.
  """
  count = whole.token_ids.shape[0] // rows
  state, metrics, scored = made.update(state, split_rows(whole, rows), count)
  prepared = whole.prepared
  gap = np.abs(np.asarray(scored).reshape(prepared.weights.shape) - prepared.behaviour_log_probs)
  gap = np.where(prepared.weights > 0, gap, 0.0)
  metrics |= {"mismatch/mean": np.sum(prepared.shares * gap), "mismatch/max": gap.max()}
  return state, {name: float(value) for name, value in metrics.items()}


def abstract_like(tree):
  """ShapeDtypeStructs of a pytree of arrays, with their shardings: a restore target."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
