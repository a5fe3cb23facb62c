import dataclasses
import json
import sys

import pytest

from agentjax.adapters.reasoning_gym.tasks import ReasoningGymConfig
from agentjax.adapters.tfds import TfdsConfig
from agentjax.config import ConfigError
from agentjax.data import DataConfig, DataError, TaskSplits, load_tasks
from agentjax.data.config import JsonlConfig, MixtureConfig
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.worlds.question.gsm8k import Gsm8kConfig
from agentjax.worlds.question.word_problems import WordProblemConfig


@pytest.mark.parametrize(
  ("fields", "named"),
  [
    ({"source": Gsm8kConfig()}, "config.data.path"),
    ({"source": JsonlConfig()}, "--config.data.path=DIR"),
    ({}, "config.data.source=None"),
    ({"source": "gsm8k"}, "config.data.source='gsm8k' has type str"),
    ({"train_size": 0}, "config.data.train_size"),
    ({"source": WordProblemConfig(), "train_size": None}, "train_size=None; allowed: a number"),
    ({"test_size": -1}, "config.data.test_size"),
    ({"seed": -1}, "config.data.seed"),
    ({"source": TfdsConfig(), "path": "x"}, "config.data.source.name"),
    ({"source": WordProblemConfig(levels=(7,))}, "config.data.source.levels"),
    ({"source": JsonlConfig(test_file="train.jsonl")}, "config.data.source.test_file"),
    (
      {"source": JsonlConfig(response_field="a", messages_field="b")},
      "config.data.source.response_field='a'; allowed: '' with",
    ),
    ({"source": TfdsConfig(test_split="train")}, "config.data.source.test_split"),
    ({"source": ReasoningGymConfig(parameters="{")}, "parameters='{' is not JSON"),
    ({"source": ReasoningGymConfig(parameters='{"seed": 1}')}, "other than 'seed'"),
    ({"source": MixtureConfig(sources=(Gsm8kConfig(), JsonlConfig()))}, "at most one that reads"),
    ({"source": MixtureConfig()}, r"sources=\(\); allowed: two or more"),
    (
      {"source": MixtureConfig((WordProblemConfig(), JsonlConfig()), (1.0,)), "path": "x"},
      "config.data.source.weights",
    ),
    ({"source": MixtureConfig(sources=(WordProblemConfig(),), weights=(1.0,))}, "two or more"),
  ],
)
def test_an_impossible_setting_is_refused_by_field_name(fields, named):
  with pytest.raises(ConfigError, match=named):
    load_tasks(DataConfig(**fields))


def test_settings_survive_json():
  config = DataConfig(source=WordProblemConfig(levels=(2,), demonstration_levels=(2,)))
  assert DataConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_word_problems_come_in_the_sizes_asked_for():
  splits = load_tasks(DataConfig(source=WordProblemConfig(), train_size=7, test_size=3, seed=1))
  assert (len(splits.train), len(splits.test)) == (7, 3)


def test_jsonl_files_are_found_in_the_folder(tmp_path):
  for name, count in (("a.jsonl", 3), ("b.jsonl", 2)):
    (tmp_path / name).write_text('{"q": "?", "a": 1}\n' * count)
  files = JsonlConfig(
    name="mine", train_file="a.jsonl", test_file="b.jsonl", question_field="q", answer_field="a"
  )
  config = DataConfig(path=str(tmp_path), train_size=None, source=files)
  splits = load_tasks(config)
  assert load_tasks(
    dataclasses.replace(config, source=dataclasses.replace(files, test_file=""))
  ) == (TaskSplits(splits.train, []))
  assert [t.id for t in splits.train] == [0, 1, 2]
  assert [t.id for t in splits.test] == [FIRST_TEST_ID, FIRST_TEST_ID + 1]
  assert splits.train[0].source == "mine"


def test_a_missing_gsm8k_folder_names_the_file(tmp_path):
  with pytest.raises(DataError, match="nowhere/train.jsonl: no such file"):
    load_tasks(DataConfig(source=Gsm8kConfig(), path=str(tmp_path / "nowhere")))


def test_a_mixture_holds_each_source_with_fresh_ids():
  pytest.importorskip("reasoning_gym")
  source = MixtureConfig((WordProblemConfig(), ReasoningGymConfig()), (3.0, 1.0))
  config = DataConfig(source=source, train_size=40, test_size=8)
  splits = load_tasks(config)
  sources = [t.source for t in splits.train]
  assert (sources.count("word_problems"), sources.count("reasoning_gym/chain_sum")) == (30, 10)
  assert [t.id for t in splits.test] == [FIRST_TEST_ID + i for i in range(8)]
  equal = dataclasses.replace(config, source=dataclasses.replace(source, weights=()))
  counts = [t.source for t in load_tasks(equal).train].count("word_problems")
  assert counts == 20


@pytest.mark.parametrize(
  ("module", "extra", "config"),
  [
    ("reasoning_gym", "envs", DataConfig(source=ReasoningGymConfig())),
    ("tensorflow_datasets", "tfds", DataConfig(path=".", source=TfdsConfig("tiny"))),
  ],
)
def test_a_missing_extra_is_named(monkeypatch, module, extra, config):
  monkeypatch.setitem(sys.modules, module, None)  # makes the import fail
  with pytest.raises(ConfigError, match=rf"pip install 'agentjax\[{extra}\]'"):
    load_tasks(config)
