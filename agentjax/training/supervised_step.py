"""One optimiser step on demonstrations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from agentjax.models import Params, pass_kind
from agentjax.objectives.preparation import prepare_supervised
from agentjax.objectives.supervised import supervised_objective
from agentjax.sharding import time_multiple
from agentjax.signals.signal import ForUpdate
from agentjax.signals.teacher import kept_places
from agentjax.training import processes
from agentjax.training.build import Parts
from agentjax.training.demonstrations import demonstration_trajectory
from agentjax.training.likelihood import noise_of
from agentjax.training.packs import pack_rows
from agentjax.training.passes import make_ready, run_update
from agentjax.training.phases import update_settings
from agentjax.training.rows import MeshRows
from agentjax.training.state import TrainState
from agentjax.training.states import TrainStates, counted
from agentjax.training.token_sets import Compute, TokenSetSource, TokenSetTools
from agentjax.training.update import make_update, used_micro_batches
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.packing import to_sequences, unpack
from agentjax.trajectory.record import Task


class SupervisedSteps:
  """The supervised stage, compiled.

  Args:
    parts: host-side parts of the run.
    states: of the run's stages.
  """

  def __init__(self, parts: Parts, states: TrainStates):
    settings = parts.experiment.supervised
    self._parts, self._states, self._settings = parts, states, settings
    self._rows = MeshRows(states.mesh, settings.microbatch_rows)
    own = parts.experiment.likelihood.demonstrations(parts.model, parts.chat)
    self._noise = None if own is None else jax.jit(noise_of, out_shardings=self._rows.whole)
    self._update = make_update(
      # Nothing is sampled, so log-probs are not compared.
      dataclasses.replace(parts.model, exact_chunk=0),
      states.optimizers["supervised"],
      supervised_objective,
      update_settings(settings, parts.experiment.lora, score=own),
      states.specs["supervised"].placed,
    )
    self._prepare = jax.jit(
      lambda batch: prepare_supervised(batch, aggregation=settings.aggregation),
      out_shardings=self._rows.whole,
    )
    # 0, 1 and 2 address the initial parameters.
    key = jax.random.fold_in(jax.random.key(parts.experiment.seed), 3)
    passes = pass_kind(parts.model)
    draw = None if passes is None else passes.draw
    self._draw = None
    if draw is not None:
      self._draw = jax.jit(
        lambda step, sequences: draw(parts.model, jax.random.fold_in(key, step), sequences)
      )
    self._token_sets: TokenSetSource | None = None

  def __call__(self, state: TrainState, tasks: Sequence[Task]) -> tuple[TrainState, dict[str, Any]]:
    """The state after one optimiser step on the tasks' demonstrations, and metrics."""
    packed = self._pack(tasks)
    batch = self._rows.place(packed)
    prepared = self._prepare(batch)
    drawn = None
    if self._draw is not None:
      # Reinforcement learning uses the depth and the start states of sampling.
      drawn = self._draw(state.step, batch.segment_ids)
    given: dict[str, Any] = {}
    if self._noise is not None:
      given["marks"] = self._noise(batch.weights, state.step + 1)
    if self._settings.token_sets is not None:
      if self._token_sets is None:
        self._token_sets = self._settings.token_sets.build(self._tools())
      kept = kept_places(np.asarray(packed.weights), time_multiple(self._states.mesh))
      given |= {"kept": kept, "sets": self._token_sets.at(tasks, packed, kept)}
    ready = make_ready(self._rows, batch, prepared, ForUpdate(given), drawn)
    state, values, _ = run_update(self._update, state, ready, self._states.mesh)
    return counted(state), values

  def _pack(self, tasks: Sequence[Task]) -> Batch:
    settings = self._settings
    return pack_rows(
      to_sequences([demonstration_trajectory(task, self._parts) for task in tasks]),
      row_length=settings.row_length,
      rows=settings.microbatch_rows,
      pad_id=self._parts.tokenizer.pad_id,
      expected=settings.tasks_per_step,
      align=self._parts.experiment.likelihood.align,
    )

  def _tools(self) -> TokenSetTools:
    return TokenSetTools(
      model=self._parts.model,
      tasks=[task for task in self._parts.tasks.train if task.demonstration],
      tasks_per_step=self._settings.tasks_per_step,
      first_policy=lambda: self._states.policy(self._states.first_state("supervised")),
      read=self._read,
    )

  def _read(
    self, compute: Compute, params: Params, tasks: Sequence[Task]
  ) -> list[list[np.ndarray]]:
    """See ``TokenSetTools.read``."""
    batch = self._pack(tasks)
    grid = (batch.token_ids, batch.segment_ids, batch.positions)
    with jax.set_mesh(self._states.mesh):
      placed = self._rows.split(grid)
      parts = [
        [to_host(x) for x in jax.tree.leaves(compute(params, *(v[i] for v in placed)))]
        for i in range(used_micro_batches(batch.segment_ids, self._settings.microbatch_rows))
      ]
    found = [np.concatenate(part) for part in zip(*parts, strict=True)]
    used = np.asarray(batch.segment_ids)[: len(found[0])]
    return [unpack(x, used, len(tasks)) for x in found]


def to_host(x: jax.Array) -> np.ndarray:
  """The whole array, on every process."""
  return np.asarray(processes.local_copy(x))
