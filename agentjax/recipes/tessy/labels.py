"""Style spans of texts, as a model lists them: what boundary predictors learn from.

A text is cut into chunks of 60 words. For each, a model lists the fillers, connectives and talk to
itself that stand in it, word for word, and they are found again in the text (TESSY, 2604.14164,
which asks a 32B model). The words of the prompt are ours, and so is what happens to a reply that
cannot be read: it is asked for again, and then the text is given up.

  labels.jsonl    a row a text, with its ``spans``; ``flow.read_spans`` reads it
  given_up.jsonl  texts with a chunk that cannot be asked about, or whose reply cannot be read
  settings.json   what they were made with; a folder holds those of one setting
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence

from agentjax.adapters.chat_endpoint.endpoint import JudgeRefusedError
from agentjax.adapters.judge_model import JudgeModelConfig, open_judge
from agentjax.config import Config, PositiveInt
from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl, require_text
from agentjax.data.synthesis_folder import GIVEN_UP, Report, Row, RowFile, claim, fill, unreported
from agentjax.engine import ContextLengthError, SamplingConfig
from agentjax.recipes.tessy.flow import find_spans
from agentjax.rewards.judges import (
  Judge,
  ask,
  delimit,
  last_json_object,
  material_notice,
  nonce,
  question_key,
)
from agentjax.threads import LoopThread
from agentjax.training.experiment import Experiment, resolve
from agentjax.training.model_pool import ModelPool
from agentjax.trajectory.record import Message

LABELS = "labels.jsonl"


@dataclasses.dataclass(unsafe_hash=True)
class LabelConfig(Config):
  """How texts are labelled.

  Attributes:
    chunk_words: words that the model sees at one time; 60 in the source.
    rounds: attempts to get a reply that can be read. Ours.
    end_of_thoughts: text that is style wherever it stands, because the student ends the thoughts.
    seed: with the text's id it addresses all randomness.
  """

  chunk_words: PositiveInt = 60
  rounds: PositiveInt = 3
  end_of_thoughts: str = "</think>"
  seed: int = 0


def labeller_config() -> JudgeModelConfig:
  """The model lists greedily. Ours."""
  return JudgeModelConfig(sampling=SamplingConfig(temperature=0.0), max_tokens=1024)


@dataclasses.dataclass(frozen=True)
class Text:
  """What is labelled."""

  id: int
  text: str


def read_texts(path: str | os.PathLike[str]) -> list[Text]:
  """Texts of a JSONL file, numbered by their lines: ``text``, or the last of ``messages``.

  Raises:
    DataError: a file that cannot be read, or a row that does not fit, with line and field.
  """
  found = []
  for line, row in read_jsonl(path):
    messages = row.get("messages")
    if "text" not in row and isinstance(messages, list) and messages:
      row = {"text": messages[-1].get("content") if isinstance(messages[-1], dict) else None}
    text = require_text(row, "text", path, line)
    # Half a surrogate pair is no character: a file cannot hold it.
    found.append(Text(line - 1, text.encode("utf-8", "replace").decode()))
  return found


def chunks_of(text: str, words: int) -> list[tuple[int, str]]:
  """(start, piece) of pieces of so many words, with the white space before them."""
  ends = [word.end() for word in re.finditer(r"\S+", text)]
  cuts = [0, *ends[words - 1 : -1 : words], len(text)] if ends else []
  return [(a, text[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]


class UnreadableError(Exception):
  """No reply about a chunk can be read; ``args`` have its start."""


async def label(text: Text, labeller: Judge, config: LabelConfig) -> list[tuple[int, int]]:
  """The style spans of a text, in order.

  Raises:
    UnreadableError: a chunk has no reply that can be read.
  """
  end = config.end_of_thoughts
  spans = [m.span() for m in re.finditer(re.escape(end), text.text)] if end else []
  for start, chunk in chunks_of(text.text, config.chunk_words):
    key = question_key(config.seed, text.id, start)
    messages = label_messages(chunk, key=key)
    for turn in range(config.rounds):
      listed = read_fillers(await ask(labeller, messages, key=question_key(key, turn)))
      if listed is not None:
        spans += [(start + a, start + b) for a, b in find_spans(chunk, listed)]
        break
    else:
      raise UnreadableError(start)
  return sorted(spans)


def label_messages(chunk: str, *, key: int) -> tuple[Message, ...]:
  """Asks for the fillers of a chunk."""
  mark = nonce(key, chunk)
  asked = (
    "List every piece of this text that shows only the manner of its writer and adds nothing to "
    "the solution: fillers, connectives, talk to oneself, announcements of what comes next. Copy "
    "each word for word, in the order in which they stand. Calculations, facts, names and "
    'conclusions are not listed. Reply with one JSON object: {"fillers": ["...", "..."]}'
  )
  return (
    Message("system", "You mark the style of texts. " + material_notice(mark)),
    Message("user", f"{delimit('text', chunk, mark)}\n\n{asked}"),
  )


def read_fillers(reply: str) -> list[str] | None:
  """The list of a reply, or None."""
  found = (last_json_object(reply) or {}).get("fillers")
  readable = isinstance(found, list) and all(isinstance(piece, str) for piece in found)
  return found if readable else None


@dataclasses.dataclass(frozen=True)
class Labelled:
  """What a call of ``label_texts`` did: texts by what came of them, and those from before."""

  texts: int
  given_up: int
  kept: int


def label_texts(
  experiment: Experiment,
  output: str | os.PathLike[str],
  *,
  texts: Sequence[Text],
  labeller: JudgeModelConfig,
  config: LabelConfig,
  concurrency: int = 16,
  report: Report = unreported,
) -> Labelled:
  """Labels texts that the folder does not hold yet; see the module.

  Args:
    experiment: its engine serves a model on disk; validated and frozen here.
    output: new, empty, or of an earlier call; texts may have been added since.
    texts: with ids of their own.
    labeller: the model.
    config: settings.
    concurrency: texts at once.
    report: told how many are done.

  Raises:
    ConfigError: settings that cannot be, or an output of other settings or texts.
    DataError: there is no text, or an earlier output cannot be read.
    CheckpointError: no model to load.
    JudgeUnavailableError, JudgeRefusedError: an endpoint failed; the same call goes on.
  """
  resolve(experiment)
  labeller.validate("labeller")
  config.validate("labels")
  if not texts:
    raise DataError("there is no text to label; allowed: at least one row", "--texts")
  known = {text.id: text.text for text in texts}
  pool, runner = ModelPool(experiment), LoopThread()
  try:
    model, identity = open_judge(labeller, pool, config.seed)
    settings = {"labels": config.to_dict(), "labeller": identity}
    directory = claim(output, settings, (LABELS, GIVEN_UP))

    def other(row: Row) -> str | None:
      same = known.get(row["id"]) == row["text"]
      return None if same else f"text {row['id']} was another"

    labels = RowFile(directory / LABELS, {"text": str, "spans": list}, other)
    given_up = RowFile(directory / GIVEN_UP, {"text": str, "reason": str}, other)
    kept = len(labels.rows) + len(given_up.rows)

    async def work(text: Text) -> None:
      row = {"id": text.id, "text": text.text}
      try:
        labels.append(row | {"spans": await label(text, model, config)})
      except UnreadableError as error:
        reason = f"no reply about the chunk from character {error.args[0]} can be read"
        given_up.append(row | {"reason": reason})
      except ContextLengthError as error:
        given_up.append(row | {"reason": str(error)})
      except JudgeRefusedError as error:
        if error.fault is None:  # not about this request
          raise
        given_up.append(row | {"reason": str(error)})

    files = (labels, given_up)
    runner.run(fill(files, texts, work, what="labels", report=report, concurrency=concurrency))
  finally:
    runner.close()
    pool.close()
  return Labelled(len(labels.rows), len(given_up.rows), kept)
