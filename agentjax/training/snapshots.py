"""Frozen copies of policies that play seats, and their place in the state."""

from __future__ import annotations

from collections.abc import Mapping

from agentjax.models import ModelConfig
from agentjax.rollout.seat_config import SnapshotSeat, policy_names
from agentjax.training.experiment import Experiment
from agentjax.training.state import NetworkSpec, Weights, network_specs


def snapshot_networks(experiment: Experiment, model: ModelConfig) -> Mapping[str, NetworkSpec]:
  """Networks of the snapshots, by the name of the policy; with LoRA they hold adapters."""
  names = policy_names(experiment.seats)
  copied = {names[a]: c.of for a, c in experiment.seats.items() if isinstance(c, SnapshotSeat)}
  policy = network_specs(model, False, experiment.lora).policy
  return {
    name: NetworkSpec(Weights(policy), start="trained", of=of)
    for name, of in sorted(copied.items())
  }
