import gzip
import json
import math
import os
import pathlib

import pytest

from agentjax.config import ConfigError
from agentjax.recipes.c2.rubrics import (
  REWARD_PARTS,
  REWARD_WEIGHTS,
  C2Config,
  Verdict,
  arrange,
  margin,
  read_rubric,
  read_verdict,
  rubric_messages,
  select,
  synthesise,
  verdict_messages,
  verifier_tasks,
)
from agentjax.recipes.c2.runs import generator_rows
from agentjax.rewards import RewardConfig, build_rewards
from agentjax.trajectory.record import Message, Status, Task
from tests.rewards.judging import Scripted, episode, run

ROOT = os.environ.get("AGENTJAX_DATA")
QUESTION = (Message("user", "Name a prime above 7."),)
PAIR = arrange(1, QUESTION, "11", "9")


def rubric(word):
  return f"<analyze>hm</analyze>\n1. Helpfulness: Is it {word}?"


# ---------------------------------------------------------------------------------------- margins


def test_margins_golden():
  assert margin({"A": -0.25, "B": -1.75}, "A") == 1.5
  assert margin({"A": -0.25, "B": -1.75}, "B") == -1.5


@pytest.mark.parametrize(
  ("without", "margins", "helpful", "misleading"),
  [
    # Right without a rubric: a helpful one makes it surer, a misleading one turns it.
    (1.0, (2.0, 0.5, -0.5, 3.0, -2.0, 1.0), (0, 3), (2, 4)),
    # Wrong without: a helpful one turns it, a misleading one makes it worse.
    (-1.0, (0.5, -0.5, -1.5, -3.0, 0.0), (0,), (2, 3)),
    (0.0, (1e-9, -1e-9), (0,), (1,)),
  ],
)
def test_helpful_and_misleading_sets(without, margins, helpful, misleading):
  selection = select(without, margins)
  assert (selection.helpful, selection.misleading) == (helpful, misleading)
  assert margins[selection.most_helpful] == max(margins)
  assert margins[selection.most_misleading] == min(margins)


def test_pairs_without_both_kinds_are_not_kept():
  assert select(1.0, (2.0, 3.0, 0.5)) is None
  assert select(1.0, (-2.0, 0.5)) is None
  assert select(0.0, ()) is None


def test_an_infinite_margin_is_refused_rather_than_winning():
  for bad in (math.inf, -math.inf, math.nan):
    with pytest.raises(ValueError, match="finite"):
      select(0.0, (1.0, bad))


# ---------------------------------------------------------------------------------------- reading


def test_rubrics_need_analysis_and_a_numbered_question():
  assert read_rubric("  " + rubric("short")) == rubric("short")
  for broken in (
    "1. Helpfulness: Is it short?",
    "<analyze>hm</analyze> Be kind.",
    "<analyze>hm</analyze>\n1. Style: Is it short?",
    "<analyze>hm</analyze>\n1. Safety: It is short.",
    "<analyze>hm\n1. Helpfulness: Is it short?",
  ):
    assert read_rubric(broken) is None


@pytest.mark.parametrize(
  ("text", "with_rubric", "verdict"),
  [
    (
      "<analyze>x</analyze>\n<rubric>helpful</rubric>\n<answer>A</answer>",
      True,
      Verdict("A", "helpful"),
    ),
    ("<analyze>x</analyze><answer> B </answer>\n", False, Verdict("B", None)),
    ("<analyze>x</analyze><answer>B</answer>", True, None),
    ("<analyze>x</analyze><rubric>helpful</rubric><answer>A</answer>", False, None),
    ("<rubric>helpful</rubric><analyze>x</analyze><answer>A</answer>", True, None),
    ("<analyze>x</analyze><answer>A</answer><rubric>helpful</rubric>", True, None),
    ("<analyze>x</analyze><answer>C</answer>", False, None),
    ("<analyze><answer>B</answer></analyze><answer>A</answer>", False, None),
    ("I say <analyze>x</analyze><answer>A</answer>", False, None),
  ],
)
def test_verdicts_come_in_their_order_or_not_at_all(text, with_rubric, verdict):
  assert read_verdict(text, with_rubric=with_rubric) == verdict


def test_the_order_of_answers_is_drawn_and_kept():
  pairs = [arrange(i, QUESTION, "11", "9") for i in range(200)]
  first = sum(p.label == "A" for p in pairs)
  assert 70 < first < 130
  for p in pairs:
    assert (p.first, p.second) == (("11", "9") if p.label == "A" else ("9", "11"))
  assert pairs == [arrange(i, QUESTION, "11", "9") for i in range(200)]


# -------------------------------------------------------------------------------------- synthesis


def generator_of(words):
  """Writes the words as rubrics in turn."""
  queue = list(words)

  def answer(messages, key):
    word = queue.pop(0)
    return "no rubric" if word is None else rubric(word)

  return Scripted(answer)


def judge_of(margins, label=PAIR.label):
  """A judge whose margin depends on the rubric it is shown."""

  def letters(messages, opening, choices):
    assert tuple(choices) == ("A", "B") and opening.endswith("<answer>")
    assert opening.count("<answer>") == 1
    text = messages[-1].content
    gap = next((m for word, m in margins.items() if f"Is it {word}?" in text), margins[None])
    sign = 1 if label == "A" else -1
    return [sign * gap / 2, -sign * gap / 2]

  return Scripted(lambda messages, key: "<analyze>so</analyze><answer>A</answer>", letters)


def test_synthesis_finds_the_rubrics_that_move_the_judge_most():
  margins = {None: 0.5, "prime": 2.0, "odd": 0.25, "short": -1.0, "even": -3.0, "long": 1.0}
  words = ["prime", None, "odd", "short", "even", "long"]
  generator = generator_of(words)
  result = run(synthesise(PAIR, generator, judge_of(margins), C2Config(rubrics=5)))
  # The one that could not be read was asked for once more, and nothing else was.
  assert len(generator.asked) == 6 and len({key for _, key in generator.asked}) == 6
  assert len(result.rubrics) == 5 and result.without == 0.5
  assert result.chosen == rubric("prime") and result.rejected == rubric("even")
  assert sorted(result.margins) == [-3, -1, 0.25, 1, 2]


def test_rubrics_that_never_come_out_right_are_done_without():
  generator = Scripted(lambda messages, key: "no rubric")
  result = run(synthesise(PAIR, generator, judge_of({None: 1.0}), C2Config(rubrics=4, rounds=3)))
  assert len(generator.asked) == 12 and result.rubrics == () and result.selection is None
  assert generator_rows([result], seed=0) == [] and verifier_tasks([result], seed=0) == []
  with pytest.raises(ValueError, match="pair 1"):
    _ = result.chosen


def test_a_judge_cut_off_before_its_verdict_is_asked_for_the_letter():
  seen = []

  def letters(messages, opening, choices):
    seen.append(opening)
    return [0.0, -1.0]

  judge = Scripted(lambda messages, key: "<analyze>on and on", letters)
  run(synthesise(PAIR, generator_of(["a", "b"]), judge, C2Config(rubrics=2)))
  assert set(seen) == {"<analyze>on and on<answer>"}


def kept():
  margins = {None: 0.5, "prime": 2.0, "even": -3.0}
  generator = generator_of(["prime", "even"])
  return run(synthesise(PAIR, generator, judge_of(margins), C2Config(rubrics=2)))


def test_rows_of_generator_and_verifier():
  (row,) = generator_rows([kept()], seed=0)
  assert (row.chosen, row.rejected) == (rubric("prime"), rubric("even"))
  tasks = verifier_tasks([kept(), kept()], seed=0)
  assert [t.id for t in tasks] == list(range(6))
  label = PAIR.label
  assert [t.answer for t in tasks[:3]] == [label, f"{label} helpful", f"{label} misleading"]
  shown = [t.prompt[-1].content for t in tasks[:3]]
  assert "<rubric " not in shown[0] and "prime?" in shown[1] and "even?" in shown[2]


# ----------------------------------------------------------------------------------------- reward


def reply(answer, label=None):
  middle = "" if label is None else f"<rubric>{label}</rubric>"
  return f"<analyze>x</analyze>{middle}<answer>{answer}</answer>"


@pytest.mark.parametrize(
  ("expected", "text", "value"),
  [
    ("A helpful", reply("A", "helpful"), 1.0),
    ("A helpful", reply("A", "misleading"), 0.6 - 0.3 + 0.1),
    ("A helpful", reply("B", "helpful"), -0.6 + 0.3 + 0.1),
    ("A misleading", reply("B", "helpful"), -0.6 - 0.3 + 0.1),
    ("A", reply("A"), 0.7),
    ("A", reply("B"), -0.5),
    ("A helpful", reply("A"), -1.0),
    ("A", "A is better", -0.7),
    ("A helpful", None, -1.0),
  ],
)
def test_verifier_reward_golden(expected, text, value):
  graph = build_rewards(RewardConfig(parts=REWARD_PARTS, weights=REWARD_WEIGHTS))
  task = Task(3, (), expected, "c2")
  one = episode(text)
  run(graph.score(one, task))
  assert one.reward.value == pytest.approx(value)
  assert set(one.reward_parts) == set(REWARD_PARTS)


def test_a_task_that_is_none_of_c2_is_a_fault_of_the_verifier():
  graph = build_rewards(RewardConfig(parts=REWARD_PARTS, weights=REWARD_WEIGHTS))
  one = episode(reply("A"))
  run(graph.score(one, Task(3, (), "42", "digits")))
  assert one.status is Status.VERIFIER_ERROR and "42" in one.reward.reason


def test_settings_are_checked():
  with pytest.raises(ConfigError, match="rubrics"):
    C2Config(rubrics=1).validate()


@pytest.mark.skipif(not ROOT, reason="set AGENTJAX_DATA to the folder that holds preferences/")
def test_real_pairs_go_through_synthesis_whatever_they_contain():
  path = pathlib.Path(ROOT or "") / "preferences" / "llmbar.jsonl.gz"
  with gzip.open(path, "rt") as lines:
    rows = [json.loads(line) for line in lines]
  assert len(rows) == 419
  syntheses = []
  for i, row in enumerate(rows):
    pair = arrange(i, (Message("user", row["prompt"]),), row["chosen"], row["rejected"])
    for messages in (rubric_messages(pair, key=i), verdict_messages(pair, "r", key=i)):
      mark = messages[0].content.partition("the code ")[2].partition(" ")[0]
      assert pair.first in messages[1].content and pair.second in messages[1].content
      assert sum(t.count(mark) for t in (row["prompt"], pair.first, pair.second)) == 0
      assert messages[1].content.count(mark) in (6, 8)
    if i < 20:
      judge = judge_of({None: 0.5, "prime": 2.0, "even": -3.0}, pair.label)
      config = C2Config(rubrics=2)
      syntheses.append(run(synthesise(pair, generator_of(["prime", "even"]), judge, config)))
  assert (
    len(generator_rows(syntheses, seed=0)) == 20 and len(verifier_tasks(syntheses, seed=0)) == 60
  )
