"""Answers in words, tags, citations, evidence: golden values, and what must earn nothing."""

import asyncio
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.config import ConfigError
from agentjax.recipes.scorers import (
  CitationsConfig,
  EvidenceConfig,
  RelativeConfig,
  TagsConfig,
  TextMatchConfig,
)
from agentjax.recipes.scorers.answers import MEASURES, common_subsequence, normalised_words
from agentjax.recipes.scorers.lengths import place
from agentjax.rewards import RewardConfig, build_rewards
from agentjax.sandbox.config import Sandboxes
from agentjax.trajectory.record import Reward, Status, Task, ToolRecord, Trajectory

TASK = Task(0, (), "the Eiffel Tower", "made", metadata={"evidence": ["Paris, 1889", "Gustave"]})


def episode(answer=None, *outputs, sample=0, status=Status.OK):
  tools = [
    ToolRecord(0, name, {}, "ok" if text is not None else "error", text or "", seconds)
    for name, text, seconds in outputs
  ]
  return Trajectory(1, 0, sample, "made", [], answer=answer, tools=tools, status=status)


def score(config, one, task=TASK):
  return config.build(Sandboxes())(one, task)


@pytest.mark.parametrize(
  ("answer", "expected"),
  [  # exact, contained, f1, rouge_1, rouge_2, rouge_l
    ("An Eiffel tower!", (1, 1, 1, 1, 1, 1)),
    ("It is the Eiffel Tower in Paris.", (0, 1, 0.5, 0.5, 1 / 3, 0.5)),
    ("tower eiffel", (0, 0, 1, 1, 0, 0.5)),
    ("Tower of London", (0, 0, 0.4, 0.4, 0, 0.4)),
    ("Eiffel Towers", (0, 0, 0.5, 0.5, 0, 0.5)),
    ("Louvre", (0, 0, 0, 0, 0, 0)),
    ("the", (0, 0, 0, 0, 0, 0)),
    ("", (0, 0, 0, 0, 0, 0)),
  ],
)
def test_golden_values_of_text_match(answer, expected):
  found = [score(TextMatchConfig(measure=m), episode(answer)) for m in MEASURES]
  assert found == pytest.approx(expected)


def test_the_best_reference_counts_and_a_tag_may_hold_the_answer():
  task = Task(0, (), "", "made", metadata={"answers": ["La Tour Eiffel", "Eiffel Tower"]})
  tagged = TextMatchConfig(measure="exact", tagged=True)
  assert score(tagged, episode("It is <answer>Eiffel Tower</answer>."), task) == 1
  assert score(tagged, episode("Eiffel Tower"), task) == 0
  assert score(TextMatchConfig(measure="exact"), episode("la tour eiffel"), task) == 1


def test_neither_a_breach_nor_a_list_of_everything_is_paid():
  config = TextMatchConfig(measure="contained", most_words=20)
  assert score(config, episode("Eiffel Tower", status=Status.POLICY_ERROR)) == 0
  everything = "Louvre, Notre-Dame, " * 20 + "Eiffel Tower"
  assert score(config, episode(everything)) == 0
  assert score(config, episode(None)) == 0
  begun = time.monotonic()
  assert score(TextMatchConfig(measure="rouge_l"), episode("eiffel " * 10**6)) == 0
  assert time.monotonic() - begun < 10


_WORDS = st.lists(st.sampled_from("abcd"), max_size=12)


@settings(deadline=None)
@given(_WORDS, _WORDS)
def test_the_longest_common_subsequence_is_that_of_the_table(left, right):
  table = np.zeros((len(left) + 1, len(right) + 1), int)
  for i, a in enumerate(left):
    for j, b in enumerate(right):
      table[i + 1, j + 1] = table[i, j] + 1 if a == b else max(table[i, j + 1], table[i + 1, j])
  assert common_subsequence(left, right) == table[-1, -1] == common_subsequence(right, left)


@settings(deadline=None)
@given(_WORDS, _WORDS)
def test_measures_are_shares_and_equal_texts_have_all(left, right):
  for name, measure in MEASURES.items():
    assert 0 <= measure(left, right) <= 1
    if len(left) > 1:
      assert measure(left, left) == 1, name


def test_words_are_those_of_squad():
  assert normalised_words("The U.S.A.'s  a-b, an Apple; anthem") == [
    "usas",
    "ab",
    "apple",
    "anthem",
  ]


@pytest.mark.parametrize(
  ("text", "exact", "loose"),
  [
    ("<think>a</think><answer>b</answer>", 1, 1),
    (" <think>a</think>\n<answer> b </answer>\n", 1, 1),
    ("<answer>b</answer><think>a</think>", 0, 1),
    ("<think>a</think><think>a</think><answer>b</answer>", 0, 1),
    ("<think>a</think> so <answer>b</answer>", 0, 1),
    ("<think>a</think>", 0, 0),
    ("<think>a<answer>b</answer></think>", 0, 0),
    ("<think> </think><answer>b</answer>", 0, 0),
    ("<think>a</think><answer>b", 0, 0),
    ("a</think><answer>b</answer>", 0, 0),
    ("<think>a</answer><answer>b</think>", 0, 0),
    ("<think>a <b>bold</b></think><answer>b</answer>", 1, 1),
    ("plain", 0, 0),
    ("", 0, 0),
  ],
)
def test_tags(text, exact, loose):
  assert score(TagsConfig(), episode(text)) == exact
  assert score(TagsConfig(order="any", outside=True), episode(text)) == loose
  assert score(TagsConfig(), episode(text, status=Status.POLICY_ERROR)) == 0


def test_citations_count_where_a_result_has_them():
  outputs = (("search", "[1] Paris [2] Rome", 1.0), ("python", "[9]", 1.0), ("search", None, 1.0))
  config = CitationsConfig(tools=("search",))
  assert score(config, episode("Paris [1], Rome [2] and again [1]", *outputs)) == 1
  assert score(config, episode("Paris [1], London [3]", *outputs)) == 0.5
  assert score(config, episode("Nine [9]", *outputs)) == 0
  assert score(CitationsConfig(), episode("Nine [9]", *outputs)) == 1
  assert score(config, episode("no source", *outputs)) == 0
  assert score(config, episode(None, *outputs)) == 0
  with pytest.raises(ConfigError, match=r"x\.pattern="):
    CitationsConfig(pattern="(").validate("x")


def test_evidence_is_what_results_of_tools_have():
  config = EvidenceConfig(tools=("search",))
  read = ("search", "It was built in PARIS, 1889.", 1.0)
  assert score(config, episode("x", read)) == 0.5
  assert score(config, episode("x", read, ("search", "by gustave", 1.0))) == 1
  assert score(config, episode("x", ("python", "Paris, 1889 Gustave", 1.0))) == 0
  scorer = config.build(Sandboxes())
  assert scorer.refusal(TASK) is None
  assert "'evidence'" in scorer.refusal(Task(1, (), "", "made"))


def scored(config, *members):
  graph = build_rewards(config)
  asyncio.run(graph.score_group(members, TASK))
  return [member.reward.value for member in members]


def with_calls(*counts, right=()):
  return [
    episode("the Eiffel Tower" if i in right else "x", *[("search", "", 0.5)] * n, sample=i)
    for i, n in enumerate(counts)
  ]


@pytest.mark.parametrize(
  ("form", "expected"),
  [
    ("range", [0.0, 0.5, 1.0, 0.5]),
    ("rank", [0.125, 0.5, 0.875, 0.5]),
    ("z_score", [-2 / 2**0.5, 0.0, 2 / 2**0.5, 0.0]),
  ],
)
def test_calls_beside_the_group(form, expected):
  config = RewardConfig(
    parts=("tool_calls", "seconds", "relative"),
    formula="relative",
    settings={"relative": RelativeConfig(part="tool_calls", form=form)},
  )
  members = with_calls(1, 3, 5, 3)
  assert scored(config, *members) == pytest.approx(expected)
  assert [m.reward_parts["seconds"].value for m in members] == [0.5, 1.5, 2.5, 1.5]


def test_the_length_reward_of_kimi_pays_short_right_answers_and_no_wrong_one():
  config = RewardConfig(
    parts=("exact_match", "tool_calls", "relative"),
    formula="exact_match + (0.5 - relative if exact_match >= 1 else min(0, 0.5 - relative))",
    settings={"relative": RelativeConfig(part="tool_calls")},
  )
  found = scored(config, *with_calls(0, 4, 0, 4, right=(0, 1)))
  assert found == [1.5, 0.5, 0.0, -0.5]
  assert scored(config, *with_calls(2, 2, right=(0,))) == [1.0, 0.0]  # equal lengths: no difference


def test_members_may_be_compared_with_those_of_their_own_success():
  config = RewardConfig(
    parts=("exact_match", "tool_calls", "relative"),
    formula="relative",
    settings={"relative": RelativeConfig(part="tool_calls", among="exact_match")},
  )
  assert scored(config, *with_calls(0, 4, 9, 7, right=(0, 1))) == [0.0, 1.0, 1.0, 0.0]
  assert RewardConfig.from_dict(config.to_dict()) == config


def test_a_member_whose_part_has_no_value_has_no_place_and_does_not_move_the_others():
  config = RelativeConfig(part="length")
  members = with_calls(0, 0, 0)
  for member, value in zip(members, (1.0, None, 3.0), strict=True):
    member.reward_parts["length"] = Reward.invalid("lost") if value is None else Reward(value)
  found = config.build_group(Sandboxes())(members, TASK)
  assert [r.value for r in found] == [0.0, None, 1.0]


def test_what_is_compared_must_be_a_part():
  config = RewardConfig(parts=("exact_match", "relative"), weights=(1.0, 1.0))
  with pytest.raises(ConfigError, match=r"reward\.parts=.*'sampled_tokens'"):
    build_rewards(config)


def test_a_comparison_may_read_another_that_stands_before_it():
  chosen = {
    "rank": RelativeConfig(part="tool_calls", form="rank"),
    "relative": RelativeConfig(part="rank"),
  }
  config = RewardConfig(
    parts=("tool_calls", "rank", "relative"), formula="relative", settings=chosen
  )
  assert scored(config, *with_calls(0, 9, 3)) == pytest.approx([0.0, 1.0, 0.5])
  config.parts = ("tool_calls", "relative", "rank")
  with pytest.raises(ConfigError, match=r"reward\.parts=.*'rank'.*'relative', before it"):
    build_rewards(config)


@settings(deadline=None)
@given(st.lists(st.integers(-100, 100), min_size=1, max_size=8))
def test_places_keep_the_order_and_their_range(values):
  array = np.array(values, np.float64)
  for form in ("range", "rank", "place", "z_score"):
    found = [place(v, array, form) for v in values]
    for value, own in zip(values, found, strict=True):
      assert [own < other for other in found] == [value < other for other in values]
      assert form == "z_score" or 0 <= own <= 1
