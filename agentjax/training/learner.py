"""The device side of training: state on a mesh, and the steps that change it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from agentjax.config import check
from agentjax.models import Params, sample_depths
from agentjax.models.huggingface import load_pretrained
from agentjax.models.lora import LoraConfig
from agentjax.objectives.advantages import check_rewards
from agentjax.objectives.objective import Objective, Prepared, prepare, prepare_supervised
from agentjax.objectives.supervised import supervised_objective
from agentjax.rollout.schedule import bound_staleness
from agentjax.sharding import batch_sharding, make_mesh, row_multiple, time_multiple
from agentjax.training import processes
from agentjax.training.demonstrations import demonstration_trajectory
from agentjax.training.experiment import RLStage, SupervisedStage, check_model_features
from agentjax.training.mismatch import mismatch_report, warn_of_mismatch
from agentjax.training.optimizer import build_optimizer
from agentjax.training.parts import Parts
from agentjax.training.placement import place
from agentjax.training.pretrained import runtime_overrides
from agentjax.training.state import (
  Networks,
  TrainState,
  abstract_state,
  begin_stage,
  full_policy,
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
from agentjax.trajectory.packing import PackedSequence, pack, plan_rows, to_sequences
from agentjax.trajectory.record import Task, Trajectory
from agentjax.trajectory.weights import apply_weight_rules

_SUMMARIES = (
  "loss",
  "grad_norm",
  "update_norm",
  "bad_steps",
  "router_imbalance",
  "router_dropped",
  "nll",
)


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
    check_model_features(experiment, parts.model)
    self.mesh = make_mesh(experiment.mesh, place(experiment.devices).training)
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
    self._align = max(1, parts.model.exact_chunk)
    check(
      self._align == 1 or self.mesh.size == 1 or not experiment.rl.steps,
      "config.model.exact_chunk",
      parts.model.exact_chunk,
      f"0 on a mesh of {self.mesh.size} devices: sampling runs on one, and training only there "
      "computes the same bits",
    )
    self._config = experiment.rl.objective
    self._critic = experiment.rl.steps > 0 and self._config.needs_values
    self._reference = experiment.rl.steps > 0 and self._config.needs_reference
    self._lora = experiment.lora
    specs = network_specs(parts.model, self._critic, self._lora)
    updates = experiment.rl.steps * experiment.rl.minibatches * experiment.rl.epochs
    self._optimizers = {
      "supervised": build_optimizer(
        experiment.supervised.optimizer, experiment.supervised.steps, specs
      ),
      "rl": build_optimizer(experiment.rl.optimizer, updates, specs),
    }
    self._placed = {
      stage: state_shardings(
        parts.model,
        optimizer,
        self.mesh,
        critic=self._critic,
        reference=self._reference,
        lora=self._lora,
      )
      for stage, optimizer in self._optimizers.items()
    }
    settings = update_settings(
      experiment.rl, self._lora, temperature=experiment.rl.sampling.temperature or 1.0
    )
    warm = update_settings(experiment.supervised, self._lora)
    self._update = {
      "supervised": make_update(
        # Nothing is sampled that log-probs could differ from.
        dataclasses.replace(parts.model, exact_chunk=0),
        self._optimizers["supervised"],
        supervised_objective,
        warm,
        self._placed["supervised"],
      ),
      "rl": make_update(
        parts.model, self._optimizers["rl"], objective, settings, self._placed["rl"]
      ),
    }
    self._score = make_score(parts.model, settings.temperature)
    self._full_policy = jax.jit(
      lambda networks, reference: full_policy(networks, reference, self._lora)
    )
    self._prepare = jax.jit(lambda batch, extra: prepare(batch, self._config, **extra))
    self._prepare_supervised = jax.jit(prepare_supervised, static_argnames="aggregation")
    # 0, 1 and 2 address the initial parameters.
    key = jax.random.fold_in(jax.random.key(experiment.seed), 3)
    self._sample_depths = jax.jit(
      lambda step, sequences: sample_depths(parts.model, jax.random.fold_in(key, step), sequences)
    )

  # States.

  def initial_state(self, stage: str, networks: Networks | None = None) -> TrainState:
    """``networks``, else the pretrained policy, else random parameters; all else fresh."""
    experiment = self._parts.experiment
    if networks is None and experiment.pretrained is not None:
      policy, _ = load_pretrained(
        experiment.pretrained, mesh=self.mesh, overrides=runtime_overrides(self._parts.model)
      )
      networks = Networks(policy=policy, value=None)
    key = jax.random.key(experiment.seed)
    return init_state(
      self._parts.model, self._optimizers[stage], key, self._placed[stage], networks, self._lora
    )

  def abstract_state(self, stage: str) -> TrainState:
    """What a checkpoint of ``stage`` is restored to: shapes, dtypes and shardings."""
    return abstract_state(
      self._parts.model, self._optimizers[stage], self._placed[stage], self._lora
    )

  def whole_networks(self, state: TrainState) -> Networks:
    """What ``initial_state`` takes: with adapters, the policy they are added to."""
    if self._lora is None:
      return state.networks
    return dataclasses.replace(state.networks, policy=state.reference)

  def policy(self, state: TrainState) -> Params:
    """What the policy plays with: its parameters, with adapters added in where there are any."""
    if self._lora is None:
      return state.networks.policy
    with jax.set_mesh(self.mesh):
      return self._full_policy(state.networks, state.reference)

  def begin_rl(self, state: TrainState) -> TrainState:
    """The state with which reinforcement learning starts."""
    return begin_stage(state, self._optimizers["rl"], self._placed["rl"], self._lora)

  # Steps.

  def supervised_step(
    self, state: TrainState, tasks: Sequence[Task]
  ) -> tuple[TrainState, dict[str, float]]:
    """One optimiser step on the tasks' demonstrations."""
    settings = self._parts.experiment.supervised
    batch = self._pack(
      to_sequences([demonstration_trajectory(task, self._parts) for task in tasks]),
      settings.row_length,
      settings.microbatch_rows,
    )
    prepared = self._prepare_supervised(batch, aggregation=settings.aggregation)
    depths = None
    if self._parts.model.loop is not None:
      # Reinforcement learning keeps to the depth that was sampled with.
      depths = _to_host(self._sample_depths(state.step, batch.segment_ids))
    rows = settings.microbatch_rows
    state, values, _ = self._apply("supervised", state, batch, prepared, rows, depths)
    # Nothing was sampled, so there is no sampler to disagree with.
    return state, {k: v for k, v in values.items() if not k.startswith("mismatch/")}

  def rl_step(
    self, state: TrainState, trajectories: Sequence[Trajectory], step: int
  ) -> tuple[TrainState, dict[str, float]]:
    """All minibatches and epochs of training step ``step``; metrics are means over its updates.

    Metrics under ``mismatch/`` are those of ``MismatchReport``: of all tokens where the trainer
    recomputes log-probs, else of the first minibatch, which the step's first weights score.

    Raises:
      NoEpisodesError: there is nothing to learn from.
      StalenessError: a token is older than the schedule allows.
    """
    settings = self._parts.experiment.rl
    rows = settings.microbatch_rows
    weighted = [apply_weight_rules(t, settings.weights) for t in trajectories]
    weighted = bound_staleness(weighted, step, settings.schedule)
    # An episode that failed before its first token has none to learn from.
    started = [t for t in weighted if t.segments]
    if not started:
      raise NoEpisodesError(
        f"none of the {len(weighted)} episodes of this step has a token; the first ended with "
        f"status {weighted[0].status}: {weighted[0].metadata.get('reason', 'no reason given')}."
      )
    parts = [to_sequences(part) for part in _by_task(started, settings.minibatches)]
    batches = [self._pack(part, settings.row_length, rows, self._align) for part in parts]
    if not settings.replay_experts:
      batches = [dataclasses.replace(batch, experts=None) for batch in batches]
    ready = [self._prepare_rl(state, batch, rows) for batch in batches]
    every: list[dict[str, float]] = []
    trainers: list[np.ndarray] = []
    if settings.old_log_probs == "recomputed":
      trainers = [np.asarray(prepared.old_log_probs) for prepared, _ in ready]
    for _ in range(settings.epochs):
      for batch, (prepared, metrics) in zip(batches, ready, strict=True):
        state, values, log_probs = self._apply("rl", state, batch, prepared, rows)
        trainers = trainers or [_to_host(log_probs).reshape(batch.token_ids.shape)]
        every.append(values | {k: float(v) for k, v in metrics.items()})
    means = {k: float(np.mean([values[k] for values in every])) for k in every[0]}
    # The sampler's weights are those of the first update only; later ones move away by design.
    means |= {k: v for k, v in every[0].items() if k.startswith("mismatch/")}
    report = mismatch_report(batches[: len(trainers)], trainers, settings.mismatch_alarm)
    if report is not None:
      means |= report.metrics()
      warn_of_mismatch(report, parts, step, settings.mismatch_alarm)
    means["bad_steps"] = every[-1]["bad_steps"]
    return state, means

  def _prepare_rl(
    self, state: TrainState, batch: Batch, rows: int
  ) -> tuple[Prepared, dict[str, jax.Array]]:
    check_rewards(*map(np.asarray, (batch.rewards, batch.valid, batch.groups)))
    extra: dict[str, Any] = {}
    settings = self._parts.experiment.rl
    if settings.old_log_probs == "recomputed" or self._critic:
      networks = dataclasses.replace(state.networks, policy=self.policy(state))
      log_probs, old_values = self._scores(networks, batch, rows)
      if settings.old_log_probs == "recomputed":
        extra["old_log_probs"] = log_probs
      if self._critic:
        extra["values"] = old_values
    if self._reference:
      frozen = Networks(policy=state.reference, value=None)
      # The reference chooses its own experts: those recorded are the sampler's.
      own = dataclasses.replace(batch, experts=None)
      extra["reference_log_probs"] = self._scores(frozen, own, rows)[0]
    return self._prepare(dataclasses.replace(batch, experts=None), extra)

  def _scores(self, networks: Networks, batch: Batch, rows: int) -> tuple[np.ndarray, np.ndarray]:
    token_ids, segment_ids, positions, experts = self._place(
      split_rows((batch.token_ids, batch.segment_ids, batch.positions, batch.experts), rows)
    )
    count = used_micro_batches(batch.segment_ids, rows)
    with jax.set_mesh(self.mesh):
      results = self._score(networks, token_ids, segment_ids, positions, experts, count)
    log_probs, values = (_to_host(x).reshape(batch.token_ids.shape) for x in results)
    return log_probs, values

  def _apply(
    self,
    stage: str,
    state: TrainState,
    batch: Batch,
    prepared: Prepared,
    rows: int,
    depths: Any = None,
  ) -> tuple[TrainState, dict[str, float], jax.Array]:
    """One update; beside state and metrics the trainer's log-probs [M, rows, T] before it."""
    whole = UpdateBatch(
      batch.token_ids, batch.positions, jax.tree.map(_to_host, prepared), batch.experts, depths
    )
    count = used_micro_batches(batch.segment_ids, rows)
    with jax.set_mesh(self.mesh):
      placed = self._place(split_rows(whole, rows))
      state, metrics, log_probs = self._update[stage](state, placed, count)
    values = {}
    for name, value in jax.device_get(metrics).items():
      plain = "/" in name or name in _SUMMARIES
      values[name if plain else f"policy/{name}"] = float(value)
    return dataclasses.replace(state, step=state.step + 1), values, log_probs

  def _pack(
    self, sequences: Sequence[PackedSequence], row_length: int, rows: int, align: int = 1
  ) -> Batch:
    needed = plan_rows([len(s) for s in sequences], row_length, align).num_rows
    return pack(
      sequences,
      row_length=row_length,
      pad_id=self._parts.tokenizer.pad_id,
      rows=micro_rows(needed, rows),
      align=align,
    )

  def _place(self, tree: Any) -> Any:
    """[M, rows, T] host arrays on the mesh: rows over data and fsdp, time over context."""
    rows = batch_sharding(self.mesh)
    spec = jax.sharding.NamedSharding(self.mesh, jax.P(None, *rows.spec))
    return jax.tree.map(lambda x: jax.device_put(x, spec), tree)


def update_settings(
  stage: SupervisedStage | RLStage, lora: LoraConfig | None, temperature: float = 1.0
) -> UpdateSettings:
  """What ``make_update`` takes of a stage."""
  own: dict[str, Any] = {"temperature": temperature, "lora": lora}
  names = [field.name for field in dataclasses.fields(UpdateSettings)]
  return UpdateSettings(**own, **{name: getattr(stage, name) for name in names if name not in own})


def _by_task(trajectories: Sequence[Trajectory], parts: int) -> list[list[Trajectory]]:
  """Trajectories in ``parts`` runs that never split a task's group."""
  groups = sorted({t.address[:2] for t in trajectories})
  size = -(-len(groups) // parts)
  part_of = {group: i // size for i, group in enumerate(groups)}
  result: list[list[Trajectory]] = [[] for _ in range(parts)]
  for trajectory in trajectories:
    result[part_of[trajectory.address[:2]]].append(trajectory)
  return [part for part in result if part]


def _to_host(x: jax.Array) -> np.ndarray:
  return np.asarray(processes.local_copy(x))
