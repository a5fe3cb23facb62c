"""Several processes on this machine: what they exchange, write, agree on, and how they end."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.training.figures import free_address

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("ending", ["kill", pytest.param("error", marks=pytest.mark.slow)])
def test_two_processes_share_write_agree_and_end(tmp_path, ending):
  """See ``together.py``: the figures are asserted there, in each process."""
  _run_together(tmp_path, 2, ending)


@pytest.mark.parametrize("command", ["train --workdir=nowhere", "evaluate --checkpoint=nowhere"])
def test_commands_join_the_others_and_say_when_these_count_as_lost(command):
  name, *words = command.split()
  program = (
    "import jax, sys; jax.distributed.initialize = lambda **kwargs: sys.exit(str(kwargs))\n"
    f"from agentjax import {name}; from agentjax.command import main; main({name}.run)"
  )
  words += ["--config=configs/quickstart.py", "--distributed", "--lost_after=7"]
  done = subprocess.run(
    [sys.executable, "-c", program, *words],
    cwd=_ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert "{'heartbeat_timeout_seconds': 7}" in done.stderr, done.stdout + done.stderr


@pytest.mark.slow
def test_four_processes_share_write_agree_and_end(tmp_path):
  _run_together(tmp_path, 4, "kill")


def _run_together(folder, count, ending):
  address = free_address()
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
  children = [
    subprocess.Popen(
      [
        sys.executable,
        "-m",
        "tests.training.together",
        *map(str, (i, count, address, folder)),
        ending,
      ],
      cwd=_ROOT,
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for i in range(count)
  ]
  outputs = [child.communicate(timeout=300)[0] for child in children]
  told = "\n".join(output[-3000:] for output in outputs)
  *survivors, last = [child.returncode for child in children]
  assert last == {"kill": -9, "error": 1}[ending] and survivors == [4] * (count - 1), told
  assert all("Start the same command again on every host" in o for o in outputs[:-1]), told
