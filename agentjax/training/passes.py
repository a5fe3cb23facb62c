"""One pass over a batch: the arrays of its update, on the mesh, and the update itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from agentjax.objectives.objective import Prepared
from agentjax.signals.signal import ForUpdate
from agentjax.signals.teacher import TeacherHead
from agentjax.training.nonfinite import PREFIX
from agentjax.training.rows import MeshRows
from agentjax.training.state import TrainState
from agentjax.training.update import Update, UpdateBatch
from agentjax.trajectory.batch import Batch

_SUMMARIES = (
  "loss",
  "grad_norm",
  "update_norm",
  "bad_steps",
  "router_imbalance",
  "router_dropped",
  "nll",
)


@dataclasses.dataclass(frozen=True)
class Ready:
  """A batch that is ready for training, in every epoch. Arrays are on the mesh.

  Attributes:
    prepared: result of ``prepare``, [B, T].
    placed: what the update reads, [M, rows, T].
    count: int32 [], micro-batches that hold tokens.
    kept: whether logits are made for some of the tokens only.
    head: output projection of a teacher, or None.
    numbers: of the objective's schedules.
  """

  prepared: Prepared
  placed: UpdateBatch
  count: jax.Array
  kept: bool = False
  head: TeacherHead | None = None
  numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def make_ready(
  rows: MeshRows,
  batch: Batch,
  prepared: Prepared,
  given: ForUpdate | None = None,
  drawn: Any = None,
  numbers: Mapping[str, Any] | None = None,
) -> Ready:
  """What an update reads of a batch.

  Args:
    rows: how the batch is cut.
    batch: [B, T], on the mesh.
    prepared: of the batch.
    given: what signals add.
    drawn: see ``UpdateBatch``.
    numbers: of the objective's schedules.
  """
  given = given or ForUpdate()
  experts = batch.columns.get("experts")
  whole = UpdateBatch(batch.token_ids, batch.positions, prepared, experts, drawn, **given.fields)
  kept = whole.kept is not None
  count = rows.used(batch.segment_ids)
  return Ready(prepared, rows.split(whole), count, kept, given.head, numbers or {})


def run_update(
  update: Update, state: TrainState, ready: Ready, mesh: jax.sharding.Mesh
) -> tuple[TrainState, dict[str, float], jax.Array]:
  """One update: state, metrics, and the trainer's log-probs [M, rows, T] before it."""
  with jax.set_mesh(mesh):
    state, metrics, log_probs = update(state, ready.placed, ready.count, ready.head, ready.numbers)
  values = {}
  for name, value in jax.device_get(metrics).items():
    if name.startswith(PREFIX) and not value:
      continue
    plain = "/" in name or name in _SUMMARIES
    values[name if plain else f"policy/{name}"] = float(value)
  return state, values, log_probs


def join_for_update(every: list[ForUpdate]) -> tuple[ForUpdate, dict[str, Any]]:
  """Joins what several signals add to an update, and their metrics."""
  fields: dict[str, Any] = {}
  metrics: dict[str, Any] = {}
  head = None
  for one in every:
    fields |= one.fields
    metrics |= one.metrics
    head = one.head if head is None else head
  return ForUpdate(fields, head), metrics
