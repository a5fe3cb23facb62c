"""Rows of GSM8K with other numbers: the arithmetic holds, the words follow, doubtful rows stay."""

import json
import os
import random
import re

import pytest

from agentjax.data import DataConfig
from agentjax.tools.calculator import evaluate
from agentjax.trajectory.record import Message
from agentjax.worlds.question.gsm8k import Gsm8kConfig, read_gsm8k
from agentjax.worlds.question.gsm8k_variants import vary

DATA = os.environ.get("AGENTJAX_DATA")
QUESTION = "Mia has 48 clips. She buys 5 boxes of 16 clips, for $1,200 in all. How many has she?"
SOLUTION = "In boxes are 5*16=<<5*16=80>>80 clips.\nShe has 48+80=<<48+80=128>>128.\n#### 128"


def variants(question, solution, number=20):
  return [vary(question, solution, random.Random(seed)) for seed in range(number)]


def test_every_variant_is_worked_out_again_and_told_with_its_numbers():
  found = variants(QUESTION, SOLUTION)
  assert None not in found and len(set(found)) > 15
  for question, solution in found:
    clips, boxes, each = map(
      int, re.fullmatch(r"Mia has (\d+) .* buys (\d+) .* of (\d+) .*", question).groups()
    )
    assert "$1,200" in question  # no calculation uses it
    assert 24 <= clips <= 96 and 2 <= boxes <= 10 and 8 <= each <= 32
    product, total = boxes * each, clips + boxes * each
    assert solution == (
      f"In boxes are {boxes}*{each}=<<{boxes}*{each}={product}>>{product} clips.\n"
      f"She has {clips}+{product}=<<{clips}+{product}={total}>>{total}.\n#### {total}"
    )


@pytest.mark.parametrize(
  ("question", "solution"),
  [
    ("5 boys", "<<5*7=35>>35\n#### 35"),  # 7 is a number of days, perhaps
    ("5 boys and half as many girls", "<<5*2=10>>10\n#### 10"),
    ("six boys eat 5 apples each", "<<6*5=30>>30\n#### 30"),
    ("5 boys get 20% of it", "<<5*0.2=1>>1\n#### 1"),
  ],
)
def test_numbers_of_known_origin_may_stay(question, solution):
  assert any(variants(question, solution))


@pytest.mark.parametrize(
  ("question", "solution"),
  [
    ("5 boys, Carl is one of them", "<<5*6=30>>30\n#### 30"),  # where does the 6 come from?
    ("5 boys and 5 girls", "<<5+5=10>>10\n#### 10"),  # which of them?
    ("five boys and 5 girls", "<<5+5=10>>10\n#### 10"),
    ("8 boys, 1/8 of them ill", "<<8/8=1>>1\n#### 1"),
    ("20 sweets, 20% of them red", "<<20*20/100=4>>4\n#### 4"),
    ("5 boys and 8 girls", "<<5+8=13>>13\n<<13-8=5>>5\n<<5+5=10>>10\n#### 11"),  # not a result
    ("5 boys, 20 sweets", "<<20-15=5>>5\n#### 5"),
    ("9 boys, 40% are ill", "<<9-2=7>>7\n<<7-5=2>>2\n#### 2"),  # 2: a constant, then a result
    ("3rd of 50% of 1/4 and 2.5", "<<2.5*2=5>>5\n#### 5"),  # none is a whole number by itself
    ("9 boys", "<<9/2=4.5>>4.5\n<<9/4=2.3>>2.3\n#### 2.3"),  # rounded
    ("9 boys", "many\n#### 9"),
  ],
)
def test_a_doubtful_row_has_no_variant(question, solution):
  assert variants(question, solution) == [None] * 20


def test_results_stay_whole_and_positive():
  question, solution = "She cuts 36 m into 9 parts, 3 are lost.", "<<36/9=4>>4\n<<4-3=1>>1\n#### 1"
  found = [one for one in variants(question, solution, 60) if one is not None]
  assert len(set(found)) > 3
  for _, solved in found:
    assert all(re.fullmatch("[1-9][0-9]*", result) for result in re.findall("=(.*)>>", solved))


def write(folder, name):
  rows = [{"question": QUESTION, "answer": SOLUTION}, {"question": "How many?", "answer": "#### 3"}]
  (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_variants_come_behind_the_rows_of_training_alone(tmp_path):
  write(tmp_path, "train.jsonl")
  write(tmp_path, "test.jsonl")
  data = DataConfig(path=str(tmp_path), source=Gsm8kConfig(variants=2), seed=3)
  data.train_size = data.test_size = None
  splits = data.source.load(data)
  assert [task.id for task in splits.train] == [0, 1, 2, 4]  # the second row has no numbers
  assert splits.train[:2] == read_gsm8k(tmp_path / "train.jsonl") and len(splits.test) == 2
  assert splits.train[2].prompt != splits.train[3].prompt
  assert data.source.load(data) == splits


def test_a_share_of_demonstrations_states_the_answer_at_once(tmp_path):
  write(tmp_path, "train.jsonl")
  write(tmp_path, "test.jsonl")
  data = DataConfig(path=str(tmp_path), source=Gsm8kConfig(variants=40, direct_share=0.5))
  data.train_size = data.test_size = None
  splits = data.source.load(data)
  direct = [task for task in splits.train if len(task.demonstration) == 1 and task.id != 1]
  assert 10 < len(direct) < 31
  assert all(t.demonstration == (Message("assistant", f"#### {t.answer}"),) for t in direct)
  assert len(splits.test[0].demonstration) == 5


@pytest.mark.skipif(DATA is None, reason="AGENTJAX_DATA is not set")
def test_variants_of_gsm8k_state_what_they_calculate():
  tasks = read_gsm8k(os.path.join(DATA, "gsm8k", "train.jsonl"), limit=1500, variants=1)
  assert len(tasks) > 1500 + 800
  for task in tasks[1500:]:
    stated = [evaluate(m.tool_calls[0].arguments["expression"]) for m in task.demonstration[:-1:2]]
    assert evaluate(task.answer) in stated or task.answer in task.prompt[0].content
