"""The benchmark of recorded tool calls: what is read, how it is shortened, what is printed."""

import os
import pathlib

import pytest

from agentjax.tools.declared import read_tool
from agentjax.trajectory.record import Message, ToolCall
from agentjax.worlds.pivot.tasks import PivotRow
from benchmarks import recorded_pivots
from benchmarks.recorded_pivots import DOMAINS, Scores, issue_of, read_domain, shorten, table

DATA = os.environ.get("AGENTJAX_DATA")
TOOL = read_tool(
  {
    "name": "find",
    "description": "Finds things. " * 50,
    "parameters": {
      "type": "object",
      "properties": {"item": {"type": "string", "description": "What."}},
      "required": ["item"],
    },
  }
)


def _row(turns):
  history = [Message("system", "Rules. " * 99), Message("user", "Tidy up, please.")]
  for i in range(turns):
    history.append(Message("assistant", "", (ToolCall("find", {"item": f"cup {i}"}),)))
    history.append(Message("tool", f"found {i} " + "x" * 400))
  expected = Message("assistant", "", (ToolCall("find", {"item": "pen"}),))
  return PivotRow(0, "made", "one", turns, tuple(history), expected, (TOOL,))


def test_a_long_history_keeps_its_request_and_its_newest_turns_whole():
  short = shorten(_row(9), 300, 60)
  assert [m.role for m in short.history] == ["user", *("assistant", "tool") * 3]
  assert short.history[-1].content.startswith("found 8 ")
  assert max(len(m.content) for m in short.history) <= 60
  assert short.tools[0].description == "" and "description" not in str(short.tools[0].parameters)
  assert short.tools[0].parameters["required"] == ["item"]
  assert short.expected == _row(9).expected


def test_what_fits_is_kept_and_what_does_not_leaves_the_request():
  assert [m.role for m in shorten(_row(1), 9999, 9999).history] == ["user", "assistant", "tool"]
  assert [m.role for m in shorten(_row(3), 10, 60).history] == ["user"]


def test_differences_are_paired_by_seed():
  def scores(calls, loss):
    return Scores({"airline": calls, "glaive": calls / 2}, {"airline": loss, "glaive": 2 * loss})

  results = [
    {"warm start": scores(0.2 * seed, 2.0), "sft": scores(0.2 * seed + 0.1, 1.5)}
    for seed in (1, 2, 3)
  ]
  lines = table(results, "airline").splitlines()
  # The same gain in every seed has an interval without width, however far apart the seeds are.
  assert "10.0% [10.0, 10.0]" in lines[-2] and "-0.500 [-0.500, -0.500]" in lines[-2]
  assert "learned" in lines[-2] and "kept" in lines[-1] and "5.0% [5.0, 5.0]" in lines[-1]
  assert "40.0% [" in lines[0] and "[40.0, 40.0]" not in lines[0]


@pytest.mark.skipif(DATA is None, reason="AGENTJAX_DATA names no folder of data")
@pytest.mark.parametrize(
  ("domain", "conversations", "calls"),
  [("airline", 200, 1164), ("glaive", 300, 211), ("swe", 8, 120)],
)
def test_the_recordings_are_read_with_their_tools(domain, conversations, calls):
  found = read_domain(domain, pathlib.Path(DATA or ""))
  rows = [r for t in found for r in recorded_pivots.candidates([t], domain)]
  calling = [row for row in rows if row.expected.tool_calls]
  assert (len(found), len(calling)) == (conversations, calls)
  declared = {tool.name for row in calling for tool in row.tools}
  assert declared.issuperset(c.name for row in calling for c in row.expected.tool_calls)
  issues = {issue_of(t) for t in found}
  assert len(issues) == {"airline": 50, "glaive": 300}.get(domain, len(issues)) > 4
  assert set(DOMAINS) == {"airline", "glaive", "swe"}
