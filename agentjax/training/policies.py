"""Further policies that are trained: their networks in the state, and their turn in an update.

A policy P has the networks "P" and, as its own, "P.reference" and "P.NAME" for each network NAME of
a signal. To update P, these change places with "policy", "reference" and NAME (``bind``), so that
one program updates any of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optax

from agentjax.config import ConfigError
from agentjax.models import ModelConfig, param_specs
from agentjax.rollout.seat_config import TrainedSeat
from agentjax.training.state import NetworkSpec, TrainState, Weights
from agentjax.trajectory.record import POLICY, Trajectory
from agentjax.trajectory.seats import policy_of


def own_name(policy: str, name: str) -> str:
  """What the network ``name`` of a policy is called in the run."""
  if policy == POLICY:
    return name
  return policy if name == POLICY else f"{policy}.{name}"


def bind(state: TrainState, policy: str) -> TrainState:
  """The state in which the networks of a policy have changed places with those of "policy".

  It is its own inverse, and "policy" changes nothing.
  """
  if policy == POLICY:
    return state
  networks = dict(state.networks)
  for name in state.networks:
    own = own_name(policy, name)
    if own in networks:
      networks[name], networks[own] = state.networks[own], state.networks[name]
  return dataclasses.replace(state, networks=networks)


def trained_networks(
  seats: Mapping[str, TrainedSeat],
  model: ModelConfig,
  specs: Weights,
  optimizers: Mapping[str, optax.GradientTransformation],
  signals: Mapping[str, Mapping[str, NetworkSpec]],
  *,
  reference: bool,
  load: Callable[[str], Weights],
) -> dict[str, NetworkSpec]:
  """Networks of the further policies; each policy stands before what is copied from it.

  Args:
    seats: the policies, of ``trained_seats``.
    model: of all of them.
    specs: of what is trained of a policy.
    optimizers: by policy.
    signals: networks of the signals of each policy.
    reference: each has a frozen reference of its own.
    load: weights that a policy with ``start`` "checkpoint" begins with, by its name.

  Raises:
    ConfigError: a policy has the name of another network.
  """
  found: dict[str, NetworkSpec] = {}
  for name, seat in seats.items():
    loaded = seat.start == "checkpoint"
    copied: Any = "trained" if seat.start == "policy" else "random"
    start = functools.partial(load, name) if loaded else copied
    found[name] = NetworkSpec(specs, optimizers[name], start)
    if reference:
      frozen = Weights(param_specs(model))
      found[own_name(name, "reference")] = NetworkSpec(frozen, start="trained", of=name)
    own = signals.get(name, {})
    if name in ("reference", *own):
      raise ConfigError(
        f"config.seats names a policy {name!r}, and the run has another network of that name; "
        "allowed: another config.seats.AGENT.policy."
      )
    for network, spec in own.items():
      found[own_name(name, network)] = dataclasses.replace(spec, of=name)
  return found


def policy_metrics(views: list[Trajectory], names: tuple[str, ...]) -> dict[str, float]:
  """Metrics under ``policies/NAME/``: episodes that a policy took part in, and its mean reward.

  Args:
    views: of ``learning_views``.
    names: of policies.
  """
  metrics: dict[str, float] = {}
  for name in names:
    own = [view.reward.value for view in views if view.segments and policy_of(view) == name]
    metrics[f"policies/{name}/episodes"] = float(len(own))
    if known := [value for value in own if value is not None]:
      metrics[f"policies/{name}/reward"] = float(np.mean(known))
  return metrics
