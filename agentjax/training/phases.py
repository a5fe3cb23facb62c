"""Phases of reinforcement learning, compiled: signals, and passes of prepare and update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from agentjax.models.lora import LoraConfig
from agentjax.objectives.advantage_function import (
  AdvantageFunction,
  abstract_advantage_inputs,
  check_advantages,
)
from agentjax.objectives.advantages import check_outcomes, check_rewards
from agentjax.objectives.columns import without_unread
from agentjax.objectives.objective import (
  LossInputs,
  Objective,
  ObjectiveConfig,
  Prepared,
  policy_objective,
)
from agentjax.objectives.preparation import abstract_inputs, prepare
from agentjax.rollout.seat_config import trained_seats
from agentjax.schedules import at_end
from agentjax.signals.signal import Signal
from agentjax.training.alternation import learners
from agentjax.training.auxiliary import AuxiliaryConfig
from agentjax.training.experiment import Experiment, PhaseConfig, RLStage, SupervisedStage
from agentjax.training.likelihood import ScoreTokens
from agentjax.training.pass_config import PlannedPass
from agentjax.training.rows import MeshRows
from agentjax.training.update import Update, UpdateSettings
from agentjax.trajectory.batch import Batch, abstract_batch, abstract_column
from agentjax.trajectory.record import POLICY


class Pass(NamedTuple):
  """One update of every batch in every epoch.

  Attributes:
    prefix: of its metrics; "" for the first pass of a phase.
    prepare: on the mesh, given a batch with the columns of all signals, and the numbers of the
      objective's schedules.
    update: see ``update.make_update``.
  """

  prefix: str
  prepare: Callable[[Batch, Mapping[str, Any]], Any]
  update: Update


class Phase(NamedTuple):
  """A phase of reinforcement learning.

  Attributes:
    config: see PhaseConfig.
    path: of the objective in the config, for messages.
    signals: in the order in which they run.
    passes: one after the other; each runs all epochs.
    in_order: see ``LikelihoodConfig``.
  """

  config: PhaseConfig
  path: str
  signals: tuple[Signal, ...]
  passes: tuple[Pass, ...]
  in_order: bool = True

  @property
  def compared(self) -> bool:
    """Whether sampler and trainer can be compared: tokens are trained on in the context in which
    they were sampled."""
    alike = self.config.context == "episode" and self.config.objective.preference is None
    return alike and self.in_order

  def check(self, batch: Batch) -> None:
    """Refuses rewards that the objective cannot learn from; ``batch`` is on the host.

    Raises:
      ConfigError: a reward outside 0..1 where outcomes are needed.
      ValueError: a valid reward that is not finite.
    """
    outcomes = np.asarray(batch.rewards), np.asarray(batch.valid)
    check_rewards(*outcomes, np.asarray(batch.groups))
    objective = self.config.objective
    if objective.value_loss.kind == "bernoulli":
      field = f"{self.path}.value_loss.kind"
      check_outcomes(*outcomes, f"{field}='bernoulli'", f"set --{field}=squared")
    if objective.preference is not None and objective.preference.form == "outcome":
      field = f"{self.path}.preference.form"
      check_outcomes(*outcomes, f"{field}='outcome'", f"set --{field}=dpo")


def optimizer_steps(experiment: Experiment, policy: str = POLICY) -> int:
  """Updates of a policy in the reinforcement-learning stage."""
  stage, trained = experiment.rl, trained_seats(experiment.seats)
  first = passes = 0
  for phase in stage.all_phases if stage.steps else ():
    steps = range(first, first + phase.steps)
    turns = sum(policy in learners(stage.alternate, trained, step) for step in steps)
    passes += turns * (1 if phase.passes is None else phase.passes.number)
    first += phase.steps
  return passes * stage.minibatches * stage.epochs


def update_settings(
  stage: SupervisedStage | RLStage,
  lora: LoraConfig | None,
  temperature: float = 1.0,
  score: ScoreTokens | None = None,
) -> UpdateSettings:
  """The settings of ``make_update`` from those of a stage."""
  names = [field.name for field in dataclasses.fields(AuxiliaryConfig)]
  beside = {name: getattr(stage, name) for name in names}
  return UpdateSettings(**beside, temperature=temperature, lora=lora, score=score)


def compile_phases(
  experiment: Experiment,
  phases: Sequence[PhaseConfig],
  objective: Objective,
  advantage: AdvantageFunction | None,
  signals: Callable[[PhaseConfig], tuple[Signal, ...]],
  update: Callable[[PhaseConfig, Objective], Update],
  rows: MeshRows,
) -> list[Phase]:
  """All phases of a run. Nothing is computed yet; loss functions are traced.

  Args:
    experiment: validated.
    phases: those of the stage.
    objective: loss of the last phase.
    advantage: in the place of the advantages that the last phase's config names.
    signals: of a phase.
    update: the update of a phase with a loss.
    rows: how batches lie on the mesh.

  Raises:
    ConfigError: a function that cannot be traced; signals that do not fit each other.
  """
  result = []
  for number, phase in enumerate(phases):
    last = number == len(phases) - 1
    path = "config.rl.objective" if last else f"config.rl.phases[{number}].objective"
    own = objective if last else policy_objective(phase.objective)
    function = advantage if last else None
    found = signals(phase)  # which registers the columns that a function may read
    _trace(experiment, phase, own, function, found)
    plan = functools.partial(_plan, phase, function)
    passes = []
    for i, one in enumerate(plan(at_end(phase.objective))):
      prepared, loss = _pass_functions(plan, phase.objective, i)
      updated = update(phase, own if phase.passes is None else loss)
      passes.append(Pass(one.prefix, _on_mesh(prepared, rows), updated))
    result.append(Phase(phase, path, found, tuple(passes), experiment.likelihood.in_order))
  return result


def _trace(
  experiment: Experiment,
  phase: PhaseConfig,
  objective: Objective,
  function: AdvantageFunction | None,
  signals: Sequence[Signal],
) -> None:
  """Finds faults of the user's functions before anything is sampled or compiled."""
  stage = experiment.rl
  shape = (stage.microbatch_rows, stage.row_length)
  jax.eval_shape(objective, abstract_inputs(phase.objective, *shape))
  if function is None:
    function = at_end(phase.objective).advantage.function
  if function is None:
    return
  batch = abstract_batch(*shape, stage.tasks_per_step * experiment.rollout.group_size)
  added = [c for signal in signals for c in signal.adds if not c.core]
  known = {c.name: abstract_column(batch, c) for c in added if c.sized}
  given = without_unread(batch.with_columns(known), phase.objective)
  check_advantages(function, abstract_advantage_inputs(given))


def _plan(
  phase: PhaseConfig, advantage: AdvantageFunction | None, objective: ObjectiveConfig
) -> tuple[PlannedPass, ...]:
  """The passes of a phase, with numbers for the schedules of its objective."""
  if phase.passes is not None:
    return phase.passes.plan(objective)

  def ready(batch: Batch) -> tuple[Prepared, dict[str, jax.Array]]:
    return prepare(without_unread(batch, objective), objective, advantage=advantage)

  return (PlannedPass("", ready, objective),)


_Plan = Callable[[ObjectiveConfig], tuple[PlannedPass, ...]]


def _pass_functions(
  plan: _Plan, objective: ObjectiveConfig, i: int
) -> tuple[Callable[..., Any], Objective]:
  """What prepares a batch for pass ``i``, and its loss; both are given the schedules' numbers."""

  def prepared(batch: Batch, numbers: Mapping[str, jax.Array]) -> Any:
    return plan(objective.at(numbers))[i].prepare(batch)

  def loss(inputs: LossInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
    return policy_objective(plan(objective.at(inputs.numbers))[i].objective)(inputs)

  return prepared, loss


def _on_mesh(function: Callable[..., Any], rows: MeshRows) -> Callable[..., Any]:
  """Compiled: results per token are sharded like the batch, metrics are on all devices."""
  return jax.jit(function, out_shardings=(rows.whole, rows.everywhere))
