"""Runs one helper program of this machine: a jailer or a container engine's client.

Started by exec, never by a fork that runs Python; its output is kept head and tail, and it never
outlives the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from agentjax.sandbox.interface import SandboxError, SandboxLimits
from agentjax.sandbox.result import Ended
from agentjax.sandbox.zygote import Output

Look = Callable[[int], tuple[str, str] | None]
_TICK = 0.02  # seconds between looks at a run
_GRACE_SECONDS = 2.0  # for a killed program to be reaped and its pipes to close


class QueueTimeout(Exception):
  """No place came free in time."""


class Places:
  """At most ``count`` holders at once; further ones wait, at most ``seconds`` long.

  May be used from one event loop after another.
  """

  def __init__(self, count: int, seconds: float):
    self._count, self._seconds = count, seconds
    self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

  @contextlib.asynccontextmanager
  async def one(self) -> AsyncIterator[None]:
    """Holds a place. Raises QueueTimeout."""
    loop = asyncio.get_running_loop()
    if self._places is None or self._places[0] is not loop:
      self._places = (loop, asyncio.Semaphore(self._count))
    places = self._places[1]
    try:
      async with asyncio.timeout(self._seconds):
        await places.acquire()
    except TimeoutError:
      raise QueueTimeout(
        f"no free place for the run within {self._seconds:g} s; raise the sandbox's concurrency "
        f"({self._count})"
      ) from None
    try:
      yield
    finally:
      places.release()


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
  start = time.monotonic()
  try:
    process = await asyncio.create_subprocess_exec(
      *argv,
      stdin=asyncio.subprocess.PIPE,
      stdout=asyncio.subprocess.PIPE,
      stderr=asyncio.subprocess.PIPE,
      cwd="/",
      env=env,
      pass_fds=pass_fds,
      start_new_session=True,
    )
  except OSError as error:
    raise SandboxError(f"cannot start {argv[0]!r}: {error.strerror}") from error
  assert process.stdin is not None and process.stdout is not None and process.stderr is not None
  outputs = Output(limits.output_bytes), Output(limits.output_bytes)
  flooded = asyncio.Event()

  async def keep(stream: asyncio.StreamReader, output: Output) -> None:
    while data := await stream.read(1 << 16):
      output.add(data)
      if output.total > limits.output_kill_bytes:
        flooded.set()

  async def feed(stream: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):  # it may end before it has read all
      stream.write(stdin)
      await stream.drain()
    stream.close()

  ended = asyncio.ensure_future(process.wait())
  readers = [
    asyncio.ensure_future(keep(process.stdout, outputs[0])),
    asyncio.ensure_future(keep(process.stderr, outputs[1])),
  ]
  tasks: list[asyncio.Future[Any]] = [*readers, asyncio.ensure_future(feed(process.stdin))]
  reason, detail = "exit", ""
  try:
    flood = asyncio.ensure_future(flooded.wait())
    tasks.append(flood)
    deadline = start + limits.wall_seconds
    while True:
      wait = deadline - time.monotonic()
      if wait <= 0:
        reason, detail = "wall", f"did not end within {limits.wall_seconds:.1f} s"
        break
      wait = min(wait, _TICK) if look else wait
      await asyncio.wait({ended, flood}, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
      if flooded.is_set():
        reason, detail = "output", f"wrote more than {limits.output_kill_bytes} bytes"
        break
      if ended.done():
        break
      if look is not None and (found := look(process.pid)):
        reason, detail = found
        break
  finally:
    await surely(_end(process, ended, end, tasks, readers))
  seconds = time.monotonic() - start
  return Ended(reason, detail, process.returncode, seconds, *outputs)


async def _end(
  process: asyncio.subprocess.Process,
  ended: asyncio.Future[int],
  end: Callable[[int], None] | None,
  tasks: Sequence[asyncio.Future[Any]],
  readers: Sequence[asyncio.Future[Any]],
) -> None:
  """Returns when the process is reaped and what it wrote is read."""
  if not ended.done() and end is not None:
    end(process.pid)
    await asyncio.wait({ended}, timeout=_GRACE_SECONDS)
  if not ended.done():
    with contextlib.suppress(ProcessLookupError):
      process.kill()
    await ended
  await asyncio.wait(readers, timeout=_GRACE_SECONDS)
  for task in tasks:
    task.cancel()
  await asyncio.gather(*tasks, return_exceptions=True)


async def surely(work: Awaitable[None]) -> None:
  """Awaits ``work`` to its end even when the caller is cancelled."""
  task = asyncio.ensure_future(work)
  try:
    await asyncio.shield(task)
  except asyncio.CancelledError:
    await task
    raise
