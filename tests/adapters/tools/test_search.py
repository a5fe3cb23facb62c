"""Search by BM25: scores, order of ties, snippets, bad corpora."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from agentjax.adapters.tools.search import Corpus, Document, SearchConfig, SearchTool, read_corpus
from agentjax.config import ConfigError
from agentjax.tools import ToolContext, ToolRegistry, ToolResult, ToolStatus
from agentjax.trajectory.record import ToolCall

pytest.importorskip("bm25s", reason="needs the extra [search]")

_DOCUMENTS = [
  Document("a", "Tea", "Tea is brewed from leaves. " + "Filler words follow here. " * 30),
  Document("b", "", "Coffee is brewed from beans."),
  Document("c", "Water", "Water boils; tea, tea and tea."),
  Document("d", "", "Coffee is brewed from beans."),
]


def ask(tool: SearchTool, **arguments: Any) -> ToolResult:
  registry = ToolRegistry([tool])
  return asyncio.run(registry.call(ToolCall("search", arguments), ToolContext("e", 0, 10.0)))


def test_scores_are_those_of_the_formula() -> None:
  """Terms of two letters or more; "is" and "and" are stop words."""
  hits = {h.document.id: h.score for h in Corpus(_DOCUMENTS[1:]).search("boils tea", 3)}
  lengths = [4, 6, 4]  # coffee brewed from beans; water water boils tea tea tea
  idf = math.log(1 + (3 - 1 + 0.5) / (1 + 0.5))
  norm = 1.5 * (1 - 0.75 + 0.75 * lengths[1] / (sum(lengths) / 3))
  assert hits == {"c": pytest.approx(idf * (1 / (1 + norm) + 3 / (3 + norm)), rel=1e-6)}


def test_ties_come_in_the_order_of_the_corpus() -> None:
  corpus = Corpus([Document(str(n), "", "same text") for n in range(200)])
  for k in (1, 7, 200):
    assert [h.document.id for h in corpus.search("text", k)] == [str(n) for n in range(k)]


def test_policy_sees_ids_titles_and_snippets() -> None:
  tool = SearchTool(Corpus(_DOCUMENTS), SearchConfig(snippet_characters=40))
  assert ask(tool, query="coffee", results=1).output == "1. [b]\nCoffee is brewed from beans."
  assert ask(tool, query="tea leaves").output == (
    "1. [c] Water\nWater boils; tea, tea and tea.\n\n"
    "2. [a] Tea\nTea is brewed from leaves. Filler words..."
  )
  assert ask(tool, query="the xyzzy").output == "(no document holds a word of the query)"
  assert ask(tool, id="b").output == "[b]\nCoffee is brewed from beans."


def test_snippet_shows_where_the_words_stand() -> None:
  text = "nothing here " * 50 + "the needle lies in hay " + "nothing there " * 50
  corpus = Corpus([Document("a", "", text), Document("b", "", "other")])
  shown = corpus.snippet(corpus.documents[0], "needle hay", 60)
  assert "needle lies in hay" in shown
  assert shown.startswith("...")
  assert shown.endswith("...")
  assert len(shown) <= 66


@pytest.mark.parametrize(
  "arguments",
  [{}, {"query": "tea", "id": "a"}, {"id": "z"}, {"query": "tea", "results": 21}, {"query": 3}],
)
def test_wrong_calls_are_errors_for_the_policy(arguments: dict[str, Any]) -> None:
  assert ask(SearchTool(Corpus(_DOCUMENTS)), **arguments).status is ToolStatus.ERROR


def test_corpus_is_read_from_files_in_order(tmp_path: pathlib.Path) -> None:
  (tmp_path / "a.jsonl").write_text('{"id": "1", "title": "T", "text": "x", "more": 1}\n\n')
  with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
    file.write('{"id": "2", "text": "y"}\n')
  paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl.gz")]
  assert read_corpus(paths) == [Document("1", "T", "x"), Document("2", "", "y")]


@pytest.mark.parametrize(
  ("content", "message"),
  [
    ("", "holds no document"),
    ('{"id": "1", "text": "x"}\n{"id": "2"}', r"a\.jsonl:2 is no document"),
    ('{"id": 1, "text": "x"}', "must be strings"),
    ("[]", "is no document"),
    ("{", "is no document"),
    ('{"id": "1", "text": "x"}\n{"id": "1", "text": "y"}', r"occurs before, at .*a\.jsonl:1"),
  ],
)
def test_bad_corpus_is_named_by_line(tmp_path: pathlib.Path, content: str, message: str) -> None:
  (tmp_path / "a.jsonl").write_text(content)
  with pytest.raises(ConfigError, match=message):
    read_corpus([str(tmp_path / "a.jsonl")])
  with pytest.raises(ConfigError, match="cannot be read"):
    read_corpus([str(tmp_path / "missing.jsonl")])


def test_kept_index_finds_the_same_and_follows_the_corpus(tmp_path: pathlib.Path) -> None:
  config = SearchConfig(index_directory=str(tmp_path))
  built = Corpus(_DOCUMENTS, config).search("tea brewed", 4)
  assert len(list(tmp_path.iterdir())) == 1
  assert Corpus(_DOCUMENTS, config).search("tea brewed", 4) == built
  Corpus(_DOCUMENTS[:2], config)
  assert len(list(tmp_path.iterdir())) == 2


def test_import_never_starts_jax() -> None:
  program = (
    "import sys; from agentjax.adapters.tools.search import Corpus, Document\n"
    "Corpus([Document('a', '', 'text')]).search('text', 1)\n"
    "assert not [m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib')]\n"
  )
  subprocess.run([sys.executable, "-c", program], check=True)


def test_impossible_settings_are_refused_by_name() -> None:
  for field, value in (("k1", -1.0), ("b", 2.0), ("results", 0), ("max_results", 1),
                       ("snippet_characters", 0), ("max_characters", 0)):  # fmt: skip
    with pytest.raises(ConfigError, match=field):
      SearchConfig(**{field: value}).validate("search")


@pytest.mark.skipif("AGENTJAX_DATA" not in os.environ, reason="needs the question data")
def test_recall_on_natural_questions() -> None:
  """The data's notes give recall@1 0.756 and recall@5 0.911 by bm25s, over all questions."""
  folder = pathlib.Path(os.environ["AGENTJAX_DATA"], "qa_search")
  corpus = Corpus(read_corpus([str(folder / "nq_corpus.jsonl.gz")]))
  with gzip.open(folder / "nq_open_2655.jsonl.gz", "rt") as lines:
    questions = [json.loads(line) for line in lines][::5]
  ranks = []
  for row in questions:
    found = [h.document.id for h in corpus.search(row["question"], 5)]
    ranks.append(found.index(row["gold"]) if row["gold"] in found else 9)
  assert sum(r == 0 for r in ranks) / len(ranks) == pytest.approx(0.756, abs=0.05)
  assert sum(r < 5 for r in ranks) / len(ranks) == pytest.approx(0.911, abs=0.05)
