"""Runs one helper program of this machine: a jailer or a container engine's client.

Started by exec, never by a fork that runs Python; its output is kept head and tail, and it never
outlives the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import cast

from agentjax.sandbox.interface import SandboxError, SandboxLimits
from agentjax.sandbox.measure import Output
from agentjax.sandbox.result import Ended

Look = Callable[[int], tuple[str, str] | None]
_TICK = 0.02  # seconds between looks at a run
_GRACE_SECONDS = 2.0  # for a program to end what it started and itself
_PIPE_SECONDS = 0.5  # for its pipes to close after its end


async def supervise(
  argv: Sequence[str],
  limits: SandboxLimits,
  *,
  stdin: bytes = b"",
  env: Mapping[str, str] | None = None,
  pass_fds: tuple[int, ...] = (),
  look: Look | None = None,
  end: Callable[[int], None] | None = None,
) -> Ended:
  """Runs ``argv`` until it exits or must be ended: wall clock, output, or what ``look`` finds.

  Args:
    argv: program and arguments.
    limits: wall clock and output bounds; the others are the program's own to enforce.
    stdin: what it reads; then the end of file.
    env: its environment; None is this process's.
    pass_fds: file descriptors it inherits.
    look: called with its process id every 20 ms; a (reason, detail) ends the run.
    end: called with its process id to end it gently: what it started dies first. It is killed where
      that does not help within 2 s.

  Raises:
    SandboxError: ``argv[0]`` cannot be started.
  """
  loop, start = asyncio.get_running_loop(), time.monotonic()
  try:
    transport, run = await loop.subprocess_exec(
      lambda: _Run(limits), *argv, cwd="/", env=env, pass_fds=pass_fds, start_new_session=True
    )
  except OSError as error:
    raise SandboxError(f"cannot start {argv[0]!r}: {error.strerror}") from error
  pid = transport.get_pid()
  pipe = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
  pipe.write(stdin)
  pipe.close()  # once all is written, or the program does not read any more
  reason, detail = "exit", ""
  try:
    deadline = start + limits.wall_seconds
    while True:
      wait = deadline - time.monotonic()
      if wait <= 0:
        reason, detail = "wall", f"did not end within {limits.wall_seconds:.1f} s"
        break
      wait = min(wait, _TICK) if look else wait
      await asyncio.wait(
        {run.exited, run.flooded}, timeout=wait, return_when=asyncio.FIRST_COMPLETED
      )
      if run.flooded.done():
        reason, detail = "output", f"wrote more than {limits.output_kill_bytes} bytes"
        break
      if run.exited.done():
        break
      if look is not None and (found := look(pid)):
        reason, detail = found
        break
  finally:
    await surely(_end(transport, run, end))
  seconds = time.monotonic() - start
  return Ended(reason, detail, transport.get_returncode(), seconds, *run.outputs)


class _Run(asyncio.SubprocessProtocol):
  """Outputs and end of a process; the end does not wait for the pipes, which others may hold."""

  def __init__(self, limits: SandboxLimits):
    loop = asyncio.get_running_loop()
    self.outputs = Output(limits.output_bytes), Output(limits.output_bytes)
    self.flooded: asyncio.Future[None] = loop.create_future()
    self.exited: asyncio.Future[None] = loop.create_future()
    self.drained: asyncio.Future[None] = loop.create_future()
    self._most = limits.output_kill_bytes
    self._pipes = {1, 2}

  def pipe_data_received(self, fd: int, data: bytes | str) -> None:
    output = self.outputs[fd - 1]
    output.add(cast(bytes, data))
    if output.total > self._most and not self.flooded.done():
      self.flooded.set_result(None)

  def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
    self._pipes.discard(fd)
    if not self._pipes and not self.drained.done():
      self.drained.set_result(None)

  def process_exited(self) -> None:
    self.exited.set_result(None)


async def _end(
  transport: asyncio.SubprocessTransport, run: _Run, end: Callable[[int], None] | None
) -> None:
  """Returns when the process is reaped and what it wrote is read."""
  if not run.exited.done() and end is not None:
    end(transport.get_pid())
    await asyncio.wait({run.exited}, timeout=_GRACE_SECONDS)
  if not run.exited.done():
    with contextlib.suppress(ProcessLookupError):
      transport.kill()
    await run.exited
  await asyncio.wait({run.drained}, timeout=_PIPE_SECONDS)
  transport.close()


async def surely(work: Awaitable[None]) -> None:
  """Awaits ``work`` to its end even when the caller is cancelled."""
  task = asyncio.ensure_future(work)
  try:
    await asyncio.shield(task)
  except asyncio.CancelledError:
    await task
    raise
