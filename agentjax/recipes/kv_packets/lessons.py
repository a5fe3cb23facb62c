"""What an adapter learns from: real text, cut to equal shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from agentjax.adapters.tools.search import Document
from agentjax.config import Config, ConfigError, FilePath, NonNegativeInt, PositiveInt, check
from agentjax.data.jsonl import read_jsonl, require_text
from agentjax.data.text_file import read_text
from agentjax.recipes.kv_packets.questions import Questions
from agentjax.recipes.kv_packets.training import AdapterTraining

Encode = Callable[[str], Sequence[int]]


@dataclasses.dataclass(unsafe_hash=True)
class LessonsConfig(Config):
  """Contexts that an adapter is trained on. The model answers itself; no answers are read.

  A source has ``count`` contexts: line breaks, ``documents`` of ``tokens`` each, a prompt. The
  shapes are ours and should be those of the run; header and trailer are the paper's main setting.

  Attributes:
    text: text files (.gz too). Documents are cut from anywhere; the prompt goes on where one of
      them ends.
    questions: JSONL of {"question", "gold" (optional: id of a passage of ``PacketsConfig.corpus``)}
      (.gz too). The right passage stands among others of the corpus.
    documents, tokens: of a context; tokens a document.
    prompt: tokens; shorter questions have line breaks before them, longer ones are left out.
    answer: tokens that the model writes.
    count: contexts of each source. 256 to 512 in the paper.
    header, trailer: tokens of the adapter.
    seed: of all draws.
    training: steps of AdamW.
  """

  text: tuple[FilePath, ...] = ()
  questions: tuple[FilePath, ...] = ()
  documents: PositiveInt = 4
  tokens: PositiveInt = 128
  prompt: PositiveInt = 32
  answer: PositiveInt = 16
  count: PositiveInt = 256
  header: PositiveInt = 8
  trailer: PositiveInt = 8
  seed: NonNegativeInt = 0
  training: AdapterTraining = dataclasses.field(default_factory=AdapterTraining)

  def sources(self, encode: Encode, corpus: Sequence[Document], *, seed: int) -> list[Questions]:
    """A source for all of ``text``, and one for all of ``questions``.

    Args:
      encode: of the vocabulary.
      corpus: passages for ``questions``.
      seed: of these contexts; another gives others.

    Raises:
      ConfigError: there is no source, or one has too little text.
      DataError: a file that cannot be read.
    """
    check(
      bool(self.text or self.questions),
      "config.likelihood.lessons.text",
      self.text,
      "text files, unless lessons.questions names questions",
    )
    rng, found = np.random.default_rng([self.seed, seed]), []
    if self.text:
      found.append(self._of_text(encode, rng))
    if self.questions:
      found.append(self._of_questions(encode, corpus, rng))
    return found

  def _of_text(self, encode: Encode, rng: np.random.Generator) -> Questions:
    ids = np.concatenate([np.asarray(encode(read_text(path)), np.int32) for path in self.text])
    whole = self.tokens + self.prompt
    _need(len(ids) > self.documents * whole, "lessons.text", len(ids), self.documents * whole)
    documents = np.empty((self.count, self.documents, self.tokens), np.int32)
    prompts = np.empty((self.count, self.prompt), np.int32)
    for row in range(self.count):
      starts = rng.integers(0, len(ids) - whole, self.documents)
      documents[row] = ids[starts[:, None] + np.arange(self.tokens)]
      begin = starts[rng.integers(self.documents)] + self.tokens
      prompts[row] = ids[begin : begin + self.prompt]
    return self._questions(encode, documents, prompts)

  def _of_questions(
    self, encode: Encode, corpus: Sequence[Document], rng: np.random.Generator
  ) -> Questions:
    cut = {d.id: encode(f"{d.title}\n{d.text}")[: self.tokens] for d in corpus}
    passages = {name: ids for name, ids in cut.items() if len(ids) == self.tokens}
    _need(len(passages) > self.documents, "corpus", len(passages), self.documents)
    names, asked = list(passages), []
    fill = list(encode("\n")) or [0]
    for path in self.questions:
      for line, row in read_jsonl(path):
        prompt = list(encode(f"\n\n{require_text(row, 'question', path, line)}\n"))
        if len(prompt) <= self.prompt:
          before = fill * self.prompt
          asked.append(([*before, *prompt][-self.prompt :], row.get("gold")))
    _need(bool(asked), "lessons.questions", len(asked), 1)
    documents = np.empty((self.count, self.documents, self.tokens), np.int32)
    prompts = np.empty((self.count, self.prompt), np.int32)
    for number in range(self.count):
      prompts[number], gold = asked[rng.integers(len(asked))]
      chosen = [names[i] for i in rng.choice(len(names), self.documents, replace=False)]
      if gold in passages and gold not in chosen:
        chosen[rng.integers(self.documents)] = gold
      documents[number] = [passages[name] for name in chosen]
    return self._questions(encode, documents, prompts)

  def _questions(self, encode: Encode, documents: np.ndarray, prompts: np.ndarray) -> Questions:
    begin = (list(encode("\n")) or [0])[:1]
    preamble = np.full((self.count, 1), begin, np.int32)
    unknown = np.zeros((self.count, self.answer), np.int32)  # the model's own take their place
    return Questions(preamble, documents, prompts, unknown)  # type: ignore[arg-type]


def _need(enough: bool, name: str, found: int, wanted: int) -> None:
  if not enough:
    raise ConfigError(
      f"config.likelihood.{name} gives {found} that fit; allowed: above {wanted}. Name more files, "
      "or lower lessons.documents, lessons.tokens or raise lessons.prompt."
    )
