import json
import os
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjax.rewards.answers import (
  answers_equal,
  normalise_number,
  numbers_equal,
)
from agentjax.text.answers import mark_answer, read_marked_answer

DATA = os.environ.get("AGENTJAX_DATA")


@pytest.mark.parametrize(
  ("text", "answer"),
  [
    ("3+4=7\n#### 7", "7"),
    ("#### 7\n", "7"),
    ("####7", "7"),
    ("#### 1,234", "1,234"),
    ("#### 5\n#### 6", "6"),  # listing answers gains nothing
    ("#### 5 or 6", "5 or 6"),
  ],
)
def test_a_marked_answer_is_the_line_behind_the_last_mark(text, answer):
  assert read_marked_answer(text) == answer


@pytest.mark.parametrize("text", ["The answer is 7.", "7", "", "####  \n7"])
def test_a_marked_answer_needs_the_mark_and_something_behind_it(text):
  assert read_marked_answer(text) is None


@given(st.text(st.characters(exclude_characters="\n#"), min_size=1).filter(str.strip))
def test_a_marked_answer_reads_back(answer):
  assert read_marked_answer(f"#### 0\n{mark_answer(answer)}\nbye") == answer.strip()


@pytest.mark.parametrize(
  ("text", "value"),
  [
    ("7", 7),
    ("-7", -7),
    ("−7", -7),
    ("+7", 7),
    ("1,234", 1234),
    ("$1,234.50", Fraction(2469, 2)),
    ("-$3", -3),
    ("7.", 7),
    (" 7 ", 7),
    ("12%", 12),
    ("3/4", Fraction(3, 4)),
    ("007", 7),
    (".5", Fraction(1, 2)),
    ("1234567", 1234567),
    ("5 apples", None),
    ("1,23", None),
    ("1,2345", None),
    ("--7", None),
    ("7 8", None),
    ("", None),
    ("3/0", None),
    ("1e3", None),
    ("nan", None),
    ("inf", None),
    ("٣", None),
    ("9" * 5000, None),
  ],
)
def test_only_a_whole_number_is_a_number(text, value):
  assert normalise_number(text) == value


@given(st.integers(-(10**9), 10**9))
def test_every_spelling_of_an_integer_is_the_same_number(n):
  for text in (str(n), f"{n:,}", f"{n}.0", f"{n}.", f" {n} "):
    assert normalise_number(text) == n


@pytest.mark.parametrize(
  ("left", "right", "equal"),
  [
    ("1,000", "1000", True),
    ("0.3333333333", "1/3", True),
    ("0.33", "1/3", False),
    ("19", "19.0", True),
    ("19", "20", False),
    ("0", "0.0", True),
    ("0", "0.000000001", False),
    ("red", "red", True),
    (" red ", "red", True),
    ("red", "Red", False),
    ("red", "7", False),
    ("7 apples", "7", False),
  ],
)
def test_answers_are_compared_as_numbers_where_both_are(left, right, equal):
  assert answers_equal(left, right) is equal
  assert answers_equal(right, left) is equal


def test_no_number_equals_nothing():
  assert not numbers_equal(None, None)


@pytest.mark.skipif(DATA is None, reason="AGENTJAX_DATA is not set")
def test_verdicts_on_gsm8k_model_solutions_are_those_of_its_authors():
  path = os.path.join(DATA, "gsm8k")
  with open(os.path.join(path, "test.jsonl")) as file:
    references = [read_marked_answer(json.loads(line)["answer"]) for line in file]
  with open(os.path.join(path, "example_model_solutions.jsonl")) as file:
    rows = [json.loads(line) for line in file]

  def final(solution):  # these solutions mark the answer by "A:"
    return read_marked_answer(solution.replace("\nA:", "\n####")) or ""

  verdicts = [
    (answers_equal(final(s["solution"]), reference), s["is_correct"])
    for row, reference in zip(rows, references, strict=True)
    for s in row.values()
    if isinstance(s, dict)
  ]
  assert len(verdicts) == 5276
  assert sum(ours != theirs for ours, theirs in verdicts) == 0
