"""Runs that read documents as packets: settings, lessons of real text, a step of training."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re

import jax
import numpy as np
import pytest

from agentjax import models
from agentjax.adapters.tools.search import Document, read_corpus
from agentjax.config import ConfigError
from agentjax.data import DataConfig
from agentjax.recipes.kv_packets import (
  AdapterTraining,
  LessonsConfig,
  Library,
  PacketsConfig,
  ReadingConfig,
  init_adapter,
  read_adapter,
  write_adapter,
)
from agentjax.recipes.kv_packets.learn import learn_adapter
from agentjax.recipes.kv_packets.library import steady_ids
from agentjax.recipes.kv_packets.reading import shown
from agentjax.text.chat import MarkedChat
from agentjax.tools.files_program import lines_of, numbered
from agentjax.training import Run, load_experiment
from agentjax.training.model_pool import Policy
from tests.models.rows import TINY, draw
from tests.rollout.scripted_engine import TOKENIZER
from tests.training.smoke import quiet

_CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
_WORDS = "lake hill stone river chalk north south cold old deep wide bridge".split()


@pytest.fixture
def folder(tmp_path):
  """A corpus of 24 passages, with a question for each."""
  rng = np.random.default_rng(0)
  rows = [" ".join([f"n{i}", *rng.choice(_WORDS, 16)]) for i in range(24)]
  corpus = [{"id": f"d{i}", "title": f"t{i}", "text": text} for i, text in enumerate(rows)]
  asked = [
    {
      "question": f"what of n{i} by the lake or hill?",
      "answers": [rows[i].split()[1]],
      "gold": f"d{i}",
    }
    for i in range(24)
  ]
  for name, found in (("corpus", corpus), ("questions", asked)):
    text = "".join(json.dumps(row) + "\n" for row in found)
    (tmp_path / f"{name}.jsonl").write_text(text)
  (tmp_path / "book.txt").write_text("\n".join(rows))
  return tmp_path


def test_ids_that_depend_on_what_is_around_a_text_are_left_out():
  def encode(text):  # merges a letter with a line break behind it, and a blank with what follows
    ids, i = [], 0
    while i < len(text):
      pair = text[i : i + 2]
      merged = len(pair) == 2 and (pair[1] == "\n" or pair[0] == " ")
      ids.append(hash(pair) % 997 + 300 if merged else ord(pair[0]))
      i += 1 + merged
    return ids

  text = "lakes and hills"
  ids = steady_ids(encode, text)
  assert 8 <= len(ids) < len(encode(text))
  library = Library()
  assert library.add_text(encode, text)
  for around in ("{}", "x\n{}\ny", "1.  {} ?"):
    found = [number for _, number in library.split(encode(around.format(text)))]
    assert found.count(0) == 1
  assert not library.add_text(encode, text, least_tokens=len(ids) + 1)


def test_texts_are_known_as_tools_show_them(folder):
  lines = lines_of((folder / "book.txt").read_text())
  config = PacketsConfig(files=(str(folder / "book.txt"),), corpus=(str(folder / "corpus.jsonl"),))

  class Chat:
    tokenizer = TOKENIZER

  library = config.library(Chat())
  view = numbered(lines, 1, len(lines))
  document = read_corpus(config.corpus)[3]
  for text, whole in ((f"{view}\n", view), (f"1. [d3] t3\n{document.text}\n\n", document.text)):
    found = [n for _, n in library.split(TOKENIZER.encode(text)) if n is not None]
    assert [len(library.documents[n]) for n in found] == [len(TOKENIZER.encode(whole))]


def test_reading_tasks_have_the_right_passage_among_others(folder):
  source = ReadingConfig(questions="questions.jsonl", corpus="corpus.jsonl", passages=3)
  splits = source.load(DataConfig(path=str(folder), train_size=None, test_size=4))
  assert (len(splits.train), len(splits.test)) == (20, 4)
  places = set()
  for number, task in enumerate([*splits.train, *splits.test]):
    passages = task.prompt[0].content.split("\n\n")
    gold = [p.startswith(f"t{number}\n") for p in passages]
    assert gold.count(True) == 1 and len(passages) == 4
    places.add(gold.index(True))
    assert task.metadata["answers"] == [task.answer]
    assert passages[-1] == f"what of n{number} by the lake or hill?"
  assert places == {0, 1, 2}
  assert shown(Document("a", "b", "c")) == "b\nc"


def test_lessons_are_cut_from_real_text_and_asked_behind_the_right_passage(folder):
  lessons = LessonsConfig(
    text=(str(folder / "book.txt"),),
    questions=(str(folder / "questions.jsonl"),),
    documents=3,
    tokens=24,
    prompt=40,
    answer=2,
    count=32,
  )
  corpus = read_corpus([str(folder / "corpus.jsonl")])
  books, asked = lessons.sources(TOKENIZER.encode, corpus, seed=0)
  text = (folder / "book.txt").read_text()
  for row in range(32):
    documents = [TOKENIZER.decode(d.tolist()) for d in books.documents[row]]
    prompt = TOKENIZER.decode(books.prompts[row].tolist())
    assert any(document + prompt in text for document in documents)
    passages = [TOKENIZER.decode(d.tolist()) for d in asked.documents[row]]
    prompt = TOKENIZER.decode(asked.prompts[row].tolist())
    (number,) = re.findall(r"n(\d+)", prompt)
    assert sum(p.startswith(f"t{number}\n") for p in passages) == 1
  other = lessons.sources(TOKENIZER.encode, corpus, seed=1)[0]
  assert not np.array_equal(books.documents, other.documents)
  with pytest.raises(ConfigError, match="lessons.text gives"):
    dataclasses.replace(lessons, tokens=5000).sources(TOKENIZER.encode, corpus, seed=0)


@pytest.mark.slow
def test_the_command_trains_an_adapter_on_lessons(folder, tmp_path):
  model = dataclasses.replace(TINY, pattern="*-*", vocab_size=TOKENIZER.vocab_size)
  policy = Policy(draw(model, seed=0), model, MarkedChat(TOKENIZER), "drawn")
  lessons = LessonsConfig(
    text=(str(folder / "book.txt"),),
    questions=(str(folder / "questions.jsonl"),),
    documents=2,
    tokens=16,
    prompt=40,
    answer=2,
    count=8,
    header=2,
    trailer=3,
    training=AdapterTraining(batch=8, epochs=20, learning_rate=2e-2),
  )
  packets = PacketsConfig(corpus=(str(folder / "corpus.jsonl"),), lessons=lessons)
  lines = learn_adapter(policy, packets, tmp_path / "trained")
  adapter = read_adapter(tmp_path / "trained")
  assert (len(adapter.header), len(adapter.trailer)) == (2, 3)
  _, drawn, trained = ([float(word) for word in line.split()[-2:]] for line in lines[-3:])
  assert len(lines) == 5 and sum(trained) < sum(drawn)


def small(folder, tmp_path, **changes):
  """A run of two steps over a tiny policy of bytes."""
  experiment = load_experiment(_CONFIGS / "kv_packet_search.py")
  experiment.model = dataclasses.replace(TINY, pattern="M*-", vocab_size=TOKENIZER.vocab_size)
  experiment.tokenizer.kind = "byte"
  experiment.data.path, experiment.data.train_size = str(folder), 16
  experiment.data.test_size = experiment.evaluation.tasks = 0
  experiment.data.source = ReadingConfig(
    questions="questions.jsonl", corpus="corpus.jsonl", passages=2
  )
  corpus = (str(folder / "corpus.jsonl"),)
  experiment.tools.settings["search"].corpus = corpus
  adapter = tmp_path / "adapter"
  params = models.init(experiment.model, jax.random.key(0))
  write_adapter(adapter, init_adapter(params, jax.random.key(1), header=2, trailer=2))
  experiment.likelihood = PacketsConfig(corpus=corpus, adapter=str(adapter), **changes)
  experiment.rollout.max_turns, experiment.rollout.group_size = 2, 2
  experiment.rollout.max_tokens_per_turn = 4
  experiment.rollout.max_total_tokens = experiment.rl.row_length = 512
  experiment.engine.max_length, experiment.engine.slots = 640, 4
  experiment.engine.extend_buckets, experiment.engine.extend_rows = (64,), (4,)
  experiment.engine.warmup = False
  experiment.rl.steps, experiment.rl.tasks_per_step = 2, 2
  experiment.rl.microbatch_rows = 2
  experiment.validate()
  return experiment


def test_a_run_reads_packets_and_reports_how_far_it_was_from_the_trainer(folder, tmp_path):
  rows = []
  settings = {"packets": {}, "text": {"recompute": True}, "trained": {"train_on_packets": True}}
  for name, changes in settings.items():
    experiment = small(folder, tmp_path, **changes)
    assert Run(experiment, tmp_path / name, console=quiet()).train().finished
    lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    rows.append([json.loads(line) for line in lines][-1])
  packets, text, trained = rows
  assert packets["packets/tokens"] > 100 and packets["packets/share"] > 0.3
  assert packets["packets/stale"] == 0
  assert text["packets/tokens"] == 0
  assert packets["mismatch/max"] > 10 * text["mismatch/max"] and text["mismatch/max"] < 1e-3
  assert trained["packets/tokens"] > 100 and trained["mismatch/max"] < 1e-4


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"corpus": ()}, "config.likelihood.corpus=()"),
    ({"engine.speculate": "ngram"}, "config.engine.speculate='ngram'"),
    ({"model.exact_chunk": 16}, "model without exact log-probs"),
    ({"train_on_packets": True, "rl.qk_clip": 100.0}, "config.rl.qk_clip=100.0"),
    ({"train_on_packets": True, "mesh.context": 2}, "config.mesh.context=2"),
  ],
)
def test_settings_that_cannot_be_are_refused(folder, tmp_path, changes, message):
  experiment = small(folder, tmp_path)
  for name, value in changes.items():
    part, _, field = name.rpartition(".")
    setattr(getattr(experiment, part) if part else experiment.likelihood, field, value)
  with pytest.raises(ConfigError) as error:
    experiment.likelihood.check_run(experiment, "config.likelihood")
  assert message in str(error.value)


def test_an_adapter_of_another_model_is_refused(folder, tmp_path):
  experiment = small(folder, tmp_path)
  wide = dataclasses.replace(experiment.model, d_model=64)
  with pytest.raises(ConfigError, match="one of d_model=64, not"):
    experiment.likelihood.engine(wide, experiment.engine, None)
  (tmp_path / "adapter").unlink()
  with pytest.raises(ConfigError, match="write_adapter makes one"):
    experiment.likelihood.engine(wide, experiment.engine, None)


@pytest.mark.skipif("AGENTJAX_DATA" not in os.environ, reason="needs AGENTJAX_DATA")
@pytest.mark.parametrize("name", ["kv_packet_reading", "kv_packet_search"])
def test_a_config_is_valid(name):
  experiment = load_experiment(_CONFIGS / f"{name}.py")
  experiment.validate()
  splits = experiment.data.source.load(experiment.data)
  assert len(splits.train) == 2000
