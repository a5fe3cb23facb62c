"""Turns a typed Python function into a tool: the schema comes from its annotations."""

from __future__ import annotations

import asyncio
import collections
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from agentjax.threads import call_in_thread
from agentjax.tools.protocol import ToolContext, ToolResult, ToolStatus

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
_MAX_ABANDONED = 64  # threads of one tool whose calls timed out and still run; ours


class ToolError(Exception):
  """Raised inside a function tool for an error of the policy, which sees its text.

  Any other exception counts as a fault of the system, which is retried and then masked.
  """


def function_tool(function: Callable[..., Any]) -> FunctionTool:
  """Makes a tool of a function, sync or async; usable as a decorator.

  The name is the function's, the description its docstring up to ``Args:``, and the JSON schema
  comes from the annotations: str, int, float, bool, list[T], dict[str, T], Literal, T | None, Any.
  A parameter annotated ``ToolContext`` receives the call's context and is no part of the schema. A
  result that is neither str nor ToolResult is written as JSON.

  A sync function runs in its own thread, so it may block. Python cannot stop a thread: each call of
  a sync function that never returns occupies a thread.

  Raises:
    TypeError: a parameter without annotation, of an unsupported type, positional-only or starred.
  """
  return FunctionTool(function)


class FunctionTool:
  """The result of ``function_tool``; satisfies the Tool protocol."""

  def __init__(self, function: Callable[..., Any]):
    self.name = function.__name__
    documentation = inspect.getdoc(function) or ""
    self.description = documentation.split("\nArgs:")[0].strip()
    self._function = self.__wrapped__ = function
    self._context_parameter: str | None = None
    self._abandoned: collections.Counter[str] = collections.Counter()  # by episode
    self._hints = typing.get_type_hints(function)
    self.parameters: Mapping[str, Any] = self._schema(_argument_descriptions(documentation))

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    keywords = {k: _as_annotated(v, self._hints[k]) for k, v in arguments.items()}
    if self._context_parameter is not None:
      keywords[self._context_parameter] = context
    try:
      if inspect.iscoroutinefunction(self._function):
        result = await self._function(**keywords)
      else:
        result = await self._call_in_thread(keywords, context.episode)
    except ToolError as error:
      return ToolResult(ToolStatus.ERROR, f"error: {error}")
    if isinstance(result, ToolResult):
      return result
    if not isinstance(result, str):
      result = json.dumps(result, ensure_ascii=False, default=str)
    return ToolResult(ToolStatus.OK, result)

  async def _call_in_thread(self, keywords: dict[str, Any], episode: str) -> Any:
    abandoned = self._abandoned.total()
    if abandoned >= _MAX_ABANDONED:
      if self._abandoned[episode]:
        raise ToolError("earlier calls of this episode have not ended yet")
      raise RuntimeError(
        f"{abandoned} calls of tool {self.name!r} timed out and never returned; make the "
        "function return, or write it as async so that it can be cancelled"
      )

    def ended() -> None:
      self._abandoned[episode] -= 1
      self._abandoned = +self._abandoned  # without episodes that left nothing

    work = functools.partial(self._function, **keywords)
    try:
      return await call_in_thread(work, name=f"tool-{self.name}", on_late_end=ended)
    except asyncio.CancelledError:
      self._abandoned[episode] += 1
      raise

  def _schema(self, descriptions: dict[str, str]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(self._function).parameters.values():
      where = f"parameter {parameter.name!r} of tool {self.name!r}"
      if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise TypeError(f"{where} is {parameter.kind.description}; tools are called by keyword")
      if parameter.name not in self._hints:
        raise TypeError(f"{where} has no annotation; the JSON schema is made from annotations")
      if self._hints[parameter.name] is ToolContext:
        self._context_parameter = parameter.name
        continue
      schema = _json_schema(self._hints[parameter.name], where)
      if parameter.name in descriptions:
        schema = {**schema, "description": descriptions[parameter.name]}
      properties[parameter.name] = schema
      if parameter.default is parameter.empty:
        required.append(parameter.name)
    return {
      "type": "object",
      "properties": properties,
      "required": required,
      "additionalProperties": False,
    }


def _json_schema(hint: Any, where: str) -> dict[str, Any]:
  if hint is Any:
    return {}
  if hint in _JSON_TYPES:
    return {"type": _JSON_TYPES[hint]}
  origin, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
  if origin is typing.Literal:
    return {"enum": list(parts)}
  if origin in (typing.Union, types.UnionType):
    return {
      "anyOf": [
        {"type": "null"} if part is type(None) else _json_schema(part, where) for part in parts
      ]
    }
  if origin is list:
    return {"type": "array", "items": _json_schema(parts[0], where) if parts else {}}
  if origin is dict and (not parts or parts[0] is str):
    return {
      "type": "object",
      "additionalProperties": _json_schema(parts[1], where) if parts else True,
    }
  raise TypeError(
    f"{where} has annotation {hint!r}; supported: str, int, float, bool, list[T], dict[str, T], "
    "Literal, T | None, Any"
  )


def _as_annotated(value: Any, hint: Any) -> Any:
  """JSON has one number type: 3.0 is a valid integer and 3 a valid number."""
  if hint is int and isinstance(value, float):
    return int(value)
  if hint is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  return value


def _argument_descriptions(documentation: str) -> dict[str, str]:
  """The ``name: text`` entries of a Google-style ``Args:`` section, continuation lines joined."""
  _, found, section = documentation.partition("\nArgs:\n")
  if not found:
    return {}
  section = re.split(r"\n\S", section)[0]
  entries = re.findall(r"^( +)(\w+)(?: *\([^)]*\))?: *(.*(?:\n\1 +.*)*)", section, re.MULTILINE)
  return {name: " ".join(text.split()) for _, name, text in entries}
