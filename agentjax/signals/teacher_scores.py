"""Scores of teachers: log-probs, which tokens to learn from, and targets of divergences."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.objectives.columns import SELECTED
from agentjax.objectives.distillation import DistillationConfig, select_tokens
from agentjax.signals.signal import BatchContext, ForUpdate, Result, Signal
from agentjax.signals.teacher import Teachers, kept_count, targets_at
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.columns import get_column

Array = jax.Array

_DIAGNOSTICS = ("overlap", "overlap_advantage", "overlap_mass", "entropy_gap")


class TeacherScores(Signal):
  """The teachers' scores that ``objective.distillation`` needs.

  Adds the teacher's log-probs of the tokens (form "sampled") and the selected tokens (``keep``
  below 1). The other forms give the teacher's scores of the kept tokens to the update.

  Args:
    teachers: that score.
    settings: which scores.
    multiple: kept tokens of a row are a multiple of it (``sharding.time_multiple``).
    whole_rows: the update scores whole rows, as exact log-probs need.
  """

  name = "teacher"

  def __init__(
    self, teachers: Teachers, settings: DistillationConfig, *, multiple: int, whole_rows: bool
  ):
    self.teachers, self._settings = teachers, settings
    self._multiple, self._whole_rows = multiple, whole_rows
    columns = (
      (settings.form == "sampled", get_column("teacher_log_probs")),
      (settings.keep < 1, SELECTED),
    )
    self.adds = tuple(column for present, column in columns if present)
    self._select = jax.jit(functools.partial(_select, settings=settings))
    self._places = jax.jit(_places, static_argnums=1)
    self._targets = jax.jit(functools.partial(targets_at, form=settings.form))

  def __call__(self, context: BatchContext, networks: Mapping[str, Any], batch: Batch) -> Result:
    del networks
    settings = self._settings
    student = context.policy() if settings.needs_comparison else None
    answers = self.teachers.ask(settings, student, context.packed, context.sequences, batch)
    context.notes[self.name] = answers
    columns = {}
    if settings.form == "sampled":
      columns["teacher_log_probs"] = answers["log_probs"]
    if settings.keep < 1:
      columns["selected"] = self._select(batch, answers["entropies"], answers["divergences"])
    return Result(columns)

  def for_update(self, context: BatchContext, prepared: Any) -> ForUpdate:
    settings, answers = self._settings, context.notes[self.name]
    compared = {k: answers[k] for k in _DIAGNOSTICS if k in answers}
    metrics = {f"distillation/{k}": v for k, v in _means(prepared.shares, compared).items()}
    if settings.keep == 1 and settings.form == "sampled":
      return ForUpdate(metrics=metrics)
    most, kept = (int(x) for x in _kept(prepared.weights))
    trained = int(np.count_nonzero(context.packed.weights))
    metrics["distillation/kept"] = kept / max(trained, 1)
    if self._whole_rows:
      return ForUpdate(metrics=metrics)
    count = kept_count(most, prepared.weights.shape[1], self._multiple)
    fields: dict[str, Any] = {"kept": self._places(prepared.weights, count)}
    if settings.form == "sampled":
      return ForUpdate(fields, metrics=metrics)
    targets = self._targets(answers, fields["kept"])
    # Exact divergences have one teacher.
    head = self.teachers.head() if settings.form == "full" else None
    return ForUpdate(fields | {"teacher": targets}, head, metrics)


def _select(
  batch: Batch, entropies: Array, divergences: Array, settings: DistillationConfig
) -> Array:
  inside = (batch.weights > 0) & jnp.append(False, batch.valid)[batch.segment_ids]
  return select_tokens(entropies, divergences, inside, settings)


@jax.jit
def _means(shares: Array, values: dict[str, Array]) -> dict[str, Array]:
  return {name: jnp.sum(shares * value) for name, value in values.items()}


@jax.jit
def _kept(weights: Array) -> tuple[Array, Array]:
  """The most weighted tokens of any row, and those of all rows."""
  each = jnp.sum(weights > 0, axis=1)
  return jnp.max(each), jnp.sum(each)


def _places(weights: Array, count: int) -> Array:
  """``teacher.kept_places`` of a known size, on the mesh."""
  inside = weights > 0
  first = jnp.argsort(~inside, axis=1, stable=True)[:, :count]
  used = jnp.arange(count) < jnp.sum(inside, axis=1, keepdims=True)
  return jnp.where(used, first, 0).astype(jnp.int32)
