"""Conversations of agents with tools, from files of several forms, as one record.

  form          rows
  "openai"      ``messages`` (or ``traj``, ``history``) with ``tool_calls``; ``tools`` where known
  "sharegpt"    ``conversations`` of from/value pairs: human, gpt, function_call, observation
  "adp"         Agent Data Protocol, standardised: actions and observations (2510.24702)

Files: ``.jsonl``, or any other name for JSON of a list of rows or of one row (a ``.traj`` of
SWE-agent); each also with ``.gz`` behind it. A wrong row is refused with file and row.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from agentjax.data.conversations import (
  check_turns,
  list_of,
  mapping_of,
  openai_messages,
  parse_json,
  read_call,
  text_of,
)
from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl
from agentjax.tools.declared import DeclaredTool, read_tools
from agentjax.trajectory.record import Message, ToolCall

TrajectoryForm = Literal["openai", "sharegpt", "adp"]

_MESSAGES = ("messages", "traj", "history")
_NAMES = ("id", "instance_id", "uuid")
_CODE_TOOLS = {"bash": ("execute_bash", "command"), "python": ("execute_ipython_cell", "code")}
_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool", "system": "system"}


@dataclasses.dataclass(frozen=True)
class AgentTrajectory:
  """One conversation.

  Attributes:
    name: its id in the file, or the file's name and the row's number.
    messages: what was said and called, and what the tools answered.
    tools: what was declared; empty where the file does not say.
    metadata: short facts of the row: reward, task_id, trial, ...
  """

  name: str
  messages: tuple[Message, ...]
  tools: tuple[DeclaredTool, ...]
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read_trajectories(
  path: str | os.PathLike[str],
  form: TrajectoryForm,
  *,
  tools: Sequence[DeclaredTool] = (),
  thinking: Literal["keep", "drop"] = "drop",
) -> Iterator[AgentTrajectory]:
  """The conversations of a file.

  Args:
    path: the file.
    form: how its rows are made; see the module.
    tools: declared for rows that declare none themselves.
    thinking: "keep" puts an assistant's reasoning before its text, within ``<think>`` and
      ``</think>``, as Qwen's and Nemotron's templates write it; "drop" leaves it out.

  Raises:
    DataError: a file that cannot be read, or a row that does not fit, with file and row.
  """
  convert = {"openai": _openai, "sharegpt": _sharegpt, "adp": _adp}[form]
  for line, where, row in _rows(path):
    try:
      messages = tuple(convert(row, thinking == "keep"))
      check_turns(messages)
      declared = _tools_of(row) or tuple(tools)
    except (KeyError, TypeError, ValueError) as error:
      reason = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
      raise DataError(f"{where}{reason}", path, line) from error
    yield AgentTrajectory(_name(row, path, line, where), messages, declared, _metadata(row))


def _rows(path: str | os.PathLike[str]) -> Iterator[tuple[int | None, str, dict[str, Any]]]:
  """(line or None, place for messages, row)."""
  name = os.fspath(path)
  if name.removesuffix(".gz").endswith(".jsonl"):
    for line, row in read_jsonl(path):
      yield line, "", row
    return
  try:
    with gzip.open(name, "rb") if name.endswith(".gz") else open(name, "rb") as stream:
      values = json.loads(stream.read().decode("utf-8"))
  except FileNotFoundError:
    raise DataError("no such file", path) from None
  except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
    raise DataError(f"cannot be read as JSON: {error}", path) from error
  single = isinstance(values, dict)
  rows = [values] if single else values
  if not isinstance(rows, list) or not rows:
    raise DataError("a row or a list of rows is needed", path)
  for number, row in enumerate(rows, start=1):
    where = "" if single else f"row {number}: "
    if not isinstance(row, dict):
      raise DataError(f"{where}a JSON {type(row).__name__}; allowed: an object", path)
    yield None, where, row


def _name(row: Mapping[str, Any], path: str | os.PathLike[str], line: int | None, at: str) -> str:
  for field in _NAMES:
    if isinstance(row.get(field), str) and row[field]:
      return row[field]
  number = f"{line}" if line is not None else at.removeprefix("row ").rstrip(": ")
  return os.path.basename(os.fspath(path)) + (f":{number}" if number else "")


def _metadata(row: Mapping[str, Any]) -> dict[str, Any]:
  """The scalars of a row."""
  return {k: v for k, v in row.items() if isinstance(v, int | float) and k not in _NAMES}


def _tools_of(row: Mapping[str, Any]) -> tuple[DeclaredTool, ...]:
  values = row.get("tools") or ()
  return read_tools(parse_json(values, "tools") if isinstance(values, str) else values)


# --- OpenAI --------------------------------------------------------------------------------------


def _openai(row: Mapping[str, Any], keep: bool) -> Iterator[Message]:
  field = next((name for name in _MESSAGES if name in row), None)
  if field is None:
    raise ValueError(f"no {', '.join(_MESSAGES)}; fields: {', '.join(row) or 'none'}")
  yield from openai_messages(list_of(row[field], field), keep)


# --- from/value pairs ----------------------------------------------------------------------------


def _sharegpt(row: Mapping[str, Any], keep: bool) -> Iterator[Message]:
  del keep  # there is no reasoning apart from the text
  if isinstance(row.get("system"), str) and row["system"]:
    yield Message("system", row["system"])
  for number, value in enumerate(list_of(row["conversations"], "conversations")):
    speaker, text = mapping_of(value, "a message")["from"], value["value"]
    if speaker == "function_call":
      calls = parse_json(text, f"message {number}: a function_call")
      calls = calls if isinstance(calls, list) else [calls]
      yield Message("assistant", "", tuple(read_call(call) for call in calls))
    elif speaker in _SHAREGPT:
      yield Message(_SHAREGPT[speaker], text_of(text, f"message {number}"))
    else:
      allowed = ", ".join((*_SHAREGPT, "function_call"))
      raise ValueError(f"message {number} is from {speaker!r}; allowed: {allowed}")


# --- Agent Data Protocol -------------------------------------------------------------------------


def _adp(row: Mapping[str, Any], keep: bool) -> Iterator[Message]:
  """Actions in a row are one turn, as long as no text follows a call.

  Code becomes a call of ``execute_bash`` (command), ``execute_ipython_cell`` (code) or
  ``execute_LANGUAGE`` (code). An answer of the environment is a tool's message while a call of the
  previous turn is open. Otherwise, or if its source is the user, it is the user's message.
  """
  del keep
  text, open_calls = "", 0
  calls: list[ToolCall] = []
  for number, item in enumerate(list_of(row["content"], "content")):
    kind = mapping_of(item, f"item {number}")["class_"]
    if kind in ("api_action", "code_action", "message_action"):
      said = text_of(item.get("description") or "", f"item {number}: description")
      if kind == "message_action":
        said = text_of(item["content"], f"item {number}: content")
      if said and calls:
        yield Message("assistant", text, tuple(calls))
        text, calls = "", []
      text = "\n\n".join(part for part in (text, said) if part)
      if kind != "message_action":
        calls.append(_adp_call(kind, item))
      continue
    if text or calls:
      yield Message("assistant", text, tuple(calls))
      open_calls = len(calls)
      text, calls = "", []
    content, source = _adp_observation(kind, item, number)
    if source == "agent":
      yield Message("assistant", content)
      open_calls = 0
    elif source == "environment" and item.get("name") == "system":
      yield Message("system", content)
    elif source == "environment" and open_calls:
      open_calls -= 1
      yield Message("tool", content)
    else:
      yield Message("user", content)
  if text or calls:
    yield Message("assistant", text, tuple(calls))


def _adp_call(kind: str, item: Mapping[str, Any]) -> ToolCall:
  if kind == "api_action":
    return read_call({"name": item["function"], "arguments": item["kwargs"]})
  language = text_of(item["language"], "language")
  name, parameter = _CODE_TOOLS.get(language, (f"execute_{language}", "code"))
  return ToolCall(name, {parameter: text_of(item["content"], "content")})


def _adp_observation(kind: str, item: Mapping[str, Any], number: int) -> tuple[str, str]:
  """Text and source."""
  if kind == "text_observation":
    source = item["source"]
    if source not in ("user", "agent", "environment"):
      raise ValueError(f"item {number}: source {source!r}; allowed: user, agent, environment")
    return text_of(item["content"], f"item {number}: content"), source
  if kind == "web_observation":
    page = item.get("axtree") or item.get("html")
    return f"URL: {item.get('url') or ''}\n{text_of(page, f'item {number}: page')}", "environment"
  raise ValueError(f"item {number}: class_ {kind!r} cannot be read as text")
