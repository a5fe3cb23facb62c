"""The device side of training: state on a mesh, and the steps that change it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from agentjax.config import check
from agentjax.models.spec import decay_mask
from agentjax.objectives.advantages import check_rewards
from agentjax.objectives.objective import Objective, Prepared, prepare, prepare_supervised
from agentjax.objectives.supervised import supervised_objective
from agentjax.sharding import batch_sharding, make_mesh, row_multiple, time_multiple
from agentjax.training import processes
from agentjax.training.demonstrations import demonstration_trajectory
from agentjax.training.optimizer import build_optimizer
from agentjax.training.parts import Parts
from agentjax.training.state import (
  Networks,
  TrainState,
  begin_stage,
  init_state,
  network_specs,
  state_shardings,
)
from agentjax.training.update import (
  UpdateBatch,
  UpdateSettings,
  make_score,
  make_update,
  micro_rows,
  split_rows,
  used_micro_batches,
)
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.packing import pack, plan_rows, to_sequences
from agentjax.trajectory.record import Task, Trajectory
from agentjax.trajectory.weights import apply_weight_rules

_SUMMARIES = ("loss", "grad_norm", "update_norm", "bad_steps", "router_imbalance", "nll")


class NoEpisodesError(RuntimeError):
  """A step has nothing to learn from; the message says what became of its episodes."""


class Learner:
  """Holds what is compiled; the state itself is passed in and out.

  Args:
    parts: host-side parts of the run.
    objective: loss of the reinforcement-learning stage.
  """

  def __init__(self, parts: Parts, objective: Objective):
    self._parts, experiment = parts, parts.experiment
    self.mesh = make_mesh(experiment.mesh)
    for name, stage in (("supervised", experiment.supervised), ("rl", experiment.rl)):
      if stage.steps:
        for field, multiple in (
          ("microbatch_rows", row_multiple(self.mesh)),
          ("row_length", time_multiple(self.mesh)),
        ):
          value = getattr(stage, field)
          check(
            value % multiple == 0,
            f"config.{name}.{field}",
            value,
            f"a multiple of {multiple}, the devices that config.mesh splits it over",
          )
    self._config = experiment.rl.objective
    self._critic = experiment.rl.steps > 0 and self._config.needs_values
    self._reference = experiment.rl.steps > 0 and self._config.needs_reference
    decayed = decay_mask(network_specs(parts.model, self._critic))
    updates = experiment.rl.steps * experiment.rl.minibatches * experiment.rl.epochs
    self._optimizers = {
      "supervised": build_optimizer(
        experiment.supervised.optimizer, experiment.supervised.steps, decayed
      ),
      "rl": build_optimizer(experiment.rl.optimizer, updates, decayed),
    }
    self._placed = {
      stage: state_shardings(
        parts.model, optimizer, self.mesh, critic=self._critic, reference=self._reference
      )
      for stage, optimizer in self._optimizers.items()
    }
    settings = UpdateSettings(
      temperature=experiment.rl.sampling.temperature or 1.0,
      router_bias_rate=experiment.rl.router_bias_rate,
      balance_coefficient=experiment.rl.balance_coefficient,
    )
    warm = UpdateSettings(
      router_bias_rate=experiment.supervised.router_bias_rate,
      balance_coefficient=experiment.supervised.balance_coefficient,
    )
    self._update = {
      "supervised": make_update(
        parts.model,
        self._optimizers["supervised"],
        supervised_objective,
        warm,
        self._placed["supervised"],
      ),
      "rl": make_update(
        parts.model, self._optimizers["rl"], objective, settings, self._placed["rl"]
      ),
    }
    self._score = make_score(parts.model, settings)
    self._prepare = jax.jit(lambda batch, extra: prepare(batch, self._config, **extra))
    self._prepare_supervised = jax.jit(prepare_supervised, static_argnames="aggregation")

  # States.

  def initial_state(self, stage: str) -> TrainState:
    """Random parameters of the run's seed, with the optimiser of ``stage``."""
    key = jax.random.key(self._parts.experiment.seed)
    return init_state(self._parts.model, self._optimizers[stage], key, self._placed[stage])

  def with_networks(self, state: TrainState, networks: Networks, stage: str) -> TrainState:
    """``state`` with other parameters, a fresh optimiser and a reference to match."""
    return begin_stage(
      dataclasses.replace(state, networks=networks), self._optimizers[stage], self._placed[stage]
    )

  def begin_rl(self, state: TrainState) -> TrainState:
    """The state with which reinforcement learning starts."""
    return begin_stage(state, self._optimizers["rl"], self._placed["rl"])

  # Steps.

  def supervised_step(
    self, state: TrainState, tasks: Sequence[Task]
  ) -> tuple[TrainState, dict[str, float]]:
    """One optimiser step on the tasks' demonstrations."""
    settings = self._parts.experiment.supervised
    batch = self._pack(
      [demonstration_trajectory(task, self._parts) for task in tasks],
      settings.row_length,
      settings.microbatch_rows,
    )
    prepared = self._prepare_supervised(batch, aggregation=settings.aggregation)
    state, values = self._apply("supervised", state, batch, prepared, settings.microbatch_rows)
    # Nothing was sampled, so there is no sampler to disagree with.
    return state, {k: v for k, v in values.items() if not k.startswith("mismatch/")}

  def rl_step(
    self, state: TrainState, trajectories: Sequence[Trajectory]
  ) -> tuple[TrainState, dict[str, float]]:
    """All minibatches and epochs of one round; metrics are means over its optimiser steps."""
    settings = self._parts.experiment.rl
    rows = settings.microbatch_rows
    weighted = [apply_weight_rules(t, settings.weights) for t in trajectories]
    # An episode that failed before its first token has none to learn from.
    started = [t for t in weighted if t.segments]
    if not started:
      raise NoEpisodesError(
        f"none of the {len(weighted)} episodes of this step has a token; the first ended with "
        f"status {weighted[0].status}: {weighted[0].metadata.get('reason', 'no reason given')}."
      )
    batches = [
      self._pack(part, settings.row_length, rows)
      for part in _by_task(started, settings.minibatches)
    ]
    ready = [self._prepare_rl(state, batch, rows) for batch in batches]
    every: list[dict[str, float]] = []
    for _ in range(settings.epochs):
      for batch, (prepared, metrics) in zip(batches, ready, strict=True):
        state, values = self._apply("rl", state, batch, prepared, rows)
        every.append(values | {k: float(v) for k, v in metrics.items()})
    means = {k: float(np.mean([values[k] for values in every])) for k in every[0]}
    # The sampler's weights are those of the first update only; later ones move away by design.
    means |= {k: v for k, v in every[0].items() if k.startswith("mismatch/")}
    means["bad_steps"] = every[-1]["bad_steps"]
    return state, means

  def _prepare_rl(
    self, state: TrainState, batch: Batch, rows: int
  ) -> tuple[Prepared, dict[str, jax.Array]]:
    check_rewards(*map(np.asarray, (batch.rewards, batch.valid, batch.groups)))
    extra: dict[str, Any] = {}
    settings = self._parts.experiment.rl
    if settings.old_log_probs == "recomputed" or self._critic:
      log_probs, old_values = self._scores(state.networks, batch, rows)
      if settings.old_log_probs == "recomputed":
        extra["old_log_probs"] = log_probs
      if self._critic:
        extra["values"] = old_values
    if self._reference:
      frozen = Networks(policy=state.reference, value=None)
      extra["reference_log_probs"] = self._scores(frozen, batch, rows)[0]
    return self._prepare(batch, extra)

  def _scores(self, networks: Networks, batch: Batch, rows: int) -> tuple[np.ndarray, np.ndarray]:
    token_ids, segment_ids, positions = self._place(
      split_rows((batch.token_ids, batch.segment_ids, batch.positions), rows)
    )
    count = used_micro_batches(batch.segment_ids, rows)
    with jax.set_mesh(self.mesh):
      results = self._score(networks, token_ids, segment_ids, positions, count)
    log_probs, values = (_to_host(x).reshape(batch.token_ids.shape) for x in results)
    return log_probs, values

  def _apply(
    self, stage: str, state: TrainState, batch: Batch, prepared: Prepared, rows: int
  ) -> tuple[TrainState, dict[str, float]]:
    whole = UpdateBatch(batch.token_ids, batch.positions, jax.tree.map(_to_host, prepared))
    count = used_micro_batches(batch.segment_ids, rows)
    with jax.set_mesh(self.mesh):
      state, metrics = self._update[stage](state, self._place(split_rows(whole, rows)), count)
    values = {}
    for name, value in jax.device_get(metrics).items():
      plain = "/" in name or name in _SUMMARIES
      values[name if plain else f"policy/{name}"] = float(value)
    return dataclasses.replace(state, step=state.step + 1), values

  def _pack(self, trajectories: Sequence[Trajectory], row_length: int, rows: int) -> Batch:
    sequences = to_sequences(trajectories)
    needed = plan_rows([len(s) for s in sequences], row_length).num_rows
    return pack(
      sequences,
      row_length=row_length,
      pad_id=self._parts.tokenizer.pad_id,
      rows=micro_rows(needed, rows),
    )

  def _place(self, tree: Any) -> Any:
    """[M, rows, T] host arrays on the mesh: rows over data and fsdp, time over context."""
    rows = batch_sharding(self.mesh)
    spec = jax.sharding.NamedSharding(self.mesh, jax.P(None, *rows.spec))
    return jax.tree.map(lambda x: jax.device_put(x, spec), tree)


def _by_task(trajectories: Sequence[Trajectory], parts: int) -> list[list[Trajectory]]:
  """Trajectories in ``parts`` runs that never split a task's group."""
  tasks = sorted({t.task_id for t in trajectories})
  size = -(-len(tasks) // parts)
  place = {task: i // size for i, task in enumerate(tasks)}
  result: list[list[Trajectory]] = [[] for _ in range(parts)]
  for trajectory in trajectories:
    result[place[trajectory.task_id]].append(trajectory)
  return [part for part in result if part]


def _to_host(x: jax.Array) -> np.ndarray:
  return np.asarray(processes.local_copy(x))
