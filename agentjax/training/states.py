"""The states of a run's stages: how they begin, where they lie, what is read off them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from agentjax.models import Params
from agentjax.models.huggingface import load_pretrained
from agentjax.signals.process import load_start, process_optimizer
from agentjax.training.checkpoint import load_networks
from agentjax.training.experiment import PhaseConfig
from agentjax.training.optimizer import applied_updates, build_optimizer, learning_rate_schedule
from agentjax.training.parts import Parts
from agentjax.training.phases import optimizer_steps
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


class TrainStates:
  """Makes the states of the stages "supervised" and "rl".

  Args:
    parts: host-side parts of the run.
    phases: of ``phases.named_phases``.
    mesh: that of the updates.
  """

  def __init__(self, parts: Parts, phases: Sequence[PhaseConfig], mesh: jax.sharding.Mesh):
    experiment = parts.experiment
    self._parts, self.mesh, self._lora = parts, mesh, experiment.lora
    process, stages = experiment.rl.process, (experiment.supervised, experiment.rl)
    critic = any(phase.objective.needs_values for phase in phases)
    reference = any(phase.objective.needs_reference for phase in phases)
    reference = reference or (process is not None and process.reference is None)
    specs = network_specs(parts.model, critic, self._lora)
    steps = (experiment.supervised.steps, optimizer_steps(experiment))
    names = ("supervised", "rl")
    settings = [stage.optimizer for stage in stages]
    self._schedules = {
      name: learning_rate_schedule(own, count)
      for name, own, count in zip(names, settings, steps, strict=True)
    }
    self.optimizers = {
      name: build_optimizer(own, count, specs)
      for name, own, count in zip(names, settings, steps, strict=True)
    }
    # That of the reward model that learns in the stage, where one does.
    updates = experiment.rl.steps * experiment.rl.minibatches
    self.process_optimizers = {
      "supervised": None,
      "rl": process_optimizer(process, parts.model, updates),
    }
    self.placed = {
      stage: state_shardings(
        parts.model,
        optimizer,
        mesh,
        critic=critic,
        reference=reference,
        lora=self._lora,
        process=self.process_optimizers[stage],
      )
      for stage, optimizer in self.optimizers.items()
    }
    self._resync = jax.jit(_resync, donate_argnums=0, out_shardings=self.placed["rl"])
    self._full_policy = jax.jit(
      lambda networks, reference: full_policy(networks, reference, self._lora)
    )

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
      self.optimizers[stage],
      key,
      self.placed[stage],
      networks,
      self._lora,
      self.process_optimizers[stage],
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
      self.optimizers[stage],
      self.placed[stage],
      self._lora,
      self.process_optimizers[stage],
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
      self.optimizers["rl"],
      self.placed["rl"],
      self._lora,
      self.process_optimizers["rl"],
      model,
    )

  def begin_phase(self, state: TrainState) -> TrainState:
    """The state of a later phase: the present policy is the reference, unless that is frozen."""
    if state.reference is None or self._lora is not None:
      return state
    return self._resync(state)


def named_networks(state: TrainState) -> dict[str, Any]:
  """The networks of a state by name, as signals are given them."""
  named = {
    "policy": state.networks,
    "reference": None if state.reference is None else Networks(state.reference, None),
    "reward_model": state.process,
  }
  return {name: network for name, network in named.items() if network is not None}


def with_networks(state: TrainState, changed: Mapping[str, Any]) -> TrainState:
  """A state with the networks that signals have changed.

  Raises:
    ValueError: a network that no signal may change.
  """
  fixed = sorted(set(changed) - {"reward_model"})
  if fixed:
    raise ValueError(f"a signal changed {', '.join(fixed)}; allowed: 'reward_model'.")
  return dataclasses.replace(state, process=changed["reward_model"]) if changed else state


def counted(state: TrainState) -> TrainState:
  """After one more training step."""
  process = None if state.process is None else counted(state.process)
  return dataclasses.replace(state, step=state.step + 1, process=process)


def _resync(state: TrainState) -> TrainState:
  return dataclasses.replace(state, reference=jax.tree.map(jnp.copy, state.networks.policy))
