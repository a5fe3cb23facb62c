"""JSON values that satisfy a schema, as a regular language.

The texts are those of ``json.dumps``, with or without the space after ``,`` and ``:``, with
properties in the order of the schema. Every text of the language satisfies the schema;
``json_language`` names the valid texts that are not in the language.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.text.language import (
  Language,
  LanguageError,
  Nfa,
  any_character,
  both,
  byte_set,
  characters,
  either,
  empty,
  literal,
  regex,
  repeat,
  searched,
  separated,
  seq,
)

Schema = Mapping[str, Any] | bool

FREE_DEPTH = 2  # nesting of values that a schema leaves free; ours

_COMMENTS = frozenset(
  "title description default examples deprecated readOnly writeOnly format $schema $id $comment "
  "$defs definitions".split()
)
_OF_TYPE = {
  "string": {"minLength", "maxLength", "pattern"},
  "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
  "number": {"minimum", "maximum"},
  "array": {"items", "minItems", "maxItems"},
  "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
  "boolean": set[str](),
  "null": set[str](),
}
_KNOWN = frozenset().union(*_OF_TYPE.values()) | _COMMENTS | {"type", "enum", "const", "anyOf"}

_comma = regex(", ?")
_colon = regex(": ?")
_digits = "(0|[1-9][0-9]*)"
# Two digits at most: Python reads 1e999 as infinity.
_fraction_and_exponent = r"(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?"
_hex = "[0-9a-fA-F]"
_escape = regex(
  # Halves of surrogate pairs are not characters: both are written, or none.
  rf'\\(["\\/bfnrt]|u([0-9a-cA-Ce-fE-F]{_hex}{{3}}|[dD][0-7]{_hex}{{2}}'
  rf"|[dD][89abAB]{_hex}{{2}}\\u[dD][c-fC-F]{_hex}{{2}}))"
)
_plain = characters(((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF)))
_character = either(_plain, _escape)


def json_language(schema: Schema) -> Language:
  """The values of a schema, written as JSON.

  Supported are type, enum, const, anyOf, references within the schema that do not recur, bounds on
  length (strings, arrays), patterns, bounds of integers (of numbers where they are integers and
  inclusive), properties, required, additionalProperties, and keywords that are only comments.

  Not in the language, though valid: other orders of properties; undeclared properties besides
  declared ones; values nested deeper than ``FREE_DEPTH`` without a schema; integers written 2.0,
  exponents beyond 99, and escapes in strings with a pattern.

  Raises:
    LanguageError: an unsupported keyword, or nothing satisfies the schema.
  """
  return _value(schema, _Where(schema))


def string_language(schema: Schema, *, where: str = "") -> Language | None:
  """The bare texts of a schema of strings, for formats that write them without quotes.

  None if any text is allowed.
  """
  at = _Where(schema, where)
  _check_known(schema, at)
  assert isinstance(schema, Mapping)
  if "const" in schema or "enum" in schema:
    return either(*(literal(text) for text in _listed(schema, at) if isinstance(text, str)))
  if schema.keys() & _OF_TYPE["string"]:
    return _text(schema, any_character, any_character)
  return None


class _Where:
  """A place in a schema: the whole schema, for references, and the path, for messages."""

  def __init__(self, root: Schema, path: str = "", open_references: tuple[str, ...] = ()):
    self.root = root
    self.path = path
    self.open_references = open_references

  def under(self, name: str) -> _Where:
    return _Where(self.root, f"{self.path}/{name}", self.open_references)

  def referred(self, reference: str) -> tuple[Schema, _Where]:
    if reference in self.open_references:
      raise self.refused(
        "$ref", reference, "references that do not lead back to themselves: no regular language"
      )
    found: Any = self.root
    for name in reference.removeprefix("#").split("/")[1:]:
      name = name.replace("~1", "/").replace("~0", "~")
      if not isinstance(found, Mapping) or name not in found:
        raise self.refused("$ref", reference, "references into the schema itself (#/$defs/NAME)")
      found = found[name]
    if not reference.startswith("#"):
      raise self.refused("$ref", reference, "references into the schema itself (#/$defs/NAME)")
    return found, _Where(self.root, self.path, (*self.open_references, reference))

  def refused(self, keyword: str, value: Any, allowed: str) -> LanguageError:
    return LanguageError(
      f"a grammar of {keyword!r}: {json.dumps(value)[:80]} at {self.path or '/'} of the schema is "
      f"not supported; allowed: {allowed}."
    )


def _value(schema: Schema, at: _Where) -> Language:
  if schema is True:
    return _free(FREE_DEPTH)
  if isinstance(schema, Mapping) and "$ref" in schema:
    found, there = at.referred(schema["$ref"])
    rest = {k: v for k, v in schema.items() if k != "$ref" and k not in _COMMENTS}
    if rest:
      raise at.refused(next(iter(rest)), next(iter(rest.values())), "no keyword beside $ref")
    return _value(found, there)
  _check_known(schema, at)
  assert isinstance(schema, Mapping)
  if "enum" in schema or "const" in schema:
    return either(*(literal(text) for value in _listed(schema, at) for text in _spellings(value)))
  if "anyOf" in schema:
    rest = {k: v for k, v in schema.items() if k != "anyOf" and k not in _COMMENTS}
    if rest:
      raise at.refused(next(iter(rest)), next(iter(rest.values())), "no keyword beside anyOf")
    options = schema["anyOf"]
    return either(*(_value(o, at.under(f"anyOf/{i}")) for i, o in enumerate(options)))
  kinds = schema.get("type", _implied(schema))
  if kinds is None:
    return _free(FREE_DEPTH)
  names = [kinds] if isinstance(kinds, str) else list(kinds)
  for name in names:
    if name not in _OF_TYPE:
      raise at.refused("type", name, ", ".join(_OF_TYPE))
  return either(*(_typed(name, schema, at) for name in names))


def _check_known(schema: Schema, at: _Where) -> None:
  if not isinstance(schema, Mapping):
    raise at.refused("false", schema, "schemas that something satisfies")
  for keyword, value in schema.items():
    if keyword not in _KNOWN:
      raise at.refused(keyword, value, ", ".join(sorted(_KNOWN - _COMMENTS)) + ", $ref")


def _implied(schema: Mapping[str, Any]) -> str | None:
  """The type that a keyword implies; it does not restrict other types."""
  return next((n for n, keywords in _OF_TYPE.items() if keywords & schema.keys()), None)


def _listed(schema: Mapping[str, Any], at: _Where) -> list[Any]:
  """Values of enum or const that are of the type."""
  values = [schema["const"]] if "const" in schema else list(schema["enum"])
  if "const" in schema and "enum" in schema:
    values = [v for v in values if v in schema["enum"]]
  beside = {k for k in schema if k not in _COMMENTS} - {"const", "enum", "type"}
  if beside:
    keyword = min(beside)
    raise at.refused(keyword, schema[keyword], "only type beside enum and const")
  kinds = schema.get("type")
  if kinds is not None:
    names = [kinds] if isinstance(kinds, str) else list(kinds)
    values = [v for v in values if any(_is(v, name) for name in names)]
  if not values:
    raise at.refused("enum", schema.get("enum"), "values of the type")
  return values


def _is(value: Any, name: str) -> bool:
  match name:
    case "null":
      return value is None
    case "boolean":
      return isinstance(value, bool)
    case "integer":
      return isinstance(value, int) and not isinstance(value, bool)
    case "number":
      return isinstance(value, int | float) and not isinstance(value, bool)
    case "string":
      return isinstance(value, str)
    case "array":
      return isinstance(value, list)
  return isinstance(value, dict)


def _spellings(value: Any) -> list[str]:
  """Spellings with and without spaces; texts with plain and with escaped characters."""
  return list(
    dict.fromkeys(
      json.dumps(value, ensure_ascii=ascii_only, separators=separators, allow_nan=False)
      for ascii_only in (False, True)
      for separators in ((", ", ": "), (",", ":"))
    )
  )


def _typed(name: str, schema: Mapping[str, Any], at: _Where) -> Language:
  match name:
    case "null":
      return literal("null")
    case "boolean":
      return either(literal("true"), literal("false"))
    case "integer":
      return _integer(schema, at)
    case "number":
      return _number(schema, at)
    case "string":
      return seq(literal('"'), _text(schema, _character, _plain), literal('"'))
    case "array":
      return _array(schema, at)
  return _object(schema, at)


def _text(schema: Mapping[str, Any], character: Language, unescaped: Language) -> Language:
  """The inside of a string."""
  least, most = schema.get("minLength", 0), schema.get("maxLength")
  if "pattern" not in schema:
    return repeat(character, least, most)
  return both(repeat(unescaped, least, most), searched(schema["pattern"]))


def _integer(schema: Mapping[str, Any], at: _Where) -> Language:
  least, most = schema.get("minimum"), schema.get("maximum")
  for keyword, step in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
    if keyword not in schema:
      continue
    bound = schema[keyword]
    if isinstance(bound, bool) or bound != int(bound):
      raise at.refused(keyword, bound, "integers")
    if step > 0:
      least = bound + 1 if least is None else max(least, bound + 1)
    else:
      most = bound - 1 if most is None else min(most, bound - 1)
  return _signed(_bound(least, "minimum", at), _bound(most, "maximum", at), at)


def _number(schema: Mapping[str, Any], at: _Where) -> Language:
  for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
    if keyword in schema:
      raise at.refused(keyword, schema[keyword], "minimum and maximum for numbers")
  least = _bound(schema.get("minimum"), "minimum", at)
  most = _bound(schema.get("maximum"), "maximum", at)
  if least is None and most is None:
    return regex(f"-?{_digits}{_fraction_and_exponent}")
  return _signed(least, most, at, fractions=True)


def _bound(value: Any, keyword: str, at: _Where) -> int | None:
  if value is None:
    return None
  if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
    raise at.refused(keyword, value, "integers")
  return int(value)


def _signed(
  least: int | None, most: int | None, at: _Where, *, fractions: bool = False
) -> Language:
  """Integers, or decimals, from ``least`` to ``most``."""
  if least is not None and most is not None and least > most:
    raise at.refused("minimum", least, f"at most the maximum, {most}")
  parts = []
  if most is None or most >= 0:
    parts.append(_magnitude(max(least or 0, 0), most, fractions))
  if least is None or least < 0:
    top = None if least is None else -least
    low = max(-most, 0) if most is not None else 0
    parts.append(seq(literal("-"), _magnitude(low, top, fractions)))
  return either(*parts)


def _magnitude(least: int, most: int | None, fractions: bool) -> Language:
  """Decimal numbers from ``least`` to ``most``, both at least 0."""
  if not fractions:
    return _range(least, most)
  fraction = regex(r"(\.[0-9]+)?")
  if most is None:
    return seq(_range(least, None), fraction)
  whole = seq(literal(str(most)), regex(r"(\.0+)?"))
  return whole if least == most else either(seq(_range(least, most - 1), fraction), whole)


def _range(least: int, most: int | None) -> Language:
  """Decimal integers from ``least`` to ``most``, without leading zeros."""
  if most is None:
    if least == 0:
      return regex(_digits)
    digits = len(str(least))
    longer = regex(f"[1-9][0-9]{{{digits},}}")
    return either(_range(least, 10**digits - 1), longer)
  parts = []
  for digits in range(len(str(least)), len(str(most)) + 1):
    low = max(least, 10 ** (digits - 1) if digits > 1 else 0)
    high = min(most, 10**digits - 1)
    parts.append(_same_length(str(low), str(high)))
  return either(*parts)


def _same_length(low: str, high: str) -> Language:
  if not low:
    return empty
  a, b = int(low[0]), int(high[0])
  if low == "0" * len(low) and high == "9" * len(high):
    return repeat(_digit(0, 9), len(low), len(low))
  if a == b:
    return seq(literal(low[0]), _same_length(low[1:], high[1:]))
  rest = len(low) - 1
  parts = [
    seq(literal(low[0]), _same_length(low[1:], "9" * rest)),
    seq(literal(high[0]), _same_length("0" * rest, high[1:])),
  ]
  if b - a > 1:
    parts.append(seq(_digit(a + 1, b - 1), _same_length("0" * rest, "9" * rest)))
  return either(*parts)


def _digit(low: int, high: int) -> Language:
  return byte_set(range(ord("0") + low, ord("0") + high + 1))


def _array(schema: Mapping[str, Any], at: _Where) -> Language:
  item = _value(schema.get("items", True), at.under("items"))
  inside = separated(item, _comma, schema.get("minItems", 0), schema.get("maxItems"))
  return seq(literal("["), inside, literal("]"))


def _object(schema: Mapping[str, Any], at: _Where) -> Language:
  properties: Mapping[str, Schema] = schema.get("properties", {})
  required: Sequence[str] = schema.get("required", ())
  others = schema.get("additionalProperties", True)
  if undeclared := [name for name in required if name not in properties]:
    raise at.refused("required", undeclared[0], "declared properties")
  least, most = schema.get("minProperties", 0), schema.get("maxProperties")
  if not properties and others is not False:
    if least > 1 or most is not None:
      raise at.refused("minProperties", least, "0 or 1, without maxProperties: keys may repeat")
    value = _value(others, at.under("additionalProperties"))
    member = seq(literal('"'), repeat(_character), literal('"'), _colon, value)
    return seq(literal("{"), separated(member, _comma, least), literal("}"))
  if least > len(required) or (most is not None and most < len(properties)):
    raise at.refused("minProperties", least, "bounds that the declared properties always keep")
  members = [
    (
      seq(
        either(*map(literal, _spellings(name))),
        _colon,
        _value(inner, at.under(f"properties/{name}")),
      ),
      name in required,
    )
    for name, inner in properties.items()
  ]
  return seq(literal("{"), _members(members), literal("}"))


def _members(members: Sequence[tuple[Language, bool]]) -> Language:
  """Members in order, with commas between; those that are not required may be left out."""

  def build(nfa: Nfa, start: int) -> int:
    # Two cases: nothing was written so far, or something was; after a member it is the second.
    nothing: int | None = start
    something: int | None = None
    for member, required in members:
      before = nfa.state()
      if nothing is not None:
        nfa.jumps[nothing].append(before)
      if something is not None:
        nfa.jumps[_comma(nfa, something)].append(before)
      after = nfa.state()
      nfa.jumps[member(nfa, before)].append(after)
      if required:
        nothing = None
      elif something is not None:
        nfa.jumps[something].append(after)
      something = after
    end = nfa.state()
    for state in (nothing, something):
      if state is not None:
        nfa.jumps[state].append(end)
    return end

  return build


def _free(depth: int) -> Language:
  """Any value, with arrays and objects nested at most so deep."""
  parts = [_typed(name, {}, _Where(True)) for name in ("null", "boolean", "number", "string")]
  if depth > 0:
    inner = _free(depth - 1)
    text = seq(literal('"'), repeat(_character), literal('"'))
    member = seq(text, _colon, inner)
    parts.append(seq(literal("["), separated(inner, _comma), literal("]")))
    parts.append(seq(literal("{"), separated(member, _comma), literal("}")))
  return either(*parts)
