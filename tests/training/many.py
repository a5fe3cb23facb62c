"""Runs of several processes on this machine, for tests; as a program, one of the processes."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

from tests.training.figures import free_address

_ROOT = pathlib.Path(__file__).parents[2]


class Group:
  """Processes of one run of ``stages.staged_experiment``, begun together.

  Args:
    directory: of the run.
    processes, devices: how many, and devices of each.
    settings: of ``_main``.
  """

  def __init__(self, directory: pathlib.Path, processes: int, devices: int = 1, **settings):
    self.directory = directory
    address = free_address() if processes > 1 else ""
    common = {"directory": str(directory), "address": address, "processes": processes, **settings}
    flags = f"--xla_force_host_platform_device_count={devices}"
    flags += " --xla_backend_optimization_level=0"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    self.children, self._outputs = [], []
    for index in range(processes):
      output = directory.with_name(f"{directory.name}.{index}.txt")
      self._outputs.append(output)
      with output.open("w") as file:
        self.children.append(
          subprocess.Popen(
            [sys.executable, "-m", "tests.training.many", json.dumps({**common, "index": index})],
            cwd=_ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
          )
        )

  def output(self, index: int) -> str:
    """What a process has printed."""
    return self._outputs[index].read_text()

  def wait(self, seconds: float = 570.0) -> list[int]:
    """Exit statuses; all processes have ended."""
    deadline = time.monotonic() + seconds
    try:
      return [child.wait(max(0.1, deadline - time.monotonic())) for child in self.children]
    finally:
      for child in self.children:
        child.kill()

  def wait_until(self, condition: Callable[[], bool], seconds: float = 570.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
      ended = [i for i, child in enumerate(self.children) if child.poll() is not None]
      if ended or time.monotonic() > deadline:
        self.wait(0.1)
        raise AssertionError(
          "\n".join(self.output(i)[-3000:] for i in ended) or "it takes too long"
        )
      time.sleep(0.02)

  def assert_ended(self, status: int = 0) -> None:
    """All end with one status."""
    found = self.wait()
    outputs = "\n".join(self.output(i)[-3000:] for i in range(len(found)))
    assert found == [status] * len(found), outputs


def _main(
  directory: str,
  address: str,
  processes: int,
  index: int,
  mesh: dict[str, int] | None = None,
  schedule: tuple[object, ...] = ("sync",),
  delay: float = 0.0,
  changes: dict[str, object] | None = None,
  measures: bool = False,
  breaks: bool = False,
) -> None:
  """Trains; ends with 3 where it was interrupted.

  Args:
    directory, address, processes, index: of the run, and who this is in it.
    mesh: devices along axes; None spreads rows over all.
    schedule: of ``ScheduleConfig``.
    delay: seconds that the last process sleeps before whatever all do together.
    changes: fields of the experiment, by dotted name.
    measures: evaluates the newest checkpoint instead, and writes the figures to a file.
    breaks: the last process fails where its lane decodes for the sixth time.
  """
  import jax

  if processes > 1:
    jax.distributed.initialize(address, processes, index, heartbeat_timeout_seconds=60)
  from agentjax.rollout.schedule import ScheduleConfig
  from agentjax.training import HeldOutConfig, Run
  from agentjax.training import processes as together
  from agentjax.training.checkpoint import CheckpointConfig
  from tests.training import stages
  from tests.training.smoke import quiet

  def late(function):
    def wrapped(*args):
      time.sleep(delay)
      return function(*args)

    return wrapped

  if delay and index == processes - 1:
    for name in ("wait", "all_agree", "exchange"):
      setattr(together, name, late(getattr(together, name)))
  if breaks and index == processes - 1:
    from agentjax.engine import programs

    right, calls = programs._OnMesh.__call__, iter(range(6))

    def broken(program, *args):
      if program.__name__ == "decode" and next(calls, None) is None:
        raise RuntimeError("no room")
      return right(program, *args)

    programs._OnMesh.__call__ = broken
  experiment = stages.staged_experiment(
    ScheduleConfig(*schedule),
    evaluation=HeldOutConfig(
      tasks=2, every=1, samples=2, pass_at=(2,), resamples=20, success_part="environment"
    ),
    checkpoint=CheckpointConfig(every=2),
  )
  for axis, size in (mesh or {"data": jax.device_count(), "fsdp": 1}).items():
    setattr(experiment.mesh, axis, size)
  for name, value in {"rl.steps": 4, **(changes or {})}.items():
    *parts, last = name.split(".")
    part = experiment
    for one in parts:
      part = getattr(part, one)
    setattr(part, last, tuple(value) if isinstance(value, list) else value)
  if measures:
    from agentjax.training.evaluation import evaluate_checkpoint

    report = evaluate_checkpoint(experiment, directory, extensions=stages.extensions())
    pathlib.Path(directory, f"measured.{index}.json").write_text(json.dumps(report.metrics()))
    return
  run = Run(experiment, directory, extensions=stages.extensions(), console=quiet())
  sys.exit(0 if run.train().finished else 3)


if __name__ == "__main__":
  _main(**json.loads(sys.argv[1]))
