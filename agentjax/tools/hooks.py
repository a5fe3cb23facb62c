"""Interception of tool calls: one interceptor for each episode.

``ToolRegistry.call`` asks the interceptor of the running episode, if there is one. It is set during
a step of an environment, also in tasks that the step starts. So every environment whose tools are
in a registry is guarded. An environment that runs calls in another way must use ``intercept``.
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
  """Decides about a call: runs it, runs another one, or answers instead."""

  async def __call__(self, call: ToolCall, context: ToolContext, run: Run) -> ToolResult:
    """``run`` executes a call without further interception."""
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
  """``run(call, context)``, through the interceptor if there is one."""
  interceptor = _interceptor.get()
  if interceptor is None:
    return await run(call, context)
  return await interceptor(call, context, run)
