"""Runs programs in a ProcessSandbox on a machine that grants less than this one.

A script of its own, because what it gives up (capabilities, system calls, root) cannot be had back:
``driver.py MACHINE CONFIG_JSON``; each line of stdin is a request, each line of stdout its result.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import json
import logging
import os
import platform
import struct
import sys
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

from agentjax.sandbox import (  # noqa: E402
  Box,
  Command,
  ProcessSandbox,
  ProcessSandboxConfig,
  PythonCell,
  SandboxError,
  SandboxLimits,
  SandboxResult,
  Session,
  jail,
  run_once,
)

NOBODY = 65534
X86 = platform.machine() == "x86_64"
NAMESPACES = [272, 308] if X86 else [97, 268]  # unshare, setns
LANDLOCK = [444, 445, 446]


def refuse(numbers: list[int]) -> None:
  """EPERM for these system calls, for this process and its children."""
  jail.no_new_privileges()
  code = struct.pack("=HBBI", 0x20, 0, 0, 0)
  for number in numbers:
    code += struct.pack("=HBBI", 0x15, 0, 1, number) + struct.pack("=HBBI", 0x06, 0, 0, 0x50001)
  code += struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)
  buffer = ctypes.create_string_buffer(code, len(code))
  program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
  zero = ctypes.c_ulong(0)
  if ctypes.CDLL(None).prctl(22, ctypes.c_ulong(2), program, zero, zero) != 0:
    raise OSError("cannot install the filter")


def give_up(machine: str) -> None:
  if machine.startswith("user") and os.geteuid() == 0:
    jail.become(NOBODY)
  if machine in ("container", "user_container"):
    refuse(NAMESPACES)
  if machine in ("no_landlock", "user_no_landlock"):
    refuse(LANDLOCK)
  if machine in ("old_kernel", "user_old_kernel"):
    refuse(NAMESPACES + LANDLOCK)


async def serve(config: ProcessSandboxConfig) -> None:
  """Each request {"runs": [...]} is answered with the list of their results; they run at once.

  A run is {"code" or "argv", "stdin", "limits", "cell": whether it is a cell of the session that
  all such share}. {"end_session": true} closes that session.
  """
  sandbox = ProcessSandbox(config)
  try:
    protections = sorted(await sandbox.start())
  except SandboxError as error:
    print(json.dumps({"error": str(error)}), flush=True)
    return
  assert sandbox._zygote is not None
  hello = {
    "protections": protections,
    "mechanisms": sandbox.mechanisms,
    "directory": sandbox._zygote.directory,
  }
  print(json.dumps(hello), flush=True)
  notebook = Notebook(sandbox)
  loop = asyncio.get_running_loop()
  while line := await loop.run_in_executor(None, sys.stdin.readline):
    request = json.loads(line)
    if request.get("end_session"):
      await notebook.close()
    runs = [_run(sandbox, notebook, run) for run in request.get("runs", ())]
    results = [dataclasses.asdict(result) for result in await asyncio.gather(*runs)]
    print(json.dumps(results), flush=True)
  await sandbox.close()


class Notebook:
  """A session, opened anew where limits change."""

  def __init__(self, sandbox: ProcessSandbox):
    self._sandbox = sandbox
    self._limits: SandboxLimits | None = None
    self._box: Box | None = None
    self._session: Session | None = None

  async def run(self, code: str, limits: SandboxLimits) -> SandboxResult:
    if self._session is None or self._limits != limits:
      await self.close()
      self._box, self._limits = await self._sandbox.create(), limits
      self._session = await self._box.session(limits=limits)
    return await self._session.run(code)

  async def close(self) -> None:
    if self._box is not None:
      await self._box.close()
    self._box = self._session = None


async def _run(
  sandbox: ProcessSandbox, notebook: Notebook, request: dict[str, Any]
) -> SandboxResult:
  limits = SandboxLimits(**{"wall_seconds": 5.0, **request.get("limits", {})})
  if request.get("cell"):
    return await notebook.run(request["code"], limits)
  program = Command(tuple(request["argv"])) if "argv" in request else PythonCell(request["code"])
  stdin = request.get("stdin", "").encode()
  return await run_once(sandbox, program, stdin=stdin, limits=limits)


if __name__ == "__main__":
  logging.disable(logging.WARNING)
  give_up(sys.argv[1])
  settings = ProcessSandboxConfig(**json.loads(sys.argv[2]))
  asyncio.run(serve(settings))
