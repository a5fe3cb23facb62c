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

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)

from agentjax.sandbox import (  # noqa: E402
  Command,
  ProcessSandbox,
  ProcessSandboxConfig,
  PythonCell,
  SandboxError,
  SandboxLimits,
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
  if machine in ("user", "user_container", "user_old_kernel") and os.geteuid() == 0:
    jail.become(NOBODY)
  if machine in ("container", "user_container"):
    refuse(NAMESPACES)
  if machine in ("old_kernel", "user_old_kernel"):
    refuse(NAMESPACES + LANDLOCK)


async def serve(config: ProcessSandboxConfig) -> None:
  sandbox = ProcessSandbox(config)
  try:
    print(json.dumps(sorted(await sandbox.start())), flush=True)
  except SandboxError as error:
    print(json.dumps({"error": str(error)}), flush=True)
    return
  loop = asyncio.get_running_loop()
  while line := await loop.run_in_executor(None, sys.stdin.readline):
    request = json.loads(line)
    program = Command(tuple(request["argv"])) if "argv" in request else PythonCell(request["code"])
    limits = SandboxLimits(**{"wall_seconds": 5.0, **request.get("limits", {})})
    result = await run_once(sandbox, program, limits=limits)
    print(json.dumps(dataclasses.asdict(result)), flush=True)
  await sandbox.close()


if __name__ == "__main__":
  logging.disable(logging.WARNING)
  give_up(sys.argv[1])
  settings = ProcessSandboxConfig.from_dict(json.loads(sys.argv[2]))
  asyncio.run(serve(settings))
