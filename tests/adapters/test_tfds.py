import os
import subprocess
import sys

import pytest

from agentjax.adapters.tfds import TfdsConfig, TfdsTasks
from agentjax.config import ConfigError
from agentjax.data import DataConfig, DataError, load_tasks
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.trajectory.record import Message
from tests.adapters.tfds_folder import write_tfds

tfds = pytest.importorskip("tensorflow_datasets")

ROWS = {
  "train": [{"question": f"What is {i}+{i}?", "answer": str(2 * i), "level": i} for i in range(7)],
  "test": [
    {"question": "What is 9+9?", "answer": "18", "level": 9},
    {"question": "  ", "answer": "1", "level": 0},
  ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  root = tmp_path_factory.mktemp("tfds")
  write_tfds(root, ROWS)
  return str(root)


def tiny(**fields):
  return TfdsConfig(name="tiny", **fields)


def load(folder, tfds_config=None, **fields):
  return load_tasks(
    DataConfig(
      path=folder,
      train_size=None,
      test_size=None,
      source=tfds_config or tiny(),
      **fields,
    )
  )


def test_every_example_becomes_the_task_it_tells(folder):
  splits = load(folder)
  assert len(splits.train) == 7
  for i, task in enumerate(splits.train):
    assert task.id == i
    assert task.prompt == (Message("user", f"What is {i}+{i}?"),)
    assert task.answer == str(2 * i)
    assert task.source == "tfds/tiny"
  assert (splits.test[0].id, splits.test[0].answer) == (FIRST_TEST_ID, "18")


def test_tasks_are_a_sequence(folder):
  tasks = TfdsTasks(tiny(), data_dir=folder, split="train", limit=5)
  assert len(tasks) == 5
  assert tasks[-1] == tasks[4]
  assert [t.id for t in tasks[1:4:2]] == [1, 3]
  assert len(TfdsTasks(tiny(), data_dir=folder, split="train", limit=0)) == 0
  for index in (5, -6):
    with pytest.raises(IndexError):
      tasks[index]


def test_slices_of_a_split_and_numeric_fields_are_read(folder):
  config = tiny(train_split="train[:50%]", test_split="train[50%:]", answer_field="level")
  splits = load(folder, config)
  assert len(splits.train) + len(splits.test) == 7
  assert splits.train[2].answer == "2"


def test_reading_needs_neither_tensorflow_nor_jax(folder):
  code = f"""
import sys
from agentjax.adapters.tfds import TfdsConfig, TfdsTasks
tasks = TfdsTasks(TfdsConfig(name="tiny"), data_dir={folder!r}, split="train")
assert tasks[6].answer == "12"
loaded = {{"tensorflow", "jax"}} & set(sys.modules)
assert not loaded, loaded
"""
  subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_empty_field_names_its_example(folder):
  with pytest.raises(DataError, match="example 1 of split 'test': 'question' is empty"):
    load(folder).test[1]


@pytest.mark.parametrize(
  ("config", "named"),
  [
    (tiny(question_field="text"), "'text'; allowed: .*question"),
    (tiny(train_split="dev"), "split 'dev'; allowed: .*train"),
  ],
)
def test_a_field_or_split_that_is_not_there_is_refused_with_what_is(folder, config, named):
  with pytest.raises(ConfigError, match=named):
    load(folder, config)


@pytest.mark.parametrize("name", ["small", "tiny/other", "tiny:9.9.9"])
def test_a_data_set_that_is_not_there_is_refused_by_name_and_folder(folder, name):
  with pytest.raises(DataError, match=f"no prepared TFDS data set '{name}'") as caught:
    load(folder, TfdsConfig(name=name))
  assert caught.value.path == folder
  assert len(str(caught.value)) < 500


def test_a_data_set_tfds_knows_is_never_downloaded(folder):
  with pytest.raises(DataError, match="prepared"):
    load(folder, TfdsConfig(name="ag_news_subset"))
  assert os.listdir(folder) == ["tiny"]
