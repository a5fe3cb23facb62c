"""Which skills are shown, and how."""

import asyncio

import numpy as np
import pytest

from agentjax.adapters.chat_endpoint.endpoint import EndpointConfig
from agentjax.adapters.http_client import NoAnswerError
from agentjax.recipes.skillclaw.library import Entry
from agentjax.recipes.skillclaw.retrieval import (
  EmbedderConfig,
  EndpointEmbedder,
  EndpointEmbedderConfig,
  RetrievalConfig,
  Retriever,
  catalogue,
  skills_in,
  without_catalogue,
)
from agentjax.recipes.skillclaw.skill import Skill
from tests.rewards.judging import run

_VECTORS = {"north": (1.0, 0.0), "nearly": (0.999, 0.04), "half": (0.6, 0.8), "east": (0.0, 1.0)}


class _Table:
  """Vectors by the first word of a text."""

  async def embed(self, texts):
    return np.array([_VECTORS[text.split()[0]] for text in texts])


def _entry(name, shown=0, positive=0):
  return Entry(Skill(name, f"When {name}.", f"Do {name}."), 1, shown, positive)


def _chosen(*entries, query="north", **settings):
  retriever = Retriever(entries, RetrievalConfig(**settings))
  retriever._embedder = _Table()
  return [entry.name for entry in run(retriever.choose(query))]


def test_skills_are_ranked_by_similarity_and_by_how_they_served():
  north, half, east = _entry("north"), _entry("half"), _entry("east")
  assert _chosen(north, half, east) == ["north", "half", "east"]
  # 1 (.3 + .7 * .1) = .37 is below .6 (.3 + .7 * .5) = .39
  assert _chosen(_entry("north", 10, 1), half, top_k=1) == ["half"]
  assert _chosen(_entry("north", 10, 2), half, top_k=1) == ["north"]
  assert _chosen() == []


def test_the_better_of_two_that_say_the_same_is_shown():
  assert _chosen(_entry("north", 4, 1), _entry("nearly", 4, 4), _entry("half")) == [
    "nearly",
    "half",
  ]
  assert _chosen(_entry("north"), _entry("nearly"), duplicates=1.0) == ["north", "nearly"]


def test_similar_skills_alone_are_candidates():
  """A skill that always served would rank first, but three others are nearer to the task."""

  class Named(_Table):
    async def embed(self, texts):
      return await super().embed([text.split("-")[0] for text in texts])

  near = [Entry(Skill(f"north-{i}", "x", "y"), 1, 10, 0) for i in range(3)]

  def first(count):
    retriever = Retriever((_entry("half", 9, 9), *near[:count]), RetrievalConfig(top_k=1))
    retriever._embedder = Named()
    return run(retriever.choose("north"))[0].name

  assert (first(2), first(3)) == ("half", "north-0")


def test_words_find_the_skill_that_speaks_of_them():
  dates = Entry(Skill("dates", "When a date is written.", "Write the year first."))
  sums = Entry(Skill("sums", "When numbers are added.", "Use the calculator."))
  retriever = Retriever((dates, sums), RetrievalConfig())
  assert run(retriever.choose("Which numbers are added here?"))[0].name == "sums"
  assert run(retriever.choose("What is the DATE of the year?"))[0].name == "dates"


def test_a_catalogue_is_full_as_long_as_it_fits():
  entries = [_entry("north"), _entry("east")]
  whole = catalogue(entries, RetrievalConfig(show="bodies"))
  assert "Do north." in whole and skills_in(f"{whole}\n\nGo.") == (["north", "east"],) * 2
  described = catalogue(entries, RetrievalConfig())
  assert "When north." in described and "Do north." not in described
  assert skills_in(described) == (["north", "east"], [])
  assert catalogue(entries, RetrievalConfig(show="bodies", most_characters=80)) == described
  compact = catalogue(entries, RetrievalConfig(most_characters=20))
  assert "When" not in compact and skills_in(compact) == (["north", "east"], [])
  assert catalogue([], RetrievalConfig()) == "" and skills_in("Go.") == ([], [])
  assert without_catalogue(f"{whole}\n\nGo.") == "Go."


def test_embeddings_come_from_an_endpoint():
  web = pytest.importorskip("aiohttp.web", reason="needs the extra [web]")
  asked = []

  async def serve(use):
    async def receive(request):
      asked.append((request.path, await request.json()))
      rows = [{"index": i, "embedding": [float(i), 1.0]} for i in (1, 0)]
      return web.json_response({"data": rows})

    app = web.Application()
    app.router.add_post("/v1/embeddings", receive)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    try:
      return await use(EndpointEmbedder(EndpointConfig(f"http://127.0.0.1:{port}/v1", "embed")))
    finally:
      await runner.cleanup()

  vectors = asyncio.run(serve(lambda embedder: embedder.embed(["a", "b"])))
  np.testing.assert_array_equal(vectors, [[0, 1], [1, 1]])
  assert asked == [("/v1/embeddings", {"model": "embed", "input": ["a", "b"]})]
  with pytest.raises(NoAnswerError, match="for 1 texts"):
    asyncio.run(serve(lambda embedder: embedder.embed(["a"])))
  assert isinstance(EmbedderConfig.from_name("endpoint", "x"), EndpointEmbedderConfig)
