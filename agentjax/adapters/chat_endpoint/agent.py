"""A model behind an endpoint as an agent: it is shown tools and calls them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentjax.adapters.chat_endpoint.endpoint import JudgeRefusedError, chat_messages
from agentjax.adapters.chat_endpoint.judge import HttpJudge
from agentjax.text.tool_calls import DescribedTool
from agentjax.trajectory.record import Message, ToolCall


class HttpAgent(HttpJudge):
  """Asks ``POST base_url/chat/completions`` with ``tools``; a ``rollout.seats.ToolService``.

  Results of tools belong to the calls of the assistant's message before them, in their order.
  """

  async def turn(
    self, messages: Sequence[Message], tools: Sequence[DescribedTool], *, key: int
  ) -> Message:
    config = self._config
    written = await chat_messages(config, messages)
    choice = await self._ask(
      {
        "messages": with_calls(written, messages),
        "tools": [_described(tool) for tool in tools],
        **self._drawn(key),
      }
    )
    said = choice["message"]
    calls = tuple(_call(call) for call in said.get("tool_calls") or ())
    content = said.get("content") or ""
    if not isinstance(content, str) or not (content or calls):
      raise JudgeRefusedError(f"the reply of {config.model} has no text: {str(choice)[:300]}")
    return Message("assistant", content, calls)


def with_calls(
  written: Sequence[dict[str, Any]], messages: Sequence[Message]
) -> list[dict[str, Any]]:
  """Messages of a request, with the calls of assistants and the ids that join results to them.

  A result without a call, as at the beginning of a rewritten history, is the user's.
  """
  shown: list[dict[str, Any]] = []
  waiting: list[str] = []
  for number, (row, message) in enumerate(zip(written, messages, strict=True)):
    row = dict(row)
    if message.role == "tool" and waiting:
      row["tool_call_id"] = waiting.pop(0)
    elif message.role == "tool":
      row["role"] = "user"
    if message.tool_calls:
      waiting = [f"call_{number}_{i}" for i in range(len(message.tool_calls))]
      row["tool_calls"] = [
        {
          "id": id,
          "type": "function",
          "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for id, call in zip(waiting, message.tool_calls, strict=True)
      ]
    shown.append(row)
  return shown


def _described(tool: DescribedTool) -> dict[str, Any]:
  function = {"name": tool.name, "description": tool.description}
  return {"type": "function", "function": {**function, "parameters": dict(tool.parameters)}}


def _call(value: Any) -> ToolCall:
  """A call; arguments that are no JSON object become none, which the tool then refuses."""
  try:
    function = value["function"]
    name = str(function["name"])
  except (KeyError, TypeError) as error:
    raise JudgeRefusedError(f"a call without a name: {str(value)[:300]}") from error
  try:
    arguments = json.loads(function.get("arguments") or "{}")
  except (TypeError, ValueError):
    arguments = {}
  name = "_".join(name.split()) or "unnamed"
  return ToolCall(name, arguments if isinstance(arguments, dict) else {})
