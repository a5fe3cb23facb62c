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

from agentjax.text.tool_calls import ParsedTurn, Schemas, load_json, parse_json_call
from agentjax.trajectory.record import ToolCall

TemplateCallFormat = Literal["hermes", "xml"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{_OPEN}(?P<body>.*?)(?P<close>{_CLOSE}|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]*)>(?P<body>.*)</function>\s*", re.DOTALL)
# A value may spell </parameter>: the one that counts has another parameter or the end behind it.
_PARAMETER = re.compile(
  r"\s*<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))",
  re.DOTALL,
)
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
  kinds = schema.get("type", "string")
  kinds = [kinds] if isinstance(kinds, str) else list(kinds)
  if kinds == ["string"]:
    return text, None
  # Templates write JSON's words as Python's, so a model that follows them does too.
  value, error = load_json(_PYTHON_WORDS.get(text.strip(), text))
  if error is None or "string" in kinds:
    return (text if error is not None else value), None
  return None, f"must be JSON of type {' or '.join(kinds)}: {error}"
