"""Rubrics for preference pairs, sampled, weighed and made into the data of C2's two runs.

  rubrics.jsonl    a row a pair, with the rubrics that could be read
  margins.jsonl    a row a pair, with the judge's margin without and with each of them
  given_up.jsonl   pairs that a model could not be asked about, and why
  settings.json    what they were made with; a folder holds those of one setting
  generator, episodes, verifier: as ``write_c2`` makes them of the rows, when all are there

A row is on the disk before the next pair is begun (``agentjax.data.synthesis_folder``), so a
stopped command continues where it was.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from agentjax.adapters.chat_endpoint.endpoint import JudgeRefusedError
from agentjax.adapters.chat_endpoint.judge import ChoiceNotToldError
from agentjax.adapters.judge_model import JudgeModelConfig, open_judge
from agentjax.data.conversations import openai_messages
from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl, require_text
from agentjax.data.splits import TaskSplits
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
from agentjax.engine import ContextLengthError, SamplingConfig
from agentjax.recipes.c2.rubrics import (
  C2Config,
  NotFiniteError,
  Pair,
  Synthesis,
  arrange,
  rubric_messages,
  select,
  weigh,
  write_rubrics,
)
from agentjax.recipes.c2.runs import C2Data, write_c2
from agentjax.rewards.judges import LetterJudge, question_key
from agentjax.threads import LoopThread
from agentjax.training.build import Extensions, build_parts
from agentjax.training.experiment import Experiment, resolve
from agentjax.training.model_pool import ModelPool
from agentjax.training.preferences import SOURCE
from agentjax.trajectory.record import Message, Task

RUBRICS, MARGINS = "rubrics.jsonl", "margins.jsonl"


def generator_config() -> JudgeModelConfig:
  """How the source samples rubrics: temperature 1, top-p .9, up to 1024 tokens."""
  return JudgeModelConfig(sampling=SamplingConfig(temperature=1.0, top_p=0.9), max_tokens=1024)


def judge_config() -> JudgeModelConfig:
  """How the source's judge argues: greedily, in up to 512 tokens."""
  return JudgeModelConfig(sampling=SamplingConfig(temperature=0.0), max_tokens=512)


def read_pairs(path: str | os.PathLike[str], *, order_seed: int) -> list[Pair]:
  """Preferences of a JSONL file.

  A row has ``prompt``, a text or a list of messages, the texts ``chosen`` and ``rejected``, and may
  have an integer ``id``; where no row has one it is the number of the line, from 0.

  Raises:
    DataError: a file that cannot be read, or a row that does not fit, with line and field.
  """
  pairs: dict[int, Pair] = {}
  named: bool | None = None
  for line, row in read_jsonl(path):
    named = "id" in row if named is None else named
    number = row.get("id") if named else line - 1
    if named != ("id" in row) or type(number) is not int or number < 0 or number in pairs:
      raise DataError(
        f"'id' is {row.get('id')!r}; allowed: an integer >= 0 of its own in every row, or none in "
        "any",
        path,
        line,
      )
    prompt = row.get("prompt")
    if isinstance(prompt, list):
      try:
        question = tuple(
          dataclasses.replace(m, content=_characters(m.content))
          for m in openai_messages(prompt, keep=True)
        )
      except ValueError as error:
        raise DataError(f"'prompt': {error}", path, line) from error
      if not question or any(message.tool_calls for message in question):
        raise DataError("'prompt' is empty or has calls; allowed: messages of text", path, line)
    else:
      question = (Message("user", _characters(require_text(row, "prompt", path, line))),)
    chosen, rejected = (
      _characters(require_text(row, name, path, line)) for name in ("chosen", "rejected")
    )
    if chosen == rejected:
      raise DataError("'chosen' and 'rejected' are the same text", path, line)
    pairs[number] = arrange(number, question, chosen, rejected, seed=order_seed)
  return list(pairs.values())


def _characters(text: str) -> str:
  """The text with a question mark for each half of a surrogate pair, which is no character."""
  return text.encode("utf-8", "replace").decode()


@dataclasses.dataclass(frozen=True)
class RubricsWritten:
  """What a call of ``synthesise_rubrics`` did.

  Attributes:
    pairs: of the folder.
    rubrics: that could be read, of all of them.
    given_up: pairs that a model could not be asked about.
    resumed: pairs with rubrics, and with margins, that were there before.
    data: of the two runs.
  """

  pairs: int
  rubrics: int
  given_up: int
  resumed: tuple[int, int]
  data: C2Data


def synthesise_rubrics(
  experiment: Experiment,
  output: str | os.PathLike[str],
  *,
  pairs: Sequence[Pair],
  generator: JudgeModelConfig,
  judge: JudgeModelConfig,
  c2: C2Config,
  concurrency: int = 16,
  report: Report = unreported,
) -> RubricsWritten:
  """C2's first step for many pairs, and the data of the other two; see the module.

  Each row is the one that ``c2.synthesise`` gives for the pair alone.

  Args:
    experiment: that of the generator's run (configs/c2_generator.py); validated and frozen here.
      Its engine serves each model that is on disk, its vocabulary and ``rl.row_length`` are those
      of the episodes.
    output: new, empty, or of an earlier call; pairs may have been added since.
    pairs: with ids of their own.
    generator, judge: the model that writes rubrics, and the model that judges with them.
    c2: settings of the flow.
    concurrency: pairs at once; each asks for all of its rubrics, or verdicts, at once.
    report: called with how many pairs have rubrics, then margins.

  Raises:
    ConfigError: settings that cannot be, or an output of other settings or pairs.
    CheckpointError: no model to load.
    DataError: no pair was kept, or an earlier output cannot be read.
    JudgeUnavailableError, JudgeRefusedError: an endpoint failed; the same call goes on.
  """
  resolve(experiment)
  generator.validate("generator")
  judge.validate("judge")
  c2.validate("c2")
  if not pairs or len({pair.id for pair in pairs}) != len(pairs) or concurrency < 1:
    raise ValueError(f"{len(pairs)} pairs, concurrency={concurrency}; allowed: >= 1, ids once.")
  # Fail now if the run cannot be built, not after all rubrics are measured.
  shortest = min(pairs, key=lambda pair: len(str(_plain(pair))))
  messages = rubric_messages(shortest, key=question_key(c2.seed, shortest.id))
  first = Task(shortest.id, messages, "chosen", SOURCE)
  parts = build_parts(experiment, None, Extensions(tasks=TaskSplits([first], ())))
  pool, runner = ModelPool(experiment), LoopThread()
  try:
    writes, written_with = open_judge(generator, pool, c2.seed)
    weighs, weighed_with = open_judge(judge, pool, c2.seed)
    settings = {"c2": c2.to_dict(), "generator": written_with, "judge": weighed_with}
    folder = _Folder(claim(output, settings, (RUBRICS, MARGINS, GIVEN_UP)), pairs, c2)
    resumed = folder.resumed
    runner.run(folder.write(writes, concurrency, report))
    runner.run(folder.weigh(weighs, concurrency, report))
  finally:
    runner.run(parts.close())
    runner.close()
    pool.close()
  found = folder.syntheses()
  rubrics = sum(len(s.rubrics) for s in found)
  if not any(s.selection for s in found):
    raise DataError(
      f"none of {len(pairs)} pairs was kept: none has a rubric that helps the judge and one that "
      f"misleads it. {rubrics} of {c2.rubrics * len(pairs)} rubrics could be read; "
      f"{len(folder.given_up.rows)} pairs were given up ({GIVEN_UP} says why). More pairs, in "
      "another folder more rubrics, or other models are needed",
      output,
    )
  data = write_c2(output, found, parts, seed=c2.seed)
  return RubricsWritten(len(pairs), rubrics, len(folder.given_up.rows), resumed, data)


class _Folder:
  """The rows of a folder, and the pairs they are for."""

  def __init__(self, directory: pathlib.Path, pairs: Sequence[Pair], config: C2Config):
    self._pairs = sorted(pairs, key=lambda pair: pair.id)
    self._config = config
    self._plain = {pair.id: _plain(pair) for pair in pairs}
    self._rubrics = RowFile(directory / RUBRICS, {"rubrics": list}, self._other)
    self._margins = RowFile(directory / MARGINS, {"without": float, "margins": list}, self._other)
    self.given_up = RowFile(directory / GIVEN_UP, {"reason": str}, self._other)
    self.resumed = (len(self._rubrics.rows), len(self._margins.rows))

  def _other(self, row: Row) -> str | None:
    """Rows of the folder are of these pairs, all of them."""
    wanted = self._plain.get(row["id"])
    if wanted is None:
      return f"pair {row['id']} is not among the pairs"
    return None if row.get("pair") == wanted else f"pair {row['id']} was another"

  async def write(self, generator: LetterJudge, concurrency: int, report: Report) -> None:
    """Rubrics of every pair."""

    async def one(pair: Pair) -> Row:
      return {"rubrics": list(await write_rubrics(pair, generator, self._config))}

    await self._fill("rubrics", self._rubrics, one, concurrency, report)

  async def weigh(self, judge: LetterJudge, concurrency: int, report: Report) -> None:
    """Margins of every pair that has rubrics."""

    async def one(pair: Pair) -> Row:
      found = await weigh(pair, self._rubrics.rows[pair.id]["rubrics"], judge, self._config)
      return {"without": found.without, "margins": list(found.margins)}

    await self._fill("margins", self._margins, one, concurrency, report)

  async def _fill(
    self, what: str, file: RowFile, make: Any, concurrency: int, report: Report
  ) -> None:
    async def work(pair: Pair) -> None:
      row = {"id": pair.id, "pair": self._plain[pair.id]}
      try:
        file.append(row | await make(pair))
      except (ContextLengthError, ChoiceNotToldError, NotFiniteError) as error:
        self.given_up.append(row | {"reason": f"{what}: {error}"})
      except JudgeRefusedError as error:
        if error.fault is None:  # not about this request
          raise JudgeRefusedError(f"pair {pair.id}, {what}: {error}") from error
        self.given_up.append(row | {"reason": f"{what}: {error}"})

    files = (file, self.given_up)
    await fill(files, self._pairs, work, what=what, report=report, concurrency=concurrency)

  def syntheses(self) -> list[Synthesis]:
    """Of the pairs that were not given up, by id."""
    found = []
    for pair in self._pairs:
      if pair.id in self.given_up.rows:
        continue
      rubrics = tuple(self._rubrics.rows[pair.id]["rubrics"])
      row = self._margins.rows[pair.id]
      without, margins = row["without"], tuple(row["margins"])
      found.append(Synthesis(pair, rubrics, without, margins, select(without, margins)))
    return found


def _plain(pair: Pair) -> Row:
  return {
    "question": plain_messages(pair.question),
    "first": pair.first,
    "second": pair.second,
    "label": pair.label,
  }
