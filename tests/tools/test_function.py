"""Functions as tools: the schema from annotations, threads, errors."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, Literal

import pytest

from agentjax.tools import (
  ToolContext,
  ToolError,
  ToolRegistry,
  ToolResult,
  ToolStatus,
  function_tool,
)
from agentjax.trajectory.record import ToolCall


def call(tool: Any, arguments: dict[str, Any], timeout: float = 5.0, **settings: Any) -> ToolResult:
  registry = ToolRegistry([tool], **settings)
  return asyncio.run(registry.call(ToolCall(tool.name, arguments), ToolContext("e", 7, timeout)))


@function_tool
def area(width: float, height: float = 1.0, unit: Literal["m", "km"] = "m") -> str:
  """Area of a rectangle.

  Works for squares too.

  Args:
    width: one side,
      in the unit.
    unit (str): what the sides are measured in.

  Returns:
    text: the area.
  """
  return f"{width * height:g} {unit}2"


def test_schema_comes_from_annotations_defaults_and_docstring() -> None:
  assert area.name == "area"
  assert area.description == "Area of a rectangle.\n\nWorks for squares too."
  assert area.parameters == {
    "type": "object",
    "properties": {
      "width": {"type": "number", "description": "one side, in the unit."},
      "height": {"type": "number"},
      "unit": {"enum": ["m", "km"], "description": "what the sides are measured in."},
    },
    "required": ["width"],
    "additionalProperties": False,
  }
  assert call(area, {"width": 3, "unit": "km"}).output == "3 km2"
  assert call(area, {"width": 3, "unit": "mile"}).status is ToolStatus.ERROR


def test_nested_types_and_json_results() -> None:
  @function_tool
  async def table(rows: list[dict[str, int]], limit: int | None = None, extra: Any = 0) -> Any:
    return {"n": len(rows), "limit": limit, "type": type(limit).__name__, "é": extra}

  items = table.parameters["properties"]["rows"]["items"]
  assert items == {"type": "object", "additionalProperties": {"type": "integer"}}
  assert call(table, {"rows": [{"a": 1}]}).output == (
    '{"n": 1, "limit": null, "type": "NoneType", "é": 0}'
  )
  assert call(table, {"rows": [{"a": "x"}]}).status is ToolStatus.ERROR


def test_integral_numbers_arrive_as_annotated() -> None:
  @function_tool
  def kinds(a: int, b: float, c: bool) -> str:
    return f"{type(a).__name__} {type(b).__name__} {type(c).__name__}"

  assert call(kinds, {"a": 2.0, "b": 3, "c": True}).output == "int float bool"


def test_context_is_passed_and_hidden_from_the_schema() -> None:
  @function_tool
  def who(context: ToolContext) -> str:
    return f"{context.episode} {context.seed}"

  assert who.parameters["properties"] == {}
  assert call(who, {}).output == "e 7"


def test_errors_of_data_are_observations_and_other_exceptions_are_faults() -> None:
  @function_tool
  def picky(n: int) -> str:
    if n < 0:
      raise ToolError("n must not be negative")
    if n == 0:
      raise KeyError("n")
    raise ConnectionError("database")

  wrong = call(picky, {"n": -1})
  assert (wrong.status, wrong.output) == (ToolStatus.ERROR, "error: n must not be negative")
  odd = call(picky, {"n": 0})
  assert odd.status is ToolStatus.ERROR and "KeyError" in odd.output
  assert call(picky, {"n": 1}).status is ToolStatus.INFRA_ERROR


def test_tool_result_passes_unchanged() -> None:
  @function_tool
  def limited() -> ToolResult:
    return ToolResult(ToolStatus.OUTPUT_LIMIT, "cut")

  result = call(limited, {})
  assert (result.status, result.output) == (ToolStatus.OUTPUT_LIMIT, "cut")


def test_blocking_functions_run_side_by_side_in_threads() -> None:
  @function_tool
  def blocking() -> str:
    time.sleep(0.2)
    return "done"

  async def body() -> float:
    registry = ToolRegistry([blocking])
    start = time.monotonic()
    request, context = ToolCall("blocking", {}), ToolContext("e", 0, 30.0)
    results = await asyncio.gather(*(registry.call(request, context) for _ in range(40)))
    assert {r.output for r in results} == {"done"}
    return time.monotonic() - start

  assert asyncio.run(body()) < 4.0


def test_blocking_function_that_never_returns_times_out_and_starves_nobody() -> None:
  release = threading.Event()

  @function_tool
  def hanging(forever: bool) -> str:
    if forever:
      release.wait()
    return "returned"

  async def body() -> None:
    registry = ToolRegistry([hanging], retries=0)

    async def ask(forever: bool, timeout: float, episode: str = "e") -> ToolStatus:
      request = ToolCall("hanging", {"forever": forever})
      return (await registry.call(request, ToolContext(episode, 0, timeout))).status

    hung = await asyncio.gather(*(ask(True, 0.1) for _ in range(63)))
    assert set(hung) == {ToolStatus.TIMEOUT}
    assert await ask(False, 10.0) is ToolStatus.OK
    assert await ask(True, 0.1) is ToolStatus.TIMEOUT
    # 64 threads are lost: stop. Whoever lost them is not excused.
    assert await ask(False, 10.0, "other") is ToolStatus.INFRA_ERROR
    assert await ask(False, 10.0) is ToolStatus.ERROR
    release.set()
    await asyncio.sleep(0.2)
    assert await ask(False, 10.0) is ToolStatus.OK

  asyncio.run(body())


@pytest.mark.parametrize(
  ("source", "message"),
  [
    ("def f(x): pass", "no annotation"),
    ("def f(*x: int): pass", "by keyword"),
    ("def f(x: int, /): pass", "by keyword"),
    ("def f(x: complex): pass", "complex"),
    ("def f(x: dict[int, str]): pass", "supported"),
  ],
)
def test_functions_without_a_schema_are_refused(source: str, message: str) -> None:
  scope: dict[str, Any] = {}
  exec(source, scope)
  with pytest.raises(TypeError, match=message):
    function_tool(scope["f"])
