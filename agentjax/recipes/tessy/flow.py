r"""TESSY: reasoning traces that a teacher and a student write together, for supervised fine-tuning.

The teacher writes capability tokens, the student writes style tokens (fillers, connectives, talk to
itself). So the text has strong content and is close to the student's own style. The student begins.
The active model writes a chunk; the predictor for its texts looks for the first piece of the
*other* class; the chunk is cut there, never inside a word, and the other model continues. After the
end of the thoughts the student writes the answer.

Models exchange text, never token ids: their tokenizers and templates may differ.

Reference: 2604.14164 and its published code, which has the chunks of 5 and 10 tokens, the 200
tokens of context, 38 000 tokens at most, a check for repetition every 100 steps and 5 retries.
Ours: context in words; the definition of repetition; a new start after a trace is given up; a chunk
is kept whole if both models in turn would leave the word to the other; and the small classifier of
words, for runs without an accelerator (``boundaries`` trains a model on labels, as the paper does).
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np

from agentjax.config import Config, NonNegativeInt, PositiveInt, check
from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl, require_text
from agentjax.files import write_atomically
from agentjax.trajectory.record import Message, Task

Author = Literal["student", "teacher"]
_OTHER: Mapping[Author, Author] = {"student": "teacher", "teacher": "student"}
_WORD = re.compile(r"\S+")
_CHUNK_WORDS, _CONTEXT_WORDS = 10, 200  # of what ``word_accuracy`` asks about


@dataclasses.dataclass(frozen=True)
class Continuation:
  """What a model wrote: text, how many tokens of its own that was, and whether it ended there."""

  text: str
  tokens: int
  ended: bool = False


class GivenUpError(Exception):
  """A trace cannot be used; ``args`` say why. A writer raises it for a text that it cannot
  continue."""


class Writer(Protocol):
  """A model that continues a text, with its own template, tokenizer and sampling.

  The published settings are temperature .7, top-p .8 and top-k 20, with prefix caching.
  """

  async def extend(
    self, prompt: tuple[Message, ...], text: str, tokens: int, key: tuple[int, ...]
  ) -> Continuation:
    """Up to ``tokens`` more tokens of the assistant's ``text``.

    Args:
      prompt: the task's messages.
      text: written so far by both models.
      tokens: at most.
      key: addresses the draw.

    Raises:
      GivenUpError: the text is too long for the model.
    """
    ...


class BoundaryPredictor(Protocol):
  """Classifies pieces as style or capability."""

  def style(self, context: str, chunk: str) -> list[tuple[int, bool]]:
    """(start in ``chunk``, whether it is style) of every piece of a chunk, in order."""
    ...


class SavedPredictor(BoundaryPredictor, Protocol):
  """A trained one."""

  def fingerprint(self) -> str:
    """Tells it from others."""
    ...


@dataclasses.dataclass(unsafe_hash=True)
class TessyConfig(Config):
  """Attributes:
  student_tokens, teacher_tokens: of a chunk.
  context_words: that the predictor sees before a chunk.
  max_tokens: of the thoughts; a longer trace is given up.
  answer_tokens: of the answer, at most.
  end_of_thoughts: text at which the thoughts end.
  check_every: chunks between two checks for repetition.
  repetition_words, repetition_times: a text repeats itself where its last words have stood in it so
    many times.
  retries: fresh starts after traces that were given up.
  """

  student_tokens: PositiveInt = 5
  teacher_tokens: PositiveInt = 10
  context_words: PositiveInt = 200
  max_tokens: PositiveInt = 38_000
  answer_tokens: PositiveInt = 4096
  end_of_thoughts: str = "</think>"
  check_every: PositiveInt = 100
  repetition_words: PositiveInt = 20
  repetition_times: int = 4
  retries: NonNegativeInt = 5

  def validate(self, path: str = "tessy") -> None:
    super().validate(path)
    times = self.repetition_times
    check(times >= 2, f"{path}.repetition_times", times, ">= 2")
    check(bool(self.end_of_thoughts), f"{path}.end_of_thoughts", "", "a text")


@dataclasses.dataclass(frozen=True)
class Synthesis:
  """A trace that two models wrote.

  Attributes:
    parts: (author, text) in order, neighbours by different authors.
    attempts: how often it was begun.
    given_up: why each earlier attempt was given up.
  """

  parts: tuple[tuple[Author, str], ...]
  attempts: int
  given_up: tuple[str, ...] = ()

  @property
  def text(self) -> str:
    return "".join(text for _, text in self.parts)

  @property
  def teacher_share(self) -> float:
    """Characters that the teacher wrote, of all."""
    written = sum(len(text) for author, text in self.parts if author == "teacher")
    return written / max(len(self.text), 1)

  def demonstration(self, task: Task) -> Task:
    """The task with this trace as its demonstration, and who wrote what in its metadata."""
    lineage = {"parts": [list(part) for part in self.parts], "attempts": self.attempts}
    return dataclasses.replace(
      task,
      demonstration=(Message("assistant", self.text),),
      metadata={**task.metadata, "tessy": lineage},
    )


async def synthesise(
  task: Task,
  writers: Mapping[Author, Writer],
  predictors: Mapping[Author, BoundaryPredictor],
  config: TessyConfig,
  *,
  seed: int = 0,
) -> Synthesis:
  """One trace for a task.

  An attempt is given up when it repeats itself, passes ``max_tokens``, a model ends its text before
  the end of the thoughts, or a writer says so. Other errors of a writer propagate.

  Args:
    task: its prompt is what both models are asked.
    writers: the two models.
    predictors: for texts of each of them.
    config: validated.
    seed: with the task's id, the attempt and the chunk it makes the key of every call.

  Raises:
    GivenUpError: all attempts were given up; its ``args`` say why, one reason each.
  """
  given_up: list[str] = []
  for attempt in range(1 + config.retries):
    trace = _Trace(task, writers, predictors, config, (seed, task.id, attempt))
    try:
      await trace.think()
      await trace.answer()
    except GivenUpError as reason:
      given_up.append(str(reason))
      continue
    return Synthesis(tuple(trace.parts), attempt + 1, tuple(given_up))
  raise GivenUpError(*given_up)


class _Trace:
  """One attempt."""

  def __init__(
    self,
    task: Task,
    writers: Mapping[Author, Writer],
    predictors: Mapping[Author, BoundaryPredictor],
    config: TessyConfig,
    key: tuple[int, int, int],
  ):
    self._task, self._writers, self._predictors = task, writers, predictors
    self._config, self._key = config, key
    self.parts: list[tuple[Author, str]] = []
    self.text = ""
    self._calls = 0

  async def think(self) -> None:
    """Chunks in turn until the thoughts have ended."""
    config, end = self._config, self._config.end_of_thoughts
    active: Author = "student"
    declined, spent = False, 0
    while True:
      chunk = await self._extend(active, getattr(config, f"{active}_tokens"))
      spent += max(chunk.tokens, 1)
      cut = self._boundary(active, chunk.text)
      if declined and cut == 0:
        cut = len(chunk.text)
      switches = cut < len(chunk.text)
      declined = switches and cut == 0
      seen = len(self.text)
      self._write(active, chunk.text[:cut])
      # The marker may have begun in an earlier chunk.
      at = self.text.find(end, max(0, seen - len(end)))
      if at >= 0:
        self._drop(len(self.text) - at - len(end))
        return
      if chunk.ended and not switches:
        raise GivenUpError(f"the {active} ended its text before {end!r}")
      if spent >= config.max_tokens:
        raise GivenUpError(f"no {end!r} within max_tokens={config.max_tokens}")
      if self._calls % config.check_every == 0 and repeats_itself(
        self.text, config.repetition_words, config.repetition_times
      ):
        raise GivenUpError("it repeats itself")
      if switches:
        active = _OTHER[active]

  async def answer(self) -> None:
    """The student's answer after the thoughts."""
    chunk = await self._extend("student", self._config.answer_tokens)
    if not chunk.ended:
      raise GivenUpError(f"no answer within answer_tokens={self._config.answer_tokens}")
    self._write("student", chunk.text)

  async def _extend(self, author: Author, tokens: int) -> Continuation:
    key = (*self._key, self._calls)
    self._calls += 1
    return await self._writers[author].extend(self._task.prompt, self.text, tokens, key)

  def _boundary(self, author: Author, chunk: str) -> int:
    """How much of a chunk its author keeps, up to white space."""
    number = self._config.context_words
    tail = self.text[-20 * number :]
    words = list(_WORD.finditer(tail))
    context = tail[words[-number].start() :] if len(words) > number else tail
    for start, style in self._predictors[author].style(context, chunk):
      if style != (author == "student"):
        before = (tail + chunk[:start])[-1:]
        if not before or before.isspace() or chunk[start].isspace():
          return start
        space = re.search(r"\s", chunk[start:])  # the rest of a word is its author's
        return start + space.start() if space else len(chunk)
    return len(chunk)

  def _write(self, author: Author, text: str) -> None:
    if not text:
      return
    self.text += text
    if self.parts and self.parts[-1][0] == author:
      text = self.parts.pop()[1] + text
    self.parts.append((author, text))

  def _drop(self, count: int) -> None:
    """Removes the last characters."""
    self.text = self.text[: len(self.text) - count]
    while count:
      author, text = self.parts.pop()
      if len(text) > count:
        self.parts.append((author, text[: len(text) - count]))
      count -= min(count, len(text))


def repeats_itself(text: str, words: int, times: int) -> bool:
  """Whether a text's last ``words`` words occur in it ``times`` times, overlaps counted."""
  every = text.split()
  if len(every) < words + times - 1:
    return False
  last = every[-words:]
  starts = range(len(every) - words + 1)
  return sum(every[i] == last[0] and every[i : i + words] == last for i in starts) >= times


def find_spans(text: str, phrases: Iterable[str]) -> list[tuple[int, int]]:
  """The places of the verbatim phrases that a labelling model listed, each after the previous one.

  A phrase that is not there (models misquote) is left out, and so is one that is only there within
  a word, such as "so" in "also".
  """
  spans, at = [], 0
  for phrase in phrases:
    start = text.find(phrase, at) if phrase else -1
    while start >= 0 and not _stands_alone(text, start, start + len(phrase)):
      start = text.find(phrase, start + 1)
    if start >= 0:
      at = start + len(phrase)
      spans.append((start, at))
  return spans


def _stands_alone(text: str, start: int, end: int) -> bool:
  """Whether no word goes on at either end. Scripts without capitals may have no blanks."""

  def goes_on(at: int) -> bool:
    return 0 < at < len(text) and all(
      c.isdigit() or c.lower() != c.upper() for c in text[at - 1 : at + 1]
    )

  return not goes_on(start) and not goes_on(end)


def read_spans(
  path: str | os.PathLike[str],
) -> tuple[list[str], list[list[tuple[int, int]]]]:
  """Labelled traces of a JSONL file, for ``WordClassifier.train``: texts and their style spans.

  A row has a ``text``, and either ``spans``, a list of [start, end], or ``phrases``, the verbatim
  fillers that a labelling model listed, in order (see ``find_spans``).

  Raises:
    DataError: a file that cannot be read, or a row that does not fit, with line and field.
  """
  texts: list[str] = []
  found: list[list[tuple[int, int]]] = []
  for line, row in read_jsonl(path):
    text = _characters(require_text(row, "text", path, line))
    field = "spans" if "spans" in row else "phrases"
    values = row.get(field)
    if not isinstance(values, list):
      raise DataError("the row has no list 'spans' and no list 'phrases'", path, line)
    if field == "phrases":
      if not all(isinstance(value, str) for value in values):
        raise DataError("'phrases' holds more than texts", path, line)
      spans = find_spans(text, [_characters(value) for value in values])
    else:
      spans = []
      for i, value in enumerate(values):
        fits = (
          isinstance(value, list)
          and len(value) == 2
          and all(type(v) is int for v in value)
          and 0 <= value[0] < value[1] <= len(text)
        )
        if not fits:
          raise DataError(
            f"'spans'[{i}] is {value!r}; allowed: [start, end] within the {len(text)} characters",
            path,
            line,
          )
        spans.append((value[0], value[1]))
    texts.append(text)
    found.append(spans)
  return texts, found


def _characters(text: str) -> str:
  """The text with a question mark for each half of a surrogate pair, which is no character."""
  return text.encode("utf-8", "replace").decode()


class WordClassifier:
  """A boundary predictor of words: logistic regression on the word and the two before it.

  ``p(style) = sigmoid(sum of the weights of three hashed features + bias)``.

  Args:
    weights: float32 [2^n + 1], the last is the bias.
  """

  BUCKETS = 1 << 15

  def __init__(self, weights: np.ndarray):
    if weights.shape != (self.BUCKETS + 1,):
      raise ValueError(f"weights of shape {weights.shape}; allowed: ({self.BUCKETS + 1},).")
    self.weights = weights

  @classmethod
  def train(
    cls,
    texts: Sequence[str],
    style_spans: Sequence[Sequence[tuple[int, int]]],
    *,
    steps: int = 300,
    learning_rate: float = 2.0,
    decay: float = 1e-4,
  ) -> WordClassifier:
    """Fits by gradient descent on all words at once; deterministic.

    Args:
      texts: traces.
      style_spans: of each, the (start, end) that are style; a word is style where it begins in one.
      steps, learning_rate, decay: of the descent.
    """
    rows, labels = [], []
    for text, spans in zip(texts, style_spans, strict=True):
      words = list(_WORD.finditer(text))
      rows += cls._features([word.group() for word in words])
      labels += [any(a <= word.start() < b for a, b in spans) for word in words]
    if not 0 < sum(labels) < len(labels):
      raise ValueError(
        f"{sum(labels)} of {len(labels)} words are style; allowed: words of both classes."
      )
    features, wanted = np.array(rows), np.array(labels, np.float64)
    weights = np.zeros(cls.BUCKETS + 1)
    for _ in range(steps):
      error = _sigmoid(weights[features].sum(axis=1) + weights[-1]) - wanted
      slope = np.bincount(features.ravel(), np.repeat(error, features.shape[1]), len(weights))
      slope[-1] = error.sum()
      weights -= learning_rate * (slope / len(wanted) + decay * weights)
    return cls(weights.astype(np.float32))

  def style(self, context: str, chunk: str) -> list[tuple[int, bool]]:
    before = context.split()[-2:]
    joined = bool(before) and not context[-1:].isspace() and not chunk[:1].isspace()
    words = list(_WORD.finditer(chunk))
    if not words:
      return []
    names = [word.group() for word in words]
    if joined:  # the chunk goes on with a word that was begun
      names[0] = before.pop() + names[0]
    rows = self._features([*before, *names])[len(before) :]
    scores = self.weights[np.array(rows)].sum(axis=1) + self.weights[-1]
    return [(word.start(), bool(s > 0)) for word, s in zip(words, scores, strict=True)]

  def save(self, path: str | os.PathLike[str]) -> None:
    """One file in numpy's ``.npy`` format."""
    data = io.BytesIO()
    np.save(data, self.weights)
    write_atomically(path, data.getvalue())

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> WordClassifier:
    """What ``save`` wrote. Raises ValueError for another file, OSError where there is none."""
    try:
      with open(path, "rb") as file:
        weights = np.load(file, allow_pickle=False)
    except EOFError as error:
      raise ValueError(str(error)) from error
    if not isinstance(weights, np.ndarray) or weights.dtype != np.float32:
      raise ValueError("no array of float32")
    if not np.isfinite(weights).all():
      raise ValueError("weights that are not finite")
    return cls(weights)

  def fingerprint(self) -> str:
    """SHA-256 hex of the weights."""
    return hashlib.sha256(self.weights.tobytes()).hexdigest()

  @classmethod
  def _features(cls, words: Sequence[str]) -> list[list[int]]:
    padded = ["", "", *(word.lower() for word in words)]

    def bucket(place: int, word: str) -> int:
      return zlib.crc32(f"{place} {word}".encode()) % cls.BUCKETS

    return [[bucket(back, padded[i + 2 - back]) for back in range(3)] for i in range(len(words))]


def word_accuracy(
  predictor: BoundaryPredictor, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
) -> tuple[float, float]:
  """Share of the words that are classified correctly, and share of the more frequent class.

  Words are asked about in chunks of 10 with up to 200 words before them, as a trace grows.
  """
  right, style, total = 0, 0, 0
  for text, own in zip(texts, spans, strict=True):
    words = list(_WORD.finditer(text))
    for at in range(0, len(words), _CHUNK_WORDS):
      some = words[at : at + _CHUNK_WORDS]
      begin, end = (words[at - 1].end() if at else 0), some[-1].end()
      before = words[max(0, at - _CONTEXT_WORDS)].start() if at else 0
      pieces = predictor.style(text[before:begin], text[begin:end])
      for word in some:
        said = [one for start, one in pieces if begin + start <= word.start()]
        wanted = any(a <= word.start() < b for a, b in own)
        right += bool(said) and said[-1] == wanted
        style, total = style + wanted, total + 1
  if not total:
    raise ValueError("the labelled texts have no words; allowed: at least one.")
  return right / total, max(style, total - style) / total


def _sigmoid(x: np.ndarray) -> np.ndarray:
  return 1 / (1 + np.exp(-np.clip(x, -30, 30)))
