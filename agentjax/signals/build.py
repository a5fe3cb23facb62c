"""The signals of a run, from its config."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax

from agentjax.config import ConfigError
from agentjax.objectives.advantages import AdvantageConfig
from agentjax.sharding import time_multiple
from agentjax.signals.baseline import GreedyBaseline
from agentjax.signals.critic import Critic
from agentjax.signals.policy import PolicyScores
from agentjax.signals.reference import ReferenceScores
from agentjax.signals.reward_parts import TurnRewards
from agentjax.signals.signal import Signal, SignalTools, order_signals, own_networks
from agentjax.signals.teacher import Teachers
from agentjax.signals.teacher_scores import TeacherScores
from agentjax.training.packs import pack_rows

if TYPE_CHECKING:
  from agentjax.training.build import Parts
  from agentjax.training.experiment import Experiment, PhaseConfig


def signal_tools(parts: Parts, mesh: jax.sharding.Mesh) -> SignalTools:
  """What the signals of a run are built with; ``mesh`` is that of the updates."""
  stage = parts.experiment.rl
  expected = stage.tasks_per_step * parts.experiment.rollout.group_size
  pack = functools.partial(
    pack_rows,
    row_length=stage.row_length,
    rows=stage.microbatch_rows,
    pad_id=parts.tokenizer.pad_id,
    expected=-(-expected // stage.minibatches),
    align=max(parts.experiment.likelihood.align, parts.model.exact_chunk),
  )
  return SignalTools(
    parts.model,
    parts.tokenizer.token_bytes(),
    mesh,
    pack,
    stage.microbatch_rows,
    stage.sampling.temperature or 1.0,
    stage.steps * stage.minibatches,
    parts.chat,
    parts.tools,
  )


def credit_signals(credit: AdvantageConfig, experiment: Experiment) -> list[Signal]:
  """What the function and the terms of ``advantage`` read; those that share a signal have it once.

  Raises:
    ConfigError: two read one signal, each with settings of its own.
  """
  found: dict[str, Signal] = {}
  chosen = filter(None, (credit.function, *credit.terms))
  for signal in (signal for one in chosen for signal in one.signals(experiment)):
    first, other = vars(found.setdefault(signal.name, signal)), vars(signal)
    if first != other:
      raise ConfigError(
        f"advantage.function and advantage.terms read the signal {signal.name!r} with {first} and "
        f"{other}; allowed: the same settings in all that read it."
      )
  return list(found.values())


class SignalBuilder:
  """Makes the signals of each phase; signals that several phases share are made once.

  Args:
    parts: of the run.
    tools: what signals are built with.

  Attributes:
    networks: of all signals, by name.
  """

  def __init__(self, parts: Parts, tools: SignalTools):
    self._experiment: Experiment = parts.experiment
    self._tools = tools
    self._teachers = Teachers(parts.experiment.rl.teachers, tools)
    self._own = tuple(config.build(tools) for config in parts.experiment.rl.signals)
    stage = parts.experiment.rl
    self._process = None if stage.process is None else stage.process.build(tools)
    self._critic: Critic | None = None
    if stage.critic is not None and stage.steps:
      loss = stage.objective.value_loss
      self._critic = stage.critic.build(loss, tools, stage.steps * stage.minibatches)
    shared = [s for s in (*self._own, self._process, self._critic) if s is not None]
    self.networks = own_networks(shared)

  def of_phase(self, phase: PhaseConfig) -> tuple[Signal, ...]:
    """The signals of a phase in the order of their needs; those of ``rl.signals`` come first.

    Raises:
      ConfigError: as ``order_signals``.
    """
    return order_signals([*self._own, *self._of_policies(phase), *self._of_rewards(phase)])

  def _of_policies(self, phase: PhaseConfig) -> list[Signal]:
    stage, objective = self._experiment.rl, phase.objective
    found: list[Signal] = []
    response = phase.context == "response"
    recomputed = stage.old_log_probs == "recomputed" or response
    head = objective.needs_values and self._critic is None
    if recomputed or head:
      found.append(PolicyScores(recomputed=recomputed, critic=head, replaces_behaviour=response))
    if objective.needs_values and self._critic is not None:
      found.append(self._critic)
    if objective.needs_reference or any(s.needs_reference for s in stage.every_signal):
      found.append(ReferenceScores())
    if objective.distillation is not None:
      found.append(
        TeacherScores(
          self._teachers,
          objective.distillation,
          multiple=time_multiple(self._tools.mesh),
          whole_rows=self._tools.model.exact_chunk > 1,
        )
      )
    return found

  def _of_rewards(self, phase: PhaseConfig) -> list[Signal]:
    objective, credit = phase.objective, phase.objective.advantage
    found: list[Signal] = []
    if objective.needs_baseline:
      found.append(GreedyBaseline())
    found += credit_signals(credit, self._experiment)
    if credit.turn_rewards:
      shares = self._experiment.reward.shares
      found.append(TurnRewards({name: shares[name] for name in credit.turn_rewards}))
    if phase.passes is not None:
      found += phase.passes.signals(self._experiment)
    if self._process is not None:
      found.append(self._process)
    return found
