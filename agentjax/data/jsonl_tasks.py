"""Tasks of rows in files: questions with answers, worked solutions, whole conversations."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from agentjax.data.conversations import check_turns, openai_messages
from agentjax.data.errors import DataError
from agentjax.data.jsonl import require_text
from agentjax.data.tables import read_rows
from agentjax.tools.declared import DECLARED_TOOLS, read_tools
from agentjax.trajectory.record import Message, Task

_TOOLS, _METADATA = "tools", "metadata"


def load_jsonl(
  path: str | os.PathLike[str],
  *,
  source: str,
  question_field: str = "question",
  answer_field: str = "answer",
  response_field: str = "",
  messages_field: str = "",
  first_id: int = 0,
  limit: int | None = None,
) -> list[Task]:
  """Tasks of a JSONL file, a Parquet file, or a folder of Parquet or Arrow files.

  A row's ``metadata``, an object, becomes the task's; its ``tools`` are the tools that the task
  declares. Further fields are ignored.

  Args:
    path: the file or folder (``tables.read_rows``).
    source: name of the data set, kept in every task.
    question_field: text that a user says.
    answer_field: final answer; "" where rows have none, and every task's is then "".
    response_field: what the assistant answers, the task's demonstration; "" reads none.
    messages_field: a conversation in OpenAI's form, instead of question and response; "" reads
      none. The messages before the first assistant message are the prompt; the rest, up to the last
      assistant message, is the demonstration. ``reasoning_content`` is kept within ``<think>``
      tags.
    first_id: id of the task in row 1; ids follow the rows.
    limit: at most this many rows, from the start; None reads all.

  Raises:
    DataError: as ``read_rows``, or a row without one of the fields or with a value that does not
      fit, with row and field.
  """
  tasks: list[Task] = []
  for line, row in read_rows(path):
    if limit is not None and len(tasks) >= limit:
      break
    demonstration: tuple[Message, ...] = ()
    if messages_field:
      prompt, demonstration = _conversation(row, messages_field, path, line)
    else:
      prompt = (Message("user", require_text(row, question_field, path, line)),)
      if response_field:
        demonstration = (Message("assistant", require_text(row, response_field, path, line)),)
    answer = require_text(row, answer_field, path, line).strip() if answer_field else ""
    metadata = _metadata(row, path, line)
    tasks.append(Task(first_id + line - 1, prompt, answer, source, demonstration, metadata))
  return tasks


def _conversation(
  row: Mapping[str, Any], field: str, path: str | os.PathLike[str], line: int
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
  """Prompt and demonstration."""
  if field not in row:
    raise DataError(f"the row has no {field!r}; its fields: {', '.join(row) or 'none'}", path, line)
  values = row[field]
  if not isinstance(values, list):
    raise DataError(f"{field!r} is a {type(values).__name__}; allowed: a list", path, line)
  try:
    messages = tuple(openai_messages(values, keep=True))
    spoken = [i for i, message in enumerate(messages) if message.role == "assistant"]
    if messages and not spoken:
      return messages, ()
    check_turns(messages)
  except ValueError as error:
    raise DataError(f"{field!r}: {error}", path, line) from error
  first = spoken[0]
  if first == 0:
    raise DataError(
      f"{field!r} starts with an assistant's message; allowed: what it answers before it",
      path,
      line,
    )
  if messages[-1].role != "assistant":
    raise DataError(
      f"{field!r} ends with a {messages[-1].role} message; allowed: an assistant's", path, line
    )
  return messages[:first], messages[first:]


def _metadata(row: Mapping[str, Any], path: str | os.PathLike[str], line: int) -> Mapping[str, Any]:
  metadata = row.get(_METADATA)
  if metadata is not None and not isinstance(metadata, dict):
    raise DataError(f"{_METADATA!r} is a {type(metadata).__name__}; allowed: an object", path, line)
  if not row.get(_TOOLS):
    return metadata or {}
  try:
    tools = read_tools(row[_TOOLS])
  except ValueError as error:
    raise DataError(f"{_TOOLS!r}: {error}", path, line) from error
  return {**(metadata or {}), DECLARED_TOOLS: [tool.to_dict() for tool in tools]}
