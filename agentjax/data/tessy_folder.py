"""Traces of many tasks in a folder: written as they are made, never twice, the same in any order.

train.jsonl     a conversation a row, as ``config.data.source=jsonl`` reads with
                ``config.data.jsonl.messages_field=messages``
given_up.jsonl  tasks without a trace, and why
settings.json   what the traces were made with; a folder holds those of one setting
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.config import ConfigError, differing_fields
from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl
from agentjax.data.tessy import (
  Author,
  BoundaryPredictor,
  GivenUpError,
  Synthesis,
  TessyConfig,
  Writer,
  synthesise,
)
from agentjax.files import write_atomically
from agentjax.trajectory.record import Message, Task

TRACES, GIVEN_UP, SETTINGS = "train.jsonl", "given_up.jsonl", "settings.json"


@dataclasses.dataclass(frozen=True)
class Written:
  """What a call of ``write_traces`` did.

  Attributes:
    traces, given_up: tasks of the folder by what came of them.
    kept: those of them that were there before.
    teacher_share: characters that the teacher wrote, of all; mean over the traces.
  """

  traces: int
  given_up: int
  kept: int
  teacher_share: float


async def write_traces(
  folder: str | os.PathLike[str],
  tasks: Sequence[Task],
  writers: Mapping[Author, Writer],
  predictors: Mapping[Author, BoundaryPredictor],
  config: TessyConfig,
  *,
  seed: int,
  concurrency: int,
  made_with: Mapping[str, Any],
) -> Written:
  """``synthesise`` for each task that the folder does not hold yet.

  A row is on the disk before the next one is begun, so whoever is stopped goes on where it was.
  When all are there the files are put in the order of the tasks' ids: they then depend on neither
  ``concurrency`` nor interruptions.

  Args:
    folder: new, empty, or of an earlier call.
    tasks: with ids of their own.
    writers, predictors, config, seed: as in ``synthesise``.
    concurrency: tasks at once, at least 1.
    made_with: plain JSON that says who writes; an earlier call must have had the same.

  Raises:
    ConfigError: the folder was made with other settings or of other tasks, or a task's prompt has
      an assistant's message.
    DataError: the folder's files are damaged.
  """
  config.validate()
  if concurrency < 1 or len({task.id for task in tasks}) != len(tasks):
    raise ValueError(f"concurrency={concurrency} and {len(tasks)} tasks; allowed: >= 1, ids once.")
  for task in tasks:
    if any(message.role == "assistant" for message in task.prompt):
      raise ConfigError(
        f"the prompt of task {task.id} of {task.source!r} has an assistant's message, so that its "
        "end would be lost in the file; allowed: prompts without."
      )
  directory = pathlib.Path(folder)
  directory.mkdir(parents=True, exist_ok=True)
  _claim(directory, {"tessy": config.to_dict(), "seed": seed, **made_with})
  traces, given_up = (_RowFile(directory / name, tasks) for name in (TRACES, GIVEN_UP))
  kept = len(traces.rows) + len(given_up.rows)
  rest = iter([task for task in tasks if task.id not in traces.rows | given_up.rows])

  async def work() -> None:
    for task in rest:
      try:
        trace = await synthesise(task, writers, predictors, config, seed=seed)
      except GivenUpError as error:
        reasons = list(error.args)
        given_up.append({"id": task.id, "messages": _messages(task.prompt), "reasons": reasons})
      else:
        traces.append(_row(task, trace))

  workers = [asyncio.ensure_future(work()) for _ in range(concurrency)]
  try:
    await asyncio.gather(*workers)
  finally:
    for worker in workers:
      worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
  traces.sort()
  given_up.sort()
  shares = [row["teacher_share"] for row in traces.rows.values()]
  return Written(
    len(traces.rows), len(given_up.rows), kept, sum(shares) / len(shares) if shares else 0.0
  )


def _claim(directory: pathlib.Path, settings: dict[str, Any]) -> None:
  file = directory / SETTINGS
  wanted = json.loads(json.dumps(settings))
  if file.exists():
    present = json.loads(file.read_text())
    if differences := "; ".join(differing_fields(present, wanted, "settings")):
      raise ConfigError(
        f"{directory} holds traces that were made with other settings: {differences}. Give another "
        "folder or the same settings."
      )
  elif any((directory / name).exists() for name in (TRACES, GIVEN_UP)):
    raise ConfigError(f"{directory} holds other files; allowed: a new or an empty folder.")
  else:
    write_atomically(file, json.dumps(wanted, indent=2) + "\n")


def _row(task: Task, trace: Synthesis) -> dict[str, Any]:
  made = trace.demonstration(task)
  return {
    "id": task.id,
    "source": task.source,
    "messages": _messages((*made.prompt, *made.demonstration)),
    "answer": task.answer,
    "metadata": dict(made.metadata),
    "teacher_share": trace.teacher_share,
  }


def _messages(messages: Sequence[Message]) -> list[dict[str, str]]:
  return [{"role": message.role, "content": message.content} for message in messages]


class _RowFile:
  """A JSONL file of rows with ids that grows by whole lines."""

  def __init__(self, path: pathlib.Path, tasks: Sequence[Task]):
    self._path = path
    self.rows: dict[int, dict[str, Any]] = {}
    if not path.exists():
      return
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):  # a line that was cut off as the process died
      write_atomically(path, whole)
    prompts = {task.id: _messages(task.prompt) for task in tasks}
    for line, row in read_jsonl(path) if whole else ():
      if not isinstance(row.get("id"), int) or not isinstance(row.get("messages"), list):
        raise DataError("the row has no 'id' or no 'messages'", path, line)
      prompt = prompts.get(row["id"])
      if prompt is not None and row["messages"][: len(prompt)] != prompt:
        raise ConfigError(
          f"{path}:{line}: task {row['id']} had another prompt; other tasks need another folder."
        )
      self.rows[row["id"]] = row

  def append(self, row: dict[str, Any]) -> None:
    with self._path.open("ab") as file:
      file.write(_line(row))
      file.flush()
      os.fsync(file.fileno())
    self.rows[row["id"]] = row

  def sort(self) -> None:
    if list(self.rows) != sorted(self.rows):
      write_atomically(self._path, b"".join(_line(self.rows[i]) for i in sorted(self.rows)))
      self.rows = {i: self.rows[i] for i in sorted(self.rows)}


def _line(row: dict[str, Any]) -> bytes:
  return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
