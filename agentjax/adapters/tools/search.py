"""Search in a local corpus by BM25, as a tool."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import types
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentjax.config import (
  AtLeastTwo,
  ConfigError,
  FilePath,
  NonNegativeFloat,
  PositiveInt,
  Share,
  check,
)
from agentjax.tools.config import ToolConfig, Workbench
from agentjax.tools.output import clip
from agentjax.tools.protocol import Tool, ToolContext, ToolResult, ToolStatus

_QUERY_CHARACTERS = 2000  # ours


@dataclasses.dataclass(unsafe_hash=True)
class SearchConfig(ToolConfig):
  """Settings of the search tool. ``k1`` and ``b`` are bm25s's defaults; the other figures are ours.

  Attributes:
    corpus: JSONL files (.jsonl, or .jsonl.gz), a document a line: {"id", "title" (optional),
      "text"}; other fields are not read. All together are one corpus.
    index_directory: folder where the index is kept for later runs over the same corpus and
      settings; None builds it anew.
    k1, b: BM25's saturation of term frequency and normalisation of length.
    stopwords: language whose stop words are left out ("en", ...), or None.
    results: documents a search returns unless the policy asks for another number.
    max_results: most that it may ask for.
    snippet_characters: characters shown of a document in a search.
    max_characters: characters shown of a document that is opened, half from the head and half from
      the tail.
  """

  corpus: tuple[FilePath, ...] = ()
  index_directory: FilePath | None = None
  k1: NonNegativeFloat = 1.5
  b: Share = 0.75
  stopwords: str | None = "en"
  results: PositiveInt = 5
  max_results: int = 20
  snippet_characters: PositiveInt = 300
  max_characters: AtLeastTwo = 8000

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(self.max_results >= self.results, "max_results", f">= results ({self.results})")

  def check_run(self, bench: Workbench, path: str) -> None:
    check(bool(self.corpus), f"{path}.corpus", self.corpus, "JSONL files, at least one")

  def build(self, bench: Workbench) -> Tool:
    return SearchTool(Corpus(read_corpus(self.corpus), self), self)


@dataclasses.dataclass(frozen=True)
class Document:
  """One entry of the corpus; ``title`` may be empty."""

  id: str
  title: str
  text: str


@dataclasses.dataclass(frozen=True)
class Hit:
  """A document that a search found, and its BM25 score (higher is better)."""

  document: Document
  score: float


class Corpus:
  """Documents and their BM25 index, in memory.

  The score is that of bm25s's default, Lucene's variant: the sum over query terms t of
  ``ln(1 + (N - n_t + 0.5) / (n_t + 0.5)) · f / (f + k1 (1 - b + b L / mean L))`` with f the count
  of t in title and text, L their length in terms, N documents of which n_t hold t.

  Args:
    documents: with distinct ids, at least one.
    config: see SearchConfig; ``corpus`` is not read here.

  Raises:
    ImportError: bm25s is missing.
    ValueError: no documents, or an id occurs twice.

  References:
    Robertson & Zaragoza (2009), The Probabilistic Relevance Framework: BM25 and Beyond;
    Lù, 2407.03618 (bm25s).
  """

  def __init__(self, documents: Sequence[Document], config: SearchConfig | None = None):
    self._config = config or SearchConfig()
    self._bm25s = _import_bm25s()
    self.documents = tuple(documents)
    self._by_id = {d.id: d for d in self.documents}
    if not self.documents:
      raise ValueError("the corpus is empty")
    if len(self._by_id) < len(self.documents):
      raise ValueError("two documents of the corpus have one id")
    self._index = self._load_or_build()

  def search(self, query: str, k: int) -> list[Hit]:
    """The best ``k`` documents that hold a term of ``query``; of equal scores the earlier one."""
    terms = self._terms([query])[0]
    if not terms:
      return []
    scores = self._index.get_scores(terms)
    k = min(k, len(scores))
    # All that reach the k-th score, then in order: a partition alone splits ties at random.
    (enough,) = np.nonzero(scores >= np.partition(scores, -k)[-k])
    best = enough[np.lexsort((enough, -scores[enough]))][:k]
    return [Hit(self.documents[i], float(scores[i])) for i in best if scores[i] > 0]

  def get(self, id: str) -> Document | None:
    return self._by_id.get(id)

  def snippet(self, document: Document, query: str, characters: int) -> str:
    """The first stretch of the text, on word borders, with the most distinct terms of ``query``."""
    text = " ".join(document.text.split())
    if len(text) <= characters:
      return text
    terms = set(self._terms([query])[0])
    words = [(m.start(), m.group().lower()) for m in re.finditer(r"\w+", text)]
    places = [(start, word) for start, word in words if word in terms]
    best, most = 0, 0
    for at, (start, _) in enumerate(places):
      held = {word for place, word in places[at:] if place < start + characters - 20}
      if len(held) > most:
        best, most = start, len(held)
    begin = max(0, min(best - characters // 4, len(text) - characters))
    begin = next((start for start, _ in words if start >= begin), begin) if begin else 0
    shown = text[begin : begin + characters]
    end = "..." if begin + characters < len(text) else ""
    return f"{'...' if begin else ''}{shown.rstrip()}{end}"

  def _terms(self, texts: Sequence[str]) -> list[list[str]]:
    return self._bm25s.tokenize(
      list(texts), stopwords=self._config.stopwords, return_ids=False, show_progress=False,
      allow_empty=False,
    )  # fmt: skip

  def _load_or_build(self) -> Any:
    config = self._config
    if config.index_directory is None:
      return self._build()
    digest = hashlib.sha256()
    settings = [config.k1, config.b, config.stopwords, self._bm25s.__version__]
    digest.update(json.dumps(settings).encode())
    for document in self.documents:
      digest.update(json.dumps(dataclasses.astuple(document)).encode())
    kept = Path(config.index_directory) / digest.hexdigest()[:32]
    if kept.is_dir():
      return self._bm25s.BM25.load(kept, show_progress=False)
    index = self._build()
    kept.parent.mkdir(parents=True, exist_ok=True)
    beside = tempfile.mkdtemp(prefix=".index-", dir=kept.parent)
    try:
      index.save(beside, show_progress=False)
      os.rename(beside, kept)
    except OSError:
      shutil.rmtree(beside, ignore_errors=True)
      if not kept.is_dir():  # else another run was first
        raise
    return index

  def _build(self) -> Any:
    terms = self._terms([f"{d.title}\n{d.text}" for d in self.documents])
    if not any(terms):
      raise ValueError("no document of the corpus holds a term that could be searched")
    index = self._bm25s.BM25(k1=self._config.k1, b=self._config.b)
    index.index(terms, show_progress=False)
    return index


class SearchTool:
  """Finds documents of a corpus and opens them; the same query finds the same in the same order.

  Args:
    corpus: what is searched; built once, shared by all episodes.
    config: see SearchConfig.
  """

  name = "search"
  description = (
    "Searches a collection of documents. With query: the best documents with their ids and a "
    "snippet of each. With id: the text of that document."
  )

  def __init__(self, corpus: Corpus, config: SearchConfig | None = None):
    self.corpus = corpus
    self._config = config or SearchConfig()
    self._config.validate("search")
    self.parameters: Mapping[str, Any] = {
      "type": "object",
      "properties": {
        "query": {"type": "string", "maxLength": _QUERY_CHARACTERS},
        "results": {"type": "integer", "minimum": 1, "maximum": self._config.max_results},
        "id": {"type": "string", "description": "of a document to open"},
      },
      "additionalProperties": False,
    }

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    if ("query" in arguments) == ("id" in arguments):
      return ToolResult(ToolStatus.ERROR, "error: give either query or id")
    if "id" in arguments:
      document = self.corpus.get(arguments["id"])
      if document is None:
        return ToolResult(ToolStatus.ERROR, f"error: no document has the id {arguments['id']!r}")
      shown = clip(document.text, self._config.max_characters)
      return ToolResult(ToolStatus.OK, f"{_heading(document)}\n{shown}")
    count = int(arguments.get("results", self._config.results))
    return ToolResult(
      ToolStatus.OK, await asyncio.to_thread(self._search, arguments["query"], count)
    )

  def _search(self, query: str, count: int) -> str:
    shown = [
      f"{n}. {_heading(hit.document)}\n"
      f"{self.corpus.snippet(hit.document, query, self._config.snippet_characters)}"
      for n, hit in enumerate(self.corpus.search(query, count), start=1)
    ]
    return "\n\n".join(shown) or "(no document holds a word of the query)"


def read_corpus(paths: Sequence[str]) -> list[Document]:
  """The documents of JSONL files, in their order.

  Raises:
    ConfigError: a file that cannot be read, a line that is no document, an id that occurs twice.
  """
  documents: list[Document] = []
  seen: dict[str, str] = {}
  for path in paths:
    for where, line in _lines(path):
      try:
        row = json.loads(line)
        document = Document(row["id"], row.get("title") or "", row["text"])
      except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
          f'{where} is no document; allowed: {{"id", "title" (optional), "text"}}, all strings '
          f"({type(error).__name__}: {error})."
        ) from error
      if not all(isinstance(part, str) for part in dataclasses.astuple(document)):
        raise ConfigError(f"{where}: id, title and text must be strings.")
      if document.id in seen:
        raise ConfigError(f"{where}: id {document.id!r} occurs before, at {seen[document.id]}.")
      seen[document.id] = where
      documents.append(document)
  if not documents:
    raise ConfigError(f"tools.settings.search.corpus={tuple(paths)!r} holds no document.")
  return documents


def _lines(path: str) -> Iterator[tuple[str, str]]:
  """Each line that is not blank, with its place."""
  opened = gzip.open if path.endswith(".gz") else open
  try:
    with opened(path, "rt", encoding="utf-8") as file:
      for number, line in enumerate(file, start=1):
        if line.strip():
          yield f"{path}:{number}", line
  except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
    raise ConfigError(f"tools.settings.search.corpus: {path} cannot be read ({error}).") from error


def _heading(document: Document) -> str:
  return f"[{document.id}] {document.title}".rstrip()


def _import_bm25s() -> types.ModuleType:
  """bm25s without JAX: where it finds JAX it runs an operation at import, which would start the
  accelerator from a tool. Its NumPy path is all that is used here.
  """
  if (loaded := sys.modules.get("bm25s")) is not None:
    return loaded
  hidden = {name: sys.modules.get(name) for name in ("jax", "jax.lax")}
  sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes an ImportError
  try:
    import bm25s
  except ImportError as error:
    raise ImportError(
      f"the search tool needs bm25s ({error}); install the extra: pip install 'agentjax[search]'"
    ) from error
  finally:
    for name, module in hidden.items():
      if module is None:
        del sys.modules[name]
      else:
        sys.modules[name] = module
  return bm25s
