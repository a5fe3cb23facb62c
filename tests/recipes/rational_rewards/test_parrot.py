"""PARROT in text: what the teacher and the checker are asked, and what is kept."""

import gzip
import json
import os
import pathlib
import re

import pytest

from agentjax.config import ConfigError
from agentjax.data.errors import DataError
from agentjax.recipes.rational_rewards.critiques import read_critique
from agentjax.recipes.rational_rewards.parrot import (
  ParrotConfig,
  Preference,
  UnusableError,
  anchored_messages,
  check_critiques,
  prefers_chosen,
  read_preferences,
  student_rows,
  without_grades,
  write_critiques,
)
from agentjax.recipes.rational_rewards.scorer import critique_messages
from agentjax.trajectory.record import Message
from tests.recipes.rational_rewards.scripted_critics import checker_reply, critique, teacher_reply
from tests.rewards.judging import Scripted, run

_CONFIG = ParrotConfig(aspects=("correctness", "clarity"))
_PAIR = Preference(7, (Message("user", "Name a prime."),), "It is 7.", "It is 8.")


def test_the_teacher_knows_the_label_and_sees_both_answers():
  for side, told in (("chosen", "prefer the answer."), ("rejected", "prefer the other answer.")):
    text = anchored_messages(_PAIR, side, _CONFIG.aspects, key=1)[-1].content
    assert told in text and "It is 7." in text and "It is 8." in text
    assert re.search(rf"<answer \w+>\n{re.escape(_PAIR.answer(side))}\n</answer", text)
    assert "correctness: 1 to 4" in text and "## Request refinement" in text


def test_consistent_critiques_are_kept():
  written = run(write_critiques(_PAIR, Scripted(teacher_reply), _CONFIG))
  assert written == {"chosen": critique(4, "right"), "rejected": critique(1, "wrong")}
  checker = Scripted(checker_reply)
  checked = run(check_critiques(_PAIR, written, checker, _CONFIG))
  assert checked.kept and len(checker.asked) == 2
  first = [json.loads(re.search(r"\{.*\}", m[-1].content)[0])["answer_A"] for m, _ in checker.asked]
  assert sorted(first) == ["It is 7.", "It is 8."]  # both orders


@pytest.mark.parametrize(
  ("critiques", "answer", "by_words", "by_grades"),
  [
    ((critique(4, "right"), critique(1, "wrong")), lambda m, k: "<answer>A</answer>", False, True),
    ((critique(4, "right"), critique(1, "wrong")), lambda m, k: "no verdict", False, True),
    ((critique(2, "right"), critique(2, "wrong")), checker_reply, True, False),
    ((critique(1, "wrong"), critique(4, "right")), checker_reply, False, False),
  ],
)
def test_what_does_not_lead_to_the_label_is_dropped(critiques, answer, by_words, by_grades):
  texts = dict(zip(("chosen", "rejected"), critiques, strict=True))
  checked = run(check_critiques(_PAIR, texts, Scripted(answer), _CONFIG))
  assert (checked.by_words, checked.by_grades, checked.kept) == (by_words, by_grades, False)


def test_a_critique_that_speaks_of_the_label_is_written_again():
  replies = iter(
    [critique(4, "preferred by people"), critique(4, "right"), "no grade", critique(1, "wrong")]
  )
  teacher = Scripted(lambda messages, key: next(replies))
  written = run(write_critiques(_PAIR, teacher, _CONFIG))
  assert written == {"chosen": critique(4, "right"), "rejected": critique(1, "wrong")}
  assert len({key for _, key in teacher.asked}) == 4


def test_a_teacher_that_never_keeps_to_the_form_is_given_up():
  replies = iter([critique(4, "better than the other answer"), "none", critique(1, "as I prefer")])
  with pytest.raises(
    UnusableError, match="chosen answer: it speaks .*, it has no grade, it speaks"
  ):
    run(write_critiques(_PAIR, Scripted(lambda m, k: next(replies)), _CONFIG))


def test_grades_are_hidden_and_words_stay():
  text = "correctness: 4, 2 of 3 facts hold.\n**Clarity** (score): 3.5/4\nclarity = N/A"
  hidden = without_grades(text, _CONFIG.aspects)
  assert hidden == "correctness: …, 2 of 3 facts hold.\n**Clarity** (score): …\nclarity = …"
  assert not read_critique(hidden, _CONFIG.aspects).grades
  assert without_grades("A false line costs clarity: 2", _CONFIG.aspects).endswith("clarity: …")


def _unmarked(message):
  """The text without the codes around what is judged, which differ by key."""
  return re.sub(r"[0-9a-f]{16}", "", message.content)


def test_the_student_learns_the_answers_of_the_reward_and_never_sees_a_label():
  texts = {"chosen": critique(4, "right"), "rejected": critique(1, "wrong")}
  rows = list(student_rows(_PAIR, texts, _CONFIG))
  assert [row[-1].content for row in rows] == list(texts.values())
  for row, side in zip(rows, texts, strict=True):
    asked = critique_messages(_PAIR.question, _PAIR.answer(side), _CONFIG.aspects, key=0)
    assert [_unmarked(m) for m in row[:-1]] == [_unmarked(m) for m in asked]
    assert "prefer" not in "".join(m.content for m in row)


def test_a_judge_of_single_answers_orders_pairs():
  def judge(messages, key):
    return critique(4, "") if "It is 7." in messages[-1].content else critique(2, "")

  assert run(prefers_chosen(_PAIR, Scripted(judge), _CONFIG)) == 1.0
  swapped = Preference(7, _PAIR.question, _PAIR.rejected, _PAIR.chosen)
  assert run(prefers_chosen(swapped, Scripted(judge), _CONFIG)) == 0.0
  assert run(prefers_chosen(_PAIR, Scripted(lambda m, k: "nothing"), _CONFIG)) == 0.5


def test_pairs_are_read_with_and_without_a_prompt(tmp_path):
  rows = [
    {"id": "Natural/0", "prompt": "q", "chosen": "a", "rejected": "b"},
    {"prompt": "q", "chosen": "a", "rejected": "a"},
    {
      "chosen": "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Why?\n\nAssistant: So.",
      "rejected": "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Why?\n\nAssistant: Sorry.",
    },
  ]
  file = tmp_path / "pairs.jsonl.gz"
  file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
  one, other = read_preferences(file)
  assert (one.id, one.question[0].content, one.chosen, one.rejected) == (0, "q", "a", "b")
  assert [(m.role, m.content) for m in other.question] == [
    ("user", "Hi"), ("assistant", "Yes?"), ("user", "Why?"),
  ]  # fmt: skip
  assert (other.id, other.chosen, other.rejected) == (2, "So.", "Sorry.")


@pytest.mark.parametrize(
  ("row", "named"),
  [
    ({"prompt": "q", "chosen": "a"}, "no 'rejected'"),
    ({"prompt": ["q"], "chosen": "a", "rejected": "b"}, "'prompt' is a list"),
    ({"chosen": "a", "rejected": "b"}, "no 'prompt'"),
    ({"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: b"}, "no dialogues"),
    ({"prompt": "q", "chosen": "a", "rejected": "a"}, "no row has two different answers"),
  ],
)
def test_pairs_that_do_not_fit_are_refused(tmp_path, row, named):
  file = tmp_path / "pairs.jsonl"
  file.write_text(json.dumps(row))
  with pytest.raises(DataError, match=named):
    read_preferences(file)


def test_settings_are_checked():
  with pytest.raises(ConfigError, match=r"parrot\.aspects"):
    ParrotConfig(aspects=()).validate()
  with pytest.raises(ConfigError, match=r"parrot\.attempts"):
    ParrotConfig(attempts=0).validate()


@pytest.mark.skipif("AGENTJAX_DATA" not in os.environ, reason="needs AGENTJAX_DATA")
@pytest.mark.parametrize(
  ("name", "count"), [("llmbar.jsonl.gz", 419), ("hh_harmless_base_test.jsonl.gz", 2300)]
)
def test_published_preferences_are_read(name, count):
  pairs = read_preferences(pathlib.Path(os.environ["AGENTJAX_DATA"]) / "preferences" / name)
  assert count <= len(pairs) <= count + 12
  for pair in pairs:
    assert pair.question[-1].role == "user" and pair.chosen != pair.rejected
