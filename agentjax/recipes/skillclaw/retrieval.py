"""Which skills a task is shown, and the text that shows them.

  score = similarity (floor + (1 - floor) effectiveness)

of the ``3 top_k`` skills whose name, description and beginning are most similar to the task (cosine
of embeddings). Of two skills that say nearly the same only the better one is shown. Reference:
2604.08377 and its code, which has top_k 6, the floor of .3, the bound of .9 for duplicates, 30,000
characters and Qwen3-Embedding-0.6B. Our default counts words and needs no model.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
from jaxtyping import Float

from agentjax.adapters.chat_endpoint.endpoint import EndpointConfig
from agentjax.adapters.http_client import NoAnswerError, exchange, load_aiohttp
from agentjax.config import Config, NonNegativeInt, PositiveInt, Share
from agentjax.names import Choice
from agentjax.recipes.skillclaw.library import Entries, Entry

_BEGINNING = 200  # characters of the body that count
_CANDIDATES = 3  # times top_k
_BUCKETS = 4096
_HERE = "agentjax.recipes.skillclaw.retrieval"
_WORD = re.compile(r"[^\W_]+")
_CATALOGUE = re.compile(r"<available_skills>\n(.*?)\n</available_skills>", re.S)
_BODY = re.compile(r'^<skill name="([a-z0-9-]+)">$', re.M)
_LINE = re.compile(r"^- ([a-z0-9-]+)(?::|$)", re.M)


class Embedder(Protocol):
  """Turns texts into vectors whose cosine tells how similar they are."""

  async def embed(self, texts: Sequence[str]) -> Float[np.ndarray, "texts width"]:
    """A vector each."""
    ...


@dataclasses.dataclass(unsafe_hash=True)
class EmbedderConfig(Choice):
  """What measures similarity: "words" counts them, "endpoint" asks a model of embeddings."""

  @classmethod
  def built_in(cls) -> Mapping[str, str]:
    return {"words": f"{_HERE}:WordsConfig", "endpoint": f"{_HERE}:EndpointEmbedderConfig"}

  def build(self) -> Embedder:
    """The embedder of a run."""
    raise NotImplementedError(f"{type(self).__name__} must define build()")


@dataclasses.dataclass(unsafe_hash=True)
class WordsConfig(EmbedderConfig):
  """Counts of words, hashed."""

  def build(self) -> Embedder:
    return WordEmbedder()


@dataclasses.dataclass(unsafe_hash=True)
class EndpointEmbedderConfig(EmbedderConfig):
  """A model behind ``POST base_url/embeddings``, such as Qwen3-Embedding-0.6B of the source.

  Attributes:
    endpoint: where it is.
  """

  endpoint: EndpointConfig = dataclasses.field(default_factory=EndpointConfig)

  def build(self) -> Embedder:
    return EndpointEmbedder(self.endpoint)


class WordEmbedder:
  """Square roots of the counts of a text's words, hashed into buckets, of length 1."""

  async def embed(self, texts: Sequence[str]) -> Float[np.ndarray, "texts width"]:
    vectors = np.zeros((len(texts), _BUCKETS))
    for vector, text in zip(vectors, texts, strict=True):
      for word in _WORD.findall(text.lower()):
        vector[zlib.crc32(word.encode("utf-8", "replace")) % _BUCKETS] += 1
    return np.sqrt(vectors)


class EndpointEmbedder:
  """Asks an endpoint with OpenAI's protocol of embeddings.

  Raises:
    ImportError: aiohttp is missing.
  """

  def __init__(self, config: EndpointConfig):
    config.validate()
    load_aiohttp("an embedder")
    self._config = config

  async def embed(self, texts: Sequence[str]) -> Float[np.ndarray, "texts width"]:
    """A vector each.

    Raises:
      NoAnswerError: no answer, or one that is none of embeddings.
    """
    config = self._config
    aiohttp = load_aiohttp("an embedder")
    url = f"{config.base_url.rstrip('/')}/embeddings"
    limit = aiohttp.ClientTimeout(total=config.timeout)
    async with aiohttp.ClientSession(timeout=limit) as session:
      status, data = await exchange(
        session,
        "POST",
        url,
        body={"model": config.model, "input": list(texts)},
        token_variable=config.api_key_variable or None,
      )
    try:
      rows = sorted(json.loads(data)["data"], key=lambda row: row["index"])
      vectors = np.array([row["embedding"] for row in rows], np.float64)
    except (KeyError, TypeError, ValueError) as error:
      raise NoAnswerError(f"{url} answered {status}: {data[:300]!r}") from error
    if vectors.ndim != 2 or len(vectors) != len(texts):
      raise NoAnswerError(f"{url} gave {vectors.shape} for {len(texts)} texts")
    return vectors


@dataclasses.dataclass(unsafe_hash=True)
class RetrievalConfig(Config):
  """What a task is shown.

  Attributes:
    top_k: skills, at most.
    floor: share of the score that does not depend on how a skill has served.
    duplicates: of two skills with a higher cosine the better one alone is shown.
    show: "bodies" writes whole skills into the prompt, for policies without tools; "names" writes
      names and descriptions, and offers the tool ``read_skill``. Ours.
    most_characters: of the catalogue; a longer one has descriptions instead of bodies, then names.
    most_reads: calls of ``read_skill`` in an episode. Ours.
    embedder: what measures similarity.
  """

  top_k: PositiveInt = 6
  floor: Share = 0.3
  duplicates: Share = 0.9
  show: Literal["bodies", "names"] = "names"
  most_characters: PositiveInt = 30_000
  most_reads: NonNegativeInt = 8
  embedder: EmbedderConfig = dataclasses.field(default_factory=WordsConfig)


class Retriever:
  """Chooses among the skills of a library; embeds them once.

  Args:
    entries: the published skills.
    config: see RetrievalConfig.
  """

  def __init__(self, entries: Entries, config: RetrievalConfig):
    self.entries, self.config = entries, config
    self._embedder = config.embedder.build()
    self._vectors: Float[np.ndarray, "skills width"] | None = None
    self._lock = asyncio.Lock()

  async def choose(self, query: str) -> Entries:
    """The skills that a task is shown, the best first."""
    if not self.entries:
      return ()
    vectors, config = await self._embedded(), self.config
    similar = vectors @ _unit(await self._embedder.embed([query]))[0]
    served = np.array([e.effectiveness for e in self.entries])
    scores = similar * (config.floor + (1 - config.floor) * served)
    candidates = np.argsort(-similar, kind="stable")[: _CANDIDATES * config.top_k]
    chosen: list[int] = []
    for i in sorted(candidates.tolist(), key=lambda i: (-scores[i], self.entries[i].name)):
      if all(vectors[i] @ vectors[j] <= config.duplicates for j in chosen):
        chosen.append(i)
    return tuple(self.entries[i] for i in chosen[: config.top_k])

  async def _embedded(self) -> Float[np.ndarray, "skills width"]:
    async with self._lock:  # many episodes begin at once
      if self._vectors is None:
        texts = [
          f"{e.name}\n{e.skill.description}\n{e.skill.body[:_BEGINNING]}" for e in self.entries
        ]
        self._vectors = _unit(await self._embedder.embed(texts))
      return self._vectors


def _unit(vectors: Float[np.ndarray, "n width"]) -> Float[np.ndarray, "n width"]:
  return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def catalogue(entries: Sequence[Entry], config: RetrievalConfig) -> str:
  """The text that shows skills; "" if there are none."""
  if not entries:
    return ""
  described = [f"- {e.name}: {e.skill.description}" for e in entries]
  forms = ["\n".join(described), "\n".join(f"- {e.name}" for e in entries)]
  if config.show == "bodies":
    whole = (
      f'<skill name="{e.name}">\n{e.skill.description}\n{e.skill.body}\n</skill>' for e in entries
    )
    forms.insert(0, "\n".join(whole))
  shown = next((form for form in forms if len(form) <= config.most_characters), forms[-1])
  return f"<available_skills>\n{shown}\n</available_skills>"


def skills_in(text: str) -> tuple[list[str], list[str]]:
  """(names that a prompt's catalogue shows, those whose whole text it shows)."""
  found = _CATALOGUE.search(text)
  if found is None:
    return [], []
  whole = _BODY.findall(found[1])
  return whole or _LINE.findall(found[1]), whole


def without_catalogue(text: str) -> str:
  """A prompt's text without its first catalogue."""
  return _CATALOGUE.sub("", text, count=1).lstrip("\n")
