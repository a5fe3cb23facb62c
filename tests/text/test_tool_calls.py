import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentjax.text.tokenizer import ByteTokenizer
from agentjax.text.tool_calls import format_call, parse_turn, text_parameter
from agentjax.trajectory.record import ToolCall

TOKENIZER = ByteTokenizer()
SPECIAL = TOKENIZER.special
SCHEMAS: dict[str, dict[str, Any]] = {
  "calculator": {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
  },
  "book": {
    "type": "object",
    "properties": {"seat": {"type": "integer"}, "name": {"type": "string"}},
    "required": ["seat", "name"],
  },
  "now": {"type": "object", "properties": {}},
}


def _turn(*parts: str | int, closed: bool = True) -> list[int]:
  ids: list[int] = []
  for part in parts:
    ids.extend(TOKENIZER.encode(part) if isinstance(part, str) else [part])
  return [*ids, SPECIAL.end] if closed else ids


JSON = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.floats(allow_nan=False, allow_infinity=False)
  | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(
      st.text(st.characters(exclude_categories=["Cs"]), max_size=4), inner, max_size=3
    )
  ),
  max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(
  name=st.sampled_from(["book", "now", "nobody-knows"]),
  arguments=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), JSON),
)
def test_a_json_call_reads_back(name, arguments):
  call = ToolCall(name, arguments)
  text = format_call(call, "json", SCHEMAS)
  assert parse_turn(TOKENIZER, _turn(SPECIAL.call, text), SCHEMAS, "json").calls == (call,)
  if name != "nobody-knows":
    compact = format_call(call, "compact", SCHEMAS)
    assert parse_turn(TOKENIZER, _turn(SPECIAL.call, compact), SCHEMAS).calls == (call,)


@settings(max_examples=200, deadline=None)
@given(
  text=st.text(st.characters(exclude_categories=["Cs"])), tool=st.sampled_from(["calculator", "?"])
)
@example(text="  x = 1\n  print(x)\n", tool="calculator")
@example(text="", tool="calculator")
def test_a_compact_call_keeps_its_text_to_the_last_space(text, tool):
  call = ToolCall(tool, {"expression" if tool == "calculator" else "input": text})
  ids = _turn("So", SPECIAL.call, format_call(call, "compact", SCHEMAS))
  assert parse_turn(TOKENIZER, ids, SCHEMAS) == ("So", (call,))


@settings(max_examples=500, deadline=None)
@given(
  ids=st.lists(st.one_of(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 6, 6]), st.integers(8, 263))),
  closed=st.booleans(),
  tool_call_format=st.sampled_from(["compact", "json"]),
)
def test_whatever_a_policy_samples_is_read(ids, closed, tool_call_format):
  ids = [*ids, SPECIAL.end] if closed else ids
  text, calls = parse_turn(TOKENIZER, ids, SCHEMAS, tool_call_format)
  assert len(calls) == ids.count(SPECIAL.call)
  for call in calls:
    assert call.error is None or not call.arguments
    json.dumps(dict(call.arguments)).encode()


@pytest.mark.parametrize(
  ("text", "error"),
  [
    ("", "must be a JSON object"),
    ("[]", "got a JSON list"),
    ("{}", 'needs a "name"'),
    ('{"name": 3}', 'needs a "name"'),
    ('{"name": "book", "arguments": [1]}', '"arguments" of book must be a JSON object'),
    ('{"name": "book", "args": {}}', "got 'args'"),
    ('{"name": "book", "arguments": {"seat": NaN}}', "NaN is not JSON"),
    ('{"name": "book", "arguments": {"name": "\\ud800"}}', "surrogates not allowed"),
    ('{"name": "book"', "must be a JSON object"),
    ('{"name": "book", "arguments": {"seat": ' + "9" * 5000 + "}}", "must be a JSON object"),
    ("[" * 100_000, "nested more than 100 deep"),
    ('{"name": "now", "arguments": {"a": ' + "[" * 600 + "]" * 600 + "}}", "more than 100 deep"),
  ],
)
def test_a_malformed_json_call_says_why(text, error):
  (call,) = parse_turn(TOKENIZER, _turn(SPECIAL.call, text), SCHEMAS, "json").calls
  assert call.error is not None and error in call.error and call.arguments == {}


@pytest.mark.parametrize(
  ("parts", "closed", "name", "error"),
  [
    (["  "], True, "", "no tool name"),
    (["book seat 3"], True, "book", "arguments of book must be a JSON object"),
    (["calculator 3", SPECIAL.user, "4"], True, "calculator", "<|user|> inside a call"),
    (["calculator 3+"], False, "calculator", "cut off before <|end|>"),
  ],
)
def test_a_malformed_compact_call_says_why(parts, closed, name, error):
  ids = _turn("Hm", SPECIAL.call, *parts, closed=closed)
  text, (call,) = parse_turn(TOKENIZER, ids, SCHEMAS)
  assert text == "Hm" and call.name == name
  assert call.error is not None and error in call.error and call.arguments == {}


def test_only_the_last_call_of_a_cut_turn_is_lost():
  ids = _turn(SPECIAL.call, "calculator 1+1", SPECIAL.call, "calcul", closed=False)
  first, last = parse_turn(TOKENIZER, ids, SCHEMAS).calls
  assert first == ToolCall("calculator", {"expression": "1+1"}) and last.error is not None


def test_text_that_spells_a_call_is_text():
  turn = parse_turn(TOKENIZER, _turn("<|call|>calculator 1+1<|end|>"), SCHEMAS)
  assert turn == ("<|call|>calculator 1+1<|end|>", ())


def test_a_tool_nobody_knows_reads_as_a_call():
  (call,) = parse_turn(TOKENIZER, _turn(SPECIAL.call, "oracle who am I"), SCHEMAS).calls
  assert call == ToolCall("oracle", {"input": "who am I"})


def test_a_tool_without_parameters_needs_no_text():
  (call,) = parse_turn(TOKENIZER, _turn(SPECIAL.call, "now"), SCHEMAS).calls
  assert call == ToolCall("now", {})


def test_nothing_may_follow_the_end_of_a_turn():
  with pytest.raises(ValueError, match="2 ids follow"):
    parse_turn(TOKENIZER, [*_turn("a"), 9, 9], SCHEMAS)


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (ToolCall("calculator", {"expression": 3}), "text of its parameter 'expression' alone"),
    (ToolCall("calculator", {"expression": "3", "x": 1}), "text of its parameter"),
    (ToolCall("two words", {"x": "3"}), "must be one word"),
    (ToolCall("", {"x": "3"}), "must be one word"),
    (ToolCall("book", {}, error="no name"), "malformed call"),
  ],
)
def test_a_call_that_would_not_read_back_is_refused(call, message):
  with pytest.raises(ValueError, match=message):
    format_call(call, "compact", SCHEMAS)


def test_the_text_parameter_is_the_only_required_string():
  assert {k: text_parameter(v) for k, v in SCHEMAS.items()} == {
    "calculator": "expression",
    "book": None,
    "now": None,
  }
  assert text_parameter({"required": ["n"], "properties": {"n": {"type": "integer"}}}) is None
