"""Whether an episode called every one of some tools."""

import pytest

from agentjax.config import ConfigError
from agentjax.recipes.scorers import UsedConfig
from agentjax.sandbox.config import Sandboxes
from agentjax.trajectory.record import Status, Task, ToolRecord, Trajectory

TASK = Task(0, (), "", "made")


def used(*calls, status=Status.OK, tools=("search", "python")):
  records = [ToolRecord(0, name, {}, said, "", 0.1) for name, said in calls]
  made = Trajectory(0, 0, 0, "made", segments=[], tools=records, status=status)
  return UsedConfig(tools=tools).build(Sandboxes())(made, TASK)


def test_every_tool_must_have_been_called_with_success():
  assert used(("python", "ok"), ("search", "ok"), ("search", "error")) == 1
  assert used(("python", "ok"), ("search", "error")) == 0
  assert used(("python", "ok")) == 0 and used(("python", "ok"), tools=("python",)) == 1
  assert used(("python", "ok"), ("search", "ok"), status=Status.POLICY_ERROR) == 0


def test_no_tools_are_refused():
  with pytest.raises(ConfigError, match="tools"):
    UsedConfig(tools=()).validate()
