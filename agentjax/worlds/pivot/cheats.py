"""Cheats of single turns."""

from __future__ import annotations

import json

from agentjax.tools.declared import declared_tools
from agentjax.trajectory.record import Message, Task, ToolCall
from agentjax.world.cheats import Turns, claims, each, say
from agentjax.worlds.pivot.terminal_match import read_object
from agentjax.worlds.pivot.verifier import VerifierKind


def pivot_cheats(task: Task, kind: VerifierKind) -> dict[str, Turns]:
  """All that could be called at once, calls that are none, and calls that say nothing.

  They fit what ``PivotVerifierConfig.kind`` promises: where the name alone is compared, a call
  without arguments is no cheat.
  """
  expected = task.demonstration[0]
  if kind == "terminal":
    return _terminal_cheats(task, expected)
  right = expected.tool_calls
  declared = tuple(ToolCall(tool.name, {}) for tool in declared_tools(task.metadata))
  if not right:
    return {"any_message": say("ok"), "every_tool": (Message("assistant", "", declared),)}
  others = tuple(call for call in declared if call.name not in {c.name for c in right})
  calls = {
    "every_tool_after": (*right, *others),
    "every_tool_before": (*others, *right),
    "repeated": right * 20,
    "malformed": tuple(ToolCall(c.name, {}, error="no JSON") for c in right),
    "undeclared": tuple(ToolCall(f"{c.name}_or_any_other", c.arguments) for c in right),
  }
  if not others:
    del calls["every_tool_after"], calls["every_tool_before"]
  if kind in ("arguments", "edits") and any(call.arguments for call in right):
    echo = "\n".join(message.content for message in task.prompt)
    calls["no_arguments"] = tuple(ToolCall(call.name, {}) for call in right)
    calls["empty_arguments"] = tuple(
      ToolCall(c.name, {k: type(v)() for k, v in c.arguments.items()}) for c in right
    )
    calls["stuffed_arguments"] = tuple(
      ToolCall(c.name, {k: echo if isinstance(v, str) else v for k, v in c.arguments.items()})
      for c in right
    )
  written_out = "\n".join(
    f"<tool_call>{json.dumps({'name': c.name, 'arguments': dict(c.arguments)})}</tool_call>"
    for c in right
  )
  return {
    **{name: (Message("assistant", "", turn),) for name, turn in calls.items()},
    "call_in_the_text": say(written_out),
    **each(claims(task), str),
  }


def _terminal_cheats(task: Task, expected: Message) -> dict[str, Turns]:
  batch = read_object(expected.content) or {}
  keys = "".join(command["keystrokes"] for command in batch.get("commands", ()))
  flood = [{**command, "keystrokes": "\n".join([command["keystrokes"], *"abcdefgh"] * 50)}
           for command in batch.get("commands", ())]  # fmt: skip
  texts = {
    "two_batches": f"{expected.content}\n{expected.content}",
    "in_a_list": json.dumps([batch, batch]),
    "keys_alone": keys,
    "no_commands": json.dumps({**batch, "commands": []}),
    "flood": json.dumps({**batch, "commands": flood}),
    "further_field": json.dumps({**batch, "reward": 1.0}),
  }
  for flag in ("task_complete", "is_task_complete"):
    if flag in batch:
      texts["other_verdict"] = json.dumps({**batch, flag: not batch[flag]})
  if not batch.get("commands"):
    del texts["no_commands"], texts["flood"]
  return {name: say(text) for name, text in texts.items()} | each(claims(task), str)
