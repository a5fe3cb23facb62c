"""The states of a run's stages: how they begin, where they lie, what is read off them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax

from agentjax.models import Params
from agentjax.models.huggingface import load_pretrained
from agentjax.rollout.seat_config import TrainedSeat, trained_seats
from agentjax.training.build import Parts
from agentjax.training.checkpoint import load_networks
from agentjax.training.experiment import PhaseConfig
from agentjax.training.optimizer import applied_updates, build_optimizer, learning_rate_schedule
from agentjax.training.phases import optimizer_steps
from agentjax.training.policies import own_name, trained_networks
from agentjax.training.pretrained import runtime_overrides
from agentjax.training.snapshots import snapshot_networks
from agentjax.training.state import (
  Network,
  NetworkSpec,
  StateSpec,
  TrainState,
  Weights,
  full_policy,
  network_specs,
)
from agentjax.trajectory.record import POLICY


class TrainStates:
  """Makes the states of the stages "supervised" and "rl".

  Args:
    parts: host-side parts of the run.
    phases: those of the stage.
    mesh: that of the updates.
    networks: of signals, which exist in the stage that they learn in.
    own: networks of the signals of each further policy that is trained.

  Attributes:
    trained: those policies, by name.
    specs: what the states of each stage are made of.
    policy_optimizers: of the reinforcement-learning stage, of all trained policies.
  """

  def __init__(
    self,
    parts: Parts,
    phases: Sequence[PhaseConfig],
    mesh: jax.sharding.Mesh,
    networks: Mapping[str, NetworkSpec],
    own: Mapping[str, Mapping[str, NetworkSpec]],
  ):
    experiment = parts.experiment
    self._parts, self.mesh, self._lora = parts, mesh, experiment.lora
    critic = bool(phases) and experiment.rl.has_value_head
    reference = any(phase.objective.needs_reference for phase in phases)
    reference = reference or any(s.needs_reference for s in experiment.rl.every_signal)
    specs = network_specs(parts.model, critic, self._lora)
    self._schedules: dict[tuple[str, str], optax.Schedule] = {}  # by stage and policy
    self.optimizers: dict[str, optax.GradientTransformation] = {}  # by stage
    steps = {"supervised": experiment.supervised.steps, "rl": optimizer_steps(experiment)}
    for stage, count in steps.items():
      chosen = getattr(experiment, stage).optimizer
      self._schedules[stage, POLICY] = learning_rate_schedule(chosen, count)
      self.optimizers[stage] = build_optimizer(chosen, count, specs)
    self.trained = trained_seats(experiment.seats) if experiment.rl.steps else {}
    self.policy_optimizers = {POLICY: self.optimizers["rl"]}
    for name, seat in self.trained.items():
      self._add_optimizer(name, seat, specs)
    further = trained_networks(
      self.trained,
      parts.model,
      specs,
      self.policy_optimizers,
      own,
      reference=reference and self._lora is None,
      load=self._load_policy,
    )
    present: dict[str, Mapping[str, NetworkSpec]] = {
      "supervised": {},
      "rl": {**networks, **further, **snapshot_networks(experiment, parts.model)},
    }
    self.specs = {
      stage: StateSpec(parts.model, optimizer, mesh, critic, reference, self._lora, present[stage])
      for stage, optimizer in self.optimizers.items()
    }
    placed = self.specs["rl"].placed
    self._resync = jax.jit(
      functools.partial(_resync, policies=(POLICY, *self.trained)),
      donate_argnums=0,
      out_shardings=placed,
    )
    self._take_snapshots = jax.jit(
      _take_snapshots, static_argnums=1, donate_argnums=0, out_shardings=placed
    )

  def _add_optimizer(self, name: str, seat: TrainedSeat, specs: Weights) -> None:
    """That of a further policy: the one of "policy" where it does the same."""
    experiment = self._parts.experiment
    shared = experiment.rl.optimizer
    rate = shared.learning_rate if seat.learning_rate is None else seat.learning_rate
    chosen = dataclasses.replace(shared, learning_rate=rate)
    steps = optimizer_steps(experiment, name)
    self._schedules["rl", name] = learning_rate_schedule(chosen, steps)
    same = chosen == shared and steps == optimizer_steps(experiment)
    self.policy_optimizers[name] = (
      self.optimizers["rl"] if same else build_optimizer(chosen, steps, specs)
    )

  def _load_policy(self, name: str) -> Weights:
    """What a further policy begins with that starts from a checkpoint."""
    seat = self.trained[name]
    assert seat.path is not None
    wanted = self.abstract_state("rl").networks[name].weights
    return load_networks(seat.path, wanted, self._parts.base_identity, seat.of)

  def initial_state(self, stage: str, weights: Weights | None = None) -> TrainState:
    """``weights``, else the pretrained policy, else random parameters; all else fresh."""
    experiment = self._parts.experiment
    if weights is None and experiment.pretrained is not None:
      policy, _ = load_pretrained(
        experiment.pretrained, mesh=self.mesh, overrides=runtime_overrides(self._parts.model)
      )
      weights = Weights(policy)
    key = jax.random.key(experiment.seed)
    return self.specs[stage].create(key, weights)

  def first_state(self, stage: str) -> TrainState:
    """What a run begins with: ``initial_state``, with the networks of ``config.start_from``."""
    earlier = self._parts.experiment.start_from
    if earlier is None:
      return self.initial_state(stage)
    wanted = self.whole_weights(self.abstract_state(stage))
    return self.initial_state(stage, load_networks(earlier, wanted, self._parts.base_identity))

  def abstract_state(self, stage: str) -> TrainState:
    """What a checkpoint of ``stage`` is restored to: shapes, dtypes and shardings."""
    return self.specs[stage].abstract()

  def whole_weights(self, state: TrainState) -> Weights:
    """What ``initial_state`` takes: with adapters, the policy they are added to."""
    if self._lora is None:
      return state.weights
    return dataclasses.replace(state.weights, policy=state.reference)

  def policy(self, state: TrainState) -> Params:
    """What the policy plays with: its parameters, with adapters beside them where there are any."""
    return full_policy(state.weights, state.reference, self._lora)

  def take_snapshots(self, state: TrainState, names: tuple[str, ...]) -> TrainState:
    """The state with the present policies as the snapshots of these names."""
    copied = tuple((name, self.specs["rl"].further[name].of) for name in names)
    return self._take_snapshots(state, copied) if names else state

  def snapshot(self, state: TrainState, name: str) -> Params:
    """What a snapshot or a further policy plays with; "policy" where there is none yet."""
    if name not in state.networks:
      return self.policy(state)
    return full_policy(state.networks[name].weights, state.reference, self._lora)

  def learning_rate(self, stage: str, state: TrainState, policy: str = POLICY) -> float:
    """That of a policy's latest update; of the first one where all so far were skipped."""
    latest = max(int(applied_updates(state.networks[policy].opt_state)) - 1, 0)
    return float(self._schedules[stage, policy](latest))

  def begin_rl(self, state: TrainState) -> TrainState:
    """The state with which reinforcement learning starts."""
    return self.specs["rl"].begin_stage(state, jax.random.key(self._parts.experiment.seed))

  def begin_phase(self, state: TrainState) -> TrainState:
    """The state of a later phase: the present policies are the references, without adapters."""
    if state.reference is None or self._lora is not None:
      return state
    return self._resync(state)


def with_networks(state: TrainState, changed: Mapping[str, Network]) -> TrainState:
  """A state with the networks that signals have changed.

  Raises:
    ValueError: a network that the state does not have, or the policy, which the update changes.
  """
  wrong = sorted(name for name in changed if name == "policy" or name not in state.networks)
  if wrong:
    allowed = ", ".join(name for name in state.networks if name != "policy")
    raise ValueError(f"a signal changed the networks {wrong}; allowed: {allowed or 'none'}.")
  return dataclasses.replace(state, networks={**state.networks, **changed})


def counted(state: TrainState) -> TrainState:
  """After one more training step."""
  return dataclasses.replace(state, step=state.step + 1)


def _take_snapshots(state: TrainState, copied: tuple[tuple[str, str], ...]) -> TrainState:
  """``copied`` are the names of snapshots, each with that of its policy."""
  for name, policy in copied:
    copy = jax.tree.map(jnp.copy, state.networks[policy].weights.policy)
    state = state.with_network(name, Network(Weights(copy)))
  return state


def _resync(state: TrainState, policies: Sequence[str]) -> TrainState:
  for policy in policies:
    copy = jax.tree.map(jnp.copy, state.networks[policy].weights.policy)
    state = state.with_network(own_name(policy, "reference"), Network(Weights(copy)))
  return state
