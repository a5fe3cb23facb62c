"""The registry: whatever a policy or a tool does comes back as a typed result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import pytest

from agentjax.tools import ToolContext, ToolRegistry, ToolResult, ToolSchemaError, ToolStatus
from agentjax.trajectory.record import ToolCall

SCHEMA = {
  "type": "object",
  "properties": {"n": {"type": "integer", "minimum": 0}, "unit": {"enum": ["m", "km"]}},
  "required": ["n"],
  "additionalProperties": False,
}


class Scripted:
  """A tool that does what its body does, and counts its calls."""

  description = "A tool of the tests."

  def __init__(self, body: Any = None, name: str = "scripted", parameters: Any = None):
    self.name = name
    self.parameters: Mapping[str, Any] = SCHEMA if parameters is None else parameters
    self._body = body
    self.calls: list[Mapping[str, Any]] = []
    self.cancelled = False
    self.closed = 0

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    self.calls.append(arguments)
    try:
      if self._body is not None:
        return await self._body(len(self.calls))
    except asyncio.CancelledError:
      self.cancelled = True
      raise
    return ToolResult(ToolStatus.OK, f"n={arguments['n']}")

  async def close(self) -> None:
    self.closed += 1


def call(
  tool: Any,
  arguments: Any = None,
  *,
  name: str = "scripted",
  timeout: float = 5.0,
  **settings: Any,
) -> ToolResult:
  registry = ToolRegistry([tool], **settings)
  request = ToolCall(name, {"n": 1} if arguments is None else arguments)
  return asyncio.run(registry.call(request, ToolContext("e", 0, timeout)))


def test_valid_call_reaches_the_tool_and_is_timed() -> None:
  async def slow(_: int) -> ToolResult:
    await asyncio.sleep(0.05)
    return ToolResult(ToolStatus.OK, "done")

  result = call(Scripted(slow))
  assert (result.status, result.output) == (ToolStatus.OK, "done")
  assert 0.05 <= result.seconds < 2.0


def test_unknown_tool_is_an_observation_that_lists_the_tools() -> None:
  tool = Scripted()
  result = call(tool, name="search")
  assert result.status is ToolStatus.ERROR
  assert "'search'" in result.output
  assert "scripted" in result.output
  assert tool.calls == []


def test_malformed_call_is_an_observation_with_the_parsers_words() -> None:
  request = ToolCall("scripted", {}, error="not JSON: line 1")
  registry = ToolRegistry([Scripted()])
  result = asyncio.run(registry.call(request, ToolContext("e", 0, 1.0)))
  assert result.status is ToolStatus.ERROR
  assert "not JSON: line 1" in result.output


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ({}, ["'n'", "required"]),
    ({"n": "three"}, ["n", "integer"]),
    ({"n": True}, ["n", "integer"]),
    ({"n": -1}, ["n", "minimum"]),
    ({"n": 1, "unit": "mile"}, ["unit", "'m'"]),
    ({"n": 1, "extra": 0}, ["extra"]),
    ({"n": "x" * 10_000}, ["n", "..."]),
  ],
)
def test_arguments_against_the_schema_are_an_observation_that_names_them(
  arguments: dict[str, Any], words: list[str]
) -> None:
  tool = Scripted()
  result = call(tool, arguments)
  assert result.status is ToolStatus.ERROR
  assert all(word in result.output for word in words), result.output
  assert len(result.output) < 1200
  assert tool.calls == []


@pytest.mark.parametrize(
  ("parameters", "words"),
  [
    ({"type": "objekt"}, ["object"]),
    ([], ["object"]),
    ({"type": "object", "properties": {"n": {"type": "int"}}}, ["$.properties.n", "'int'"]),
    ({"type": "object", "required": "n"}, ["required"]),
    ({"type": "object", "properties": {"n": {"$ref": "#/$defs/missing"}}}, ["missing"]),
    ({"type": "object", "properties": {"n": {"$ref": "http://localhost/x"}}}, ["localhost"]),
    ({"type": "object", "properties": {"n": {"default": {1, 2}}}}, ["JSON"]),
  ],
)
def test_schema_that_is_none_is_refused_when_the_registry_is_made(
  parameters: Any, words: list[str]
) -> None:
  with pytest.raises(ToolSchemaError) as caught:
    ToolRegistry([Scripted(parameters=parameters)])
  assert all(word in str(caught.value) for word in ["scripted", *words]), caught.value


@pytest.mark.parametrize("name", ["", "1st", "a b", "x" * 65, "<|call|>"])
def test_unusable_and_repeated_names_are_refused(name: str) -> None:
  with pytest.raises(ToolSchemaError, match="name"):
    ToolRegistry([Scripted(name=name)])
  with pytest.raises(ToolSchemaError, match="distinct"):
    ToolRegistry([Scripted(), Scripted()])


def test_references_inside_a_schema_are_followed() -> None:
  schema = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/count"}},
    "$defs": {"count": {"type": "integer"}},
  }
  assert call(Scripted(parameters=schema)).status is ToolStatus.OK
  assert call(Scripted(parameters=schema), {"n": "x"}).status is ToolStatus.ERROR


def test_tool_that_raises_is_tried_once_more_and_then_masked() -> None:
  async def broken(_: int) -> ToolResult:
    raise OSError("disk on fire")

  async def shaky(attempt: int) -> ToolResult:
    if attempt == 1:
      raise ConnectionError
    return ToolResult(ToolStatus.OK, "second try")

  tool = Scripted(broken)
  result = call(tool)
  assert result.status is ToolStatus.INFRA_ERROR
  assert "OSError: disk on fire" in result.output
  assert len(tool.calls) == 2
  assert call(Scripted(shaky)).output == "second try"
  once = Scripted(broken)
  call(once, retries=0)
  assert len(once.calls) == 1


def test_only_infrastructure_errors_are_tried_again() -> None:
  async def wrong(_: int) -> ToolResult:
    return ToolResult(ToolStatus.ERROR, "no such city")

  tool = Scripted(wrong)
  assert call(tool).status is ToolStatus.ERROR
  assert len(tool.calls) == 1


def test_tool_that_returns_something_else_is_a_fault_of_the_system() -> None:
  async def careless(_: int) -> Any:
    return "just text"

  result = call(Scripted(careless))
  assert result.status is ToolStatus.INFRA_ERROR
  assert "str instead of a ToolResult" in result.output


def test_tool_that_never_returns_is_cancelled_at_its_timeout() -> None:
  async def hanging(_: int) -> ToolResult:
    await asyncio.Event().wait()
    raise AssertionError

  tool = Scripted(hanging)
  start = time.monotonic()
  result = call(tool, timeout=0.2)
  assert result.status is ToolStatus.TIMEOUT
  assert "0.2 s" in result.output
  assert time.monotonic() - start < 2.0
  assert tool.cancelled
  assert len(tool.calls) == 1


def test_registrys_own_timeout_bounds_a_longer_one_of_the_call() -> None:
  async def hanging(_: int) -> ToolResult:
    await asyncio.Event().wait()
    raise AssertionError

  registry = ToolRegistry([Scripted(hanging)], timeout=0.1)
  result = asyncio.run(registry.call(ToolCall("scripted", {"n": 1}), ToolContext("e", 0, 60.0)))
  assert result.status is ToolStatus.TIMEOUT


def test_tool_that_swallows_its_cancellation_is_left_behind() -> None:
  release: list[asyncio.Event] = []

  async def stubborn(_: int) -> ToolResult:
    release.append(asyncio.Event())
    while not release[0].is_set():
      try:
        await release[0].wait()
      except asyncio.CancelledError:
        continue
    return ToolResult(ToolStatus.OK, "too late")

  async def body() -> ToolResult:
    registry = ToolRegistry([Scripted(stubborn)], grace=0.1)
    result = await registry.call(ToolCall("scripted", {"n": 1}), ToolContext("e", 0, 0.1))
    release[0].set()
    await asyncio.sleep(0.01)
    return result

  start = time.monotonic()
  assert asyncio.run(body()).status is ToolStatus.TIMEOUT
  assert time.monotonic() - start < 2.0


def test_cancelling_the_caller_cancels_the_tool() -> None:
  async def hanging(_: int) -> ToolResult:
    await asyncio.Event().wait()
    raise AssertionError

  tool = Scripted(hanging)

  async def body() -> None:
    registry = ToolRegistry([tool])
    task = asyncio.create_task(
      registry.call(ToolCall("scripted", {"n": 1}), ToolContext("e", 0, 60.0))
    )
    while not tool.calls:
      await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task

  asyncio.run(body())
  assert tool.cancelled
  assert len(tool.calls) == 1


def test_tools_run_side_by_side() -> None:
  async def slow(_: int) -> ToolResult:
    await asyncio.sleep(0.2)
    return ToolResult(ToolStatus.OK, "")

  async def body() -> float:
    registry = ToolRegistry([Scripted(slow)])
    start = time.monotonic()
    request, context = ToolCall("scripted", {"n": 1}), ToolContext("e", 0, 60.0)
    await asyncio.gather(*(registry.call(request, context) for _ in range(20)))
    return time.monotonic() - start

  assert asyncio.run(body()) < 2.0


def test_tools_come_in_the_order_given() -> None:
  registry = ToolRegistry([Scripted(), Scripted(name="other")])
  assert registry.schemas == {"scripted": SCHEMA, "other": SCHEMA}
  assert [tool.name for tool in registry.tools] == ["scripted", "other"]


def test_close_closes_the_tools_that_can_be_closed() -> None:
  tool = Scripted()
  asyncio.run(ToolRegistry([tool]).close())
  assert tool.closed == 1
