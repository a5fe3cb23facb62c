"""Texts that a policy can learn to write: running sums, word problems, passages of books."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import pathlib
import random
import re
from collections.abc import Sequence

from agentjax.config import NonNegativeInt, PositiveInt, check
from agentjax.data import DataConfig
from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl, require_text
from agentjax.data.source import TaskSource
from agentjax.data.splits import FIRST_TEST_ID, TaskSplits
from agentjax.data.text_file import read_text
from agentjax.text.answers import mark_answer, read_marked_answer
from agentjax.trajectory.record import Message, Task

_TEST_SHARE = 0.1  # of all sums; a constant, since it decides which side a sum is on
_ANNOTATION = re.compile(r"<<[^<>]*>>")


@dataclasses.dataclass(unsafe_hash=True)
class RunningSumConfig(TaskSource):
  """Sums that are worked out term by term: ``7+5+8`` is ``7+5=12``, ``12+8=20``, ``#### 20``.

  Train and test share no sum, for any seed. All figures are ours.

  Attributes:
    fewest, most: terms of a sum.
    largest: of the terms, which are at least 1.
  """

  fewest: PositiveInt = 3
  most: PositiveInt = 6
  largest: PositiveInt = 9

  def validate(self, path: str = "config.data.source") -> None:
    super().validate(path)
    check(self.fewest >= 2, f"{path}.fewest", self.fewest, "at least 2")
    check(self.most >= self.fewest, f"{path}.most", self.most, f"at least fewest={self.fewest}")
    said = f"such that train and test have a sum each; raise it, or {path}.most={self.most}"
    check(self._has_both_sides(), f"{path}.largest", self.largest, said)

  def _has_both_sides(self) -> bool:
    """Whether train and test have a sum each; all of a few sums may be on one side."""
    terms = range(1, min(self.largest, 100) + 1)  # 10,000 sums or more are on both
    counts = range(self.fewest, self.most + 1)
    sums = itertools.chain.from_iterable(itertools.product(terms, repeat=n) for n in counts)
    side = _side(next(sums))
    return any(_side(terms) != side for terms in sums)

  def load(self, data: DataConfig) -> TaskSplits:
    assert data.train_size is not None and data.test_size is not None
    train = self._draw(data.train_size, data.seed, "train", 0)
    return TaskSplits(train, self._draw(data.test_size, data.seed, "test", FIRST_TEST_ID))

  def _draw(self, size: int, seed: int, side: str, first_id: int) -> list[Task]:
    draws = random.Random(f"running sums {seed} {side}")
    tasks: list[Task] = []
    while len(tasks) < size:
      count = draws.randint(self.fewest, self.most)
      terms = [draws.randint(1, self.largest) for _ in range(count)]
      if _side(terms) == side:
        tasks.append(running_sum(terms, first_id + len(tasks)))
    return tasks


def running_sum(terms: list[int], number: int) -> Task:
  """The task of adding up ``terms``."""
  lines, total = [], terms[0]
  for term in terms[1:]:
    lines.append(f"{total}+{term}={total + term}")
    total += term
  worked = "\n".join([*lines, mark_answer(str(total))])
  return Task(
    id=number,
    prompt=(Message("user", "+".join(map(str, terms))),),
    answer=str(total),
    source="running_sums",
    demonstration=(Message("assistant", worked),),
    metadata={"level": len(terms)},
  )


def _side(terms: Sequence[int]) -> str:
  digest = hashlib.sha256("+".join(map(str, terms)).encode()).digest()
  return "test" if int.from_bytes(digest[:4], "big") < _TEST_SHARE * 2**32 else "train"


@dataclasses.dataclass(unsafe_hash=True)
class WordProblemFilesConfig(TaskSource):
  """Word problems of files in ``config.data.path``, as plain text without tools.

  A row has ``question`` and ``answer``, a worked solution that ends in ``#### ANSWER``, as in
  GSM8K; its calculator annotations are left out. Or it has ``input`` and ``target``, as in MAWPS;
  then the solution is the marked answer alone.

  Attributes:
    train_file, test_file: names of the files; without a test file the last tenth of the train file
      is for tests.
  """

  reads_path = True

  train_file: str = "train.jsonl"
  test_file: str = "test.jsonl"

  def load(self, data: DataConfig) -> TaskSplits:
    assert data.path is not None
    folder = pathlib.Path(data.path)
    train = _problems(folder / self.train_file, 0)
    if self.test_file:
      test = _problems(folder / self.test_file, FIRST_TEST_ID)
    else:
      border = len(train) * 9 // 10
      train, left = train[:border], train[border:]
      test = [dataclasses.replace(task, id=FIRST_TEST_ID + i) for i, task in enumerate(left)]
    return TaskSplits(train[: data.train_size], test[: data.test_size])


def _problems(path: pathlib.Path, first_id: int) -> list[Task]:
  tasks = []
  for line, row in read_jsonl(path):
    if "question" in row:
      question = require_text(row, "question", path, line)
      worked = _ANNOTATION.sub("", require_text(row, "answer", path, line))
      answer = read_marked_answer(worked)
      if answer is None:
        raise DataError("'answer' has no line '#### ANSWER'", path, line)
    else:
      question, answer = (require_text(row, name, path, line) for name in ("input", "target"))
      worked = mark_answer(answer)
    tasks.append(
      Task(
        id=first_id + line - 1,
        prompt=(Message("user", question),),
        answer=answer,
        source=path.name,
        demonstration=(Message("assistant", worked),),
      )
    )
  return tasks


@dataclasses.dataclass(unsafe_hash=True)
class PassageConfig(TaskSource):
  """Passages of the text files of ``config.data.path``: a few lines, and how they go on.

  The last tenth of each file (``*.txt``, ``*.txt.gz``) is for tests. There is no answer to check.

  Attributes:
    lead, rest: characters of the prompt and of what follows it. Ours.
    files: names without suffix that are read; () reads all.
    stride: characters from one passage to the next; 0 is their length.
  """

  reads_path = True

  lead: PositiveInt = 96
  rest: PositiveInt = 160
  files: tuple[str, ...] = ()
  stride: NonNegativeInt = 0

  def load(self, data: DataConfig) -> TaskSplits:
    assert data.path is not None
    folder = pathlib.Path(data.path)
    found = sorted(p for p in folder.iterdir() if p.name.endswith((".txt", ".txt.gz")))
    if self.files:
      found = [p for p in found if p.name.split(".")[0] in self.files]
    if not found:
      raise DataError("no *.txt or *.txt.gz that config.data.source.files names", folder)
    sides: tuple[list[Task], list[Task]] = ([], [])
    for path in found:
      text = read_text(path)
      border = len(text) * 9 // 10
      for side, part, first in zip(
        sides, (text[:border], text[border:]), (0, FIRST_TEST_ID), strict=True
      ):
        side += self._cut(part, path.name, first + len(side))
    limits = (data.train_size, data.test_size)
    return TaskSplits(*(side[:limit] for side, limit in zip(sides, limits, strict=True)))

  def _cut(self, text: str, name: str, first_id: int) -> list[Task]:
    length = self.lead + self.rest
    starts = range(0, len(text) - length + 1, self.stride or length)
    passages = [text[at : at + length] for at in starts]
    whole = [p for p in passages if p[: self.lead].strip() and p[self.lead :].strip()]
    return [
      Task(
        id=first_id + i,
        prompt=(Message("user", passage[: self.lead]),),
        answer="",
        source=name,
        demonstration=(Message("assistant", passage[self.lead :]),),
      )
      for i, passage in enumerate(whole)
    ]
