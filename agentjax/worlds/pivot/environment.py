"""One turn of a conversation: the tools are declared, the action is recorded and nothing is run."""

from __future__ import annotations

from agentjax.tools.declared import declared_tools
from agentjax.tools.protocol import ToolStatus
from agentjax.trajectory.record import Status, Task, ToolRecord
from agentjax.world.environment import Action, Environment, Observation, Step


class PivotEnvironment(Environment):
  """Shows the history of a turn and ends after the policy's action.

  The task's prompt is the history, its metadata declares the tools (``tools.declared``). The text
  of the turn is the episode's answer; each call is recorded, as an error where it could not be read
  or names a tool beside the declared ones. ``PivotScorer`` judges it.
  """

  async def reset(self, task: Task, key: int) -> Observation:
    del key  # nothing here is left to chance
    self.tools = declared_tools(task.metadata)
    return Observation(task.prompt)

  async def step(self, action: Action) -> Step:
    if action.truncated:
      return Step(Observation(()), truncated=True, status=Status.TRUNCATED)
    declared = {tool.name for tool in self.tools}
    records = []
    for call in action.tool_calls:
      problem = call.error
      if problem is None and declared and call.name not in declared:
        problem = f"no tool {call.name!r} is declared"
      status = ToolStatus.OK if problem is None else ToolStatus.ERROR
      records.append(ToolRecord(0, call.name, call.arguments, status.value, problem or "", 0.0))
    return Step(Observation(()), terminated=True, answer=action.text, tools=tuple(records))

  def snapshot(self) -> bytes:
    return b""  # one turn: nothing has happened before it ends

  def restore(self, state: bytes) -> None:
    del state
