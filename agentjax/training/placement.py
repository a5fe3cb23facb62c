"""Which devices train and which sample."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

import jax

from agentjax.config import ConfigError, check
from agentjax.training.experiment import DeviceConfig


class Placement(NamedTuple):
  """Devices of a run.

  Attributes:
    training: of all processes, for the mesh.
    rollout: of this process and of those that share its lanes, for the engine.
  """

  training: list[jax.Device]
  rollout: list[jax.Device]


def place(
  config: DeviceConfig, described: Sequence[jax.Device] | None = None, *, together: int = 1
) -> Placement:
  """The devices a config names; all for both where it names none.

  Args:
    config: validated.
    described: in the place of the devices that there are; "this process" is that of the first.
    together: processes that share lanes (``EngineConfig.processes``).

  Raises:
    ConfigError: a process does not have that many devices, or none is left for the other part; or
      processes cannot share lanes.
  """
  every = list(described or jax.devices())
  here = described[0].process_index if described else jax.process_index()
  by_process: dict[int, list[jax.Device]] = collections.defaultdict(list)
  for device in every:
    by_process[device.process_index].append(device)
  counts = [len(devices) for _, devices in sorted(by_process.items())]
  check(
    len(counts) % together == 0 and (together == 1 or len(set(counts)) == 1),
    "config.engine.processes",
    together,
    f"a divisor of the processes, all with as many devices; there are {counts}",
  )
  if not config.training and not config.rollout:
    shared = [d for d in every if d.process_index // together == here // together]
    return Placement(every, shared if together > 1 else by_process[here])
  placement = Placement([], [])
  for process, devices in sorted(by_process.items()):
    chosen = {"training": config.training, "rollout": config.rollout}
    for name, numbers in chosen.items():
      if max(numbers, default=0) >= len(devices):
        raise ConfigError(
          f"config.devices.{name}={numbers}; allowed: 0 to {len(devices) - 1}, as process "
          f"{process} has {len(devices)} devices."
        )
    for name, other in (("training", "rollout"), ("rollout", "training")):
      chosen[name] = chosen[name] or tuple(i for i in range(len(devices)) if i not in chosen[other])
      if not chosen[name]:
        raise ConfigError(
          f"config.devices.{other}={chosen[other]} takes all {len(devices)} devices of process "
          f"{process}; allowed: fewer, so that one is left for {name}."
        )
    placement.training.extend(devices[i] for i in chosen["training"])
    if process // together == here // together:
      placement.rollout.extend(devices[i] for i in chosen["rollout"])
  return placement
