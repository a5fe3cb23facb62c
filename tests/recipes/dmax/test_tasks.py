"""Running sums, word problems and passages."""

import gzip
import io
import os

import pytest

from agentjax.config import ConfigError
from agentjax.data import DataConfig
from agentjax.data.errors import DataError
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.recipes.dmax.tasks import (
  PassageConfig,
  RunningSumConfig,
  WordProblemFilesConfig,
  running_sum,
)
from agentjax.text.answers import read_marked_answer


def test_a_sum_is_worked_out_term_by_term():
  task = running_sum([7, 5, 8], 3)
  assert task.prompt[0].content == "7+5+8"
  assert task.demonstration[0].content == "7+5=12\n12+8=20\n#### 20"
  assert read_marked_answer(task.demonstration[0].content) == task.answer == "20"


def test_train_and_test_share_no_sum():
  source = RunningSumConfig(fewest=2, most=3)
  splits = [source.load(DataConfig(train_size=400, test_size=60, seed=s)) for s in (0, 1)]
  texts = [
    {t.prompt[0].content for s in splits for t in getattr(s, side)} for side in ("train", "test")
  ]
  assert not texts[0] & texts[1]
  assert splits[0].train[:20] != splits[1].train[:20]
  assert source.load(DataConfig(train_size=5, test_size=0)).train == splits[0].train[:5]
  for task in splits[0].test:
    assert task.id >= FIRST_TEST_ID
    assert sum(map(int, task.prompt[0].content.split("+"))) == int(task.answer)


def test_sums_that_are_all_on_one_side_are_refused():
  for settings in ({"largest": 1}, {"largest": 3}, {"largest": 2, "most": 3}):
    with pytest.raises(ConfigError, match=r"source\.largest=.*train and test have a sum each"):
      RunningSumConfig(**{"fewest": 2, "most": 2} | settings).validate()
  for settings in ({"largest": 4}, {"largest": 1, "most": 6}, {"largest": 10**9, "most": 10**6}):
    RunningSumConfig(**{"fewest": 2, "most": 2} | settings).validate()
  both = RunningSumConfig(fewest=2, most=2, largest=4)
  splits = both.load(DataConfig(train_size=3, test_size=3))
  assert len(splits.train) == len(splits.test) == 3


def test_passages_of_files_go_on_where_their_prompts_end(tmp_path):
  text = "".join(f"{i:03d} " for i in range(1000))
  (tmp_path / "a.txt").write_text(text)
  with gzip.open(tmp_path / "b.txt.gz", "wt", encoding="utf-8") as file:
    file.write(text.upper())
  source = PassageConfig(lead=8, rest=12)
  splits = source.load(DataConfig(path=str(tmp_path), train_size=None, test_size=3))
  first = splits.train[0]
  assert first.prompt[0].content + first.demonstration[0].content == text[:20]
  assert {t.source for t in splits.train} == {"a.txt", "b.txt.gz"}
  assert len(splits.test) == 3
  assert splits.test[0].prompt[0].content == text[3600:3608]
  assert len({t.id for t in splits.train}) == len(splits.train)
  only = PassageConfig(lead=8, rest=12, files=("b",))
  assert {t.source for t in only.load(DataConfig(path=str(tmp_path))).train} == {"b.txt.gz"}
  with pytest.raises(DataError, match=r"config\.data\.source\.files names"):
    PassageConfig(files=("c",)).load(DataConfig(path=str(tmp_path)))


def test_passages_are_utf_8_whatever_the_locale_says(tmp_path, monkeypatch):
  (tmp_path / "a.txt").write_bytes("Brontë ".encode() * 20)
  monkeypatch.setattr(io, "text_encoding", lambda encoding, stacklevel=2: encoding or "latin-1")
  source = PassageConfig(lead=7, rest=7)
  assert source.load(DataConfig(path=str(tmp_path))).train[0].prompt[0].content == "Brontë "


def test_word_problems_are_read_as_plain_text(tmp_path):
  rows = [
    '{"question": "Q1", "answer": "2+3 = <<2+3=5>>5 eggs\\n#### 5"}',
    *(f'{{"input": "Q{i}", "target": {i}.0}}' for i in range(2, 21)),
  ]
  (tmp_path / "all.jsonl").write_text("\n".join(rows) + "\n")
  source = WordProblemFilesConfig(train_file="all.jsonl", test_file="")
  splits = source.load(DataConfig(path=str(tmp_path), train_size=None, test_size=None))
  first, second = splits.train[:2]
  assert (first.demonstration[0].content, first.answer) == ("2+3 = 5 eggs\n#### 5", "5")
  assert (second.prompt[0].content, second.demonstration[0].content) == ("Q2", "#### 2")
  assert [t.answer for t in splits.test] == ["19", "20"]
  assert splits.test[0].id == FIRST_TEST_ID
  (tmp_path / "all.jsonl").write_text('{"question": "Q", "answer": "5"}\n')
  with pytest.raises(DataError, match=r"all.jsonl.*has no line '#### ANSWER'"):
    source.load(DataConfig(path=str(tmp_path)))


@pytest.mark.skipif("AGENTJAX_DATA" not in os.environ, reason="no data")
@pytest.mark.parametrize(
  ("folder", "source", "least"),
  [
    ("gsm8k", WordProblemFilesConfig(), 7000),
    ("math_words", WordProblemFilesConfig(train_file="mawps_singleop.jsonl", test_file=""), 300),
    ("text", PassageConfig(files=("tinyshakespeare",)), 3000),
  ],
)
def test_real_files_are_read(folder, source, least):
  path = os.path.join(os.environ["AGENTJAX_DATA"], folder)
  splits = source.load(DataConfig(path=path, train_size=None, test_size=None))
  assert len(splits.train) > least
  assert len(splits.test) > 30
