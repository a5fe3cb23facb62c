"""Questions about passages of a corpus: tasks for runs, and lessons for adapters."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np

from agentjax.adapters.tools.search import Corpus, Document, read_corpus
from agentjax.config import PositiveInt
from agentjax.data.config import DataConfig
from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl, require_text
from agentjax.data.source import TaskSource
from agentjax.data.splits import FIRST_TEST_ID, TaskSplits
from agentjax.trajectory.record import Message, Task


@dataclasses.dataclass(unsafe_hash=True)
class ReadingConfig(TaskSource):
  """Questions behind passages that a search found; files in ``config.data.path``.

  The answers are in ``task.metadata["answers"]``; the first is the demonstration. The last
  ``config.data.test_size`` questions are the test tasks. All figures are ours.

  Attributes:
    questions: JSONL of {"id", "question", "answers", "gold" (optional: id of the right passage)}.
    corpus: JSONL of passages, as the search tool reads them.
    passages: in front of a question: the best that BM25 finds, and the right one in any case. They
      stand in random order.
    most_characters: of a passage; longer ones are not used.
  """

  reads_path = True

  questions: str = "nq_open_2655.jsonl.gz"
  corpus: str = "nq_corpus.jsonl.gz"
  passages: PositiveInt = 4
  most_characters: PositiveInt = 1500

  def load(self, data: DataConfig) -> TaskSplits:
    assert data.path is not None
    whole = read_corpus([os.path.join(data.path, self.corpus)])
    known = [document for document in whole if len(document.text) <= self.most_characters]
    corpus, path = Corpus(known), os.path.join(data.path, self.questions)
    rows = [(line, row) for line, row in read_jsonl(path)]
    test = 0 if data.test_size is None else data.test_size
    train = len(rows) - test if data.train_size is None else data.train_size
    if train < 1 or train + test > len(rows):
      raise DataError(
        f"{len(rows)} questions; config.data.train_size={data.train_size} and "
        f"test_size={data.test_size} need {train + test}",
        path,
      )
    made = [self._task(corpus, path, data.seed, *row) for row in rows[:train]]
    held = [self._task(corpus, path, data.seed, *row) for row in rows[len(rows) - test :]]
    first = FIRST_TEST_ID - 1
    return TaskSplits(made, [dataclasses.replace(t, id=first + t.id) for t in held])

  def _task(self, corpus: Corpus, path: str, seed: int, line: int, row: dict[str, Any]) -> Task:
    question, answers = require_text(row, "question", path, line), row.get("answers")
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
      raise DataError(f"'answers' is {answers!r}; allowed: a list of texts", path, line)
    found = [hit.document for hit in corpus.search(question, self.passages)]
    gold = corpus.get(row.get("gold", ""))
    if gold is not None and gold not in found:
      found = [gold, *found[: self.passages - 1]]
    order = np.random.default_rng([seed, line]).permutation(len(found))
    text = "\n\n".join([*(shown(found[i]) for i in order), question])
    demonstration = (Message("assistant", answers[0]),)
    return Task(
      line, (Message("user", text),), answers[0], "reading", demonstration, {"answers": answers}
    )


def shown(document: Document) -> str:
  """A passage as it stands in a prompt; its text is a line of its own."""
  return f"{document.title}\n{document.text}"
