"""GSM8K (Cobbe et al., 2110.14168): grade-school problems whose solutions carry calculator calls.

A solution writes ``48/2 = <<48/2=24>>24 clips``. Each ``<<expression=value>>`` becomes a call of
the calculator, its result the tool's message, and the solution goes on with what follows. The last
line ``#### N`` is the answer.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
from fractions import Fraction

from agentjax.config import NonNegativeInt, Share
from agentjax.data.config import DataConfig
from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl, require_text
from agentjax.data.source import TaskSource
from agentjax.data.splits import FIRST_TEST_ID, TaskSplits
from agentjax.text.answers import mark_answer, read_marked_answer
from agentjax.tools.calculator import CalculatorError, evaluate, format_value
from agentjax.trajectory.record import Message, Task, ToolCall
from agentjax.worlds.question.gsm8k_variants import vary

SOURCE = "gsm8k"
_ANNOTATION = re.compile(r"<<([^<>]*)>>")
_ANSWER = re.compile(r"-?\d{1,3}(?:,\d{3})+|-?\d+(?:\.\d+)?")


@dataclasses.dataclass(unsafe_hash=True)
class Gsm8kConfig(TaskSource):
  """GSM8K, as published, in the folder ``config.data.path``.

  Attributes:
    variants: for each train task, as many more with other numbers, of those rows that allow it
      (``gsm8k_variants``); ``config.data.train_size`` counts the rows before.
    direct_share: share of the demonstrations of train tasks that state the right answer at once: a
      policy that cannot do sums learns from them to guess; rewards then teach it to work it out.
  """

  reads_path = True

  variants: NonNegativeInt = 0
  direct_share: Share = 0.0

  def load(self, data: DataConfig) -> TaskSplits:
    assert data.path is not None
    splits = load_gsm8k(
      data.path,
      train_limit=data.train_size,
      test_limit=data.test_size,
      variants=self.variants,
      seed=data.seed,
    )
    train = [_perhaps_direct(task, self.direct_share, data.seed) for task in splits.train]
    return dataclasses.replace(splits, train=train)


def load_gsm8k(
  directory: str | os.PathLike[str],
  *,
  train_limit: int | None = None,
  test_limit: int | None = None,
  variants: int = 0,
  seed: int = 0,
) -> TaskSplits:
  """``train.jsonl``, with variants, and ``test.jsonl``; limits count rows from the start."""
  folder = os.fspath(directory)
  train = os.path.join(folder, "train.jsonl")
  return TaskSplits(
    train=read_gsm8k(train, limit=train_limit, variants=variants, seed=seed),
    test=read_gsm8k(os.path.join(folder, "test.jsonl"), first_id=FIRST_TEST_ID, limit=test_limit),
  )


def read_gsm8k(
  path: str | os.PathLike[str],
  *,
  first_id: int = 0,
  limit: int | None = None,
  variants: int = 0,
  seed: int = 0,
) -> list[Task]:
  """Tasks of one GSM8K file; the id of a task is ``first_id`` plus its line number less one.

  ``variants`` of each row that allows it follow behind all rows (``gsm8k_variants``).

  ``metadata["level"]`` is the number of calculator calls of the solution. The observations of the
  demonstrations are what our calculator answers, so that they replay exactly (``.50`` is ``0.5``).

  Raises:
    DataError: as ``read_jsonl``; a row without question, solution or ``#### N``; an annotation that
      is not an expression, or whose stated value is not the expression's.
  """
  tasks: list[Task] = []
  rows: list[tuple[int, str, str]] = []
  for line, row in read_jsonl(path):
    if limit is not None and len(tasks) >= limit:
      break
    question = require_text(row, "question", path, line)
    solution = require_text(row, "answer", path, line)
    try:
      tasks.append(_task(first_id + line - 1, question, solution))
    except ValueError as error:
      raise DataError(str(error), path, line) from error
    rows.append((line, question, solution))
  for copy in range(1, variants + 1):
    for line, question, solution in rows:
      other = vary(question, solution, random.Random(f"{SOURCE}/{seed}/{copy}/{line}"))
      if other is not None:
        tasks.append(_task(first_id + copy * rows[-1][0] + line - 1, *other))
  return tasks


def _perhaps_direct(task: Task, share: float, seed: int) -> Task:
  """The task; its demonstration states the answer at once, with probability ``share``."""
  if random.Random(f"{SOURCE}/{seed}/direct/{task.id}").random() >= share:
    return task
  return dataclasses.replace(task, demonstration=(Message("assistant", mark_answer(task.answer)),))


def _task(task_id: int, question: str, solution: str) -> Task:
  marked = read_marked_answer(solution)
  if marked is None or _ANSWER.fullmatch(marked) is None:
    raise ValueError(f"the solution must end in '#### N' with N a number, got {solution[-40:]!r}")
  demonstration = _demonstrate(solution)
  return Task(
    id=task_id,
    prompt=(Message("user", question),),
    answer=marked.replace(",", ""),
    source=SOURCE,
    demonstration=demonstration,
    metadata={"level": len(demonstration) // 2},
  )


def _demonstrate(solution: str) -> tuple[Message, ...]:
  """Assistant and tool messages of a solution, in turn; the last is the assistant's."""
  messages: list[Message] = []
  start = 0
  for annotation in _ANNOTATION.finditer(solution):
    expression, separator, stated = annotation.group(1).rpartition("=")
    if not separator:
      raise CalculatorError(f"annotation {annotation.group()} has no '='")
    value = evaluate(expression)
    if not _states(stated, value):
      raise CalculatorError(
        f"annotation {annotation.group()} is wrong: the calculator gives {format_value(value)}"
      )
    call = ToolCall("calculator", {"expression": expression})
    messages.append(Message("assistant", solution[start : annotation.start()], (call,)))
    messages.append(Message("tool", format_value(value)))
    start = annotation.end()
  messages.append(Message("assistant", solution[start:]))
  return tuple(messages)


def _states(stated: str, value: Fraction) -> bool:
  """Whether ``stated`` is ``value``, perhaps rounded or cut at its last decimal."""
  decimals = len(stated.strip().partition(".")[2])
  difference = abs(evaluate(stated) - value)
  return difference < Fraction(1, 10**decimals) if decimals else difference == 0
