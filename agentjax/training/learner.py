"""The device side of training: pack, signals in the order of their needs, prepare, update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from agentjax.config import check
from agentjax.objectives.advantage_function import AdvantageFunction
from agentjax.objectives.objective import Objective
from agentjax.rollout.schedule import bound_staleness
from agentjax.rollout.seat_config import trained_seats
from agentjax.rollout.statistics import apart
from agentjax.sharding import in_order, make_mesh, row_multiple, time_multiple
from agentjax.signals.build import SignalBuilder, signal_tools
from agentjax.signals.signal import BatchContext, ForUpdate, Signal, StepContext
from agentjax.training import processes
from agentjax.training.alternation import learners
from agentjax.training.build import Parts
from agentjax.training.experiment import PhaseConfig, check_model_features
from agentjax.training.mismatch import mismatch_report, warn_of_mismatch
from agentjax.training.nonfinite import PREFIX, first_nonfinite
from agentjax.training.passes import Ready, join_for_update, make_ready, run_update
from agentjax.training.phases import Phase, compile_phases, update_settings
from agentjax.training.placement import place
from agentjax.training.policies import bind
from agentjax.training.rows import MeshRows, make_scorer
from agentjax.training.scheduled import ScheduledNumbers
from agentjax.training.state import TrainState
from agentjax.training.states import TrainStates, counted, with_networks
from agentjax.training.supervised_step import SupervisedSteps
from agentjax.training.update import Update, make_update
from agentjax.training.wide_columns import WideColumns
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.packing import PackedSequence, to_sequences, without_prompt
from agentjax.trajectory.record import POLICY, Task, Trajectory
from agentjax.trajectory.seats import learning_views, policy_of
from agentjax.trajectory.weights import apply_weight_rules


class NoEpisodesError(RuntimeError):
  """A step has nothing to learn from; the message says what became of its episodes."""


@dataclasses.dataclass(frozen=True)
class _Prepared:
  """A batch of a step.

  Attributes:
    sequences: what was packed.
    packed: on the host.
    batch: on the mesh.
    ready: on the mesh, for each pass of the phase.
    metrics: of signals and of ``prepare``.
  """

  sequences: Sequence[PackedSequence]
  packed: Batch
  batch: Batch
  ready: Sequence[Ready]
  metrics: dict[str, Any]


class Learner(TrainStates):
  """Holds what is compiled; the state itself is passed in and out.

  Args:
    parts: host-side parts of the run.
    objective: loss of the reinforcement-learning stage, or of its last phase.
    advantage: in the place of the advantages that its config names.

  Attributes:
    scheduled: numbers of the run's schedules.

  Raises:
    ConfigError: settings that model or devices cannot do, a loss function that cannot be traced, or
      signals that do not fit each other.
  """

  def __init__(
    self, parts: Parts, objective: Objective, advantage: AdvantageFunction | None = None
  ):
    experiment = parts.experiment
    check_model_features(experiment, parts.model)
    mesh = make_mesh(experiment.mesh, place(experiment.devices).training)
    _check_mesh(parts, mesh)
    phases = list(experiment.rl.all_phases) if experiment.rl.steps else []
    tools = signal_tools(parts, mesh)
    builders = {n: SignalBuilder(parts, tools) for n in (POLICY, *trained_seats(experiment.seats))}
    networks = {name: builder.networks for name, builder in builders.items()}
    super().__init__(parts, phases, mesh, networks.pop(POLICY), networks)
    stage = experiment.rl
    self.scheduled = ScheduledNumbers(experiment)
    self._wide = WideColumns()
    self._rows = MeshRows(mesh, stage.microbatch_rows, self._wide)
    self._pack = tools.pack
    likelihood = experiment.likelihood
    score = likelihood.episodes(parts.model, parts.chat)
    self._mark = None if score is None else likelihood.marks
    self.score = make_scorer(parts.model, tools.temperature, self._rows, score, likelihood.marks)
    settings = update_settings(stage, self._lora, tools.temperature, score)

    def update(name: str, phase: PhaseConfig, own: Objective) -> Update:
      ours = dataclasses.replace(
        settings,
        distillation=phase.objective.distillation,
        only_values=phase.trains == "values",
      )
      optimizer = self.policy_optimizers[name]
      return make_update(parts.model, optimizer, own, ours, bind(self.specs["rl"].placed, name))

    self._phases: dict[str, list[Phase]] = {}
    for name, optimizer in self.policy_optimizers.items():
      signals = builders[name].of_phase
      if name != POLICY and optimizer is self.optimizers["rl"]:  # its programs serve both
        own = [phase._replace(signals=signals(phase.config)) for phase in self._phases[POLICY]]
      else:
        make = functools.partial(update, name)
        own = compile_phases(experiment, phases, objective, advantage, signals, make, self._rows)
      self._phases[name] = own
    self._supervised = SupervisedSteps(parts, self)

  @property
  def signals(self) -> dict[str, Signal]:
    """The signals of all phases by name; of one that phases make anew, the last phase's.

    Those of a further policy P are called P.NAME.
    """
    return {
      signal.name if policy == POLICY else f"{policy}.{signal.name}": signal
      for policy, phases in self._phases.items()
      for phase in phases
      for signal in phase.signals
    }

  def gather(self, own: Sequence[Trajectory], step: int) -> list[Trajectory]:
    """Everyone's episodes for ``rl_step``, in the order of their addresses.

    Columns that only devices read stay where they are, unless a signal keeps episodes for later
    steps.
    """
    if any(signal.keeps_episodes for signal in self.signals.values()):
      return processes.gather_trajectories(own)
    return self._wide.gather(own, step)

  def supervised_step(
    self, state: TrainState, tasks: Sequence[Task]
  ) -> tuple[TrainState, dict[str, float]]:
    """One optimiser step on the tasks' demonstrations."""
    return self._supervised(state, tasks)

  def rl_step(
    self, state: TrainState, trajectories: Sequence[Trajectory], step: int
  ) -> tuple[TrainState, dict[str, float]]:
    """All minibatches and epochs of training step ``step``; metrics are means over its updates.

    Each policy learns from the episodes that it played, where it is its turn (``rl.alternate``).
    Metrics of "policy" have no prefix, those of another are under ``policies/NAME/``.

    Metrics under ``mismatch/`` are those of ``MismatchReport``: of all tokens where the trainer
    recomputes log-probs, else of the first minibatch, which the step's first weights score. A phase
    with context "response" or an objective with a ``preference`` has none.

    Raises:
      ConfigError: rewards that the phase's signals or its objective refuse.
      NoEpisodesError: there is nothing to learn from.
      StalenessError: a token is older than the schedule allows.
    """
    settings = self._parts.experiment.rl
    done = step - self._parts.experiment.supervised.steps - 1
    number, begins = settings.phase_of(done)
    if begins and number:
      state = self.begin_phase(state)
    views = learning_views(trajectories)
    names = learners(settings.alternate, self.trained, done)
    if self.trained:
      played = {n: [v for v in views if v.segments and policy_of(v) == n] for n in names}
      played = {name: own for name, own in played.items() if own}
      if not played:
        raise NoEpisodesError(f"step {step}: {', '.join(names)} played none of its episodes.")
    else:
      played = {POLICY: views}
    means: dict[str, float] = {}
    for name, own in played.items():
      phase = self._phases[name][number]
      bound, found = self._train(phase, bind(state, name), own, step)
      state = bind(bound, name)
      prefix = "" if name == POLICY else f"policies/{name}/"
      means |= {f"{prefix}{k}": v for k, v in found.items()}
    return counted(state), means

  def _train(
    self, phase: Phase, state: TrainState, episodes: Sequence[Trajectory], step: int
  ) -> tuple[TrainState, dict[str, float]]:
    """The updates of one policy, which is "policy" in the state, and their metrics."""
    settings = self._parts.experiment.rl
    state, batches, observed = self._prepare_step(phase, state, episodes, step)
    every: list[list[dict[str, float]]] = []  # by pass
    trainers: list[Any] = []
    if settings.old_log_probs == "recomputed":
      trainers = [one.ready[0].prepared.old_log_probs for one in batches]
    for i, own in enumerate(phase.passes):
      found: list[dict[str, float]] = []
      for one in batches * settings.epochs:
        # A later pass may have no token at this step; an optimiser would move on its momentum.
        if i and not one.metrics.get(f"{own.prefix}tokens/weighted", 1):
          continue
        state, values, log_probs = self._apply(own.update, state, one, i)
        if i == 0:
          trainers = trainers or [self._rows.join(log_probs)]
          values |= {
            k: float(v)
            for k, v in one.metrics.items()
            if phase.compared or not k.startswith("mismatch/")
          }
        found.append(values)
      every.append(found)
    means: dict[str, float] = {}
    for own, found in zip(phase.passes, every, strict=True):
      means |= {f"{own.prefix}{k}": v for k, v in _means(found).items()}
    means |= first_nonfinite([values for found in every for values in found])
    # The sampler's weights are those of the first update only; later ones move away by design.
    means |= {k: v for k, v in every[0][0].items() if k.startswith("mismatch/")}
    if phase.compared:
      means |= self._mismatch(batches, trainers, step)
    means |= observed
    # How often in a row updates were skipped is no mean.
    means |= {k: v for k, v in every[0][-1].items() if k.endswith("/bad_steps")}
    means["bad_steps"] = [values for found in every for values in found][-1]["bad_steps"]
    return state, means

  def _prepare_step(
    self, phase: Phase, state: TrainState, views: Sequence[Trajectory], step: int
  ) -> tuple[TrainState, list[_Prepared], dict[str, Any]]:
    """The batches of a step, and metrics of its episodes; signals may change networks."""
    settings = self._parts.experiment.rl
    policy = functools.cache(lambda: self.policy(state))
    at = functools.partial(self.scheduled.at, step=step)
    episodes, beside = apart(views)
    weighted = [apply_weight_rules(t, settings.weights) for t in episodes]
    if settings.rollouts is None:
      weighted = bound_staleness(weighted, step, settings.schedule)
    # An episode that failed before its first token has none to learn from.
    started = [t for t in weighted if t.segments]
    if not started:
      raise NoEpisodesError(
        f"none of the {len(weighted)} episodes of this step has a token; the first ended with "
        f"status {weighted[0].status}: {weighted[0].metadata.get('reason', 'no reason given')}."
      )
    observed: dict[str, Any] = {}
    for signal in phase.signals:
      started, found = signal.observe(StepContext(step, policy, beside, at), started)
      observed |= found
    if not started:
      raise NoEpisodesError(f"step {step}: its signals left out all {len(weighted)} episodes.")
    parts = [to_sequences(part) for part in _by_task(started, settings.minibatches)]
    if phase.config.context == "response":
      parts = [[r for r in map(without_prompt, part) if r is not None] for part in parts]
      parts = [part for part in parts if part]
      if not parts:
        raise NoEpisodesError(f"step {step}: no token of its {len(started)} episodes has weight.")
    groups = len({t.address[:2] for t in started})
    factor = settings.selection.loss_factor(groups, settings.tasks_per_step)
    result = []
    for part in parts:
      state, one = self._prepare_batch(phase, state, part, step, policy, factor)
      in_order([each.placed for each in one.ready])  # the next batch does not depend on it
      result.append(one)
    return state, result, observed

  def _prepare_batch(
    self,
    phase: Phase,
    state: TrainState,
    sequences: Sequence[PackedSequence],
    step: int,
    policy: Any,
    factor: float,
  ) -> tuple[TrainState, _Prepared]:
    """What the updates on a batch are given: signals, then ``prepare``, all on the mesh."""
    packed = self._pack(sequences)
    if not self._parts.experiment.rl.replay_experts:
      packed = packed.without("experts")
    phase.check(packed)
    batch = self._rows.place(packed)
    context = BatchContext(step, policy, sequences, packed, self.score, self._rows)
    metrics: dict[str, Any] = {}
    for signal in phase.signals:
      said = signal(context, state.networks, batch)
      columns = {k: self._rows.place_column(k, v) for k, v in said.columns.items()}
      batch, state = batch.with_columns(columns), with_networks(state, said.networks)
      metrics |= said.metrics
    ready: list[Ready] = []
    numbers = self.scheduled.arrays(phase.config.objective, step)
    for own in phase.passes:
      prepared, found = own.prepare(batch, numbers)
      for signal in phase.signals if not ready else ():
        learnt = signal.learn(context, state.networks, batch, prepared)
        state = with_networks(state, learnt.networks)
        metrics |= learnt.metrics
      asked = [s.for_update(context, prepared) for s in phase.signals]
      if self._mark is not None:
        asked.append(ForUpdate({"marks": self._mark(batch)}))
      given, more = join_for_update(asked)
      metrics |= {f"{own.prefix}{k}": v for k, v in found.items()} | more
      scaled = prepared if factor == 1 else prepared.scaled(factor)
      ready.append(make_ready(self._rows, batch, scaled, given, numbers=numbers))
    return state, _Prepared(sequences, packed, batch.for_loss(), ready, metrics)

  def _mismatch(
    self, batches: Sequence[_Prepared], trainers: Sequence[Any], step: int
  ) -> dict[str, float]:
    """Sampler against trainer, token by token, of the batches that the trainer has scored."""
    alarm = self._parts.experiment.rl.mismatch_alarm
    # Tokens without logits were not scored.
    scored = [
      dataclasses.replace(one.batch, weights=one.ready[0].prepared.weights)
      if one.ready[0].kept
      else one.batch
      for one in batches[: len(trainers)]
    ]
    report = mismatch_report(scored, trainers, alarm)
    if report is None:
      return {}
    warn_of_mismatch(report, [one.sequences for one in batches], step, alarm)
    return report.metrics()

  def _apply(
    self, update: Update, state: TrainState, one: _Prepared, number: int
  ) -> tuple[TrainState, dict[str, float], jax.Array]:
    """One update on a batch, of the phase's pass ``number``."""
    return run_update(update, state, one.ready[number], self.mesh)


def _check_mesh(parts: Parts, mesh: jax.sharding.Mesh) -> None:
  """Refuses rows that do not divide over the mesh, and exact log-probs on several devices."""
  experiment = parts.experiment
  for name, stage in (("supervised", experiment.supervised), ("rl", experiment.rl)):
    if stage.steps:
      for field, multiple in (
        ("microbatch_rows", row_multiple(mesh)),
        ("row_length", time_multiple(mesh)),
      ):
        value = getattr(stage, field)
        check(
          value % multiple == 0,
          f"config.{name}.{field}",
          value,
          f"a multiple of {multiple}, the devices that config.mesh splits it over",
        )
  check(
    parts.model.exact_chunk <= 1 or mesh.size == 1 or not experiment.rl.steps,
    "config.model.exact_chunk",
    parts.model.exact_chunk,
    f"0 on a mesh of {mesh.size} devices: sampling runs on one, and training only there "
    "computes the same bits",
  )


def _means(every: Sequence[dict[str, float]]) -> dict[str, float]:
  """Of the metrics of some updates, each over the updates that have it."""
  names = dict.fromkeys(k for values in every for k in values if not k.startswith(PREFIX))
  return {k: float(np.mean([values[k] for values in every if k in values])) for k in names}


def _by_task(trajectories: Sequence[Trajectory], parts: int) -> list[list[Trajectory]]:
  """Trajectories in ``parts`` runs that never split a task's group."""
  groups = sorted({t.address[:2] for t in trajectories})
  size = -(-len(groups) // parts)
  part_of = {group: i // size for i, group in enumerate(groups)}
  result: list[list[Trajectory]] = [[] for _ in range(parts)]
  for trajectory in trajectories:
    result[part_of[trajectory.address[:2]]].append(trajectory)
  return [part for part in result if part]
