"""The device side of training: state on a mesh, and the steps that change it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agentjax.config import ConfigError, check
from agentjax.models import ModelConfig, Params, TokenSets, cross_log_probs, sample_depths
from agentjax.models.huggingface import load_pretrained
from agentjax.models.lora import LoraConfig
from agentjax.objectives.advantage_function import (
  AdvantageFunction,
  abstract_advantage_inputs,
  advantage_function,
  check_advantages,
)
from agentjax.objectives.advantages import check_outcomes, check_rewards
from agentjax.objectives.distillation import DistillationConfig, select_tokens
from agentjax.objectives.objective import (
  Objective,
  ObjectiveConfig,
  Prepared,
  abstract_inputs,
  policy_objective,
  prepare,
  prepare_staged,
  prepare_supervised,
)
from agentjax.objectives.supervised import supervised_objective
from agentjax.rollout.schedule import bound_staleness
from agentjax.rollout.statistics import apart
from agentjax.sharding import batch_sharding, make_mesh, row_multiple, time_multiple
from agentjax.training import processes
from agentjax.training.checkpoint import load_networks
from agentjax.training.consistency import CONSISTENCY_PART, with_consistency
from agentjax.training.demonstrations import demonstration_trajectory
from agentjax.training.experiment import (
  PhaseConfig,
  RLStage,
  SupervisedStage,
  check_model_features,
)
from agentjax.training.mismatch import mismatch_report, warn_of_mismatch
from agentjax.training.nonfinite import PREFIX, first_nonfinite
from agentjax.training.optimizer import (
  applied_updates,
  build_optimizer,
  learning_rate_schedule,
)
from agentjax.training.parts import Parts
from agentjax.training.placement import place
from agentjax.training.pretrained import runtime_overrides
from agentjax.training.process_rewards import OnlineConfig, ProcessRewards, load_start
from agentjax.training.shaping import Shaper, ShapingTools
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
from agentjax.training.teacher import (
  Teachers,
  TeacherTargets,
  kept_places,
  targets_at,
)
from agentjax.training.token_sets import Compute, TokenSetSource, TokenSetTools
from agentjax.training.update import (
  Update,
  UpdateBatch,
  UpdateSettings,
  make_score,
  make_update,
  micro_rows,
  split_rows,
  used_micro_batches,
)
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.columns import TEACHER_COLUMNS
from agentjax.trajectory.packing import (
  PackedSequence,
  pack,
  paid_by_turn,
  part_rewards,
  plan_rows,
  stage_rewards,
  to_sequences,
  unpack,
  without_prompt,
)
from agentjax.trajectory.record import Reward, Task, Trajectory
from agentjax.trajectory.weights import apply_weight_rules

BASELINE_PART = "greedy_baseline"  # reward of the group's greedy episode, among a member's parts

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


Prepare = Callable[[Batch, dict[str, Any]], tuple[Prepared, dict[str, jax.Array]]]


class _Phase(NamedTuple):
  """A phase of reinforcement learning, compiled."""

  config: PhaseConfig
  prepare: Prepare
  update: Update
  correction: tuple[Prepare, Update] | None = None  # of staged rollouts, after ``update``


class _Ready(NamedTuple):
  """A batch before its updates: what ``prepare`` says, and what the update is given beside it."""

  prepared: Prepared
  metrics: dict[str, Any]
  kept: Any = None  # int32 [B, K]
  teacher: TeacherTargets | None = None
  sets: TokenSets | None = None
  correction: Prepared | None = None  # in the place of ``prepared`` in a second update

  def scaled(self, factor: float) -> _Ready:
    """With losses that are ``factor`` times as large."""
    second = self.correction
    return self._replace(
      prepared=self.prepared.scaled(factor),
      correction=None if second is None else second.scaled(factor),
    )


class Learner:
  """Holds what is compiled; the state itself is passed in and out.

  Args:
    parts: host-side parts of the run.
    objective: loss of the reinforcement-learning stage, or of its last phase.
    advantage: in the place of the advantages that its config names.

  Raises:
    ConfigError: settings that model or devices cannot do, or a loss function that cannot be traced.
  """

  def __init__(
    self, parts: Parts, objective: Objective, advantage: AdvantageFunction | None = None
  ):
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
    shares = experiment.reward.shares
    phases = [
      dataclasses.replace(phase, objective=phase.objective.with_parts_of(shares))
      for phase in (experiment.rl.all_phases if experiment.rl.steps else ())
    ]
    self._critic = any(phase.objective.needs_values for phase in phases)
    self._compares = any(phase.objective.needs_reference for phase in phases)
    process = experiment.rl.process
    self._reference = self._compares or (process is not None and process.reference is None)
    self._lora = experiment.lora
    specs = network_specs(parts.model, self._critic, self._lora)
    passes = sum(phase.steps * (1 + (phase.objective.staged is not None)) for phase in phases)
    updates = passes * experiment.rl.minibatches * experiment.rl.epochs
    self._schedules = {
      "supervised": learning_rate_schedule(
        experiment.supervised.optimizer, experiment.supervised.steps
      ),
      "rl": learning_rate_schedule(experiment.rl.optimizer, updates),
    }
    self._optimizers = {
      "supervised": build_optimizer(
        experiment.supervised.optimizer, experiment.supervised.steps, specs
      ),
      "rl": build_optimizer(experiment.rl.optimizer, updates, specs),
    }
    # That of the reward model that learns in the stage, where one does.
    self._process_optimizers: dict[str, optax.GradientTransformation | None] = {
      "supervised": None,
      "rl": process_optimizer(experiment.rl, parts.model),
    }
    self._placed = {
      stage: state_shardings(
        parts.model,
        optimizer,
        self.mesh,
        critic=self._critic,
        reference=self._reference,
        lora=self._lora,
        process=self._process_optimizers[stage],
      )
      for stage, optimizer in self._optimizers.items()
    }
    settings = update_settings(
      experiment.rl, self._lora, temperature=experiment.rl.sampling.temperature or 1.0
    )
    warm = update_settings(experiment.supervised, self._lora)
    self._supervised_update = make_update(
      # Nothing is sampled that log-probs could differ from.
      dataclasses.replace(parts.model, exact_chunk=0),
      self._optimizers["supervised"],
      supervised_objective,
      warm,
      self._placed["supervised"],
    )

    def compiled(number: int, phase: PhaseConfig) -> _Phase:
      own = objective if number == len(phases) - 1 else policy_objective(phase.objective)
      # Faults of a loss function show here, before anything is sampled or compiled.
      shape = (experiment.rl.microbatch_rows, experiment.rl.row_length)
      jax.eval_shape(own, abstract_inputs(phase.objective, *shape))
      credit = phase.objective.advantage
      given = advantage if number == len(phases) - 1 else None
      function = advantage_function(credit.function, given)
      if function is not None:
        traced = abstract_advantage_inputs(
          *shape,
          sequences=experiment.rl.tasks_per_step * experiment.rollout.group_size,
          turn_rewards=bool(credit.turn_rewards),
          token_rewards=process is not None,
          reference=self._compares,
        )
        check_advantages(function, traced)
      with_teacher = dataclasses.replace(
        settings,
        distillation=phase.objective.distillation,
        only_values=phase.trains == "values",
      )
      update = functools.partial(
        make_update,
        parts.model,
        self._optimizers["rl"],
        settings=with_teacher,
        placed=self._placed["rl"],
      )
      if phase.objective.staged is None:
        settle = functools.partial(prepare, config=phase.objective, advantage=function)
        ready = jax.jit(lambda batch, extra: settle(batch, **extra))
        return _Phase(phase, ready, update(objective=own))
      first, second = (
        jax.jit(functools.partial(_prepare_stages, config=phase.objective, update=name))
        for name in ("immediate", "correction")
      )
      narrower = policy_objective(phase.objective.correction)
      return _Phase(phase, first, update(objective=own), (second, update(objective=narrower)))

    self._phases = [compiled(i, phase) for i, phase in enumerate(phases)]
    self._resync = jax.jit(_resync, donate_argnums=0, out_shardings=self._placed["rl"])
    self.teachers = Teachers(
      experiment.rl.teachers,
      parts.chat,
      parts.model,
      self.mesh,
      settings.temperature,
      self._pack_rl,
      experiment.rl.microbatch_rows,
    )
    self.process: ProcessRewards | None = None
    if process is not None:
      self.process = ProcessRewards(
        process,
        parts.chat,
        parts.model,
        self.mesh,
        settings.temperature,
        self._pack_rl,
        experiment.rl.microbatch_rows,
      )
    optimizer, placed = self._process_optimizers["rl"], self._placed["rl"].process
    if process is not None and optimizer is not None and placed is not None:
      self._process_prepare = jax.jit(functools.partial(prepare, config=process.objective))
      self._process_update = make_update(
        parts.model,
        optimizer,
        policy_objective(process.objective),
        UpdateSettings(temperature=settings.temperature),
        placed,
      )
    self.shaper: Shaper | None = None
    if experiment.rl.shaping is not None:
      tools = ShapingTools(
        parts.model,
        parts.tokenizer.token_bytes(),
        self.mesh,
        self._pack_rl,
        experiment.rl.microbatch_rows,
      )
      self.shaper = experiment.rl.shaping.build(tools)
    self._select = jax.jit(select_tokens, static_argnums=3)
    self._score = make_score(parts.model, settings.temperature)
    self._full_policy = jax.jit(
      lambda networks, reference: full_policy(networks, reference, self._lora)
    )
    self._token_sets: TokenSetSource | None = None
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
      self._parts.model,
      self._optimizers[stage],
      key,
      self._placed[stage],
      networks,
      self._lora,
      self._process_optimizers[stage],
    )

  def first_state(self, stage: str) -> TrainState:
    """What a run begins with: ``initial_state``, with the networks of ``config.start_from``."""
    earlier = self._parts.experiment.start_from
    if earlier is None:
      return self.initial_state(stage)
    wanted = self.whole_networks(self.abstract_state(stage))
    return self.initial_state(stage, load_networks(earlier, wanted, self._parts.base_identity))

  def abstract_state(self, stage: str) -> TrainState:
    """What a checkpoint of ``stage`` is restored to: shapes, dtypes and shardings."""
    return abstract_state(
      self._parts.model,
      self._optimizers[stage],
      self._placed[stage],
      self._lora,
      self._process_optimizers[stage],
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

  def learning_rate(self, stage: str, state: TrainState) -> float:
    """That of the latest update; of the first one where all so far were skipped."""
    latest = max(int(applied_updates(state.opt_state)) - 1, 0)
    return float(self._schedules[stage](latest))

  def begin_rl(self, state: TrainState) -> TrainState:
    """The state with which reinforcement learning starts."""
    process, model = self._parts.experiment.rl.process, None
    if process is not None and process.online is not None and process.model is not None:
      model = load_start(process.model, self._parts.chat, self._parts.model, self.mesh)
    return begin_stage(
      state,
      self._optimizers["rl"],
      self._placed["rl"],
      self._lora,
      self._process_optimizers["rl"],
      model,
    )

  # Steps.

  def supervised_step(
    self, state: TrainState, tasks: Sequence[Task]
  ) -> tuple[TrainState, dict[str, float]]:
    """One optimiser step on the tasks' demonstrations."""
    settings = self._parts.experiment.supervised
    batch = self._pack_demonstrations(tasks)
    prepared = self._prepare_supervised(batch, aggregation=settings.aggregation)
    depths = None
    if self._parts.model.loop is not None:
      # Reinforcement learning keeps to the depth that was sampled with.
      depths = _to_host(self._sample_depths(state.step, batch.segment_ids))
    rows = settings.microbatch_rows
    ready = _Ready(prepared, {})
    if settings.token_sets is not None:
      if self._token_sets is None:
        self._token_sets = settings.token_sets.build(self._token_set_tools())
      kept = kept_places(np.asarray(prepared.weights), time_multiple(self.mesh))
      ready = _Ready(prepared, {}, kept, sets=self._token_sets.at(tasks, batch, kept))
    state, values, _ = self._apply(self._supervised_update, state, batch, ready, rows, depths)
    state = _counted(state)
    # Nothing was sampled, so there is no sampler to disagree with.
    return state, {k: v for k, v in values.items() if not k.startswith("mismatch/")}

  def _pack_demonstrations(self, tasks: Sequence[Task]) -> Batch:
    settings = self._parts.experiment.supervised
    return self._pack(
      to_sequences([demonstration_trajectory(task, self._parts) for task in tasks]),
      settings.row_length,
      settings.microbatch_rows,
    )

  def _token_set_tools(self) -> TokenSetTools:
    return TokenSetTools(
      model=self._parts.model,
      tasks=[task for task in self._parts.tasks.train if task.demonstration],
      tasks_per_step=self._parts.experiment.supervised.tasks_per_step,
      first_policy=lambda: self.policy(self.first_state("supervised")),
      read=self._read_demonstrations,
    )

  def _read_demonstrations(
    self, compute: Compute, params: Params, tasks: Sequence[Task]
  ) -> list[list[np.ndarray]]:
    """See ``TokenSetTools.read``."""
    batch, rows = (
      self._pack_demonstrations(tasks),
      self._parts.experiment.supervised.microbatch_rows,
    )
    grid = (batch.token_ids, batch.segment_ids, batch.positions)
    with jax.set_mesh(self.mesh):
      placed = self._place(split_rows(grid, rows))
      parts = [
        [_to_host(x) for x in jax.tree.leaves(compute(params, *(v[i] for v in placed)))]
        for i in range(used_micro_batches(batch.segment_ids, rows))
      ]
    found = [np.concatenate(part) for part in zip(*parts, strict=True)]
    used = np.asarray(batch.segment_ids)[: len(found[0])]
    return [unpack(x, used, len(tasks)) for x in found]

  def rl_step(
    self, state: TrainState, trajectories: Sequence[Trajectory], step: int
  ) -> tuple[TrainState, dict[str, float]]:
    """All minibatches and epochs of training step ``step``; metrics are means over its updates.

    Metrics under ``mismatch/`` are those of ``MismatchReport``: of all tokens where the trainer
    recomputes log-probs, else of the first minibatch, which the step's first weights score. A phase
    with context "response" or an objective with a ``preference`` has none.

    Raises:
      ConfigError: a part of ``advantage.turn_rewards`` is given for whole episodes.
      NoEpisodesError: there is nothing to learn from.
      StalenessError: a token is older than the schedule allows.
    """
    settings = self._parts.experiment.rl
    rows = settings.microbatch_rows
    trajectories, greedy = apart(trajectories)
    baselines = {t.address[:2]: t.reward for t in greedy}
    weighted = [apply_weight_rules(t, settings.weights) for t in trajectories]
    number, begins = settings.phase_of(step - self._parts.experiment.supervised.steps - 1)
    phase = self._phases[number]
    if begins and number and state.reference is not None and self._lora is None:
      state = self._resync(state)
    shaping: dict[str, float] = {}
    if self.shaper is not None:
      weighted, shaping = self.shaper.shape(self.policy(state), weighted)
    if settings.rollouts is None:
      weighted = bound_staleness(weighted, step, settings.schedule)
    # An episode that failed before its first token has none to learn from.
    started = [t for t in weighted if t.segments]
    if not started:
      raise NoEpisodesError(
        f"none of the {len(weighted)} episodes of this step has a token; the first ended with "
        f"status {weighted[0].status}: {weighted[0].metadata.get('reason', 'no reason given')}."
      )
    if phase.config.objective.needs_baseline:
      started = [_with_baseline(t, baselines.get(t.address[:2])) for t in started]
    if phase.config.objective.ambiguity is not None:
      started = with_consistency(started)
    staged = phase.config.objective.staged
    of_turns = phase.config.objective.advantage.turn_rewards
    check_turn_rewards(started, of_turns if staged is None else (staged.part,))
    parts = [to_sequences(part) for part in _by_task(started, settings.minibatches)]
    if phase.config.context == "response":
      parts = [[r for r in map(without_prompt, part) if r is not None] for part in parts]
      parts = [part for part in parts if part]
      if not parts:
        raise NoEpisodesError(f"step {step}: no token of its {len(started)} episodes has weight.")
    groups = len({t.address[:2] for t in started})
    factor = settings.selection.loss_factor(groups, settings.tasks_per_step)
    batches = [self._pack_rl(part) for part in parts]
    if not settings.replay_experts:
      batches = [batch.without("experts") for batch in batches]
    ready: list[_Ready] = []
    for batch, part in zip(batches, parts, strict=True):
      state, one = self._prepare_rl(phase, state, batch, part, rows)
      ready.append(one)
    if factor != 1:
      ready = [one.scaled(factor) for one in ready]
    every: list[dict[str, float]] = []
    trainers: list[np.ndarray] = []
    # Stored preferences were sampled by nobody.
    compared = phase.config.context == "episode" and phase.config.objective.preference is None
    if settings.old_log_probs == "recomputed":
      trainers = [np.asarray(one.prepared.old_log_probs) for one in ready]
    for _ in range(settings.epochs):
      for batch, one in zip(batches, ready, strict=True):
        state, values, log_probs = self._apply(phase.update, state, batch, one, rows)
        trainers = trainers or [_to_host(log_probs).reshape(batch.token_ids.shape)]
        values |= {k: float(v) for k, v in one.metrics.items()}
        every.append(values if compared else _without_mismatch(values))
    later: list[dict[str, float]] = []  # of the corrections
    if phase.correction is not None:
      for _ in range(settings.epochs):
        for batch, one in zip(batches, ready, strict=True):
          assert one.correction is not None
          second = one._replace(prepared=one.correction)
          state, values, _ = self._apply(phase.correction[1], state, batch, second, rows)
          later.append(_without_mismatch(values))
    means = _means(every) | {f"correction/{k}": v for k, v in _means(later).items()}
    means |= first_nonfinite([*every, *later])
    # The sampler's weights are those of the first update only; later ones move away by design.
    means |= {k: v for k, v in every[0].items() if k.startswith("mismatch/")}
    if compared:
      # Tokens without logits were not scored.
      scored = [
        dataclasses.replace(batch, weights=one.prepared.weights) if one.kept is not None else batch
        for batch, one in zip(batches, ready, strict=True)
      ]
      report = mismatch_report(scored[: len(trainers)], trainers, settings.mismatch_alarm)
    else:
      report = None
    if report is not None:
      means |= report.metrics()
      warn_of_mismatch(report, parts, step, settings.mismatch_alarm)
    means |= shaping
    means["bad_steps"] = [*every, *later][-1]["bad_steps"]
    if "process/bad_steps" in means:
      means["process/bad_steps"] = every[-1]["process/bad_steps"]
    return _counted(state), means

  def _prepare_rl(
    self,
    phase: _Phase,
    state: TrainState,
    batch: Batch,
    sequences: Sequence[PackedSequence],
    rows: int,
  ) -> tuple[TrainState, _Ready]:
    """What the updates on a batch are given; a reward model beside the policy learns from it."""
    check_rewards(*map(np.asarray, (batch.rewards, batch.valid, batch.groups)))
    number = next(i for i, known in enumerate(self._phases) if known is phase)
    last = number == len(self._phases) - 1
    path = "config.rl.objective" if last else f"config.rl.phases[{number}].objective"
    outcomes = np.asarray(batch.rewards), np.asarray(batch.valid)
    if phase.config.objective.value_loss.kind == "bernoulli":
      field = f"{path}.value_loss.kind"
      check_outcomes(*outcomes, f"{field}='bernoulli'", f"set --{field}=squared")
    preference = phase.config.objective.preference
    if preference is not None and preference.form == "outcome":
      field = f"{path}.preference.form"
      check_outcomes(*outcomes, f"{field}='outcome'", f"set --{field}=dpo")
    extra: dict[str, Any] = {}
    stage = self._parts.experiment.rl
    alone = phase.config.context == "response"
    recomputed = stage.old_log_probs == "recomputed" or alone
    if recomputed or self._critic:
      networks = dataclasses.replace(state.networks, policy=self.policy(state))
      log_probs, old_values = self._scores(networks, batch, rows)
      if alone:
        batch = dataclasses.replace(batch, behaviour_log_probs=log_probs)
      if recomputed:
        extra["old_log_probs"] = log_probs
      if self._critic:
        extra["values"] = old_values
    reference_log_probs = None
    if self._reference:
      frozen = Networks(policy=state.reference, value=None)
      # The reference chooses its own experts: those recorded are the sampler's.
      own = batch.without("experts")
      reference_log_probs = self._scores(frozen, own, rows)[0]
    if self._compares:
      extra["reference_log_probs"] = reference_log_probs
    credit, staged = phase.config.objective.advantage, phase.config.objective.staged
    if credit.parts:
      values, known = part_rewards(sequences, credit.parts, batch.num_sequences)
      batch = dataclasses.replace(batch, valid=np.asarray(batch.valid) & known)
      extra["part_rewards"] = values
    if phase.config.objective.needs_baseline:
      extra["baselines"], _ = part_rewards(sequences, (BASELINE_PART,), batch.num_sequences)
      extra["baselines"] = extra["baselines"][:, 0]
    if phase.config.objective.ambiguity is not None:
      consistency, _ = part_rewards(sequences, (CONSISTENCY_PART,), batch.num_sequences)
      extra["consistency"] = consistency[:, 0]
    if credit.turn_rewards:
      _, known = part_rewards(sequences, credit.turn_rewards, batch.num_sequences)
      batch = dataclasses.replace(batch, valid=np.asarray(batch.valid) & known)
    taught = phase.config.objective.distillation
    answers: dict[str, np.ndarray] = {}
    if taught is not None:
      student = self.policy(state) if taught.needs_comparison else None
      answers = self.teachers.ask(taught, student, batch, sequences)
      if taught.form == "sampled":
        extra["teacher_log_probs"] = answers["log_probs"]
      if taught.keep < 1:
        inside = np.asarray(batch.weights) > 0
        inside &= np.append(False, batch.valid)[np.asarray(batch.segment_ids)]
        extra["selected"] = self._select(
          answers["entropies"], answers["divergences"], inside, taught
        )
    # Rewards of steps stand on tokens that keep their weight.
    trained_on = np.asarray(batch.weights) * np.asarray(extra.get("selected", 1))
    credited = dataclasses.replace(batch, weights=trained_on.astype(np.float32))
    if credit.turn_rewards:
      shares = self._parts.experiment.reward.shares
      of_turns = {name: shares[name] for name in credit.turn_rewards}
      extra["turn_rewards"] = paid_by_turn(sequences, of_turns, credited)
    metrics: dict[str, Any] = {}
    if self.process is not None:
      policy_log_probs = np.asarray(extra.get("old_log_probs", batch.behaviour_log_probs))
      reference = self.process.log_probs("reference", batch, sequences, reference_log_probs)
      online = self.process.config.online
      learnt: dict[str, float] = {}
      if online is None:
        model = self.process.log_probs("model", batch, sequences, policy_log_probs)
      else:
        state, model, learnt = self._learn_rewards(online, state, batch, sequences, reference, rows)
      extra["token_rewards"], metrics = self.process.score(credited, sequences, model, reference)
      metrics |= learnt
    bare = batch.for_loss()
    if staged is not None:
      stages = self._parts.experiment.rollout.max_turns
      names = ("rewards", "known", "stages")
      extra |= zip(names, stage_rewards(sequences, staged.part, stages, batch), strict=True)
    prepared, found = phase.prepare(bare, extra)
    metrics |= found
    if phase.correction is not None:
      second, of_second = phase.correction[0](bare, extra)
      metrics |= {f"correction/{k}": v for k, v in of_second.items()}
      return state, _Ready(prepared, metrics, correction=second)
    if taught is None or not (taught.keep < 1 or phase.config.objective.needs_divergences):
      return state, _Ready(prepared, self._with_diagnostics(metrics, prepared, answers))
    weights = np.asarray(prepared.weights)
    trained = int(np.count_nonzero(np.asarray(batch.weights)))
    metrics["distillation/kept"] = np.count_nonzero(weights) / max(trained, 1)
    metrics = self._with_diagnostics(metrics, prepared, answers)
    if self._align > 1:
      return state, _Ready(prepared, metrics)  # exact log-probs are those of whole rows
    kept = kept_places(weights, time_multiple(self.mesh))
    if taught.form == "sampled":
      return state, _Ready(prepared, metrics, kept)
    return state, _Ready(prepared, metrics, kept, targets_at(answers, kept, taught.form))

  def _learn_rewards(
    self,
    online: OnlineConfig,
    state: TrainState,
    batch: Batch,
    sequences: Sequence[PackedSequence],
    reference_log_probs: np.ndarray,
    rows: int,
  ) -> tuple[TrainState, np.ndarray, dict[str, float]]:
    """One step of the reward model, its log-probs [B, T] for the rewards, and ``process/...``.

    Metrics are of the model before it has learnt from these episodes.
    """
    assert state.process is not None
    own = batch.for_loss()  # it chooses its own experts
    if online.outcome:
      values, known = part_rewards(sequences, (online.outcome,), batch.num_sequences)
      valid = np.asarray(batch.valid) & known
      outcomes: Any = values[:, 0]
      own = dataclasses.replace(own, rewards=outcomes, valid=valid)
    check_outcomes(
      np.asarray(own.rewards),
      np.asarray(own.valid),
      f"config.rl.process.online.outcome={online.outcome!r}",
      "set --config.rl.process.online.outcome to a part of the reward that has such",
    )
    before, _ = self._scores(state.process.networks, own, rows)
    extra = {"old_log_probs": before, "reference_log_probs": reference_log_probs}
    prepared, found = self._process_prepare(own, **extra)
    update, ready = self._process_update, _Ready(prepared, {})
    process, changed, _ = self._apply(update, state.process, own, ready, rows)
    metrics = {
      f"process/{name}": float(found[f"preference/{name}"])
      for name in ("loss", "accuracy", "margin")
    }
    metrics |= {
      f"process/{name}": changed[name] for name in ("grad_norm", "update_norm", "bad_steps")
    }
    state = dataclasses.replace(state, process=process)
    if online.forward == "single":
      return state, before, metrics
    return state, self._scores(process.networks, own, rows)[0], metrics

  @staticmethod
  def _with_diagnostics(
    metrics: dict[str, Any], prepared: Prepared, answers: dict[str, np.ndarray]
  ) -> dict[str, Any]:
    """``metrics`` and means over the weighted tokens of what ``distillation.compare`` says."""
    shares = np.asarray(prepared.shares)
    names = ("overlap", "overlap_advantage", "overlap_mass", "entropy_gap")
    means = {f"distillation/{k}": np.sum(shares * answers[k]) for k in names if k in answers}
    return metrics | means

  def cross_log_probs(
    self, state: TrainState, prompts: Sequence[np.ndarray], answers: Sequence[np.ndarray]
  ) -> np.ndarray:
    """``models.cross_log_probs`` of the present policy, at the temperature of sampling."""
    with jax.set_mesh(self.mesh):
      return cross_log_probs(
        self.policy(state),
        self._parts.model,
        prompts,
        answers,
        temperature=self._parts.experiment.rl.sampling.temperature or 1.0,
      )

  def score_by_teachers(
    self,
    trajectories: Sequence[Trajectory],
    settings: DistillationConfig,
    policy: Params | None = None,
  ) -> list[dict[str, np.ndarray]]:
    """What the teachers say of all tokens of episodes: arrays [n, ...] each, see ``make_ask``.

    Args:
      trajectories: what they are asked about; what is stored with them is not looked at.
      settings: what they are asked.
      policy: the student, where it is compared with.

    Raises:
      ValueError: an episode has several leaves, or no token.
    """
    sequences = to_sequences(trajectories)
    if len(sequences) != len(trajectories):
      raise ValueError("an episode has several branches, or no token; give episodes of one path.")
    batch = self._pack_rl(sequences).without(*TEACHER_COLUMNS)
    answers = self.teachers.ask(settings, policy, batch, sequences)
    each = {k: unpack(v, batch.segment_ids, len(sequences)) for k, v in answers.items()}
    return [{k: values[i] for k, values in each.items()} for i in range(len(sequences))]

  def _scores(self, networks: Networks, batch: Batch, rows: int) -> tuple[Any, Any]:
    token_ids, segment_ids, positions, experts = self._place(
      split_rows(
        (batch.token_ids, batch.segment_ids, batch.positions, batch.columns.get("experts")), rows
      )
    )
    count = used_micro_batches(batch.segment_ids, rows)
    with jax.set_mesh(self.mesh):
      results = self._score(networks, token_ids, segment_ids, positions, experts, count)
    log_probs, values = (_to_host(x).reshape(batch.token_ids.shape) for x in results)
    return log_probs, values

  def _apply(
    self,
    update: Update,
    state: TrainState,
    batch: Batch,
    ready: _Ready,
    rows: int,
    depths: Any = None,
  ) -> tuple[TrainState, dict[str, float], jax.Array]:
    """One update; beside state and metrics the trainer's log-probs [M, rows, T] before it."""
    whole = UpdateBatch(
      batch.token_ids,
      batch.positions,
      jax.tree.map(_to_host, ready.prepared),
      batch.columns.get("experts"),
      depths,
      ready.kept,
      ready.teacher,
      ready.sets,
    )
    # Exact divergences have one teacher.
    exact = ready.teacher is not None and ready.teacher.hidden is not None
    head = self.teachers.head() if exact else None
    count = used_micro_batches(batch.segment_ids, rows)
    with jax.set_mesh(self.mesh):
      placed = self._place(split_rows(whole, rows))
      state, metrics, log_probs = update(state, placed, count, head)
    values = {}
    for name, value in jax.device_get(metrics).items():
      if name.startswith(PREFIX) and not value:
        continue
      plain = "/" in name or name in _SUMMARIES
      values[name if plain else f"policy/{name}"] = float(value)
    return state, values, log_probs

  def _pack_rl(self, sequences: Sequence[PackedSequence]) -> Batch:
    stage = self._parts.experiment.rl
    return self._pack(sequences, stage.row_length, stage.microbatch_rows, self._align)

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


def process_optimizer(stage: RLStage, model: ModelConfig) -> optax.GradientTransformation | None:
  """Optimiser of the reward model that learns beside the policy; None without one."""
  online = None if stage.process is None else stage.process.online
  if online is None or not stage.steps:
    return None
  updates = stage.steps * stage.minibatches
  return build_optimizer(online.optimizer, updates, network_specs(model, critic=False))


def update_settings(
  stage: SupervisedStage | RLStage, lora: LoraConfig | None, temperature: float = 1.0
) -> UpdateSettings:
  """What ``make_update`` takes of a stage."""
  own: dict[str, Any] = {"temperature": temperature, "lora": lora}
  names = [field.name for field in dataclasses.fields(UpdateSettings)]
  own |= {"distillation": None, "only_values": False}  # those of a phase
  return UpdateSettings(**own, **{name: getattr(stage, name) for name in names if name not in own})


def _counted(state: TrainState) -> TrainState:
  """After one more training step."""
  process = None if state.process is None else _counted(state.process)
  return dataclasses.replace(state, step=state.step + 1, process=process)


def _resync(state: TrainState) -> TrainState:
  """The present policy is the reference from here on."""
  return dataclasses.replace(state, reference=jax.tree.map(jnp.copy, state.networks.policy))


def _with_baseline(trajectory: Trajectory, greedy: Reward | None) -> Trajectory:
  """A copy that carries its group's baseline; without one there is nothing to learn from it."""
  if greedy is None or greedy.value is None:
    invalid = Reward.invalid("the greedy episode of its group has no reward")
    return dataclasses.replace(trajectory, reward=invalid)
  parts = {**trajectory.reward_parts, BASELINE_PART: greedy}
  return dataclasses.replace(trajectory, reward_parts=parts)


def check_turn_rewards(trajectories: Sequence[Trajectory], names: Sequence[str]) -> None:
  """Refuses parts of the reward that no turn has earned.

  Raises:
    ConfigError: what the turns were paid is not what the part says.
  """
  for trajectory in trajectories:
    for name in names:
      whole = trajectory.reward_parts.get(name)
      if whole is None or whole.value is None:
        continue
      paid = sum(p for p in trajectory.turn_rewards.get(name, ()) if p is not None)
      if abs(paid - whole.value) > 1e-6 * max(1.0, abs(whole.value)):
        raise ConfigError(
          f"config.rl.objective takes {name!r} as a part of the reward that turns earn, and it is "
          f"{whole.value:g} for the episode {trajectory.address} and {paid:g} for its turns "
          "together; allowed in advantage.turn_rewards and staged.part: parts that are earned turn "
          "by turn, such as 'environment'."
        )


def _prepare_stages(
  batch: Batch,
  extra: dict[str, Any],
  *,
  config: ObjectiveConfig,
  update: Literal["immediate", "correction"],
) -> tuple[Prepared, dict[str, jax.Array]]:
  return prepare_staged(batch, config=config, update=update, **extra)


def _means(every: Sequence[dict[str, float]]) -> dict[str, float]:
  """Of the metrics of some updates, each over the updates that have it."""
  names = dict.fromkeys(k for values in every for k in values if not k.startswith(PREFIX))
  return {k: float(np.mean([values[k] for values in every if k in values])) for k in names}


def _without_mismatch(values: dict[str, float]) -> dict[str, float]:
  return {name: value for name, value in values.items() if not name.startswith("mismatch/")}


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
