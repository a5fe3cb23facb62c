"""Machines that grant the sandbox more or less, each a process that stands for the trainer."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

_DRIVER = pathlib.Path(__file__).with_name("driver.py")
MACHINES = (
  "native",
  "no_landlock",
  "container",
  "old_kernel",
  "user",
  "user_no_landlock",
  "user_container",
  "user_old_kernel",
)
SECRET = "secret-of-the-trainer"  # in the driver's environment
NOBODY = 65534


class NoMachine(Exception):
  """This machine cannot stand for that one; the text says why."""


class Machine:
  """A driver process; it stands for the trainer, which programs must not reach.

  "native" is this machine as its current user; "no_landlock" lacks Landlock, "container" refuses
  namespaces, "old_kernel" both; "user…" are the same as an ordinary user.
  """

  def __init__(self, name: str, config: dict[str, Any] | None = None):
    self.name = name
    settings = json.dumps({"allow_unisolated": True, **(config or {})})
    self.process = subprocess.Popen(
        [_interpreter(name), "-B", str(_DRIVER), name, settings],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
        env={**os.environ, "API_KEY": SECRET},
    )  # fmt: skip
    self.hello = self.read()

  @property
  def is_root(self) -> bool:
    return os.geteuid() == 0 and not self.name.startswith("user")

  def grants(self, name: str) -> bool:
    """Whether this protection holds, or this mechanism of one."""
    return name in (*self.hello["protections"], *self.hello["mechanisms"])

  def run(self, code: str, **limits: Any) -> dict[str, Any]:
    return self.ask({"runs": [{"code": code, "limits": limits}]})[0]

  def command(self, *argv: str, **limits: Any) -> dict[str, Any]:
    return self.ask({"runs": [{"argv": argv, "limits": limits}]})[0]

  def close(self) -> None:
    self.process.communicate(timeout=30)

  def ask(self, request: dict[str, Any]) -> Any:
    """See ``driver.serve`` for what may be asked."""
    self.send(request)
    return self.read()

  def send(self, request: dict[str, Any]) -> None:
    assert self.process.stdin is not None
    self.process.stdin.write(json.dumps(request) + "\n")
    self.process.stdin.flush()

  def read(self) -> Any:
    assert self.process.stdout is not None
    line = self.process.stdout.readline()
    assert line, f"the process that uses the sandbox on machine {self.name!r} died"
    return json.loads(line)


@functools.cache
def _interpreter(machine: str) -> str:
  base = getattr(sys, "_base_executable", sys.executable)
  if os.geteuid() != 0 or not machine.startswith("user"):
    return base
  for candidate in (os.path.realpath(base), "/usr/bin/python3", "/usr/local/bin/python3"):
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
      subprocess.run(
          [candidate, "-c", "import asyncio; asyncio.timeout; import json"],
          user=NOBODY, group=NOBODY, extra_groups=[], check=True, capture_output=True, cwd="/",
      )  # fmt: skip
      return candidate
  raise NoMachine("no Python >= 3.11 that an ordinary user can read")
