"""Tool calls as the chat templates of Qwen and Nemotron models show them, read back from text.

"hermes"::

  <tool_call>
  {"name": NAME, "arguments": {...}}
  </tool_call>

"xml" (Qwen3-Coder, Nemotron 3)::

  <tool_call>
  <function=NAME>
  <parameter=P>
  VALUE
  </parameter>
  </function>
  </tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from agentjax.text.json_language import json_language, string_language
from agentjax.text.language import (
  Language,
  both,
  control,
  either,
  empty,
  literal,
  regex,
  separated,
  seq,
  without,
)
from agentjax.text.tool_calls import (
  ParsedTurn,
  Schemas,
  json_call_language,
  load_json,
  parse_json_call,
)
from agentjax.trajectory.record import ToolCall

TemplateCallFormat = Literal["hermes", "xml"]

THINK, END_THINK = "<think>", "</think>"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{_OPEN}(?P<body>.*?)(?P<close>{_CLOSE}|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]*)>(?P<body>.*)</function>\s*", re.DOTALL)
# A value may spell </parameter>: the one that counts has another parameter or the end behind it.
_PARAMETER = re.compile(
  r"\s*<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))",
  re.DOTALL,
)
_JSON_NAMES = {
  str: "string",
  int: "integer",
  float: "number",
  bool: "boolean",
  type(None): "null",
  list: "array",
  dict: "object",
}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def parse_text(text: str, schemas: Schemas, call_format: TemplateCallFormat) -> ParsedTurn:
  """The text before the first ``<tool_call>``, and the calls; ``error`` set where one is malformed.

  Args:
    text: a turn without its thinking and its end.
    schemas: parameters of the known tools by name; they say what type a value in "xml" has.
    call_format: how calls are written.
  """
  calls = []
  for match in _CALL.finditer(text):
    body = match["body"]
    if not match["close"]:
      calls.append(ToolCall("", {}, error=f"the call was cut off before {_CLOSE}"))
    elif call_format == "hermes":
      calls.append(parse_json_call(body.strip()))
    else:
      calls.append(_parse_xml(body, schemas))
  return ParsedTurn(text.partition(_OPEN)[0], tuple(calls))


def turn_language(
  schemas: Schemas,
  call_format: TemplateCallFormat | None,
  *,
  controls: Mapping[str, int],
  free_ids: frozenset[int],
  opens_thinking: bool,
) -> Language:
  """Turns whose every call is well formed, with arguments that satisfy its tool's schema.

  Thinking may come first and may hold anything; text may stand before, between and behind calls.

  Args:
    schemas: parameters of the offered tools by name.
    call_format: how calls are written; None where the template has no calls.
    controls: id of every added token by its spelling: a tag that is one is only that token.
    free_ids: added tokens that may stand anywhere but in a call.
    opens_thinking: whether the request for a turn has already opened its thinking.

  Raises:
    LanguageError: a schema that has no automaton (see ``json_language``).
  """
  tags = (THINK, END_THINK, _OPEN, _CLOSE)
  free_ids = free_ids.difference(controls[tag] for tag in tags if tag in controls)

  def tag(spelling: str) -> Language:
    return control(controls[spelling]) if spelling in controls else literal(spelling)

  def free(*forbidden: str, allowed: tuple[str, ...] = ()) -> Language:
    text = without(*(spelling for spelling in forbidden if spelling not in controls))
    ids = free_ids.union(controls[spelling] for spelling in allowed if spelling in controls)
    return separated(text, control(*ids)) if ids else text

  text = free(*tags)
  said = text
  if schemas and call_format is not None:
    calls = (_call_language(name, schemas[name], call_format) for name in sorted(schemas))
    call = seq(regex("\\n?"), either(*calls), regex("\\n?"))
    spelled = [spelling for spelling in tags if spelling not in controls]
    if spelled:
      call = both(call, without(*spelled))
    said = separated(text, seq(tag(_OPEN), call, tag(_CLOSE)))
  thinking = free(END_THINK, allowed=(THINK, _OPEN, _CLOSE))
  thought = either(thinking, seq(thinking, tag(END_THINK), said))
  return thought if opens_thinking else either(said, seq(text, tag(THINK), thought))


def _call_language(
  name: str, schema: Mapping[str, Any], call_format: TemplateCallFormat
) -> Language:
  if call_format == "hermes":
    return json_call_language(name, schema)
  required = schema.get("required", ())
  members = []
  for parameter, declared in schema.get("properties", {}).items():
    where = f"{name}/properties/{parameter}"
    if _kinds(declared) == ["string"]:
      value = string_language(declared, where=where)
      end = without("</parameter>")
      value = end if value is None else both(value, end)
    else:
      value = json_language(declared)
    member = seq(literal(f"<parameter={parameter}>\n"), value, literal("\n</parameter>\n"))
    members.append(member if parameter in required else either(member, empty))
  return seq(literal(f"<function={name}>\n"), *members, literal("</function>"))


def _parse_xml(text: str, schemas: Schemas) -> ToolCall:
  function = _FUNCTION.fullmatch(text)
  if function is None:
    return ToolCall("", {}, error="a call must be <function=NAME>...</function>")
  name, body = function["name"].strip(), function["body"]
  if not name:
    return ToolCall("", {}, error="the call has no tool name")
  declared = schemas.get(name, {}).get("properties", {})
  arguments: dict[str, Any] = {}
  start = 0
  while match := _PARAMETER.match(body, start):
    parameter, start = match["name"].strip(), match.end()
    if parameter in arguments:
      return ToolCall(name, {}, error=f"the parameter {parameter} is given twice")
    value, error = _value(match["value"], declared.get(parameter, {}))
    if error is not None:
      return ToolCall(name, {}, error=f"the parameter {parameter} of {name} {error}")
    arguments[parameter] = value
  if stray := body[start:].strip():
    return ToolCall(
      name, {}, error=f"a call has only <parameter=P>VALUE</parameter>, got {stray[:40]!r}"
    )
  return ToolCall(name, arguments)


def _value(text: str, schema: Mapping[str, Any]) -> tuple[Any, str | None]:
  """The text itself for a string or an undeclared type, else what it says as JSON."""
  kinds = _kinds(schema)
  if kinds == ["string"]:
    return text, None
  # Templates write JSON's words as Python's, so a model that follows them does too.
  value, error = load_json(_PYTHON_WORDS.get(text.strip(), text))
  if error is None or "string" in kinds:
    return (text if error is not None else value), None
  return None, f"must be JSON of type {' or '.join(kinds)}: {error}"


def _kinds(schema: Mapping[str, Any]) -> list[str]:
  """The JSON types a parameter may have; text where nothing is said of it."""
  if "type" in schema:
    return [schema["type"]] if isinstance(schema["type"], str) else list(schema["type"])
  if "anyOf" in schema:
    return list(dict.fromkeys(kind for option in schema["anyOf"] for kind in _kinds(option)))
  listed = [schema["const"]] if "const" in schema else schema.get("enum", [""])
  return list(dict.fromkeys(_JSON_NAMES[type(value)] for value in listed))
