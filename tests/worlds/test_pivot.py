import asyncio

import pytest

from agentjax.tools.declared import DeclaredTool, declared_tools, read_tool, read_tools
from agentjax.tools.protocol import ToolContext, ToolStatus
from agentjax.trajectory.record import Message, Status, Task, ToolCall
from agentjax.world.environment import Action
from agentjax.worlds.pivot.environment import PivotEnvironment

TOOL = read_tool({"name": "find", "parameters": {"type": "object", "properties": {}}})
HISTORY = (Message("user", "find the cup"), Message("assistant", "", (ToolCall("find", {}),)))
EXPECTED = Message("assistant", "the secret answer")
TASK = Task(4, HISTORY, "the secret answer", "made", (EXPECTED,), {"tools": [TOOL.to_dict()]})


def one_turn(action, task=TASK):
  environment = PivotEnvironment()
  observation = asyncio.run(environment.reset(task, 0))
  return environment, observation, asyncio.run(environment.step(action))


def test_the_history_is_shown_with_its_tools_and_the_expected_turn_is_not():
  environment, observation, _ = one_turn(Action("x"))
  assert observation.messages == HISTORY
  assert list(environment.tools) == [TOOL]
  assert "secret" not in repr(observation)


def test_one_turn_ends_it_with_its_text_and_its_calls_recorded_and_none_run():
  calls = (
    ToolCall("find", {"item": "cup"}),
    ToolCall("fly", {}),
    ToolCall("find", {}, error="no JSON"),
  )
  _, _, step = one_turn(Action("here", calls))
  assert step.terminated and step.answer == "here" and step.reward is None
  found = [(r.name, dict(r.arguments), r.status, r.output) for r in step.tools]
  assert found == [
    ("find", {"item": "cup"}, "ok", ""),
    ("fly", {}, "error", "no tool 'fly' is declared"),
    ("find", {}, "error", "no JSON"),
  ]


def test_where_nothing_is_declared_every_name_may_be_called():
  bare = Task(4, HISTORY, "", "made", (EXPECTED,))
  _, _, step = one_turn(Action("", (ToolCall("fly", {}),)), bare)
  assert [r.status for r in step.tools] == ["ok"]


def test_a_cut_turn_is_truncated():
  _, _, step = one_turn(Action("he", truncated=True))
  assert step.truncated and step.status is Status.TRUNCATED and not step.terminated


def test_a_snapshot_brings_a_fresh_one_to_the_same_place():
  environment, *_ = one_turn(Action("x"))
  other = PivotEnvironment()
  asyncio.run(other.reset(TASK, 1))
  other.restore(environment.snapshot())
  assert asyncio.run(other.step(Action("y"))).answer == "y"


def test_calling_a_declared_tool_is_a_fault():
  result = asyncio.run(TOOL({}, ToolContext("e", 0, 1.0)))
  assert result.status is ToolStatus.INFRA_ERROR


@pytest.mark.parametrize(
  ("value", "message"),
  [
    ({"parameters": {}}, "needs a name"),
    ("find", "needs a name"),
    ({"name": "f", "parameters": {"type": "array"}}, "no JSON schema of an object"),
    ({"name": "f", "parameters": {"type": "object", "properties": 3}}, "no JSON schema at"),
  ],
)
def test_a_declaration_that_is_none_is_refused(value, message):
  with pytest.raises(ValueError, match=message):
    read_tool(value)


def test_declarations_come_in_both_forms_and_with_the_types_of_python():
  inner = {
    "name": "f",
    "parameters": {"type": "dict", "properties": {"a": {"type": "str, optional"}}},
  }
  tool = read_tool({"type": "function", "function": inner})
  assert tool == read_tool(inner)
  assert tool.parameters == {"type": "object", "properties": {"a": {"type": "string"}}}
  assert declared_tools({"tools": [tool.to_dict()]}) == (tool,)
  assert isinstance(declared_tools({"tools": [tool.to_dict()]})[0], DeclaredTool)
  with pytest.raises(ValueError, match="two tools are named 'f'"):
    read_tools([inner, inner])
