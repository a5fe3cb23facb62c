import time

import pytest

from agentjax.recipes.rational_rewards.critiques import (
  EDITING,
  Rationale,
  consistent,
  critique_reward,
  preference_sum,
  read_critique,
)
from tests.rewards.judging import run

REPLY = """## Request analysis
text_faithfulness: 1 is how it might look.

## Detailed judgement
1. **Text faithfulness**: 3.5 - the hat is red.
2. **Physical quality** (score): 2
3. text_rendering: N/A, there is no text.

## Summary
Good.

## Request refinement
A red hat on a white dog, both hands visible.
"""


def test_grades_are_read_from_the_judgement_alone():
  critique = read_critique(REPLY)
  assert critique.grades == {
    "text_faithfulness": 3.5,
    "physical_quality": 2.0,
    "text_rendering": None,
  }
  assert critique.refined_request == "A red hat on a white dog, both hands visible."


@pytest.mark.parametrize(
  ("text", "grades"),
  [
    ("faithfulness: 4\nimage_faithfulness: 1", {"faithfulness": 4}),
    ("faithfulness: 4\n- **Image** faithfulness: 1", {"faithfulness": 4}),
    ("Image-faithfulness: 1", {}),
    ("correctness: 4\nIncorrectness: 1", {"correctness": 4}),
    ("### Correctness: 3\n> *Faithfulness*: 2", {"correctness": 3, "faithfulness": 2}),
    ("a) Correctness = 3\n(2) __faithfulness__: 2", {"correctness": 3, "faithfulness": 2}),
    ("- Correctness: 3, right. Faithfulness: N/A", {"correctness": 3, "faithfulness": None}),
    ("Grades: correctness: 3; *faithfulness*: 2", {"correctness": 3, "faithfulness": 2}),
    ("correctness: 3\nThe one false line costs correctness: 1.", {"correctness": 3}),
  ],
)
def test_an_aspect_takes_no_grade_of_another_whose_name_ends_with_its_own(text, grades):
  assert read_critique(text, ("correctness", "faithfulness")).grades == grades


def test_long_runs_of_marks_are_read_at_once():
  begun = time.monotonic()
  for marks in ("*", ".", "- ", "1. ", "* .", "_\n"):
    read_critique(marks * 20_000 + "x")
  assert time.monotonic() - begun < 5


def test_golden_scores():
  critique = read_critique(REPLY)
  assert critique_reward(critique).value == pytest.approx((2.75 - 1) / 3)
  assert preference_sum(critique) == 3.5 + 2 + 2.5
  assert preference_sum(critique, EDITING) == 3.5 + 2 + 2.5 + 2.5
  best = read_critique("text_faithfulness: 4\nphysical_quality: 4.0\ntext_rendering: 4")
  worst = read_critique("text_faithfulness: 1\nphysical_quality: 1\ntext_rendering: N/A")
  assert (critique_reward(best).value, critique_reward(worst).value) == (1.0, 0.0)


def test_what_cannot_be_read_is_invalid_unless_the_papers_zero_is_asked_for():
  for text in ("", "a fine picture", "text_faithfulness: 7", "text_rendering: N/A"):
    assert not critique_reward(read_critique(text)).valid
    assert critique_reward(read_critique(text), unreadable="zero").value == 0.0
    assert preference_sum(read_critique(text)) == 7.5


def test_rationales_from_which_the_label_does_not_follow_are_dropped():
  rationales = [
    Rationale("q", "the first is sharp. Label: A", "A"),
    Rationale("q", "the second is sharp. Label: A", "A"),
    Rationale("q", "nothing. Label: B", "B"),
  ]

  async def predict(question, text):
    assert "Label" not in text
    return {"first": "A", "second": "B"}.get(text.split()[1]) if text.startswith("the") else None

  kept, share = run(consistent(rationales, predict, lambda text: text.partition(" Label")[0]))
  assert kept == rationales[:1] and share == pytest.approx(1 / 3)
