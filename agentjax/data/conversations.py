"""Conversations with tool calls as plain JSON in OpenAI's form, read value by value.

Every function raises ValueError for a wrong value; the message names it and says what is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentjax.trajectory.messages import with_marks
from agentjax.trajectory.record import Message, ToolCall


def openai_messages(values: Sequence[Any], keep: bool) -> Iterator[Message]:
  """Messages in OpenAI's form, with ``tool_calls``; each may have ``weight`` and ``flags``, see
  ``Message``.

  Args:
    values: plain JSON.
    keep: whether an assistant's ``reasoning_content`` is put before its text, within ``<think>``
      and ``</think>``, or left out.

  Raises:
    ValueError: a message that does not fit, with its number.
  """
  known: set[str] = set()  # ids of calls
  for number, message in enumerate(values):
    try:
      yield with_marks(_openai_message(message, keep, known), message)
    except (KeyError, TypeError, ValueError) as error:
      reason = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
      raise ValueError(f"message {number}: {reason}") from error


def _openai_message(value: Any, keep: bool, known: set[str]) -> Message:
  role = mapping_of(value, "a message")["role"]
  if role not in ("system", "user", "assistant", "tool"):
    raise ValueError(f"role {role!r}; allowed: system, user, assistant, tool")
  parts = _parts(value.get("content"))
  text = "".join(part for kind, part in parts if kind == "text")
  if role != "assistant":
    if any(kind != "text" for kind, _ in parts):
      raise ValueError(f"a {role} message holds more than text")
    answered = value.get("tool_call_id")
    if role == "tool" and answered is not None and str(answered) not in known:
      raise ValueError(f"tool_call_id {answered!r} is of no call before it")
    return Message(role, text)
  reasoning = text_of(value.get("reasoning_content") or "", "reasoning_content")
  reasoning = reasoning or "".join(part for kind, part in parts if kind == "reasoning")
  written = value.get("tool_calls")
  calls = [read_call(call) for call in list_of(written, "tool_calls")] if written else []
  calls += [
    read_call(parse_json(part, "a tool call")) for kind, part in parts if kind == "tool_call"
  ]
  known.update(str(call["id"]) for call in written or () if "id" in call)
  return Message(role, _with_thinking(reasoning, text, keep), tuple(calls))


def _parts(content: Any) -> list[tuple[str, str]]:
  """(kind, text) of each part of a message's content."""
  if content is None:
    return []
  if isinstance(content, str):
    return [("text", content)]
  parts = []
  for part in list_of(content, "content"):
    kind = mapping_of(part, "a part of the content")["type"]
    if kind not in ("text", "reasoning", "tool_call"):
      raise ValueError(f"content of type {kind!r}; allowed: text, reasoning, tool_call")
    parts.append((kind, text_of(part.get("value", part.get("text")), f"content of type {kind!r}")))
  return parts


def read_call(value: Any) -> ToolCall:
  """A call, with or without ``function`` around its name and arguments."""
  value = mapping_of(value, "a tool call")
  value = mapping_of(value.get("function", value), "the function of a tool call")
  name = text_of(value["name"], "the name of a tool call")
  arguments = value["arguments"] if "arguments" in value else {}
  if isinstance(arguments, str):
    arguments = parse_json(arguments or "{}", f"the arguments of {name!r}")
  if not name or not isinstance(arguments, dict):
    raise ValueError(f"the arguments of tool call {name!r} are no JSON object")
  return ToolCall(name, arguments)


def _with_thinking(reasoning: str, text: str, keep: bool) -> str:
  return f"<think>\n{reasoning.strip()}\n</think>\n\n{text}" if keep and reasoning else text


def check_turns(messages: Sequence[Message]) -> None:
  """Raises ValueError if a tool answers without a call, or the policy never speaks."""
  if not any(message.role == "assistant" for message in messages):
    raise ValueError("the conversation has no assistant message")
  open_calls = 0
  for number, message in enumerate(messages):
    if message.role == "assistant":
      open_calls = len(message.tool_calls)
      if not message.tool_calls and not message.content:
        raise ValueError(f"message {number}: an assistant message without text or calls")
    elif message.role == "tool":
      if not open_calls:
        raise ValueError(f"message {number}: a tool's answer without a call before it")
      open_calls -= 1


def parse_json(text: Any, what: str) -> Any:
  """What a JSON text holds."""
  try:
    return json.loads(text_of(text, what))
  except (json.JSONDecodeError, RecursionError) as error:
    raise ValueError(f"{what} is not JSON: {error}") from error


def text_of(value: Any, what: str) -> str:
  """The value, a text."""
  if not isinstance(value, str):
    raise ValueError(f"{what} is a {type(value).__name__}; allowed: text")
  return value


def list_of(value: Any, what: str) -> list[Any]:
  """The value, a list with something in it."""
  if not isinstance(value, list) or not value:
    raise ValueError(f"{what} is no list with something in it")
  return value


def mapping_of(value: Any, what: str) -> Mapping[str, Any]:
  """The value, an object."""
  if not isinstance(value, Mapping):
    raise ValueError(f"{what} is a {type(value).__name__}; allowed: an object")
  return value
