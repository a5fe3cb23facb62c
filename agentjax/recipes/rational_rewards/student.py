"""PARROT's folder: critiques, checks, and the conversations that the student is trained on.

  critiques.jsonl   a row a pair, with the teacher's critiques of both answers
  checks.jsonl      a row a pair, with what the consistency filter found
  given_up.jsonl    pairs that a model could not be asked about, and why
  settings.json     what they were made with; a folder holds those of one setting
  student/train.jsonl   the conversations of kept pairs, when all is there

A row is on the disk before the next pair is begun, so a stopped command continues where it was.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Awaitable, Callable, Sequence

from agentjax.adapters.chat_endpoint.endpoint import JudgeRefusedError
from agentjax.adapters.judge_model import JudgeModelConfig, open_judge
from agentjax.data.errors import DataError
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
from agentjax.engine import ContextLengthError
from agentjax.files import write_atomically
from agentjax.recipes.rational_rewards.parrot import (
  Checked,
  ParrotConfig,
  Preference,
  UnusableError,
  check_critiques,
  prefers_chosen,
  student_rows,
  write_critiques,
)
from agentjax.rewards.judges import Judge
from agentjax.rollout.evaluation import Estimate, bootstrap
from agentjax.threads import LoopThread
from agentjax.training.experiment import Experiment, resolve
from agentjax.training.model_pool import ModelPool

CRITIQUES, CHECKS = "critiques.jsonl", "checks.jsonl"


@dataclasses.dataclass(frozen=True)
class Written:
  """What a call of ``write_student_data`` did.

  Attributes:
    pairs: of the folder.
    kept: by the filter.
    by_words, by_grades: that passed either half of it.
    given_up: pairs without usable critiques.
    resumed: pairs with critiques, and with checks, that were there before.
    conversations: of the student's file.
  """

  pairs: int
  kept: int
  by_words: int
  by_grades: int
  given_up: int
  resumed: tuple[int, int]
  conversations: int


def write_student_data(
  experiment: Experiment,
  output: str | os.PathLike[str],
  *,
  preferences: Sequence[Preference],
  teacher: JudgeModelConfig,
  checker: JudgeModelConfig,
  parrot: ParrotConfig,
  concurrency: int = 16,
  report: Report = unreported,
) -> Written:
  """PARROT's critiques, checks and conversations; see the module.

  Args:
    experiment: its engine serves each model that is on disk; validated and frozen here.
    output: new, empty, or of an earlier call; preferences may have been added since.
    preferences: with ids of their own.
    teacher: writes the critiques and is told the label.
    checker: predicts the label and is not told.
    parrot: settings of the flow.
    concurrency: pairs at once.
    report: called with how many pairs have critiques, then checks.

  Raises:
    ConfigError: settings that cannot be, or an output of other settings or preferences.
    CheckpointError: no model to load.
    DataError: no pair was kept, or an earlier output cannot be read.
    JudgeUnavailableError, JudgeRefusedError: an endpoint failed; the same call goes on.
  """
  for config, name in ((teacher, "teacher"), (checker, "checker")):
    config.validate(name)
  parrot.validate("parrot")
  if not preferences or concurrency < 1:
    raise ValueError(f"{len(preferences)} preferences, concurrency={concurrency}; allowed: >= 1.")
  if teacher.path or checker.path:
    resolve(experiment)
  pool, runner = ModelPool(experiment), LoopThread()
  try:
    writer, written_with = open_judge(teacher, pool, parrot.seed)
    reader, checked_with = open_judge(checker, pool, parrot.seed)
    settings = {"parrot": parrot.to_dict(), "teacher": written_with, "checker": checked_with}
    directory = claim(output, settings, (CRITIQUES, CHECKS, GIVEN_UP))
    folder = _Folder(directory, preferences, parrot)
    resumed = (len(folder.critiques.rows), len(folder.checks.rows))
    runner.run(folder.write(writer, concurrency, report))
    runner.run(folder.check(reader, concurrency, report))
  finally:
    runner.close()
    pool.close()
  checks = [Checked(row["by_words"], row["by_grades"]) for row in folder.checks.rows.values()]
  given_up = len(folder.given_up.rows)
  kept, conversations = folder.kept(), folder.conversations()
  if not kept:
    raise DataError(
      f"none of {len(preferences)} pairs was kept; {given_up} were given up ({GIVEN_UP} says why). "
      "More pairs, or in another folder another teacher or checker, are needed",
      output,
    )
  lines = [json.dumps({"messages": messages}, ensure_ascii=False) for messages in conversations]
  file = directory / "student" / "train.jsonl"
  write_atomically(file, "".join(line + "\n" for line in lines).encode("utf-8", "replace"))
  return Written(
    len(preferences),
    len(kept),
    sum(check.by_words for check in checks),
    sum(check.by_grades for check in checks),
    given_up,
    resumed,
    len(lines),
  )


class _Folder:
  """The rows of a folder, and the preferences they are for."""

  def __init__(
    self, directory: pathlib.Path, preferences: Sequence[Preference], config: ParrotConfig
  ):
    self._preferences = sorted(preferences, key=lambda one: one.id)
    self._config = config
    self._plain = {one.id: _plain(one) for one in preferences}
    self.critiques = RowFile(directory / CRITIQUES, {"chosen": str, "rejected": str}, self._other)
    self.checks = RowFile(directory / CHECKS, {"by_words": bool, "by_grades": bool}, self._other)
    self.given_up = RowFile(directory / GIVEN_UP, {"reason": str}, self._other)

  def _other(self, row: Row) -> str | None:
    """Rows of the folder are of these preferences, all of them."""
    wanted = self._plain.get(row["id"])
    if wanted is None:
      return f"pair {row['id']} is not among the pairs"
    return None if row.get("pair") == wanted else f"pair {row['id']} was another"

  async def write(self, teacher: Judge, concurrency: int, report: Report) -> None:
    """Critiques of every pair."""

    async def one(preference: Preference) -> Row:
      return {**await write_critiques(preference, teacher, self._config)}

    await self._fill("critiques", self.critiques, one, concurrency, report)

  async def check(self, judge: Judge, concurrency: int, report: Report) -> None:
    """Checks of every pair that has critiques."""

    async def one(preference: Preference) -> Row:
      critiques = self.critiques.rows[preference.id]
      return dataclasses.asdict(await check_critiques(preference, critiques, judge, self._config))

    await self._fill("checks", self.checks, one, concurrency, report)

  async def _fill(
    self,
    what: str,
    file: RowFile,
    make: Callable[[Preference], Awaitable[Row]],
    concurrency: int,
    report: Report,
  ) -> None:
    async def work(preference: Preference) -> None:
      row = {"id": preference.id, "pair": self._plain[preference.id]}
      try:
        file.append(row | await make(preference))
      except (ContextLengthError, UnusableError) as error:
        self.given_up.append(row | {"reason": f"{what}: {error}"})
      except JudgeRefusedError as error:
        if error.fault is None:  # not about this request
          raise JudgeRefusedError(f"pair {preference.id}, {what}: {error}") from error
        self.given_up.append(row | {"reason": f"{what}: {error}"})

    files = (file, self.given_up)
    await fill(files, self._preferences, work, what=what, report=report, concurrency=concurrency)

  def kept(self) -> list[Preference]:
    """The pairs that passed the filter."""
    return [
      one
      for one in self._preferences
      if (row := self.checks.rows.get(one.id)) and Checked(row["by_words"], row["by_grades"]).kept
    ]

  def conversations(self) -> list[list[dict[str, str]]]:
    """Two of each kept pair."""
    return [
      plain_messages(messages)
      for one in self.kept()
      for messages in student_rows(one, self.critiques.rows[one.id], self._config)
    ]


def _plain(preference: Preference) -> Row:
  return {
    "question": plain_messages(preference.question),
    "chosen": preference.chosen,
    "rejected": preference.rejected,
  }


def measure_judge(
  experiment: Experiment,
  *,
  preferences: Sequence[Preference],
  judge: JudgeModelConfig,
  parrot: ParrotConfig,
  concurrency: int = 16,
  report: Report = unreported,
) -> tuple[Estimate, int]:
  """How often a judge of single answers grades the better of two higher.

  Args:
    experiment: its engine serves a model on disk; validated and frozen here.
    preferences: held out.
    judge: such as the student.
    parrot: its aspects and seed.
    concurrency: pairs at once.
    report: called with how many pairs are judged.

  Returns:
    The mean over pairs with a 95 % interval, an equal pair as one half; and the number of pairs
    that are too long for the judge, or that its endpoint refuses, which are left out.
  """
  judge.validate("judge")
  parrot.validate("parrot")
  if judge.path:
    resolve(experiment)
  pool, runner = ModelPool(experiment), LoopThread()
  found: dict[int, float] = {}
  try:
    reader, _ = open_judge(judge, pool, parrot.seed)

    async def work(preference: Preference) -> None:
      try:
        found[preference.id] = await prefers_chosen(preference, reader, parrot)
      except ContextLengthError:
        pass  # counted by its absence
      except JudgeRefusedError as error:
        if error.fault is None:  # not about this request
          raise

    runner.run(fill((), preferences, work, what="pairs", report=report, concurrency=concurrency))
  finally:
    runner.close()
    pool.close()
  if not found:
    raise ValueError(
      "all pairs are too long for the judge, or refused by its endpoint; raise "
      "config.engine.max_length, or the context of the endpoint."
    )
  values = [found[i] for i in sorted(found)]
  estimate = bootstrap(values, seed=[parrot.seed], resamples=2000, confidence=0.95)
  return estimate, len(preferences) - len(found)
