"""The tools of a run: schemas checked once, calls checked, timed and retried in one place."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import referencing
import referencing.exceptions
import referencing.jsonschema

from agentjax.tools.hooks import intercept
from agentjax.tools.protocol import Tool, ToolContext, ToolResult, ToolStatus
from agentjax.trajectory.artifacts import ArtifactStore
from agentjax.trajectory.record import ToolCall

_log = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


class ToolSchemaError(ValueError):
  """A tool whose name or parameters cannot be used; the message names the tool and the place."""


class ToolRegistry:
  """Tools by name, and the one way to call them.

  A call never raises for anything the policy or a tool does: what went wrong is a ToolResult that
  the policy reads (unknown tool, malformed or invalid arguments: ERROR; too slow: TIMEOUT) or that
  masks the trajectory (the tool raised, also on its retry: INFRA_ERROR). Only cancelling the caller
  propagates.

  Args:
    tools: tools with distinct names and valid JSON schemas.
    timeout: seconds that bound every call, besides its context's own.
    retries: further tries after INFRA_ERROR.
    grace: seconds a cancelled tool has to clean up before it is left behind; ours.

  Attributes:
    artifacts: where files that tools make are kept; None drops them.

  Raises:
    ToolSchemaError: a bad or repeated name, or parameters that are no JSON schema of an object.
  """

  def __init__(
    self, tools: Sequence[Tool], *, timeout: float = 60.0, retries: int = 1, grace: float = 1.0
  ):
    self.artifacts: ArtifactStore | None = None
    self._tools: dict[str, Tool] = {}
    self._validators: dict[str, jsonschema.Draft202012Validator] = {}
    self._timeout = timeout
    self._retries = retries
    self._grace = grace
    self._left_behind: set[asyncio.Task[ToolResult]] = set()
    for tool in tools:
      if not _NAME.fullmatch(tool.name):
        raise ToolSchemaError(
          f"tool name {tool.name!r} must be a letter or '_' followed by up to 63 letters, "
          "digits, '_', '-' or '.'"
        )
      if tool.name in self._tools:
        raise ToolSchemaError(f"two tools are named {tool.name!r}; names must be distinct")
      self._validators[tool.name] = _validator(tool)
      self._tools[tool.name] = tool

  @property
  def tools(self) -> tuple[Tool, ...]:
    """In the order given."""
    return tuple(self._tools.values())

  @property
  def schemas(self) -> dict[str, Mapping[str, Any]]:
    """Parameters (JSON schema) by tool name; what a parser of the policy's turns needs."""
    return {name: tool.parameters for name, tool in self._tools.items()}

  def describe(self) -> str:
    """One JSON line a tool: name, description, parameters; for a system prompt."""
    return "\n".join(
      json.dumps(
        {"name": t.name, "description": t.description, "parameters": t.parameters},
        ensure_ascii=False,
      )
      for t in self._tools.values()
    )

  async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
    """Runs one call; ``context.timeout`` seconds bound it, retries included.

    A call that is well formed goes through the episode's guards first (``tools.hooks``).
    """
    if problem := self._problem(call):
      return _error(problem)

    async def run(changed: ToolCall, context: ToolContext) -> ToolResult:
      return await (self._run if changed is call else self.run)(changed, context)

    return await intercept(call, context, run)

  async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
    """As ``call``, without guards."""
    if problem := self._problem(call):
      return _error(problem)
    return await self._run(call, context)

  @property
  def stateful(self) -> frozenset[str]:
    """Names of the tools whose calls depend on the episode's earlier ones."""
    return frozenset(name for name, t in self._tools.items() if getattr(t, "stateful", False))

  async def end_episode(self, episode: str) -> None:
    """Tells the tools that hold something for an episode that it is over; never raises."""
    for tool in self._tools.values():
      ending = getattr(tool, "end_episode", None)
      if ending is not None:
        try:
          await ending(episode)
        except Exception:
          _log.warning("tool %s could not end episode %s", tool.name, episode, exc_info=True)

  async def close(self) -> None:
    """Closes the tools that hold something (a sandbox, a connection): those with a ``close``."""
    for tool in self._tools.values():
      closing = getattr(tool, "close", None)
      if closing is not None:
        outcome = closing()
        if inspect.isawaitable(outcome):
          await outcome

  async def _run(self, call: ToolCall, context: ToolContext) -> ToolResult:
    start = time.monotonic()
    context = dataclasses.replace(context, timeout=min(context.timeout, self._timeout))
    result = await self._tries(call, context)
    return dataclasses.replace(result, seconds=time.monotonic() - start)

  async def _tries(self, call: ToolCall, context: ToolContext) -> ToolResult:
    deadline = time.monotonic() + context.timeout
    for attempt in range(self._retries + 1):
      result = await self._attempt(call, context, deadline)
      if result.status is not ToolStatus.INFRA_ERROR:
        return result
      _log.warning(
        "tool %s failed (try %d of %d): %s",
        call.name,
        attempt + 1,
        self._retries + 1,
        result.output,
      )
    return result

  def _problem(self, call: ToolCall) -> str | None:
    """What keeps a call from being run at all."""
    if call.error is not None:
      return f"the call could not be read: {call.error}"
    if call.name not in self._tools:
      known = ", ".join(self._tools) or "none"
      return f"unknown tool {call.name!r}; tools: {known}"
    try:
      errors = sorted(
        self._validators[call.name].iter_errors(dict(call.arguments)), key=lambda e: e.json_path
      )
    except RecursionError:
      return f"arguments of {call.name} are nested too deeply"
    if not errors:
      return None
    shown = "; ".join(_clip(f"{e.json_path.removeprefix('$.')}: {e.message}") for e in errors[:3])
    return f"invalid arguments of {call.name}: {shown}"

  async def _attempt(self, call: ToolCall, context: ToolContext, deadline: float) -> ToolResult:
    left = deadline - time.monotonic()
    if left <= 0:
      return _timeout(call, context)
    tool = self._tools[call.name]
    task = asyncio.ensure_future(_invoke(tool, call, dataclasses.replace(context, timeout=left)))
    try:
      # Not wait_for: it would wait for ever on a tool that swallows its cancellation.
      done, _ = await asyncio.wait({task}, timeout=left)
    except asyncio.CancelledError:
      await self._abandon(task, call.name)
      raise
    if not done:
      await self._abandon(task, call.name)
      return _timeout(call, context)
    if task.cancelled():
      return ToolResult(ToolStatus.INFRA_ERROR, f"tool {call.name} cancelled itself")
    if error := task.exception():
      _log.warning("tool %s raised", call.name, exc_info=error)
      return ToolResult(
        ToolStatus.INFRA_ERROR, _clip(f"tool {call.name} raised {type(error).__name__}: {error}")
      )
    result = task.result()
    if not isinstance(result, ToolResult):
      return ToolResult(
        ToolStatus.INFRA_ERROR,
        f"tool {call.name} returned {type(result).__name__} instead of a ToolResult",
      )
    return result

  async def _abandon(self, task: asyncio.Task[ToolResult], name: str) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=self._grace)
    if task.done():
      if not task.cancelled():
        task.exception()  # read, so that asyncio does not report it as lost
      return
    _log.warning("tool %s ignored its cancellation for %g s and is left behind", name, self._grace)
    self._left_behind.add(task)
    task.add_done_callback(self._left_behind.discard)


async def _invoke(tool: Tool, call: ToolCall, context: ToolContext) -> ToolResult:
  return await tool(dict(call.arguments), context)


def _validator(tool: Tool) -> jsonschema.Draft202012Validator:
  where = f"parameters of tool {tool.name!r}"
  schema = tool.parameters
  if not isinstance(schema, Mapping) or schema.get("type") != "object":
    raise ToolSchemaError(
      f'{where} must be a JSON schema with "type": "object", got {_clip(repr(schema))}'
    )
  try:
    json.dumps(schema)
    jsonschema.Draft202012Validator.check_schema(schema)
  except jsonschema.SchemaError as error:
    raise ToolSchemaError(
      f"{where} are not a valid JSON schema at {error.json_path}: {_clip(error.message)}"
    ) from error
  except (TypeError, ValueError) as error:
    raise ToolSchemaError(f"{where} cannot be written as JSON: {error}") from error
  # An empty registry: references inside the schema resolve, nothing is ever fetched.
  registry: referencing.Registry[Any] = referencing.Registry()
  resolver = registry.resolver_with_root(
    referencing.Resource.from_contents(schema, referencing.jsonschema.DRAFT202012)
  )
  for reference in _references(schema):
    try:
      resolver.lookup(reference)
    except referencing.exceptions.Unresolvable as error:
      raise ToolSchemaError(
        f"{where} refer to {reference!r}, which is not inside the schema"
      ) from error
  return jsonschema.Draft202012Validator(schema, registry=registry)


def _references(schema: Any) -> list[str]:
  if isinstance(schema, Mapping):
    own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
    return own + [r for value in schema.values() for r in _references(value)]
  if isinstance(schema, list | tuple):
    return [r for value in schema for r in _references(value)]
  return []


def _error(message: str) -> ToolResult:
  return ToolResult(ToolStatus.ERROR, f"error: {message}")


def _timeout(call: ToolCall, context: ToolContext) -> ToolResult:
  return ToolResult(
    ToolStatus.TIMEOUT, f"error: {call.name} did not finish within {context.timeout:g} s"
  )


def _clip(text: str, limit: int = 300) -> str:
  return text if len(text) <= limit else text[: limit - 3] + "..."
