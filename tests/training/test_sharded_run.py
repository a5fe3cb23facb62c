"""One run, many devices or processes: the same figures as on one device."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.training.figures import assert_same_figures, free_address

_ROOT = pathlib.Path(__file__).parents[2]
_CHILD = """
import json, sys
import jax
settings = json.loads(sys.argv[1])
if settings["processes"] > 1:
  jax.distributed.initialize(settings["address"], settings["processes"], settings["index"])
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.objectives import preset
from agentjax.training import Run
from agentjax.recipes.prime import OnlineConfig, ProcessConfig
from tests.training.smoke import quiet, smoke_experiment
experiment = smoke_experiment()
if settings["reward_model"]:
  experiment.rl.objective = preset("prime")
  experiment.rl.process = ProcessConfig(beta=0.5, centre="leave_one_out", online=OnlineConfig())
for axis, size in settings["mesh"].items():
  setattr(experiment.mesh, axis, size)
experiment.devices.rollout = tuple(settings["rollout"])
experiment.engine.lanes = max(len(settings["rollout"]), 1)
for axis, size in settings["lane"].items():
  setattr(experiment.engine.mesh, axis, size)
if settings["lane"]:
  experiment.engine.lanes = 2 // settings["processes"]
experiment.rl.schedule = ScheduleConfig(*settings["schedule"])
report = Run(experiment, settings["directory"], console=quiet()).train()
assert report.finished and report.after
"""


def _start(
  directory,
  mesh,
  *,
  devices,
  processes=1,
  index=0,
  address="",
  rollout=(),
  schedule=("sync",),
  reward_model=False,
  lane=(),
):
  settings = {
    "directory": str(directory),
    "mesh": mesh,
    "processes": processes,
    "index": index,
    "address": address,
    "rollout": rollout,
    "schedule": schedule,
    "reward_model": reward_model,
    "lane": dict(lane),
  }
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
  }
  return subprocess.Popen(
    [sys.executable, "-c", _CHILD, json.dumps(settings)],
    cwd=_ROOT,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


@pytest.mark.slow
def test_eight_devices_give_the_figures_of_one(finished_run, tmp_path):
  child = _start(tmp_path / "run", {"data": 2, "fsdp": 2, "tensor": 2}, devices=8)
  output, _ = child.communicate(timeout=900)
  assert child.returncode == 0, output[-3000:]
  assert_same_figures(tmp_path / "run", finished_run[0], 5)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("lane", "rollout", "schedule"),
  [
    ({"tensor": 4}, (), ("sync",)),
    ({"tensor": 2}, (4, 5, 6, 7), ("async", 0)),
    ({"tensor": 2, "data": 2}, (), ("sync",)),
  ],
)
def test_lanes_of_several_devices_give_the_figures_of_one(
  finished_run, tmp_path, lane, rollout, schedule
):
  where = {"devices": 8, "rollout": rollout, "schedule": schedule, "lane": lane}
  mesh = {"data": 2, "fsdp": 2, "tensor": 1 if rollout else 2}
  child = _start(tmp_path / "run", mesh, **where)
  output, _ = child.communicate(timeout=900)
  assert child.returncode == 0, output[-3000:]
  assert_same_figures(tmp_path / "run", finished_run[0], 5)


@pytest.mark.slow
def test_two_processes_with_a_lane_of_two_devices_each_give_the_figures_of_one(
  finished_run, tmp_path
):
  where = {"devices": 2, "processes": 2, "address": free_address(), "lane": {"tensor": 2}}
  mesh = {"data": 2, "fsdp": 2}
  children = [_start(tmp_path / "run", mesh, index=i, **where) for i in range(2)]
  outputs = [child.communicate(timeout=900)[0] for child in children]
  assert [child.returncode for child in children] == [0, 0], "\n".join(o[-3000:] for o in outputs)
  assert_same_figures(tmp_path / "run", finished_run[0], 5)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [("sync",), ("async", 0)])
def test_four_devices_that_train_and_four_that_sample_give_the_figures_of_one(
  finished_run, tmp_path, schedule
):
  mesh = {"data": 2, "fsdp": 2}
  child = _start(tmp_path / "run", mesh, devices=8, rollout=(4, 5, 6, 7), schedule=schedule)
  output, _ = child.communicate(timeout=900)
  assert child.returncode == 0, output[-3000:]
  assert_same_figures(tmp_path / "run", finished_run[0], 5)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("schedule", "reward_model"),
  [(("sync",), False), (("async", 0), False), (("one_step_off",), False), (("sync",), True)],
)
def test_two_processes_give_the_figures_of_one(finished_run, tmp_path, schedule, reward_model):
  straight = finished_run[0]
  if schedule == ("one_step_off",) or reward_model:  # learns from something else: its own figures
    straight = tmp_path / "straight"
    alone = _start(straight, {"data": 1}, devices=1, schedule=schedule, reward_model=reward_model)
    output, _ = alone.communicate(timeout=900)
    assert alone.returncode == 0, output[-3000:]
  where = {"devices": 2, "processes": 2, "address": free_address(), "schedule": schedule}
  where["reward_model"] = reward_model
  mesh = {"data": 2, "fsdp": 2}
  children = [_start(tmp_path / "run", mesh, index=i, **where) for i in range(2)]
  outputs = [child.communicate(timeout=900)[0] for child in children]
  assert [child.returncode for child in children] == [0, 0], "\n".join(o[-3000:] for o in outputs)
  assert_same_figures(tmp_path / "run", straight, 5)
