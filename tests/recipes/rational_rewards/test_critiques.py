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
