"""Experts' trajectories in the forms that they are published in."""

import gzip
import json
import os
import pathlib
import tarfile

import pytest

from agentjax.adapters.agent_trajectories import read_trajectories
from agentjax.data.errors import DataError
from agentjax.tools.declared import read_tool
from agentjax.trajectory.record import Message, ToolCall

DATA = os.environ.get("AGENTJAX_DATA")
TOOL = read_tool(
  {
    "name": "find",
    "parameters": {
      "type": "object",
      "properties": {"item": {"type": "string"}},
      "required": ["item"],
    },
  }
)


def write(path, *rows, name="rows.jsonl"):
  file = path / name
  file.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return file


def call(identity="c1", name="find", arguments='{"item": "cup"}'):
  return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def talk(*messages, **more):
  return {"messages": [{"role": "user", "content": "Where?"}, *messages], **more}


def test_openai_rows_are_read_with_calls_reasoning_tools_and_facts(tmp_path):
  row = talk(
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call()]},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "shelf"}]},
    {"role": "assistant", "content": "On the shelf."},
    tools=[{"type": "function", "function": TOOL.to_dict()}],
    reward=0.5,
    id="a7",
  )
  [found] = read_trajectories(write(tmp_path, row), "openai")
  assert found.messages == (
    Message("user", "Where?"),
    Message("assistant", "", (ToolCall("find", {"item": "cup"}),)),
    Message("tool", "shelf"),
    Message("assistant", "On the shelf."),
  )
  assert (found.name, found.tools, found.metadata) == ("a7", (TOOL,), {"reward": 0.5})
  [kept] = read_trajectories(write(tmp_path, row), "openai", thinking="keep")
  assert kept.messages[1].content == "<think>\nhm\n</think>\n\n"


@pytest.mark.parametrize(
  ("row", "reason"),
  [
    ({"text": "x"}, "no messages, traj, history; fields: text"),
    (talk(), "no assistant message"),
    (talk({"role": "bot", "content": "x"}), "message 1: role 'bot'"),
    (talk({"role": "assistant", "content": ""}), "message 1: an assistant message without text"),
    (talk({"role": "assistant", "content": 3}), "message 1: content is no list"),
    (talk({"role": "assistant", "tool_calls": [call(arguments="{item}")]}), "'find' is not JSON"),
    (talk({"role": "assistant", "tool_calls": [call(arguments="[1]")]}), "no JSON object"),
    (talk({"role": "assistant", "tool_calls": [{"id": "c", "function": {}}]}), "no 'name'"),
    (
      talk(
        {"role": "assistant", "tool_calls": [call()]},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
      ),
      "tool_call_id 'c2' is of no call",
    ),
    (
      talk({"role": "assistant", "content": "x"}, {"role": "tool", "content": "y"}),
      "message 2: a tool's answer without a call",
    ),
    (talk({"role": "assistant", "content": "x"}, tools=[{"name": ""}]), "a tool needs a name"),
    (
      talk({"role": "assistant", "content": [{"type": "image_url", "image_url": ""}]}),
      "content of type 'image_url'",
    ),
  ],
)
def test_a_row_that_does_not_fit_is_refused_with_file_and_line(tmp_path, row, reason):
  good = talk({"role": "assistant", "content": "x"})
  path = write(tmp_path, good, row)
  with pytest.raises(DataError, match=reason) as caught:
    list(read_trajectories(path, "openai"))
  assert str(caught.value).startswith(f"{path}:2: ")


WHOLE = {
  "openai": talk(
    {"role": "assistant", "content": "x", "reasoning_content": "hm", "tool_calls": [call()]},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "shelf"}]},
    tools=[{"type": "function", "function": TOOL.to_dict()}],
    id="a",
  ),
  "sharegpt": {
    "conversations": [
      {"from": "human", "value": "Where?"},
      {"from": "function_call", "value": '{"name": "find", "arguments": {}}'},
    ],
    "tools": "[]",
    "system": "s",
  },
  "adp": {
    "id": "x",
    "content": [
      {"class_": "text_observation", "content": "Where?", "source": "user", "name": None},
      {"class_": "code_action", "language": "bash", "content": "ls", "description": None},
      {"class_": "web_observation", "axtree": "page", "html": None, "url": "u"},
      {"class_": "api_action", "function": "find", "kwargs": {}, "description": "d"},
    ],
  },
}


def places(value, at=()):
  """Paths to everything inside a JSON value."""
  items = value.items() if isinstance(value, dict) else enumerate(value)
  for key, inner in items:
    yield (*at, key)
    if isinstance(inner, dict | list):
      yield from places(inner, (*at, key))


@pytest.mark.parametrize("form", WHOLE)
@pytest.mark.parametrize("junk", [None, 3, "x", [], ["x"], {}, {"x": 1}, [[1]], True])
def test_junk_anywhere_in_a_row_is_read_or_refused_but_never_a_crash(tmp_path, form, junk):
  path = tmp_path / "rows.jsonl"
  rows = []
  for place in places(WHOLE[form]):
    row = json.loads(json.dumps(WHOLE[form]))
    holder = row
    for key in place[:-1]:
      holder = holder[key]
    holder[place[-1]] = junk
    rows.append(row)
  for row in rows:
    path.write_text(json.dumps(row))
    try:
      [found] = read_trajectories(path, form, thinking="keep")
    except DataError as error:
      assert error.line == 1
    else:
      assert all(isinstance(m.content, str) for m in found.messages)


def test_lists_of_pairs_and_standardised_rows_give_the_same_record(tmp_path):
  pairs = [
    ("human", "Where?"),
    ("function_call", '{"name": "find", "arguments": {"item": "cup"}}'),
    ("observation", "shelf"),
    ("gpt", "There."),
  ]
  sharegpt = {"conversations": [{"from": a, "value": b} for a, b in pairs], "tools": "[]"}
  adp = {
    "id": "x",
    "content": [
      {"class_": "text_observation", "content": "Where?", "source": "user", "name": None},
      {"class_": "api_action", "function": "find", "kwargs": {"item": "cup"}, "description": None},
      {"class_": "text_observation", "content": "shelf", "source": "environment"},
      {"class_": "message_action", "content": "There.", "description": None},
    ],
    "details": {},
  }
  expected = (
    Message("user", "Where?"),
    Message("assistant", "", (ToolCall("find", {"item": "cup"}),)),
    Message("tool", "shelf"),
    Message("assistant", "There."),
  )
  for form, row in (("sharegpt", sharegpt), ("adp", adp)):
    path = tmp_path / f"{form}.json"
    path.write_text(json.dumps([row, row]))
    one, two = read_trajectories(path, form)
    assert one.messages == two.messages == expected
    path.write_text(json.dumps([row, {**row, "content": [], "conversations": []}]))
    with pytest.raises(DataError, match=r"row 2: con\w+ is no list with something in it"):
      list(read_trajectories(path, form))


def test_actions_in_a_row_are_one_turn_and_code_is_a_call(tmp_path):
  content = [
    {"class_": "text_observation", "content": "Fix it.", "source": "user"},
    {"class_": "message_action", "content": "I look.", "description": None},
    {"class_": "code_action", "language": "bash", "content": "ls", "description": None},
    {"class_": "api_action", "function": "view", "kwargs": {}, "description": None},
    {"class_": "text_observation", "content": "a.py", "source": "environment"},
    {"class_": "text_observation", "content": "x = 1", "source": "environment"},
    {"class_": "web_observation", "axtree": "page", "html": None, "url": "u"},
    {"class_": "code_action", "language": "python", "content": "1", "description": "Then this."},
  ]
  path = write(tmp_path, {"id": "x", "content": content, "details": {}})
  [found] = read_trajectories(path, "adp")
  assert found.messages == (
    Message("user", "Fix it."),
    Message(
      "assistant", "I look.", (ToolCall("execute_bash", {"command": "ls"}), ToolCall("view", {}))
    ),
    Message("tool", "a.py"),
    Message("tool", "x = 1"),
    Message("user", "URL: u\npage"),
    Message("assistant", "Then this.", (ToolCall("execute_ipython_cell", {"code": "1"}),)),
  )


@pytest.mark.skipif(DATA is None, reason="AGENTJAX_DATA names no folder of data")
def test_real_trajectories_are_read_whole(tmp_path):
  root = pathlib.Path(DATA or "")
  tools = [read_tool(t) for t in json.loads((root / "tau_bench/airline/tools.json").read_text())]
  counts = {}
  for form, name in (
    ("openai", "tau_trajectories/gpt-4o-airline.jsonl.gz"),
    ("openai", "toolcall_sft/reason_tool_use_50.jsonl.gz"),
    ("sharegpt", "toolcall_sft/glaive_toolcall_en_300.json.gz"),
  ):
    found = list(read_trajectories(root / name, form, tools=tools))
    turns = [m for t in found for m in t.messages if m.role == "assistant"]
    counts[name] = (len(found), len(turns), sum(len(m.tool_calls) for m in turns))
  assert list(counts.values()) == [(200, 2454, 1164), (50, 112, 68), (300, 957, 211)]
  with tarfile.open(root / "adp_samples/adp_samples.tar.xz") as archive:
    archive.extractall(tmp_path, filter="data")
  read = {
    path.parent.name: sum(1 for _ in read_trajectories(path, "adp"))
    for path in tmp_path.rglob("sample_std.json")
  }
  assert len(read) == 17 and sum(read.values()) == 85


def test_compressed_trajectories_read_the_same(tmp_path):
  row = talk({"role": "assistant", "content": "x"})
  path = tmp_path / "one.traj.gz"
  path.write_bytes(gzip.compress(json.dumps({"history": row["messages"]}).encode()))
  [found] = read_trajectories(path, "openai")
  assert found.messages[1] == Message("assistant", "x") and found.name == "one.traj.gz"
