"""Machines that grant the sandbox more or less, each a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

_DRIVER = pathlib.Path(__file__).with_name("driver.py")
_MACHINES = ("native", "container", "old_kernel", "user", "user_container", "user_old_kernel")


class Machine:
  """A driver process; it stands for the trainer, which programs must not reach."""

  def __init__(self, name: str, config: dict[str, Any] | None = None):
    self.name = name
    settings = json.dumps({"require": [], **(config or {})})
    self.process = subprocess.Popen(
        [_interpreter(name), "-B", str(_DRIVER), name, settings],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
        env={**os.environ, "API_KEY": "secret-of-the-trainer"},
    )  # fmt: skip
    self.hello = self.read()

  def grants(self, protection: str) -> bool:
    return protection in self.hello

  def run(self, code: str, **limits: Any) -> dict[str, Any]:
    return self._ask({"code": code, "limits": limits})

  def command(self, *argv: str, **limits: Any) -> dict[str, Any]:
    return self._ask({"argv": argv, "limits": limits})

  def close(self) -> None:
    self.process.communicate(timeout=30)

  def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
    assert self.process.stdin is not None
    self.process.stdin.write(json.dumps(request) + "\n")
    self.process.stdin.flush()
    return self.read()

  def read(self) -> Any:
    assert self.process.stdout is not None
    line = self.process.stdout.readline()
    assert line, f"the process that uses the sandbox on machine {self.name!r} died"
    return json.loads(line)


def _interpreter(machine: str) -> str:
  base = getattr(sys, "_base_executable", sys.executable)
  if os.geteuid() != 0 or not machine.startswith("user"):
    return base
  for candidate in (os.path.realpath(base), "/usr/bin/python3", "/usr/local/bin/python3"):
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
      subprocess.run(
          [candidate, "-c", "import asyncio; asyncio.timeout; import json"],
          user=65534, group=65534, extra_groups=[], check=True, capture_output=True, cwd="/",
      )  # fmt: skip
      return candidate
  pytest.skip("no Python >= 3.11 that an ordinary user can read")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  if sys.platform != "linux":
    for item in items:
      if "sandbox" in item.nodeid:
        item.add_marker(pytest.mark.skip(reason="the embedded sandbox needs Linux"))


@pytest.fixture(scope="module", params=_MACHINES)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
  machine = Machine(request.param)
  yield machine
  machine.close()


@pytest.fixture
def start_machine() -> type[Machine]:
  return Machine
