"""Probes the protections of a box by trying to break them from inside."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets

from agentjax.sandbox.interface import (
  Box,
  Protection,
  PythonScript,
  RunStatus,
  SandboxError,
  SandboxLimits,
)

_LIMITS = SandboxLimits(
  memory_bytes=64 * 2**20, disk_bytes=32 * 2**20, processes=16, wall_seconds=20.0
)

MADE = "made-by-probe"  # a file that the probing program leaves in the box
# Every name printed is a protection that was broken.
_BREAK_WALLS = (
  f"""
open({MADE!r}, "w").close()"""
  + """
import ctypes, json, os, signal, socket
broken = set()
def attempt(name, action):
  try:
    if action() is not False:
      broken.add(name)
  except (OSError, ValueError, OverflowError):
    pass
def interfaces():
  socket.socket()
  return any(name != "lo" for _, name in socket.if_nameindex())
attempt("network", interfaces)
attempt("processes", lambda: os.kill(HOST_PID, 0))
attempt("filesystem", lambda: open(HOST_FILE).read())
for folder in ("/", "/usr", "/etc", "/var", "/var/tmp", "/tmp", "/home", "/root", "/dev/shm"):
  if os.path.realpath(folder) != os.path.realpath("."):
    attempt("filesystem", lambda: open(os.path.join(folder, "agentjax-probe"), "x"))
libc = ctypes.CDLL(None, use_errno=True)
for flags in (0x10000000, 0x00020000):  # CLONE_NEWUSER, CLONE_NEWNS
  attempt("syscalls", lambda: libc.unshare(flags) == 0)
attempt("syscalls", lambda: libc.ptrace(0, 0, 0, 0) == 0)
print(json.dumps(sorted(broken)))
"""
)
_BREAK_MEMORY = "block = b'x' * (4 * MEMORY)\nprint('unbounded')"
_BREAK_PROCESSES = """
import os, time
for _ in range(PROCESSES + 8):
  if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
time.sleep(0.5)
print('unbounded')
"""
# The daemon outlives its program where it can, and then touches a file in the box.
_LEAVE_DAEMON = """
import os, time
if os.fork() == 0:
  os.setsid()
  if os.fork() == 0:
    time.sleep(0.5)
    open("outlived", "w").close()
  os._exit(0)
"""
_SEE_DAEMON = "import os, time\ntime.sleep(0.8)\nprint(os.path.exists('outlived'))"


def limits_of_probe(limits: SandboxLimits) -> SandboxLimits:
  """Small bounds, so that a probe that breaks them does no harm."""
  return dataclasses.replace(
    limits,
    memory_bytes=min(limits.memory_bytes, _LIMITS.memory_bytes),
    processes=min(limits.processes, _LIMITS.processes),
    disk_bytes=min(limits.disk_bytes, _LIMITS.disk_bytes),
    wall_seconds=_LIMITS.wall_seconds,
    cpu_seconds=_LIMITS.wall_seconds,
  )


async def probed(box: Box, limits: SandboxLimits, host_file: str) -> frozenset[Protection]:
  """The protections of ``box`` that withstood; all but USER, which only the outside can judge.

  Args:
    box: a fresh box that runs Python programs under ``limits``.
    limits: see limits_of_probe.
    host_file: a file of this machine that no program in a box may read.

  Raises:
    SandboxError: Python does not run in the box.
  """
  names = f"HOST_PID, HOST_FILE = {os.getpid()}, {host_file!r}\n"
  walls = await box.exec(PythonScript(names + _BREAK_WALLS), limits=limits)
  if walls.status is not RunStatus.OK:
    raise SandboxError(
      f"Python does not run in the box: {walls.detail} {walls.stderr.strip()[-500:]}".rstrip()
    )
  names = f"MEMORY, PROCESSES = {limits.memory_bytes}, {limits.processes}\n"
  bounded = True
  for source in (_BREAK_MEMORY, _BREAK_PROCESSES):
    result = await box.exec(PythonScript(names + source), limits=limits)
    bounded = bounded and "unbounded" not in result.stdout
  await box.exec(PythonScript(_LEAVE_DAEMON), limits=limits)
  seen = await box.exec(PythonScript(_SEE_DAEMON), limits=limits)
  broken = set(json.loads(walls.stdout))
  if not bounded:
    broken.add("limits")
  if seen.stdout != "False\n":
    broken.add("descendants")
  return frozenset(p for p in Protection if p.value not in broken and p is not Protection.USER)


def secret_name() -> str:
  """A name that no program guesses."""
  return f"agentjax-probe-{secrets.token_hex(8)}"
