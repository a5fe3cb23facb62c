"""Who may stand between a policy and its tools: one interceptor for each episode.

``ToolRegistry.call`` asks the interceptor of the running episode, if there is one. It is set for
all that an environment does in a step, tasks it starts included, so that every environment whose
tools stand in a registry is guarded without knowing of it. One that runs calls by other means does
so through ``intercept``.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from agentjax.tools.protocol import ToolContext, ToolResult
from agentjax.trajectory.record import ToolCall

Run = Callable[[ToolCall, ToolContext], Awaitable[ToolResult]]


class Interceptor(Protocol):
  """Decides what becomes of a call: runs it, runs another one, or answers in its place."""

  async def __call__(self, call: ToolCall, context: ToolContext, run: Run) -> ToolResult:
    """``run`` executes a call without being asked again."""
    ...


_interceptor: contextvars.ContextVar[Interceptor | None] = contextvars.ContextVar(
  "interceptor", default=None
)


@contextlib.contextmanager
def intercepted_by(interceptor: Interceptor) -> Iterator[None]:
  """Within it, and in tasks and threads started within it, calls of tools ask ``interceptor``."""
  token = _interceptor.set(interceptor)
  try:
    yield
  finally:
    _interceptor.reset(token)


async def intercept(call: ToolCall, context: ToolContext, run: Run) -> ToolResult:
  """``run(call, context)``, by way of the interceptor where there is one."""
  interceptor = _interceptor.get()
  if interceptor is None:
    return await run(call, context)
  return await interceptor(call, context, run)
