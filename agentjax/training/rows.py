"""Packed rows on a mesh: whole as [B, T], cut into micro-batches as [M, rows, T]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from agentjax.models import ModelConfig
from agentjax.sharding import batch_sharding, replicated, split_rows, upload
from agentjax.training.likelihood import ScoreTokens
from agentjax.training.state import Weights
from agentjax.training.update import make_score
from agentjax.training.wide_columns import WideColumns
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.columns import REFERENCE, core_fields, get_column

Array = jax.Array


class MeshRows:
  """Places rows on the mesh and cuts them there; nothing returns to the host.

  Attributes:
    whole: sharding of [B, T, ...]: rows over data, fsdp and expert, time over context.
    everywhere: sharding of arrays that every device holds whole.

  Args:
    mesh: that of the updates.
    rows: rows of a micro-batch.
    wide: values of columns that other processes have.
  """

  def __init__(self, mesh: jax.sharding.Mesh, rows: int, wide: WideColumns | None = None):
    self.mesh, self._wide = mesh, wide
    self.whole, self.everywhere = batch_sharding(mesh), replicated(mesh)
    cut = jax.sharding.NamedSharding(mesh, jax.P(None, *self.whole.spec))
    self._split = jax.jit(lambda tree: split_rows(tree, rows), out_shardings=cut)
    self._join = jax.jit(lambda x: x.reshape(-1, *x.shape[2:]), out_shardings=self.whole)
    self._used = jax.jit(lambda ids: _used(ids, rows), out_shardings=self.everywhere)

  def place(self, batch: Batch) -> Batch:
    """A batch on the mesh: tokens as ``whole`` says, sequences on every device."""
    placed = {c.name: self.place_column(c.name, getattr(batch, c.name)) for c in core_fields(Batch)}
    return Batch(**placed, columns={k: self.place_column(k, v) for k, v in batch.columns.items()})

  def place_column(self, name: str, values: Any) -> Array:
    """Values of a column on the mesh; unchanged if they are there already."""
    column = get_column(name)
    if self._wide is not None and values.dtype == REFERENCE:
      return self._wide.place(column, values, self.whole)
    return upload(values, self.everywhere if column.level == "sequence" else self.whole)

  def split(self, tree: Any) -> Any:
    """[B, ...] arrays as [M, rows, ...], rows and time sharded as before."""
    return self._split(tree)

  def join(self, values: Array) -> Array:
    """[M, rows, T] as [B, T]."""
    return self._join(values)

  def used(self, segment_ids: Array) -> Array:
    """int32 [], how many leading micro-batches of [B, T] rows hold tokens."""
    return self._used(segment_ids)


def _used(segment_ids: Array, rows: int) -> Array:
  occupied = jnp.any(segment_ids.reshape(-1, rows * segment_ids.shape[1]) > 0, axis=1)
  return jnp.max(jnp.where(occupied, jnp.arange(1, len(occupied) + 1, dtype=jnp.int32), 0))


def make_scorer(
  model: ModelConfig,
  temperature: float,
  rows: MeshRows,
  own: ScoreTokens | None,
  mark: Callable[[Batch], Array],
) -> Callable[[Weights, Batch], tuple[Array, Array]]:
  """Builds ``score(networks, batch) -> (log-probs, values)``, [B, T] on the mesh; see make_score.

  Args:
    model: the policy.
    temperature: divides logits.
    rows: how batches are cut.
    own: see ``make_score``.
    mark: the marks that ``own`` takes.
  """
  score = make_score(model, temperature, own)

  def scored(networks: Weights, batch: Batch) -> tuple[Array, Array]:
    tokens = (batch.token_ids, batch.segment_ids, batch.positions, batch.columns.get("experts"))
    marks = () if own is None else (mark(batch),)
    count = rows.used(batch.segment_ids)
    with jax.set_mesh(rows.mesh):
      *given, experts = rows.split(tokens)
      log_probs, values = score(networks, *given, experts, count, *rows.split(marks))
    return rows.join(log_probs), rows.join(values)

  return scored
