"""Which devices train and which sample: disjoint, there, and named where they are not."""

import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

import jax
import pytest

from agentjax.config import ConfigError
from agentjax.training.experiment import DeviceConfig
from agentjax.training.placement import place
from tests.training.smoke import smoke_experiment

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
  "config, message",
  [
    (
      DeviceConfig(training=(0, 1, 2), rollout=(2, 3)),
      r"config\.devices\.rollout=\(2, 3\); allowed: devices that are not in .*\(0, 1, 2\), which "
      r"has 2 as well",
    ),
    (DeviceConfig(training=(0, 0)), r"config\.devices\.training=\(0, 0\).*different numbers"),
    (DeviceConfig(rollout=(-1,)), r"config\.devices\.rollout=\(-1,\).*different numbers"),
  ],
)
def test_devices_that_overlap_are_refused(config, message):
  with pytest.raises(ConfigError, match=message):
    config.validate()


def test_lanes_must_spread_evenly_over_the_devices_that_sample():
  experiment = smoke_experiment(devices=DeviceConfig(rollout=(1, 2)))
  with pytest.raises(ConfigError, match=r"config\.engine\.lanes=1; allowed: a multiple of 2"):
    experiment.validate()


def test_without_a_choice_all_devices_do_both():
  assert place(DeviceConfig()) == (jax.devices(), jax.local_devices())


def test_a_machine_with_too_few_devices_is_refused():
  with pytest.raises(ConfigError, match=r"devices\.rollout=\(7,\); allowed: 0 to 0, as process 0"):
    place(DeviceConfig(rollout=(7,)))
  with pytest.raises(ConfigError, match=r"takes all 1 devices .* one is left for training"):
    place(DeviceConfig(rollout=(0,)))


class Described(NamedTuple):
  """A device of some process."""

  process_index: int
  number: int


EIGHT = [Described(process, number) for process in range(4) for number in range(2)]


def test_processes_that_share_lanes_sample_on_the_devices_of_all_of_them():
  assert place(DeviceConfig(), EIGHT, together=2) == (EIGHT, EIGHT[:4])
  assert place(DeviceConfig(), EIGHT[4:], together=2) == (EIGHT[4:], EIGHT[4:])
  apart = place(DeviceConfig(rollout=(1,)), EIGHT, together=4)
  assert apart == (EIGHT[::2], EIGHT[1::2])


def test_processes_that_cannot_share_lanes_are_refused():
  with pytest.raises(ConfigError, match=r"engine\.processes=3; .* there are \[2, 2, 2, 2\]"):
    place(DeviceConfig(), EIGHT, together=3)
  with pytest.raises(ConfigError, match=r"engine\.processes=2; .* as many devices"):
    place(DeviceConfig(), EIGHT[:-1], together=2)


_CHILD = """
import jax
from agentjax.training.experiment import DeviceConfig
from agentjax.training.placement import place
def numbers(config):
  return [[d.id for d in part] for part in place(config)]
assert numbers(DeviceConfig(rollout=(2, 3))) == [[0, 1], [2, 3]]
assert numbers(DeviceConfig(training=(3, 1))) == [[3, 1], [0, 2]]
assert numbers(DeviceConfig(training=(0,), rollout=(3,))) == [[0], [3]]
"""


def test_each_part_takes_what_the_other_leaves():
  flags = "--xla_force_host_platform_device_count=4"
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
  subprocess.run([sys.executable, "-c", _CHILD], cwd=_ROOT, env=environment, check=True)
