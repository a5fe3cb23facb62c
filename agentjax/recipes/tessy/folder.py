"""Traces of many tasks in a folder (``agentjax.data.synthesis_folder``).

train.jsonl     a conversation a row, as ``config.data.source=jsonl`` reads with
                ``config.data.source.messages_field=messages``
given_up.jsonl  tasks without a trace, and why
settings.json   what the traces were made with; a folder holds those of one setting
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.config import ConfigError
from agentjax.data.synthesis_folder import (
  GIVEN_UP,
  Report,
  Row,
  RowFile,
  claim,
  fill,
  plain_messages,
  unreported,
)
from agentjax.recipes.tessy.flow import (
  Author,
  BoundaryPredictor,
  GivenUpError,
  Synthesis,
  TessyConfig,
  Writer,
  synthesise,
)
from agentjax.trajectory.record import Task

TRACES = "train.jsonl"


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
  report: Report = unreported,
) -> Written:
  """``synthesise`` for each task that the folder does not hold yet.

  A row is on the disk before the next one is begun, so a stopped command continues where it was.
  When all are there the files are put in the order of the tasks' ids: they then depend on neither
  ``concurrency`` nor interruptions.

  Args:
    folder: new, empty, or of an earlier call.
    tasks: with ids of their own.
    writers, predictors, config, seed: as in ``synthesise``.
    concurrency: tasks at once, at least 1.
    made_with: plain JSON that says who writes; an earlier call must have had the same.
    report: called with how many tasks are done.

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
  settings = {"tessy": config.to_dict(), "seed": seed, **made_with}
  directory = claim(folder, settings, (TRACES, GIVEN_UP))
  prompts = {task.id: _as_written(plain_messages(task.prompt)) for task in tasks}

  def other(row: Row) -> str | None:
    prompt = prompts.get(row["id"])
    same = prompt is None or row["messages"][: len(prompt)] == prompt
    return None if same else f"task {row['id']} had another prompt"

  traces, given_up = (RowFile(directory / n, {"messages": list}, other) for n in (TRACES, GIVEN_UP))
  kept = len(traces.rows) + len(given_up.rows)

  async def work(task: Task) -> None:
    try:
      trace = await synthesise(task, writers, predictors, config, seed=seed)
    except GivenUpError as error:
      reasons = list(error.args)
      given_up.append({"id": task.id, "messages": prompts[task.id], "reasons": reasons})
    else:
      traces.append(_row(task, trace))

  files = (traces, given_up)
  await fill(files, tasks, work, what="traces", report=report, concurrency=concurrency)
  shares = [row["teacher_share"] for row in traces.rows.values()]
  return Written(
    len(traces.rows), len(given_up.rows), kept, sum(shares) / len(shares) if shares else 0.0
  )


def _as_written(messages: list[dict[str, str]]) -> list[dict[str, str]]:
  """Messages as a file gives them back, which holds no half of a surrogate pair."""
  return [{k: v.encode("utf-8", "replace").decode() for k, v in m.items()} for m in messages]


def _row(task: Task, trace: Synthesis) -> Row:
  made = trace.demonstration(task)
  return {
    "id": task.id,
    "source": task.source,
    "messages": plain_messages((*made.prompt, *made.demonstration)),
    "answer": task.answer,
    "metadata": dict(made.metadata),
    "teacher_share": trace.teacher_share,
  }
