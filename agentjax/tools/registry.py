"""The tools of a run: schemas checked once, calls checked, timed and retried in one place."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import inspect
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jsonschema
import referencing
import referencing.exceptions
import referencing.jsonschema

from agentjax.faults import Boundary, Fault, Owner, describe, fault_of
from agentjax.places import Clock, TooSlow, run_within
from agentjax.tools.hooks import intercept
from agentjax.tools.protocol import Tool, ToolContext, ToolResult, ToolStatus
from agentjax.trajectory.artifacts import ArtifactStore
from agentjax.trajectory.record import ToolCall

_log = logging.getLogger(__name__)
_NO_SUCH_FILE = frozenset(
  (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


class ToolSchemaError(ValueError):
  """A tool whose name or parameters cannot be used; the message names the tool and the place."""


class ToolRegistry:
  """Tools by name, and the one way to call them.

  A call never raises for anything that the policy or a tool does. Errors become a ToolResult. The
  policy reads it if the fault is the policy's: ERROR (unknown tool, bad arguments and their
  effects, a file that they name and that is missing), TIMEOUT (too slow), KILLED (it broke its own
  box). INFRA_ERROR, a fault of ours also on its retry, masks the trajectory. ``faults.fault_of``
  and the tool's ``is_healthy`` decide. Only cancelling the caller propagates.

  Args:
    tools: tools with distinct names and valid JSON schemas.
    timeout: seconds that bound every call, besides its context's own; waiting for places that other
      episodes hold is not counted.
    retries: further tries after INFRA_ERROR.
    calls_per_turn: calls of one turn that an environment runs at most.
    grace: seconds that a cancelled tool has to clean up before it is abandoned; ours.

  Attributes:
    artifacts: store of files that tools make; None drops them.

  Raises:
    ToolSchemaError: a bad or repeated name, or parameters that are no JSON schema of an object.
  """

  def __init__(
    self,
    tools: Sequence[Tool],
    *,
    timeout: float = 60.0,
    retries: int = 1,
    calls_per_turn: int = 16,
    grace: float = 1.0,
  ):
    self.artifacts: ArtifactStore | None = None
    self.calls_per_turn = calls_per_turn
    self._tools: dict[str, Tool] = {}
    self._validators: dict[str, jsonschema.Draft202012Validator] = {}
    self._timeout = timeout
    self._retries = retries
    self._grace = grace
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
    """Parameters (JSON schema) by tool name, for parsers of the policy's turns."""
    return {name: tool.parameters for name, tool in self._tools.items()}

  async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
    """Runs one call; ``context.timeout`` seconds bound it, retries included.

    A well-formed call passes the episode's guards first (``tools.hooks``).
    """
    if problem := self._problem(call):
      return _as_text(_error(problem))

    async def run(changed: ToolCall, context: ToolContext) -> ToolResult:
      return await (self._run if changed is call else self.run)(changed, context)

    return _as_text(await intercept(call, context, run))

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
    """Tells tools with resources for an episode that it is over; never raises."""
    for tool in self._tools.values():
      ending = getattr(tool, "end_episode", None)
      if ending is not None:
        try:
          await ending(episode)
        except Exception:
          _log.warning("tool %s could not end episode %s", tool.name, episode, exc_info=True)

  async def close(self) -> None:
    """Closes the tools that have a ``close``."""
    for tool in self._tools.values():
      closing = getattr(tool, "close", None)
      if closing is not None:
        outcome = closing()
        if inspect.isawaitable(outcome):
          await outcome

  async def _run(self, call: ToolCall, context: ToolContext) -> ToolResult:
    context = dataclasses.replace(context, timeout=min(context.timeout, self._timeout))
    with Clock() as clock:
      result = await self._tries(call, context, clock)
    return dataclasses.replace(result, seconds=clock.elapsed)

  async def _tries(self, call: ToolCall, context: ToolContext, clock: Clock) -> ToolResult:
    for attempt in range(self._retries + 1):
      result = await self._attempt(call, context, clock)
      if result.status is not ToolStatus.INFRA_ERROR:
        return result
      _log.warning(
        "tool %s failed (try %d of %d): %s",
        call.name,
        attempt + 1,
        self._retries + 1,
        result.output,
      )
    if result.fault is not None and result.fault.cause == "queue":
      return result  # it never ran
    if await self._is_healthy(call.name):
      return ToolResult(
        ToolStatus.KILLED, "error: the call broke what it ran in, which works for others"
      )
    return result

  async def _is_healthy(self, name: str) -> bool:
    probe = getattr(self._tools[name], "is_healthy", None)
    if probe is None:
      return False
    try:
      return await asyncio.wait_for(probe(), self._timeout)
    except Exception as error:
      _log.warning("tool %s cannot be probed: %s", name, describe(error))
      return False

  def _problem(self, call: ToolCall) -> str | None:
    """Why a call cannot be run; None if it can."""
    if call.error is not None:
      return f"the call could not be read: {call.error}"
    if call.name not in self._tools:
      known = ", ".join(self._tools) or "none"
      return f"unknown tool {call.name!r}; tools: {known}"
    try:
      errors = sorted(
        self._validators[call.name].iter_errors(dict(call.arguments)), key=lambda e: e.json_path
      )
      if not errors:
        return None
      shown = "; ".join(_clip(f"{e.json_path.removeprefix('$.')}: {e.message}") for e in errors[:3])
      return f"invalid arguments of {call.name}: {shown}"
    except Exception as error:
      if fault_of(error, Boundary.TOOL).masks:
        raise
      return f"arguments of {call.name} cannot be checked: {describe(error)}"

  async def _attempt(self, call: ToolCall, context: ToolContext, clock: Clock) -> ToolResult:
    left = context.timeout - clock.elapsed
    if left <= 0:
      return _timeout(call, context)
    tool = self._tools[call.name]
    within = dataclasses.replace(context, timeout=left)
    try:
      result = await run_within(
        lambda: tool(dict(call.arguments), within),
        context.timeout,
        clock,
        grace=self._grace,
        name=f"tool {call.name}",
      )
    except TooSlow:
      return _timeout(call, context)
    except asyncio.CancelledError:
      raise
    except BaseException as error:
      _log.warning("tool %s raised", call.name, exc_info=error)
      fault = fault_of(error, Boundary.TOOL)
      if _names_no_file(call.arguments, error):
        fault = Fault(Owner.POLICY, "files", fault.detail)
      if not fault.masks:
        return _error(f"{call.name} cannot do this: {fault.detail}")
      return _failed(f"tool {call.name} raised {fault.detail}", fault)
    if not isinstance(result, ToolResult):
      return _failed(f"tool {call.name} returned {type(result).__name__} instead of a ToolResult")
    return result


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


def _names_no_file(arguments: Any, error: BaseException) -> bool:
  """Whether the error is about a file that a text of the arguments names, and that cannot be."""
  if not isinstance(error, OSError) or error.errno not in _NO_SUCH_FILE:
    return False
  if isinstance(arguments, str):
    return bool(arguments) and arguments in str(error.filename)
  values = arguments.values() if isinstance(arguments, Mapping) else arguments
  return isinstance(values, Iterable) and any(_names_no_file(v, error) for v in values)


def _error(message: str) -> ToolResult:
  return ToolResult(ToolStatus.ERROR, f"error: {message}")


def _failed(message: str, fault: Fault | None = None) -> ToolResult:
  message = _clip(message)
  return ToolResult(
    ToolStatus.INFRA_ERROR,
    message,
    fault=fault or Fault(Owner.INFRASTRUCTURE, "tool", message),
  )


def _as_text(result: ToolResult) -> ToolResult:
  """The result, whose output can be written in any encoding of Unicode."""
  output = result.output.encode("utf-8", "backslashreplace").decode()
  return result if output == result.output else dataclasses.replace(result, output=output)


def _timeout(call: ToolCall, context: ToolContext) -> ToolResult:
  return ToolResult(
    ToolStatus.TIMEOUT, f"error: {call.name} did not finish within {context.timeout:g} s"
  )


def _clip(text: str, limit: int = 300) -> str:
  return text if len(text) <= limit else text[: limit - 3] + "..."
