"""Frozen copies of the policy that play seats: their names, and their place in the state."""

from __future__ import annotations

from collections.abc import Mapping

from agentjax.models import ModelConfig
from agentjax.rollout.seat_config import SeatConfig
from agentjax.training.experiment import Experiment
from agentjax.training.state import NetworkSpec, Weights, network_specs


def policy_names(experiment: Experiment) -> dict[str, str]:
  """Agent -> name of the policy that plays it; seats with the same settings have one policy.

  It is called after the first of its agents, in alphabetical order.
  """
  known: dict[SeatConfig, str] = {}
  return {
    agent: known.setdefault(config, f"seat_{agent}")
    for agent, config in sorted(experiment.seats.items())
  }


def snapshot_networks(experiment: Experiment, model: ModelConfig) -> Mapping[str, NetworkSpec]:
  """Networks of the snapshots, by the name of the policy; with LoRA they hold adapters."""
  names = policy_names(experiment)
  followed = {names[a] for a, c in experiment.seats.items() if c.snapshot_every is not None}
  policy = network_specs(model, False, experiment.lora).policy
  return {name: NetworkSpec(Weights(policy), start="trained") for name in sorted(followed)}
