import itertools
import json
import random

import jsonschema
import numpy as np
import pytest

from agentjax.text.json_language import FREE_DEPTH, json_language, string_language
from agentjax.text.language import Automaton, LanguageError, compile_language

SCHEMAS = [
  {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
  {
    "type": "object",
    "properties": {
      "a": {"type": "integer", "minimum": -17, "maximum": 1205},
      'b"': {"type": "string", "minLength": 2, "maxLength": 6},
      "c": {"enum": ["x", 'q"é', 3, None, [1, {"a": 2}]]},
    },
    "required": ['b"'],
    "additionalProperties": False,
  },
  {
    "type": "array",
    "items": {"anyOf": [{"type": "null"}, {"type": "number", "minimum": -3, "maximum": 20}]},
    "minItems": 1,
    "maxItems": 3,
  },
  {"type": "string", "pattern": r"^[a-z]{2}\d+$", "maxLength": 5},
  {"type": "string", "pattern": "b.d"},
  {},
  {"type": "object", "additionalProperties": {"type": ["integer", "boolean"]}},
  {
    "type": "object",
    "properties": {
      "p": {"$ref": "#/$defs/q"},
      "l": {"type": "array", "items": {"$ref": "#/$defs/q"}},
    },
    "$defs": {"q": {"type": ["integer", "null"], "exclusiveMinimum": 5}},
  },
  {"const": {"k": [True, "é"]}},
]  # fmt: skip


def distances(automaton: Automaton) -> np.ndarray:
  """Letters from every state to the nearest end."""
  distance = np.where(automaton.accepting, 0, 10**6)
  targets = np.where(automaton.next_state >= 0, automaton.next_state, 0)
  for _ in range(len(distance)):
    through = np.where(automaton.next_state >= 0, distance[targets], 10**6).min(axis=1) + 1
    if (through >= distance).all():
      break
    distance = np.minimum(distance, through)
  return distance


def walk(automaton: Automaton, distance: np.ndarray, rng: random.Random) -> bytes:
  """A text of the language; after 60 bytes the shortest way to its end."""
  state, text = 0, bytearray()
  while True:
    letters = np.flatnonzero(automaton.next_state[state] >= 0)
    if automaton.accepting[state] and (rng.random() < 0.3 or not letters.size):
      return bytes(text)
    if len(text) > 60:
      closer = distance[automaton.next_state[state, letters]] < distance[state]
      letters = letters[closer] if closer.any() else letters
    text.append(rng.choice(letters.tolist()))
    state = automaton.next_state[state, text[-1]]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:40])
def test_every_text_parses_and_satisfies_the_schema(schema):
  automaton = compile_language(json_language(schema))
  validator = jsonschema.Draft202012Validator(schema)
  rng, distance = random.Random(0), distances(automaton)
  for _ in range(150):
    value = json.loads(walk(automaton, distance, rng).decode())
    validator.validate(value)
    json.dumps(value, ensure_ascii=False).encode()  # no half of a surrogate pair


VALUES = [None, True, 0, -1, 7, 2.5, "", "ab", "é\n", [], [1], {}, {"a": 1}]
SMALL = [
  {"type": "integer"},
  {"type": ["string", "null"]},
  {"type": "number", "minimum": -1, "maximum": 5},
  {"type": "integer", "exclusiveMinimum": -1, "maximum": 7},
  {"type": "array", "items": {"type": "integer"}},
  {"enum": [7, "ab", [1]]},
  {"type": "string", "minLength": 1, "maxLength": 2},
  {"anyOf": [{"type": "object"}, {"const": 0}]},
  {},
  {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "null"}, "c": {}},
    "required": ["b"],
  },
  {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
]


@pytest.mark.parametrize("schema", SMALL, ids=json.dumps)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["dense", "spaced"])
def test_what_json_dumps_writes_of_a_valid_value_is_accepted(schema, separators):
  automaton = compile_language(json_language(schema))
  validator = jsonschema.Draft202012Validator(schema)
  names = [k for n in range(4) for k in itertools.combinations("abc", n)]
  objects = [dict.fromkeys(n, v) for n in names for v in (1, None)]
  for value in [*VALUES, *objects]:
    text = json.dumps(value, separators=separators, ensure_ascii=False)
    declared = schema.get("properties")
    undeclared = (
      isinstance(value, dict) and declared is not None and not value.keys() <= {*declared}
    )
    assert automaton.accepts(text) == (validator.is_valid(value) and not undeclared), text
    escaped = json.dumps(value, separators=separators)
    assert automaton.accepts(escaped) == automaton.accepts(text)


@pytest.mark.parametrize(("low", "high"), [(0, 0), (-17, 1205), (95, 105), (-120, -9), (7, 7000)])
def test_bounds_of_integers_hold_exactly(low, high):
  schema = {"type": "integer", "minimum": low, "maximum": high}
  automaton = compile_language(json_language(schema))
  found = [i for i in range(-8000, 8000) if automaton.accepts(str(i))]
  assert found == list(range(low, high + 1))


def test_free_values_nest_to_a_depth():
  automaton = compile_language(json_language({}))
  assert automaton.accepts("[" * FREE_DEPTH + "1" + "]" * FREE_DEPTH)
  assert not automaton.accepts("[" * (FREE_DEPTH + 1) + "1" + "]" * (FREE_DEPTH + 1))


def test_bare_texts_are_spelled_without_quotes():
  assert string_language({"type": "string", "description": "any"}) is None
  listed = compile_language(string_language({"type": "string", "enum": ["a b", 'c"']}))
  assert [listed.accepts(t) for t in ("a b", 'c"', '"a b"', "x")] == [True, True, False, False]


@pytest.mark.parametrize(
  ("schema", "named"),
  [
    ({"oneOf": []}, "oneOf"),
    ({"type": "integer", "multipleOf": 3}, "multipleOf"),
    ({"properties": {"x": {"uniqueItems": True}}}, "/properties/x"),
    ({"$ref": "#"}, "lead back"),
    ({"$ref": "http://x/y"}, "into the schema"),
    ({"type": "foo"}, "foo"),
    ({"type": "number", "minimum": 0.5}, "minimum"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "minimum"),
    (False, "nothing|something"),
    ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "required"),
    ({"type": "string", "enum": [1]}, "enum"),
    ({"anyOf": [{}], "type": "string"}, "beside anyOf"),
  ],
  ids=str,
)
def test_what_cannot_be_kept_is_refused_by_name(schema, named):
  with pytest.raises(LanguageError, match=named):
    compile_language(json_language(schema))
