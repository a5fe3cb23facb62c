import pytest

from agentjax.adapters.huggingface_text.calls import parse_text
from agentjax.trajectory.record import ToolCall

SCHEMAS = {
  "run": {"properties": {"code": {"type": "string"}}, "required": ["code"]},
  "book": {
    "properties": {
      "seat": {"type": "integer"},
      "window": {"type": "boolean"},
      "name": {"type": ["string", "null"]},
      "meals": {"type": "array"},
      "note": {},
    }
  },
}


def _xml(tool, /, **values):
  body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
  return f"<tool_call>\n<function={tool}>\n{body}</function>\n</tool_call>"


def test_calls_are_read_in_order_with_the_text_before_them():
  text = 'So.\n<tool_call>\n{"name": "run", "arguments": {"code": "1"}}\n</tool_call>'
  assert parse_text(text + "\n" + text, SCHEMAS, "hermes") == (
    "So.\n",
    (ToolCall("run", {"code": "1"}),) * 2,
  )
  assert parse_text("No call.", SCHEMAS, "xml") == ("No call.", ())


def test_values_have_the_types_of_the_schema():
  call = _xml("book", seat="3", window="True", name="Ann", meals='["a", 1]', note="4")
  assert parse_text(call, SCHEMAS, "xml").calls == (
    ToolCall("book", {"seat": 3, "window": True, "name": "Ann", "meals": ["a", 1], "note": "4"}),
  )
  assert parse_text(_xml("book", name="None"), SCHEMAS, "xml").calls[0].arguments == {"name": None}


@pytest.mark.parametrize(
  "code",
  ["", "\n", " x = 1\n  print(x)\n", "a </parameter> b", "if a < b:\n\n  print('</function>')"],
)
def test_code_keeps_every_character(code):
  assert parse_text(_xml("run", code=code), SCHEMAS, "xml").calls == (
    ToolCall("run", {"code": code}),
  )


def test_a_tool_nobody_knows_reads_as_a_call():
  assert parse_text(_xml("oracle", x="1"), SCHEMAS, "xml").calls == (
    ToolCall("oracle", {"x": "1"}),
  )


@pytest.mark.parametrize(
  ("call_format", "text", "name", "error"),
  [
    ("hermes", "<tool_call>{}</tool_call>", "", 'needs a "name"'),
    ("hermes", "<tool_call>run(1)</tool_call>", "", "must be a JSON object"),
    ("hermes", '<tool_call>{"name": "run"', "", "cut off before </tool_call>"),
    ("xml", "<tool_call>run</tool_call>", "", "must be <function=NAME>"),
    ("xml", "<tool_call><function=run>", "", "cut off before </tool_call>"),
    ("xml", "<tool_call><function=></function></tool_call>", "", "no tool name"),
    ("xml", _xml("book", seat="three"), "book", "seat of book must be JSON of type integer"),
    ("xml", "<tool_call><function=run>print(1)</function></tool_call>", "run", "got 'print(1)'"),
    (
      "xml",
      _xml("run", code="1").replace("</function>", "<parameter=code>2</parameter></function>"),
      "run",
      "given twice",
    ),
  ],
)
def test_a_malformed_call_says_why(call_format, text, name, error):
  (call,) = parse_text(text, SCHEMAS, call_format).calls
  assert call.name == name and call.arguments == {}
  assert call.error is not None and error in call.error
