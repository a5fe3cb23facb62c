"""The inside of a box whose interpreter has no agentjax: source text that runs a program there.

The text is made of the very functions with which the embedded back end runs programs, so that a
cell prints the same everywhere. It needs Python 3.8 or later.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import inspect
import io
import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from agentjax.sandbox import jail, programs
from agentjax.sandbox.interface import Program, SandboxLimits, as_request
from agentjax.sandbox.measure import Output
from agentjax.sandbox.programs import run_program

# What the functions use. The box's own files must not shadow the standard library meanwhile.
_HEAD = """\
from __future__ import annotations
import os, sys
sys.path[:] = [p for p in sys.path if p not in ("", os.getcwd())]
import ast, base64, builtins, contextlib, gc, io, json, linecache, random, signal, struct
import traceback, types
from typing import Any
"""
# Takes text from stdin without a buffer, so that what follows is left for the program.
_BOOT = """
import os
def take(size):
  parts = b""
  while len(parts) < size:
    part = os.read(0, size - len(parts))
    if not part:
      raise SystemExit("no program came")
    parts += part
  return parts
exec(compile(take(int(take(12))), "<guest>", "exec"))
"""
BOOT_ARGUMENTS = ("-s", "-B", "-X", "utf8", "-c", _BOOT)  # for an interpreter

# POSIX shells count file sizes in blocks of 512 bytes; bash says -u where others say -p.
_LIMITED = (
  'ulimit -S -t "$1"; ulimit -H -t $(($1 + 1)); '
  'ulimit -f "$2"; ulimit -n "$3"; ulimit -u "$4" 2>/dev/null || ulimit -p "$4"; ulimit -c 0; '
  'shift 4; exec "$@"'
)


def framed(source: str, stdin: bytes) -> bytes:
  """What an interpreter with BOOT_ARGUMENTS reads: the text's length, text, the program's stdin."""
  data = source.encode()
  return b"%012d" % len(data) + data + stdin


def limited(argv: Sequence[str], limits: SandboxLimits) -> list[str]:
  """``argv`` under the limits that a shell can set."""
  cpu = str(math.ceil(limits.cpu_seconds))
  blocks = str(math.ceil(limits.file_bytes / 512))
  return [
    "sh",
    "-c",
    _LIMITED,
    "sh",
    cpu,
    blocks,
    str(limits.open_files),
    str(limits.processes),
    *argv,
  ]


def plain(program: Program) -> str:
  """Python text that becomes ``program``, in the directory it is started in."""
  request = json.dumps(as_request(program))
  return (
    f"{_HEAD}{_text_of_programs()}"
    f"run_program({{'program': json.loads({request!r}), 'directory': os.getcwd()}}, "
    "os.open(os.devnull, os.O_WRONLY), io.BytesIO())\n"
  )


def jailed(request: dict[str, Any]) -> str:
  """Python text for the first process of a PID namespace: limits, walls, then the program.

  Args:
    request: {"program": see as_request, "limits", "directory", "other_tasks", "uid" (or null),
      "seccomp", "paths" (for sys.path), "report" (file descriptor on which the program's wait
      status and CPU seconds are written)}.
  """
  return (
    f"{_HEAD}{_text_of_programs()}{_text_of_jail()}"
    f"_run_jailed(json.loads({json.dumps(request)!r}))\n"
  )


def captured(program: Program, settings: dict[str, Any]) -> str:
  """Python text that runs ``program`` as a child and writes down how it ended and what it left.

  For services that keep no files and cut outputs their own way.

  Args:
    program: what to run.
    settings: {"limits", "stdin" (base64), "result" (name of the file that tells how it ended),
      "archive" (name of a tar: the box's files before, and then after)}.
  """
  request = {
    **settings,
    "arguments": BOOT_ARGUMENTS,
    "frame": base64.b64encode(framed(plain(program), b"")).decode(),
  }
  return f"{_HEAD}{_text_of_capture()}_run_captured(json.loads({json.dumps(request)!r}))\n"


@functools.cache
def _text_of_programs() -> str:
  return _text(
    run_program,
    programs.prepare_python,
    programs.run_source,
    programs.execute,
    programs.exit_code,
    programs.print_error,
    programs.finish,
  )


@functools.cache
def _text_of_jail() -> str:
  return (
    "jail = types.ModuleType('jail')\n"
    f"exec(compile({inspect.getsource(jail)!r}, '<jail>', 'exec'), jail.__dict__)\n"
    + _text(_run_jailed)
  )


@functools.cache
def _text_of_capture() -> str:
  return _text(Output, _run_captured, _child_limits, _watch, _archive)


def _text(*functions: Any) -> str:
  return "".join(f"{inspect.getsource(f)}\n\n" for f in functions)


# -- shipped as text, with the modules of _HEAD


def _run_jailed(request: dict[str, Any]) -> None:
  """Never returns. Pid 1 only reaps and reports; the program gets an ordinary pid."""
  import resource

  report, limits = request["report"], request["limits"]
  try:
    program = os.fork()
    if program:
      jail.be_readable(value=False)  # the program must not reach the report through /proc/1
      while True:
        pid, status, usage = os.wait4(-1, 0)
        if pid == program:
          os.write(report, f"exit {status} {usage.ru_utime + usage.ru_stime}".encode())
          os._exit(0)
    os.setsid()
    os.set_inheritable(report, False)
    with open("/proc/self/statm") as file:
      space = int(file.read().split()[0]) * resource.getpagesize()
    jail.limit(
      limits,
      address_space=space + limits["memory_bytes"],
      processes=limits["processes"] + request["other_tasks"],
      cpu_seconds=limits["cpu_seconds"],
    )
    if request["uid"] is not None:
      jail.become(request["uid"])
    os.chdir(request["directory"])
    jail.no_new_privileges()
    jail.bound_capabilities()
    jail.drop_capabilities()
    if request["seccomp"]:
      jail.refuse_system_calls(
        os.getpid(),
        own_pid_namespace=True,
        own_user=True,
        signals_scoped=False,
        files_guarded=True,
      )
  except BaseException as error:
    os.write(report, f"error {type(error).__name__}: {error}".encode(errors="replace")[:4000])
    os._exit(127)
  sys.path.extend(request["paths"])
  run_program(request, report, io.BytesIO())


def _run_captured(settings: dict[str, Any]) -> None:
  import resource
  import shutil
  import subprocess
  import tarfile
  import tempfile
  import time

  limits = settings["limits"]
  box = tempfile.mkdtemp()
  with tarfile.open(settings["archive"]) as archive:
    archive.extractall(box)
  start = time.monotonic()
  child = subprocess.Popen(
      [sys.executable, *settings["arguments"]], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
      stderr=subprocess.PIPE, start_new_session=True, preexec_fn=_child_limits(limits), cwd=box,
      env={**os.environ, "PYTHONHASHSEED": "0"},
  )  # fmt: skip
  sent = base64.b64decode(settings["frame"]) + base64.b64decode(settings["stdin"])
  outputs = [Output(limits["output_bytes"]) for _ in range(2)]
  reason, detail, code = _watch(child, sent, outputs, limits)
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  result = {
    "reason": reason,
    "detail": detail,
    "exit_code": code,
    "seconds": time.monotonic() - start,
    "cpu_seconds": usage.ru_utime + usage.ru_stime,
    "parts": [base64.b64encode(p).decode() for o in outputs for p in (o.head, o.tail)],
    "totals": [o.total for o in outputs],
  }
  try:
    _archive(box, settings["archive"], limits["disk_bytes"])
  except (OSError, ValueError) as error:
    with contextlib.suppress(OSError):
      os.unlink(settings["archive"])
    if reason == "exit":
      result.update(reason="disk", detail=str(error))
  with open(settings["result"], "w") as file:
    json.dump(result, file)
  shutil.rmtree(box, ignore_errors=True)


def _child_limits(limits: dict[str, Any]) -> Any:
  """What a child calls before its program, to lower its limits."""
  import resource

  with open("/proc/self/statm") as file:
    space = int(file.read().split()[0]) * resource.getpagesize()

  def lower() -> None:
    for kind, value in (
      (resource.RLIMIT_CPU, int(-(-limits["cpu_seconds"] // 1))),
      (resource.RLIMIT_AS, space + limits["memory_bytes"]),
      (resource.RLIMIT_FSIZE, limits["file_bytes"]),
      (resource.RLIMIT_NOFILE, limits["open_files"]),
      (resource.RLIMIT_CORE, 0),
    ):
      hard = resource.getrlimit(kind)[1]
      value = value if hard == resource.RLIM_INFINITY else min(value, hard)
      resource.setrlimit(kind, (value, value + 1 if kind == resource.RLIMIT_CPU else value))

  return lower


def _watch(child: Any, sent: bytes, outputs: Any, limits: dict[str, Any]) -> Any:
  """Feeds a child, keeps what it writes, ends it in time: (reason, detail, exit code)."""
  import subprocess
  import threading

  why = ["exit", ""]

  def stop(reason: str, detail: str) -> None:
    if child.poll() is None:
      why[:] = [reason, detail]
      with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)

  def feed() -> None:
    with contextlib.suppress(OSError), child.stdin as pipe:
      pipe.write(sent)

  def keep(stream: Any, output: Any) -> None:
    while data := os.read(stream.fileno(), 1 << 16):
      output.add(data)
      if output.total > limits["output_kill_bytes"]:
        stop("output", f"wrote more than {limits['output_kill_bytes']} bytes")

  threads = [
    threading.Thread(target=target, args=arguments, daemon=True)
    for target, arguments in (
      (feed, ()),
      (keep, (child.stdout, outputs[0])),
      (keep, (child.stderr, outputs[1])),
    )
  ]
  for thread in threads:
    thread.start()
  try:
    child.wait(timeout=limits["wall_seconds"])
  except subprocess.TimeoutExpired:
    stop("wall", f"did not end within {limits['wall_seconds']:.1f} s")
  code = child.wait()
  with contextlib.suppress(OSError):
    os.killpg(child.pid, signal.SIGKILL)  # what it left running
  for thread in threads[1:]:
    thread.join(timeout=1.0)
  return (*why, code)


def _archive(folder: str, name: str, most_bytes: int) -> None:
  """Makes ``name`` a tar of the folder's files, directories and links."""
  import tarfile

  held = 0

  def keep(entry: Any) -> Any:
    nonlocal held
    if not (entry.isreg() or entry.isdir() or entry.issym()):
      return None
    held += entry.size
    if held > most_bytes:
      raise ValueError(f"its files hold more than {most_bytes} bytes")
    return entry

  with tarfile.open(name, "w") as archive:
    for path in sorted(os.listdir(folder)):
      archive.add(os.path.join(folder, path), path, filter=keep)
