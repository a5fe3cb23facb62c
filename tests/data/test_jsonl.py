import gzip
import json
import os

import pytest

from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl
from agentjax.data.jsonl_tasks import load_jsonl
from agentjax.tools.declared import declared_tools
from agentjax.trajectory.record import Flag, Message, ToolCall

DATA = os.environ.get("AGENTJAX_DATA")


def write(tmp_path, content: bytes, name="rows.jsonl"):
  path = tmp_path / name
  path.write_bytes(content)
  return path


def test_rows_come_with_their_line_numbers(tmp_path):
  path = write(tmp_path, b'{"a": 1}\n{"a": "\xc3\xa9"}\r\n\n \n')
  assert list(read_jsonl(path)) == [(1, {"a": 1}), (2, {"a": "é"})]


def test_compressed_files_read_the_same(tmp_path):
  path = tmp_path / "rows.jsonl.gz"
  path.write_bytes(gzip.compress(b'{"a": 1}\n{"a": 2}'))
  assert list(read_jsonl(path)) == [(1, {"a": 1}), (2, {"a": 2})]


@pytest.mark.parametrize(
  ("content", "line", "reason"),
  [
    (b"", None, "no rows"),
    (b"\n\n", None, "no rows"),
    (b'{"a": 1}\n{"a": ', 2, "not JSON"),
    (b'{"a": 1}\n{"a": 1} {"a": 2}\n', 2, "not JSON: Extra data at column 10"),
    (b'{"a": 1}\n[1]\n', 2, "a JSON list"),
    (b'{"a": 1}\n\n{"a": 2}\n', 2, "blank line"),
    (b'{"a": 1}\n{"a": "\xff"}\n', 2, "not UTF-8 at byte 7"),
    (b'{"a": NaN}\n', 1, "NaN is not part of JSON"),
    (b'{"a": 1}\n' + b"[" * 100_000, 2, "not JSON"),
    (b'{"a": 1}\n{"a": ' + b"9" * 5000 + b"}", 2, "not JSON"),
    (b'{"a": 1}\n\x00\x00\x00\n', 2, "not JSON"),
  ],
)
def test_a_damaged_file_is_refused_with_path_line_and_reason(tmp_path, content, line, reason):
  path = write(tmp_path, content)
  with pytest.raises(DataError, match=reason) as caught:
    list(read_jsonl(path))
  assert caught.value.line == line
  place = f"{path}:" if line is None else f"{path}:{line}:"
  assert str(caught.value).startswith(place)


def test_a_missing_file_or_a_folder_is_refused_by_path(tmp_path):
  with pytest.raises(DataError, match="nothing.jsonl: no such file"):
    list(read_jsonl(tmp_path / "nothing.jsonl"))
  with pytest.raises(DataError, match="cannot be opened"):
    list(read_jsonl(tmp_path))


@pytest.mark.parametrize("damage", ["cut", "flip", "plain"])
def test_damaged_compression_is_refused(tmp_path, damage):
  rows = "".join(json.dumps({"a": i * 7919}) + "\n" for i in range(2000)).encode()
  packed = bytearray(gzip.compress(rows))
  if damage == "cut":
    del packed[len(packed) // 2 :]
  elif damage == "flip":
    packed[-6] ^= 0xFF  # the checksum
  path = write(tmp_path, rows if damage == "plain" else bytes(packed), "rows.jsonl.gz")
  with pytest.raises(DataError, match="cannot be read past here") as caught:
    list(read_jsonl(path))
  assert caught.value.line is not None


def test_tasks_take_the_named_fields_and_the_line_as_id(tmp_path):
  path = write(tmp_path, b'{"input": "1+1?", "target": 2.0}\n{"input": "x?", "target": " y "}\n')
  first, second = load_jsonl(
    path, source="made", question_field="input", answer_field="target", first_id=100
  )
  assert (first.id, first.prompt, first.answer) == (100, (Message("user", "1+1?"),), "2")
  assert (second.id, second.answer, second.source) == (101, "y", "made")
  assert (
    len(load_jsonl(path, source="made", question_field="input", answer_field="target", limit=1))
    == 1
  )


@pytest.mark.parametrize(
  ("row", "reason"),
  [
    ({"question": "?"}, "no 'answer'; its fields: question"),
    ({"question": "", "answer": "1"}, "'question' is empty"),
    ({"question": "?", "answer": "  "}, "'answer' is empty"),
    ({"question": "?", "answer": None}, "'answer' is a NoneType"),
    ({"question": "?", "answer": ["1"]}, "'answer' is a list"),
    ({"question": "?", "answer": True}, "'answer' is a bool"),
  ],
)
def test_a_row_without_question_or_answer_is_refused_with_its_line(tmp_path, row, reason):
  good = json.dumps({"question": "?", "answer": "1"})
  path = write(tmp_path, f"{good}\n{json.dumps(row)}\n".encode())
  with pytest.raises(DataError, match=reason) as caught:
    load_jsonl(path, source="made")
  assert caught.value.line == 2


def _rows(tmp_path, *rows):
  return write(tmp_path, "".join(json.dumps(row) + "\n" for row in rows).encode())


_SAID = [
  {"role": "system", "content": "Be brief."},
  {"role": "user", "content": "1+1?"},
  {
    "role": "assistant",
    "content": "",
    "reasoning_content": "easy",
    "tool_calls": [{"id": "a", "function": {"name": "add", "arguments": '{"x": 1}'}}],
  },
  {"role": "tool", "content": "2", "tool_call_id": "a"},
  {"role": "assistant", "content": "2"},
]


def test_a_conversation_is_a_prompt_and_a_demonstration(tmp_path):
  tools = [{"type": "function", "function": {"name": "add", "description": "Adds."}}]
  path = _rows(tmp_path, {"messages": _SAID, "tools": tools, "metadata": {"level": 2}})
  (task,) = load_jsonl(path, source="made", messages_field="messages", answer_field="")
  assert task.prompt == (Message("system", "Be brief."), Message("user", "1+1?"))
  called = Message("assistant", "<think>\neasy\n</think>\n\n", (ToolCall("add", {"x": 1}),))
  assert task.demonstration == (called, Message("tool", "2"), Message("assistant", "2"))
  assert task.answer == "" and task.metadata["level"] == 2
  assert [tool.name for tool in declared_tools(task.metadata)] == ["add"]


def test_turns_may_have_weights_and_marks(tmp_path):
  said = [one | {"weight": None, "flags": None} for one in _SAID]  # as Arrow fills columns
  said[3]["flags"], said[4]["weight"] = ["tool_error"], 0
  path = _rows(tmp_path, {"messages": said})
  (task,) = load_jsonl(path, source="made", messages_field="messages", answer_field="")
  assert [set(m.flags) for m in task.demonstration] == [set(), {Flag.TOOL_ERROR}, set()]
  assert [m.weight for m in task.demonstration] == [1.0, 1.0, 0.0]


def test_a_conversation_may_be_a_prompt_alone(tmp_path):
  path = _rows(tmp_path, {"messages": _SAID[:2], "answer": "2"})
  (task,) = load_jsonl(path, source="made", messages_field="messages")
  assert (len(task.prompt), task.demonstration, task.answer) == (2, (), "2")


def test_a_response_is_a_demonstration(tmp_path):
  path = _rows(tmp_path, {"question": "1+1?", "answer": 2, "response": "It is 2."})
  (task,) = load_jsonl(path, source="made", response_field="response")
  assert (task.prompt, task.answer) == ((Message("user", "1+1?"),), "2")
  assert task.demonstration == (Message("assistant", "It is 2."),)


@pytest.mark.parametrize(
  ("row", "reason"),
  [
    ({}, "no 'said'; its fields: none"),
    ({"said": "x"}, "'said' is a str; allowed: a list"),
    ({"said": []}, "'said': the conversation has no assistant"),
    ({"said": [{"role": "robot"}]}, "'said': message 0: role 'robot'"),
    ({"said": [_SAID[4]]}, "'said' starts with an assistant's"),
    ({"said": _SAID[:4]}, "'said' ends with a tool message"),
    ({"said": [_SAID[1], {"role": "assistant", "content": 3}]}, "'said': message 1: content"),
    (
      {"said": [_SAID[1], _SAID[4] | {"weight": -1}]},
      "weight -1; allowed: a number >= 0",
    ),
    ({"said": [_SAID[1] | {"weight": 0}, _SAID[4]]}, "weight 0 of a user message"),
    ({"said": [_SAID[1], _SAID[4] | {"weight": True}]}, "message 1: weight True"),
    ({"said": [_SAID[1], _SAID[4] | {"flags": ["bad"]}]}, "flags .*allowed: a list of tool_error"),
    ({"said": _SAID, "metadata": [1]}, "'metadata' is a list"),
    ({"said": _SAID, "tools": [{}]}, "'tools': a tool needs a name"),
  ],
)
def test_a_conversation_that_does_not_fit_is_refused_with_line_and_field(tmp_path, row, reason):
  path = _rows(tmp_path, {"said": _SAID}, row)
  with pytest.raises(DataError, match=reason) as caught:
    load_jsonl(path, source="made", messages_field="said", answer_field="")
  assert caught.value.line == 2


def test_a_row_without_a_response_is_refused(tmp_path):
  path = _rows(tmp_path, {"question": "?", "answer": "1", "response": " "})
  with pytest.raises(DataError, match="1: 'response' is empty"):
    load_jsonl(path, source="made", response_field="response")


@pytest.mark.skipif(DATA is None, reason="AGENTJAX_DATA is not set")
@pytest.mark.parametrize(
  ("name", "rows"),
  [
    ("mawps_multiarith", 600),
    ("mawps_singleeq", 508),
    ("mawps_addsub", 395),
    ("mawps_singleop", 562),
  ],
)
def test_public_collections_of_word_problems_read_whole(name, rows):
  path = os.path.join(DATA, "math_words", f"{name}.jsonl")
  tasks = load_jsonl(path, source=name, question_field="input", answer_field="target")
  assert len(tasks) == rows
