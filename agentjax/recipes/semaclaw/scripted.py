"""Stand-ins for models, with which a team works without any: they add and multiply in words.

The goal is a chain of sums such as ``(2 + 3) * (4 + 5)``. The orchestrator gives each bracket to
"counter", lets "checker" join the results with the operation between them, and repeats what came.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from agentjax.recipes.semaclaw.team import CREATE_PARENT, DISPATCH_TASK
from agentjax.rollout.seat_config import Bank, SeatConfig
from agentjax.rollout.seats import SeatPlayer
from agentjax.tools.protocol import Tool
from agentjax.trajectory.record import Message, ToolCall

_GOAL = re.compile(r"\((\d+ . \d+)\) (.) \((\d+ . \d+)\)")
_RESULT = re.compile(r"^(?:result: |\[\w+\] \w+, done: )It is (-?\d+)\.", re.M)


@dataclasses.dataclass(unsafe_hash=True)
class CounterSeat(SeatConfig):
  """Plays every agent of such a team."""

  def play(self, bank: Bank, name: str) -> SeatPlayer:
    return SeatPlayer(name, bank.chat, service=Counter())


class Counter:
  """See the module; a ``rollout.seats.ToolService``."""

  async def reply(self, messages: Sequence[Message], *, key: int) -> str:
    del key
    return _say(messages)

  async def turn(self, messages: Sequence[Message], tools: Sequence[Tool], *, key: int) -> Message:
    del key
    names, last = [tool.name for tool in tools], messages[-1]
    if CREATE_PARENT.name in names:
      return _lead(messages)
    if last.role == "tool":
      return Message("assistant", _say(messages))
    asked = last.content.rpartition("\n")[2]
    found = _RESULT.findall(last.content)
    text = asked.removeprefix("Count ")
    text = text.format(*found) if len(found) == text.count("{}") else text
    return Message("assistant", "", (ToolCall("calculator", {"expression": text}),))


def _lead(messages: Sequence[Message]) -> Message:
  last = messages[-1]
  if last.role == "user":
    found = _GOAL.search(last.content)
    if found is None:
      return Message("assistant", "I cannot read this goal.")
    left, operation, right = found.groups()
    tasks = [
      {"label": "left", "agentName": "counter", "prompt": f"Count {left}"},
      {"label": "right", "agentName": "counter", "prompt": f"Count {right}"},
      {
        "label": "join",
        "agentName": "checker",
        "prompt": f"Count {{}} {operation} {{}}",
        "dependsOn": ["left", "right"],
      },
    ]
    arguments = {"goal": found[0], "tasks": tasks}
    return Message("assistant", "", (ToolCall(CREATE_PARENT.name, arguments),))
  if found := re.match(r"(p-\d+-\d+): left", last.content):
    calls = [
      ToolCall(DISPATCH_TASK.name, {"parentId": found[1], "label": label})
      for label in ("left", "right", "join")
    ]
    return Message("assistant", "", tuple(calls))
  results = _RESULT.findall(last.content)
  return Message("assistant", f"It is {results[-1]}." if results else f"No result: {last.content}")


def _say(messages: Sequence[Message]) -> str:
  return f"It is {messages[-1].content}."
