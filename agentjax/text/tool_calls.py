"""Writing calls of tools in a turn of the policy, and reading them back from its ids."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from agentjax.text.json_language import json_language, string_language
from agentjax.text.language import (
  Language,
  LanguageError,
  any_byte,
  control,
  either,
  empty,
  literal,
  regex,
  repeat,
  seq,
)
from agentjax.text.tokenizer import SPECIAL_SPELLINGS, MarkedTokenizer
from agentjax.trajectory.record import ToolCall

ToolCallFormat = Literal["compact", "json"]  # of the vocabularies that share our markup
Schemas = Mapping[str, Mapping[str, Any]]  # tool name -> JSON schema of its parameters

UNKNOWN_TOOL_PARAMETER = "input"  # holds the text of a compact call of a tool nobody knows
_MOST_LEVELS = 100  # of lists and objects within each other: what reads them may call itself


class ParsedTurn(NamedTuple):
  """What the policy wrote: the text before its first call, and its calls in order."""

  text: str
  calls: tuple[ToolCall, ...]


class DescribedTool(Protocol):
  """The part of a tool that the policy sees."""

  @property
  def name(self) -> str: ...

  @property
  def description(self) -> str: ...

  @property
  def parameters(self) -> Mapping[str, Any]: ...


def tool_schemas(tools: Sequence[DescribedTool]) -> dict[str, Mapping[str, Any]]:
  """Parameters (JSON schema) by tool name."""
  return {tool.name: tool.parameters for tool in tools}


def text_parameter(schema: Mapping[str, Any]) -> str | None:
  """The only required parameter of a tool, if it is a string: a compact call is its text."""
  required = list(schema.get("required", ()))
  if len(required) != 1:
    return None
  declared = schema.get("properties", {}).get(required[0], {})
  return required[0] if declared.get("type") == "string" else None


def format_call(
  call: ToolCall, tool_call_format: ToolCallFormat, schemas: Schemas | None = None
) -> str:
  """The text of ``call`` after ``<|call|>``, such that ``parse_turn`` gives ``call`` back.

  "json": ``{"name": NAME, "arguments": {...}}``.
  "compact": ``NAME TEXT`` where the tool's only required parameter is a string and the only one
  given, else ``NAME {...}``. A tool missing in ``schemas`` counts as one of a single text
  parameter if the call has just one argument and that is a string.

  Raises:
    ValueError: the call is malformed (``error`` set), its name holds white space in the compact
      format, or its arguments cannot be written in that format.
  """
  if call.error is not None:
    raise ValueError(f"a malformed call ({call.error}) has no text to render.")
  arguments = dict(call.arguments)
  if tool_call_format == "json":
    return _dump({"name": call.name, "arguments": arguments})
  if not call.name or call.name.split() != [call.name]:
    raise ValueError(
      f"tool name {call.name!r} cannot be written in the compact format: it must be one word. "
      'Rename the tool or use tool_call_format="json".'
    )
  if schemas is not None and call.name in schemas:
    parameter = text_parameter(schemas[call.name])
    if parameter is None:
      return f"{call.name} {_dump(arguments)}"
    if list(arguments) != [parameter] or not isinstance(arguments[parameter], str):
      raise ValueError(
        f"a compact call of {call.name!r} is the text of its parameter {parameter!r} alone, got "
        f'arguments {arguments!r}; use tool_call_format="json".'
      )
    return f"{call.name} {arguments[parameter]}"
  if len(arguments) == 1 and isinstance(value := next(iter(arguments.values())), str):
    return f"{call.name} {value}"
  return f"{call.name} {_dump(arguments)}"


def parse_turn(
  tokenizer: MarkedTokenizer,
  ids: Sequence[int],
  schemas: Schemas,
  tool_call_format: ToolCallFormat = "compact",
) -> ParsedTurn:
  """Reads the ids the policy sampled in one turn.

  Only the special ids count as markup: text that spells ``<|call|>`` stays text. An unreadable call
  becomes a ``ToolCall`` with ``error`` set and no arguments, which the environment answers. A name
  that is not in ``schemas`` is no error here; its compact text is the argument "input".

  Args:
    tokenizer: the one the ids are of.
    ids: the turn, with its ``<|end|>`` if it has one; nothing may follow that.
    schemas: parameters of the known tools by name.
    tool_call_format: how calls are written.

  Raises:
    ValueError: ids follow ``<|end|>``.
  """
  special = tokenizer.special
  ids = [int(i) for i in ids]
  closed = special.end in ids
  if closed:
    end = ids.index(special.end)
    if end != len(ids) - 1:
      raise ValueError(
        f"{len(ids) - 1 - end} ids follow <|end|> at index {end}; a turn stops at its first one."
      )
    ids = ids[:end]
  parts = _split(ids, special.call)
  calls = []
  for number, part in enumerate(parts[1:], start=2):
    if not closed and number == len(parts):
      name = _compact_name(tokenizer.decode(part)) if tool_call_format == "compact" else ""
      calls.append(ToolCall(name, {}, error="the call was cut off before <|end|>"))
    elif stray := [i for i in part if i < len(SPECIAL_SPELLINGS)]:
      name = _compact_name(tokenizer.decode(part)) if tool_call_format == "compact" else ""
      calls.append(ToolCall(name, {}, error=f"{tokenizer.decode(stray[:1])} inside a call"))
    elif tool_call_format == "json":
      calls.append(parse_json_call(tokenizer.decode(part)))
    else:
      calls.append(_parse_compact(tokenizer.decode(part), schemas))
  return ParsedTurn(tokenizer.decode(parts[0]), tuple(calls))


def turn_language(schemas: Schemas, tool_call_format: ToolCallFormat, call_id: int) -> Language:
  """Turns that ``parse_turn`` accepts without error: text, then calls of known tools.

  Arguments of every call satisfy its schema. The caller adds ``<|end|>``.

  Raises:
    LanguageError: a schema that has no automaton (see ``json_language``), or a tool whose name the
      compact format cannot hold.
  """
  text = repeat(any_byte)
  if not schemas:
    return text
  calls = [_call_language(name, schemas[name], tool_call_format) for name in sorted(schemas)]
  return seq(text, repeat(seq(control(call_id), either(*calls))))


def _call_language(
  name: str, schema: Mapping[str, Any], tool_call_format: ToolCallFormat
) -> Language:
  if tool_call_format == "json":
    return json_call_language(name, schema)
  if not name or name.split() != [name]:
    raise LanguageError(
      f"tool name {name!r} cannot be written in the compact format: it must be one word. Rename "
      'the tool or use tool_call_format="json".'
    )
  parameter = text_parameter(schema)
  if parameter is not None:
    where = f"{name}/properties/{parameter}"
    text = string_language(schema["properties"][parameter], where=where)
    return seq(literal(f"{name} "), repeat(any_byte) if text is None else text)
  arguments = seq(literal(" "), arguments_language(name, schema))
  # Only a name: a call without arguments.
  return seq(literal(name), arguments if schema.get("required") else either(arguments, empty))


def json_call_language(name: str, schema: Mapping[str, Any]) -> Language:
  """``{"name": NAME, "arguments": {...}}``, which ``parse_json_call`` reads."""
  return seq(
    literal('{"name":'),
    regex(" ?"),
    literal(_dump(name)),
    regex(', ?"arguments": ?'),
    arguments_language(name, schema),
    literal("}"),
  )


def arguments_language(name: str, schema: Mapping[str, Any]) -> Language:
  """The arguments of a tool as a JSON object.

  Raises:
    LanguageError: its schema is not one of objects, or has no automaton.
  """
  if schema.get("type", "object") != "object":
    raise LanguageError(
      f"the parameters of tool {name!r} have type {schema['type']!r}; allowed: 'object'."
    )
  try:
    return json_language({"type": "object", **schema})
  except LanguageError as error:
    raise LanguageError(f"tool {name!r}: {error}") from error


def _split(ids: list[int], separator: int) -> list[list[int]]:
  parts: list[list[int]] = [[]]
  for i in ids:
    if i == separator:
      parts.append([])
    else:
      parts[-1].append(i)
  return parts


def _compact_name(text: str) -> str:
  words = text.split(maxsplit=1)
  return words[0] if words else ""


def _parse_compact(text: str, schemas: Schemas) -> ToolCall:
  text = text.lstrip()
  name = _compact_name(text)
  if not name:
    return ToolCall("", {}, error="the call has no tool name")
  argument = text[len(name) + 1 :]  # exactly one white space separates; the rest is the text's own
  if name not in schemas:
    return ToolCall(name, {UNKNOWN_TOOL_PARAMETER: argument})
  parameter = text_parameter(schemas[name])
  if parameter is not None:
    return ToolCall(name, {parameter: argument})
  arguments, error = _load(argument.strip() or "{}")
  if error is not None:
    return ToolCall(name, {}, error=f"the arguments of {name} must be a JSON object: {error}")
  return ToolCall(name, arguments)


def parse_json_call(text: str) -> ToolCall:
  """The call in ``{"name": NAME, "arguments": {...}}``; ``error`` is set if the text is not such a
  call."""
  value, error = _load(text)
  if error is not None:
    return ToolCall("", {}, error=f"a call must be a JSON object: {error}")
  name, arguments = value.get("name"), value.get("arguments", {})
  if not isinstance(name, str) or not name:
    return ToolCall("", {}, error='a call needs a "name" that is a non-empty string')
  if not isinstance(arguments, dict):
    return ToolCall(name, {}, error=f'the "arguments" of {name} must be a JSON object')
  if extra := sorted(set(value) - {"name", "arguments"}):
    return ToolCall(name, {}, error=f'a call has only "name" and "arguments", got {extra[0]!r}')
  return ToolCall(name, arguments)


def load_json(text: str) -> tuple[Any, str | None]:
  """A JSON value, or the reason why it is not one. Never raises."""
  too_deep = f"it is nested more than {_MOST_LEVELS} deep"
  try:
    value = json.loads(text, parse_constant=_no_constant)
    if _is_deep(value):
      return None, too_deep
    json.dumps(value, ensure_ascii=False).encode()  # lone surrogates would fail in every tool
  except RecursionError:
    return None, too_deep
  except ValueError as error:
    return None, str(error)
  return value, None


def _is_deep(value: Any) -> bool:
  """Whether more than ``_MOST_LEVELS`` lists and objects hold each other; goes level by level."""
  level = [value]
  for _ in range(_MOST_LEVELS + 1):
    nested = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
    level = list(itertools.chain.from_iterable(nested))
  return bool(level)


def _load(text: str) -> tuple[dict[str, Any], str | None]:
  """A JSON object, or the reason why it is not one."""
  value, error = load_json(text)
  if error is None and not isinstance(value, dict):
    error = f"got a JSON {type(value).__name__}"
  return ({}, error) if error is not None else (value, None)


def _no_constant(name: str) -> None:
  raise ValueError(f"{name} is not JSON")


def _dump(value: Any) -> str:
  return json.dumps(value, ensure_ascii=False, allow_nan=False)
