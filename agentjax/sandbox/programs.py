"""What a run becomes: a command, or Python source in what looks like a new interpreter.

It imports the standard library only, as the zygote does. ``guest`` sends these functions elsewhere
as text, so they use only each other and the modules that its ``_HEAD`` imports.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import gc
import io
import itertools
import json
import linecache
import os
import random
import signal
import socket
import struct
import sys
import traceback
import types
from typing import Any

_MAX_FRAME = 1 << 30


def receive(connection: socket.socket) -> bytes:
  """One frame: its length as 8 bytes, then its bytes. Raises EOFError when the peer is gone."""
  header = _receive_exactly(connection, 8)
  length = struct.unpack("<Q", header)[0]
  if length > _MAX_FRAME:
    raise EOFError
  return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
  parts = bytearray()
  while len(parts) < count:
    part = connection.recv(min(count - len(parts), 1 << 20))
    if not part:
      raise EOFError
    parts += part
  return bytes(parts)


def run_program(
  request: dict[str, Any],
  report: int,
  channel: Any,
  namespace: dict[str, Any] | None = None,
) -> None:
  """Runs in the jail; from here on nothing of this process can be trusted. Never returns.

  ``channel`` is the socket that a session's cells come on, else anything to be closed; and
  ``namespace`` what prepare_python() gave, where that is done already.
  """
  program, directory = request["program"], request["directory"]
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)
  signal.signal(signal.SIGINT, signal.default_int_handler)
  os.environ.update(HOME=directory, TMPDIR=directory, PWD=directory)
  if program["kind"] == "command":
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
      os.execvp(program["argv"][0], program["argv"])
    except OSError as error:
      os.write(2, f"{program['argv'][0]}: {error.strerror}\n".encode())
    os._exit(127)
  os.close(report)
  if namespace is None:
    namespace = prepare_python()
  sys.path.insert(0, directory)
  gc.enable()
  if program["kind"] == "session":
    _run_cells(channel, namespace)
  channel.close()
  code = run_source(program, "<tool>", namespace, show_last=program["kind"] == "cell")
  os._exit(finish(code) & 0xFF)


def _run_cells(channel: socket.socket, namespace: dict[str, Any]) -> None:
  """Runs each cell that comes and tells its exit code in a byte. Never returns."""
  own_pid = os.getpid()
  for number in itertools.count(1):
    try:
      cell = json.loads(receive(channel))
    except (EOFError, OSError):
      os._exit(0)
    code = run_source(cell, f"<cell {number}>", namespace, show_last=True)
    if os.getpid() != own_pid:
      os._exit(finish(code) & 0xFF)  # the cell forked, and this is the child
    with contextlib.suppress(BaseException):  # the program may have broken or closed them
      sys.stdout.flush()
      sys.stderr.flush()
    try:
      channel.sendall(bytes([code & 0xFF]))
    except OSError:
      os.write(2, b"the program closed the channel of its interpreter\n")
      os._exit(1)


def prepare_python() -> dict[str, Any]:
  """Makes this process look like a new interpreter; the namespace of its ``__main__``."""
  sys.argv = ["<tool>"]
  sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), errors="replace")
  for name, fd in (("stdout", 1), ("stderr", 2)):
    raw = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
    errors = "surrogateescape" if fd == 1 else "backslashreplace"
    # By the line: what was printed before a forced end is not lost.
    stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=True)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)
  main = types.ModuleType("__main__")
  main.__dict__["__builtins__"] = builtins
  sys.modules["__main__"] = main
  return main.__dict__


def run_source(
  program: dict[str, Any], name: str, namespace: dict[str, Any], *, show_last: bool
) -> int:
  """Runs ``program["source"]`` under the file name ``name``; the exit code."""
  random.seed(program["seed"])
  if (numpy := sys.modules.get("numpy")) is not None:
    numpy.random.seed(program["seed"] % 2**32)
  source = program["source"]
  linecache.cache[name] = (len(source), None, source.splitlines(True), name)
  try:
    execute(source, name, namespace, show_last=show_last)
  except SystemExit as request:
    return exit_code(request)
  except BaseException as error:
    print_error(error, name)
    return 1
  return 0


def execute(source: str, name: str, namespace: dict[str, Any], *, show_last: bool) -> None:
  tree = ast.parse(source, name)
  last = tree.body[-1] if tree.body else None
  if not show_last or not isinstance(last, ast.Expr):
    exec(compile(tree, name, "exec", dont_inherit=True), namespace)
    return
  tree.body.pop()
  exec(compile(tree, name, "exec", dont_inherit=True), namespace)
  value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), namespace)
  if value is not None:
    print(repr(value))


def exit_code(request: SystemExit) -> int:
  if request.code is None:
    return 0
  if isinstance(request.code, int):
    return request.code
  print(request.code, file=sys.stderr)
  return 1


def print_error(error: BaseException, name: str) -> None:
  trace = error.__traceback__
  while trace is not None and trace.tb_frame.f_code.co_filename != name:
    trace = trace.tb_next
  try:
    traceback.print_exception(type(error), error, trace)
  except BaseException:  # the program may have broken traceback, or its exception's __str__
    os.write(2, f"{type(error).__name__}\n".encode())


def finish(code: int) -> int:
  """What an interpreter does at its end: join threads, atexit functions, flush."""
  try:
    if "threading" in sys.modules:
      sys.modules["threading"]._shutdown()
    if "atexit" in sys.modules:
      sys.modules["atexit"]._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
  except BaseException:
    code = code or 1
  return code
