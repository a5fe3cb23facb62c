"""Tools that a conversation declares but that are never run: a name, a description, a JSON
schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jsonschema

from agentjax.tools.protocol import ToolContext, ToolResult, ToolStatus

DECLARED_TOOLS = "tools"  # in the metadata of a task whose tools are its own
_PYTHON_TYPES = {
  "dict": "object",
  "str": "string",
  "int": "integer",
  "float": "number",
  "bool": "boolean",
  "list": "array",
  "tuple": "array",
}


@dataclasses.dataclass
class DeclaredTool:
  """The policy's view of a tool, which must not be called."""

  name: str
  description: str
  parameters: Mapping[str, Any]

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    del arguments, context
    return ToolResult(ToolStatus.INFRA_ERROR, f"{self.name} is only declared; nothing runs it")

  def to_dict(self) -> dict[str, Any]:
    """Plain JSON, which ``read_tool`` reads back."""
    return {"name": self.name, "description": self.description, "parameters": self.parameters}


def read_tool(value: Any) -> DeclaredTool:
  """A tool from ``{name, description, parameters}``, bare or as OpenAI's ``{"function": {...}}``.

  Python's names of types, which some data sets use instead of JSON schema's ("dict", "str,
  optional", "List[int]"), are translated. No parameters means an object without properties.

  Raises:
    ValueError: no name, or parameters that are no JSON schema of an object.
  """
  if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
    value = value["function"]
  if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or not value["name"]:
    raise ValueError(f"a tool needs a name, got {str(value)[:80]!r}")
  name = value["name"]
  parameters = _translated(value.get("parameters") or {"type": "object", "properties": {}})
  if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
    raise ValueError(f"the parameters of tool {name!r} are no JSON schema of an object")
  try:
    jsonschema.Draft202012Validator.check_schema(parameters)
  except jsonschema.SchemaError as error:
    raise ValueError(
      f"the parameters of tool {name!r} are no JSON schema at {error.json_path}: "
      f"{error.message[:200]}"
    ) from error
  return DeclaredTool(name, str(value.get("description") or ""), parameters)


def read_tools(values: Any) -> tuple[DeclaredTool, ...]:
  """``read_tool`` of each; ValueError also where two share a name or ``values`` is no list."""
  if not isinstance(values, Sequence) or isinstance(values, str):
    raise ValueError(f"tools are a {type(values).__name__}; allowed: a list")
  tools = tuple(read_tool(value) for value in values)
  names = [tool.name for tool in tools]
  if twice := sorted({name for name in names if names.count(name) > 1}):
    raise ValueError(f"two tools are named {twice[0]!r}")
  return tools


def declared_tools(metadata: Mapping[str, Any]) -> tuple[DeclaredTool, ...]:
  """The tools that a task declares; empty if it declares none."""
  return tuple(DeclaredTool(**tool) for tool in metadata.get(DECLARED_TOOLS, ()))


def _translated(schema: Any) -> Any:
  """The schema with JSON schema's names of types."""
  if isinstance(schema, Mapping):
    return dict(_translated_items(schema))
  if isinstance(schema, list):
    return [_translated(item) for item in schema]
  return schema


def _translated_items(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
  for key, value in schema.items():
    if key == "type" and isinstance(value, str):
      name = value.partition(",")[0].partition("[")[0].strip().lower()
      yield key, _PYTHON_TYPES.get(name, value)
    elif key in ("default", "const", "enum", "examples", "description"):
      yield key, value
    else:
      yield key, _translated(value)
