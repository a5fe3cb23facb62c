"""Python as a tool: a fresh interpreter for every call, or one per episode."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from agentjax.config import AtLeastTwo, PositiveFloat, PositiveInt
from agentjax.sandbox.config import DEFAULT
from agentjax.sandbox.interface import (
  Box,
  PythonCell,
  RunStatus,
  Sandbox,
  SandboxError,
  SandboxLimits,
  Session,
  is_healthy,
  run_once,
)
from agentjax.tools.config import ToolConfig, Workbench
from agentjax.tools.output import as_tool_result
from agentjax.tools.protocol import Tool, ToolContext, ToolResult

_PARAMETERS: Mapping[str, Any] = {
  "type": "object",
  "properties": {"code": {"type": "string", "description": "Python source code"}},
  "required": ["code"],
  "additionalProperties": False,
}


@dataclasses.dataclass(unsafe_hash=True)
class PythonToolConfig(ToolConfig):
  """Settings of the Python tool; the figures are ours.

  Attributes:
    sandbox: name of the sandbox where the code runs, in ``config.sandboxes``.
    max_characters: characters of output the policy sees, half from the head and half from the tail.
    stateful: keep one interpreter an episode, as a notebook does; else each call starts afresh.
    max_sessions: interpreters kept at once where stateful; give at least as many as episodes run at
      once. Each may hold the ``limits.memory_bytes`` of the sandbox, and ``disk_bytes`` of files in
      memory.
    idle_seconds: an interpreter unused for this long may be closed.
  """

  sandbox: str = DEFAULT
  max_characters: AtLeastTwo = 2000
  stateful: bool = False
  max_sessions: PositiveInt = 64
  idle_seconds: PositiveFloat = 600.0

  def call_seconds(self, bench: Workbench) -> tuple[float, float]:
    settings = bench.sandboxes.settings(self.sandbox, "config.tools.settings.python.sandbox")
    return settings.limits.wall_seconds, settings.overhead_seconds

  def build(self, bench: Workbench) -> Tool:
    settings = bench.sandboxes.settings(self.sandbox, "config.tools.settings.python.sandbox")
    if not self.stateful:
      return PythonTool(settings.build(), settings.limits, self.max_characters)
    return PythonSessionTool(
      settings.build(),
      settings.limits,
      self.max_characters,
      max_sessions=self.max_sessions,
      idle_seconds=self.idle_seconds,
    )


class PythonTool:
  """Runs a cell of Python: the policy sees what it prints, the value of a final expression, errors.

  Nothing is kept from call to call. ``random`` is seeded by the call's context, and string hashes
  are fixed, so the same call of the same episode prints the same.

  Args:
    sandbox: any back end; this tool owns it and closes it.
    limits: bounds of one run; its wall clock is cut to 0.9 of the call's time-out, so that what was
      printed until then still reaches the policy.
    max_characters: see PythonToolConfig.
  """

  name = "python"
  description = (
    "Runs Python code and returns what it prints, and the value of a final expression. "
    "Every call starts afresh; there is no network."
  )
  parameters = _PARAMETERS

  def __init__(self, sandbox: Sandbox, limits: SandboxLimits, max_characters: int = 2000):
    self._sandbox = sandbox
    self._limits = limits
    self._max_characters = max_characters

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    limits = dataclasses.replace(
      self._limits, wall_seconds=min(self._limits.wall_seconds, 0.9 * context.timeout)
    )
    program = PythonCell(arguments["code"], seed=context.seed)
    result = await run_once(self._sandbox, program, limits=limits)
    return as_tool_result(result, self._max_characters)

  async def is_healthy(self) -> bool:
    return await is_healthy(self._sandbox)

  async def close(self) -> None:
    await self._sandbox.close()


class PythonSessionTool:
  """Runs the cells of an episode in one interpreter, which keeps names, imports and files.

  If a cell ends its interpreter (by time, memory or a crash), the next call gets a new one, and the
  policy is told. The same calls with the same seeds print the same, so an episode can be repeated
  by making its calls again.

  Args:
    sandbox: a back end with sessions; this tool owns it and closes it.
    limits: see PythonTool; memory and files are counted over the whole episode.
    max_characters: see PythonToolConfig.
    max_sessions: if there are more, those longest unused are closed, but never one that is at work.
    idle_seconds: those unused for longer are closed at the next call of any episode.

  Raises:
    SandboxError: the back end has no sessions.
  """

  name = "python"
  description = (
    "Runs Python code as a cell of a notebook: names, imports and files stay from call to call. "
    "Returns what it prints, and the value of a final expression; there is no network."
  )
  parameters = _PARAMETERS
  stateful = True

  def __init__(
    self,
    sandbox: Sandbox,
    limits: SandboxLimits,
    max_characters: int = 2000,
    *,
    max_sessions: int = 64,
    idle_seconds: float = 600.0,
  ):
    if not sandbox.capabilities.sessions:
      raise SandboxError(
        f"{type(sandbox).__name__} keeps no interpreters between calls; use PythonTool "
        "(stateful=False), or a back end whose capabilities name sessions"
      )
    self._sandbox = sandbox
    self._limits = limits
    self._max_characters = max_characters
    self._max_sessions = max_sessions
    self._idle_seconds = idle_seconds
    self._episodes: collections.OrderedDict[str, _Episode] = collections.OrderedDict()

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    deadline = time.monotonic() + 0.9 * context.timeout
    episode = self._episodes.setdefault(context.episode, _Episode())
    self._episodes.move_to_end(context.episode)
    episode.calls += 1
    try:
      await self._make_room(new=episode.box is None)
      async with episode.lock:  # calls made at the same time are cells one after another
        session = await episode.open(self._sandbox, self._limits)
        left = max(deadline - time.monotonic(), 0.01)
        result = await session.run(
          arguments["code"],
          seed=context.seed,
          wall_seconds=min(self._limits.wall_seconds, left),
        )
        lost, episode.lost = episode.lost, False
    finally:
      episode.calls -= 1
      episode.used = time.monotonic()
    shown = as_tool_result(result, self._max_characters)
    if result.status is RunStatus.INFRA_ERROR:
      return shown
    notes = []
    if lost:
      notes.append(
        "[this is a new interpreter: names, imports and files of earlier calls are gone]"
      )
    elif result.restarted:
      notes.append("[this is a new interpreter: names and imports of earlier calls are gone]")
    notes.append(shown.output)
    if not session.alive:
      notes.append("[the interpreter ended; the next call starts a new one]")
    return dataclasses.replace(shown, output="\n".join(notes))

  async def end_episode(self, episode: str) -> None:
    ended = self._episodes.pop(episode, None)
    if ended is not None:
      await ended.close()

  async def is_healthy(self) -> bool:
    return await is_healthy(self._sandbox)

  async def close(self) -> None:
    while self._episodes:
      await self._episodes.popitem()[1].close()
    await self._sandbox.close()

  async def _make_room(self, *, new: bool) -> None:
    """Closes unused sessions: those beyond the bound, and those unused for long."""
    opened = [e for e in self._episodes.values() if e.box is not None]  # longest unused first
    excess = len(opened) + new - self._max_sessions
    now = time.monotonic()
    for episode in opened:
      if not episode.calls and (excess > 0 or now - episode.used > self._idle_seconds):
        excess -= 1
        episode.lost = True
        await episode.close()


class _Episode:
  """The state of an episode: a box and its session while open, and messages for the policy."""

  def __init__(self) -> None:
    self.lock = asyncio.Lock()
    self.box: Box | None = None
    self.lost = False  # a session was closed to make room
    self.calls = 0
    self.used = time.monotonic()
    self._session: Session | None = None

  async def open(self, sandbox: Sandbox, limits: SandboxLimits) -> Session:
    if self._session is None:
      self.box = await sandbox.create()
      self._session = await self.box.session(limits=limits)
    return self._session

  async def close(self) -> None:
    box, self.box, self._session = self.box, None, None
    if box is not None:
      await box.close()
