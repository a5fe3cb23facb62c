"""TESSY's own boundary predictor: labels by a model, a run that learns, a flow that uses it."""

import dataclasses
import json
import re

import numpy as np
import pytest

from agentjax.adapters.chat_endpoint.endpoint import JudgeRefusedError
from agentjax.adapters.judge_model import JudgeModelConfig
from agentjax.config import ConfigError
from agentjax.data import DataConfig, DataError, TaskSplits
from agentjax.data.config import JsonlConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.files import CheckpointError
from agentjax.models import ModelConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes.tessy.boundaries import (
  BOUNDARY,
  BoundaryConfig,
  load_predictor,
  open_predictor,
  starts_of,
  style_of_characters,
  write_boundary_data,
)
from agentjax.recipes.tessy.flow import TessyConfig, read_spans, word_accuracy
from agentjax.recipes.tessy.labels import (
  LabelConfig,
  Text,
  UnreadableError,
  chunks_of,
  label,
  label_texts,
  labeller_config,
  read_texts,
)
from agentjax.recipes.tessy.traces import WriterConfig, synthesise_traces
from agentjax.text.tokenizer import ByteTokenizer
from agentjax.training import Experiment, Extensions, OptimizerConfig, RLStage, Run
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.record import Message, Task
from tests.recipes.table_policy import save_table_policy
from tests.rewards.judging import Scripted, run
from tests.training.smoke import quiet
from tests.training.stages import fingerprints, train_until_killed

# ----------------------------------------------------------------------------------------- labels


def _lister(messages, key):
  """Lists the words in small letters; the text is that between the marks."""
  text = messages[-1].content.partition("\n")[2].partition("\n</text ")[0]
  return json.dumps({"fillers": re.findall(r"\b[a-z]+\b", text)})


def test_texts_are_cut_after_so_many_words_and_nothing_is_lost():
  text = "one two  three\nfour five "
  pieces = chunks_of(text, 2)
  assert pieces == [(0, "one two"), (7, "  three\nfour"), (19, " five ")]
  assert chunks_of("a b", 2) == [(0, "a b")] and chunks_of("  ", 2) == []


def test_spans_of_chunks_stand_where_they_stand_in_the_text():
  text = "hm AB so CD well EF.</think>"
  labeller = Scripted(_lister)
  spans = run(label(Text(3, text), labeller, LabelConfig(chunk_words=2)))
  assert [text[a:b] for a, b in spans] == ["hm", "so", "well", "</think>", "think"]
  assert len(labeller.asked) == 3 and len({key for _, key in labeller.asked}) == 3


def test_a_reply_that_cannot_be_read_is_asked_for_again_and_then_given_up():
  replies = ["hm", '{"fillers": [1]}', '{"fillers": ["hm"]}']
  labeller = Scripted(lambda messages, key: replies[len(labeller.asked) - 1])
  assert run(label(Text(0, "hm AB"), labeller, LabelConfig())) == [(0, 2)]
  with pytest.raises(UnreadableError):
    run(label(Text(0, "hm AB"), Scripted(lambda m, k: "hm"), LabelConfig(rounds=2)))


def test_texts_are_read_with_line_and_field(tmp_path):
  file = tmp_path / "texts.jsonl"
  rows = [{"text": "a"}, {"messages": [{"role": "user", "content": "q"}, {"content": "b"}]}]
  file.write_text("".join(json.dumps(row) + "\n" for row in rows))
  assert read_texts(file) == [Text(0, "a"), Text(1, "b")]
  file.write_text('{"text": "half \\ud83d"}\n')
  assert read_texts(file) == [Text(0, "half ?")]  # as the file of labels gives it back
  file.write_text('{"messages": []}\n')
  with pytest.raises(DataError, match="'text'"):
    read_texts(file)


def test_labels_are_written_once_and_texts_may_be_added(tmp_path, monkeypatch):
  monkeypatch.setattr(
    "agentjax.recipes.tessy.labels.open_judge", lambda *args: (labeller, {"model": "a"})
  )

  def lists(messages, key):
    return "hm" if "GIVEN UP" in messages[-1].content else _lister(messages, key)

  labeller = Scripted(lists)
  texts = [Text(0, "hm AB"), Text(1, "GIVEN UP"), Text(2, "CD so")]

  def write(some, **settings):
    settings = {"config": LabelConfig(), "labeller": JudgeModelConfig("a")} | settings
    return label_texts(_experiment(tmp_path), tmp_path / "labels", texts=some, **settings)

  done = write(texts[:2])
  assert (done.texts, done.given_up, done.kept) == (1, 1, 0)
  asked = len(labeller.asked)
  done = write(texts, concurrency=3)
  assert (done.texts, done.given_up, done.kept) == (2, 1, 2) and len(labeller.asked) == asked + 1
  found, spans = read_spans(tmp_path / "labels" / "labels.jsonl")
  assert found == ["hm AB", "CD so"] and spans == [[(0, 2)], [(3, 5)]]
  with pytest.raises(ConfigError, match="text 0 was another"):
    write([Text(0, "other")])
  with pytest.raises(ConfigError, match="settings.labels.chunk_words"):
    write(texts, config=LabelConfig(chunk_words=9))
  assert labeller_config().sampling.temperature == 0


def test_a_refused_request_gives_up_its_text_and_a_refusing_endpoint_stops(tmp_path, monkeypatch):
  labeller = Scripted(None)
  monkeypatch.setattr(
    "agentjax.recipes.tessy.labels.open_judge", lambda *args: (labeller, {"model": "a"})
  )

  def write(status):
    labeller.answer = lambda messages, key: (
      JudgeRefusedError(f"answered {status}", status)
      if "LONG" in messages[-1].content
      else _lister(messages, key)
    )
    settings = {"config": LabelConfig(), "labeller": JudgeModelConfig("a")}
    texts = [Text(0, "LONG"), Text(1, "hm AB")]
    return label_texts(_experiment(tmp_path), tmp_path / "labels", texts=texts, **settings)

  with pytest.raises(JudgeRefusedError, match="answered 404"):
    write(404)
  done = write(413)
  assert (done.texts, done.given_up) == (1, 1)
  assert "answered 413" in (tmp_path / "labels/given_up.jsonl").read_text()


# ---------------------------------------------------------------------------------------- classes


def test_a_word_has_one_class_and_takes_the_white_space_before_it():
  found = style_of_characters("hm AB  so.\n", [(0, 1), (7, 8)])
  assert "".join("s" if one else "c" for one in found) == "ss" + "ccc" + "ssssss"
  assert not style_of_characters("  ", []).any()


def test_tokens_begin_where_their_first_character_does():
  tokenizer = ByteTokenizer()
  ids = tokenizer.encode("aé b")
  assert starts_of(ids, "aé b", tokenizer.token_bytes()).tolist() == [0, 1, 1, 2, 3]
  with pytest.raises(ValueError, match="does not spell"):
    starts_of(ids, "other", tokenizer.token_bytes())


# --------------------------------------------------------------------------------------- learning


# The first word of a line is style. What stands before a word tells its class, as in a trace.
def _texts(seed, count):
  random = np.random.default_rng(seed)
  texts, spans = [], []
  for _ in range(count):
    text, own = "", []
    for _ in range(6):
      own.append((len(text), len(text) + 2))
      text += random.choice(("hm", "so"))
      words = random.choice(("AB", "CD"), random.integers(1, 4))
      text += "".join(f" {word}" for word in words) + ".\n"
    texts.append(text[:-1])
    spans.append(own)
  return texts, spans


def _experiment(folder, every=1000, **rl):
  made = Experiment(
    name="boundary",
    data=DataConfig(
      path=str(folder / "data"),
      train_size=None,
      source=JsonlConfig(name=BOUNDARY, messages_field="messages", test_file=""),
    ),
    model=ModelConfig(
      vocab_size=264, d_model=32, pattern="*-", num_heads=2, num_kv_heads=2, head_dim=16, d_mlp=64
    ),
    engine=EngineConfig(
      slots=4, max_length=128, chunk_tokens=8, extend_buckets=(64,), extend_rows=(4,), warmup=False
    ),
    rl=RLStage(
      **{"steps": 25, "tasks_per_step": 16} | rl,
      row_length=128,
      microbatch_rows=8,
      rollouts=str(folder / "data" / "episodes"),
      old_log_probs="recomputed",
      mismatch_alarm=100.0,
      objective=ObjectiveConfig(AdvantageConfig(), PolicyLossConfig()),
      optimizer=OptimizerConfig(learning_rate=1e-3),
      signals=(BoundaryConfig(optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=3)),),
    ),
    checkpoint=CheckpointConfig(every=every),
  )
  made.rollout.max_total_tokens = 128
  made.evaluation.tasks = 0
  return made


def _run(folder, name, **settings):
  return Run(_experiment(folder, **settings), folder / name, console=quiet())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  folder = tmp_path_factory.mktemp("boundary")
  written = write_boundary_data(_experiment(folder), folder / "data", *_texts(0, 96))
  assert written.texts == 96 and written.pieces >= 96 and 0.2 < written.style < 0.6
  return folder


@pytest.mark.slow
def test_a_run_learns_boundaries_better_than_the_more_frequent_class_tells(data):
  assert _run(data, "run").train().finished
  rows = read_metrics(data / "run" / "metrics.jsonl")
  losses = [row["boundary/loss"] for row in rows]
  assert losses[0] == pytest.approx(np.log(2), abs=1e-3) and losses[-1] < 0.4
  right, usual = word_accuracy(load_predictor(data / "run"), *_texts(1, 4))
  assert right > 0.9 > 0.8 > usual


@pytest.mark.slow
def test_killed_and_resumed_it_learns_the_same_and_the_policy_stays(data):
  assert _run(data, "whole", every=2, steps=4).train().finished
  train_until_killed(_run(data, "cut", every=2, steps=4), 3)
  assert _run(data, "cut", every=2, steps=4).train().finished
  assert fingerprints(data / "cut") == fingerprints(data / "whole")
  found = [load_predictor(data / name) for name in ("cut", "whole")]
  assert found[0].fingerprint() == found[1].fingerprint()
  moved = [r["update_norm"] for r in read_metrics(data / "whole" / "metrics.jsonl")]
  assert moved == [0.0] * 4


@pytest.mark.slow
def test_the_flow_cuts_where_the_trained_predictor_says(data, tmp_path):
  run_folder = data / "run_of_flow"
  assert _run(data, "run_of_flow", steps=2).train().finished
  predictor = open_predictor(str(run_folder), None, print)
  assert predictor.fingerprint() == load_predictor(run_folder).fingerprint()
  with pytest.raises(ConfigError, match="is a folder"):
    open_predictor(str(run_folder), "labels.jsonl", print)
  pieces = predictor.style("hm ", "AB CD.")
  assert [start for start, _ in pieces] == list(range(6))
  # The same context and another chunk: what is said of a token is known before it is read.
  assert pieces[0] == predictor.style("hm ", "s")[0]
  assert predictor.style("", "a") == [(0, True)] and predictor.style("ab", "") == []

  student = {"": "a", "a": "b", "b": " .", " ": "a", ".": "5", "5": None}
  base = _experiment(data, steps=2)
  save_table_policy(tmp_path / "student", student, 0, base)
  save_table_policy(tmp_path / "teacher", student, 1, base)
  tasks = [Task(i, (Message("user", f"{i}?"),), "5", "sums") for i in range(2)]
  sampling = SamplingConfig(temperature=1.0)
  base.rl = dataclasses.replace(base.rl, rollouts=None, signals=())
  written = synthesise_traces(
    base,
    tmp_path / "traces",
    writers={n: WriterConfig(str(tmp_path / n), sampling) for n in ("student", "teacher")},
    predictors={"student": predictor, "teacher": predictor},
    tessy=TessyConfig(end_of_thoughts=".", max_tokens=60, answer_tokens=8),
    extensions=Extensions(tasks=TaskSplits(tasks, ())),
  )
  assert written.traces + written.given_up == 2
  settings = json.loads((tmp_path / "traces" / "settings.json").read_text())
  assert settings["predictors"]["student"] == predictor.fingerprint()


# ----------------------------------------------------------------------------------------- errors


def test_what_cannot_be_learned_from_is_said(tmp_path):
  experiment = _experiment(tmp_path)
  with pytest.raises(DataError, match="0 of 5 labelled tokens are style"):
    write_boundary_data(experiment, tmp_path / "data", ["hm AB"], [[]])
  experiment = _experiment(tmp_path)
  experiment.rl.rollouts = None
  with pytest.raises(ConfigError, match="config.rl.rollouts=None"):
    experiment.validate()
  with pytest.raises(CheckpointError):
    load_predictor(tmp_path)
