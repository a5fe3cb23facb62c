import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjax.config import ConfigError
from agentjax.recipes.genrm.cohort import (
  Comparison,
  GenRMCohort,
  GenRMConfig,
  comparison_messages,
  controlled,
  decided,
  mean_scores,
  pairs_of,
  read_comparison,
  shortness,
  split_reasoning,
  style_density,
)
from agentjax.rewards.formula import Formula
from agentjax.rewards.graph import RewardGraph
from agentjax.rewards.judges import JudgeUnavailableError
from agentjax.trajectory.record import Message, Status
from tests.rewards.judging import Scripted, episode, run, task


def test_pairings():
  assert pairs_of(4, "circular") == [(0, 1), (1, 2), (2, 3), (3, 0)]
  assert pairs_of(2, "circular") == [(0, 1), (1, 0)]  # both orders
  assert pairs_of(4, "all") == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
  assert pairs_of(1, "circular") == pairs_of(0, "all") == []


def test_a_tie_is_broken_by_the_ranking_and_nothing_else_is():
  assert decided(Comparison(4, 4, 2)) == (5.5, 2.5)
  assert decided(Comparison(3, 3, 3.5)) == (3, 3)
  assert decided(Comparison(4, 2, 6)) == (4, 2)


def test_golden_circle_of_four():
  """Comparisons (0,1) 5:2, (1,2) 3:3 ranked 5, (2,3) unreadable, (3,0) 1:4."""
  comparisons = [
    Comparison(5, 2, 1),
    Comparison(3, 3, 5),  # 1.5 and 4.5
    Comparison(),
    Comparison(1, 4, 6),
  ]
  scores = mean_scores(4, pairs_of(4, "circular"), comparisons)
  assert scores == [4.5, 1.75, 3.75, 2.0]
  # Lengths 10, 20, 40, 30 give u = 1, 2/3, 0, 1/3 with mean 1/2.
  config = GenRMConfig(answer_length=0.6, shortest_answer=0.25, best_share=0.5)
  answers = ["x" * n for n in (10, 20, 40, 30)]
  final = controlled(scores, [""] * 4, answers, config)
  # The best half is 0 and 2; 0 is the shortest of all.
  np.testing.assert_allclose(final, [4.5 + 0.3 + 0.25, 1.75 + 0.1, 3.75 - 0.3, 2.0 - 0.1])


@pytest.mark.parametrize(
  ("scores", "lengths", "raised"),
  [
    ([5, 4, 3, 2, 1], [9, 3, 4, 5, 6], None),  # the shortest is not the best
    ([5, 4, 3, 2, 1], [2, 3, 4, 5, 6], 0),
    ([5, 5, 3, 2, 1], [7, 7, 8, 8, 8], 0),  # the first of several
    ([1, 5, 3, 2, 4], [0, 1, 4, 5, 6], 1),  # what is empty does not count
    ([5, 4, 3], [9, 3, 4], None),  # a fifth of three is at least one
    ([4, 4, 3], [9, 3, 4], 1),  # both are the best
    ([3], [4], None),  # nobody to be shorter than
  ],
)
def test_the_bonus_goes_to_the_one_shortest_if_it_is_among_the_best(scores, lengths, raised):
  texts = ["x" * n + " " * i for i, n in enumerate(lengths)]  # spaces around do not count
  none = [""] * len(scores)
  expected = [score + 0.5 * (i == raised) for i, score in enumerate(scores)]
  assert controlled(scores, none, texts, GenRMConfig(shortest_answer=0.5)) == expected
  assert controlled(scores, texts, none, GenRMConfig(shortest_reasoning=0.5)) == expected


def test_reasoning_and_answer_are_controlled_apart():
  config = GenRMConfig(reasoning_length=1.0, answer_length=0.0)
  final = controlled([3, 3, 3], ["a" * 10, "a" * 20, "a" * 30], ["b" * 9, "b", "b" * 5], config)
  np.testing.assert_allclose(final, [3.5, 3.0, 2.5])


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12), st.floats(0, 3))
def test_length_control_keeps_the_mean_and_prefers_the_shorter(lengths, strength):
  scores = [3.0] * len(lengths)
  texts = ["x" * n for n in lengths]
  final = controlled(scores, texts, texts, GenRMConfig(answer_length=strength))
  assert np.mean(final) == pytest.approx(3.0)
  assert sum(shortness(lengths)) == pytest.approx(0)
  order = np.argsort(lengths, kind="stable")
  assert (np.diff(np.array(final)[order]) <= 1e-9).all()


def test_style_marks_count_a_character_and_code_does_not():
  assert style_density("plain words, 3 - 2 = 1") == 0
  text = "# Title\n- item\n1. item\n**bold** ok \U0001f680"
  assert style_density(text) == pytest.approx(5 / len(text))
  code = "```\n# comment\n- x\n```"
  assert style_density(code + "words") == 0
  assert style_density("") == 0
  plain, styled = "a" * 40, "# T\n- b\n**c**" + "a" * 27
  assert controlled([3, 3], ["", ""], [plain, styled], GenRMConfig(style=1.0)) == [3.5, 2.5]


@pytest.mark.parametrize(
  ("reply", "read"),
  [
    ('so {"score_1": 4, "score_2": 2.5, "ranking": 2}', Comparison(4, 2.5, 2)),
    ('{"score_1": 4, "score_2": 2}', None),
    ('{"score_1": 6, "score_2": 2, "ranking": 1}', None),
    ('{"score_1": "4", "score_2": 2, "ranking": 1}', None),
    ("no idea", None),
  ],
)
def test_replies_are_read_whole_or_not_at_all(reply, read):
  assert read_comparison(reply) == read


def test_reasoning_ends_at_the_last_end_of_thought():
  assert split_reasoning("<think>a</think>b</think> c") == ("a</think>b", "c")
  assert split_reasoning("no thought") == ("", "no thought")


def quality_judge(quality, roles="delimited"):
  """Scores by what ``quality`` says of a text, whatever place it stands in."""

  def answer(messages, key):
    def shown(i):
      if roles == "genrm":
        return next(m.content for m in messages if m.role == f"response_{i}")
      return messages[-1].content.partition(f"<response_{i} ")[2].partition("\n")[2].split("\n<")[0]

    first, second = (quality[shown(i).strip()] for i in (1, 2))
    ranking = 2 if first > second else 5
    return f'{{"score_1": {first}, "score_2": {second}, "ranking": {ranking}}}'

  return Scripted(answer)


def cohort(judge, config, *trajectories, to=None):
  graph = RewardGraph({}, Formula("genrm"), {"genrm": GenRMCohort(judge, config, seed=0)})
  assert graph.needs_groups
  run(graph.score_group(trajectories, to or task()))
  return [t.reward.value for t in trajectories]


@pytest.mark.parametrize("pairing", ["circular", "all"])
@pytest.mark.parametrize("roles", ["delimited", "genrm"])
def test_a_cohort_is_compared_as_one(pairing, roles):
  judge = quality_judge({"good": 5, "fair": 3, "bad": 1}, roles)
  config = GenRMConfig(pairing=pairing, roles=roles)
  members = [episode(text, i) for i, text in enumerate(["good", "<think>so</think>bad", "fair"])]
  assert cohort(judge, config, *members) == [5, 1, 3]
  assert len(judge.asked) == 3 and len({key for _, key in judge.asked}) == 3
  assert not any("<think>" in m.content for messages, _ in judge.asked for m in messages)


def test_members_without_an_answer_get_the_least_and_are_not_compared():
  judge = quality_judge({"good": 5, "fair": 3})
  members = [episode("good"), episode(None, 1), episode("fair", 2)]
  members.append(episode("good", 3, status=Status.POLICY_ERROR))
  assert cohort(judge, GenRMConfig(), *members) == [5, 1, 3, 0]  # a breach is paid nothing
  assert cohort(judge, GenRMConfig(), episode("good"), episode(None, 1)) == [3, 1]


def test_broken_members_are_not_seen_by_their_siblings():
  judge = quality_judge({"good": 5, "fair": 3})
  broken = episode("good", 1, status=Status.ENV_ERROR)
  values = cohort(
    judge, GenRMConfig(answer_length=1.0), episode("good"), broken, episode("fair", 2)
  )
  assert values == [5, None, 3]


def test_unreadable_replies_are_neutral_and_lost_ones_are_left_out(monkeypatch):
  async def at_once(seconds):
    pass

  monkeypatch.setattr("agentjax.rewards.judges.asyncio.sleep", at_once)
  mute = Scripted(lambda messages, key: "I can't say")
  assert cohort(mute, GenRMConfig(), *(episode(t, i) for i, t in enumerate("abc"))) == [3, 3, 3]

  def flaky(messages, key):
    if ">\nlost\n" in messages[-1].content:
      return JudgeUnavailableError("down")
    return '{"score_1": 5, "score_2": 1, "ranking": 1}'

  members = [episode(t, i) for i, t in enumerate(["a", "b", "c", "lost"])]
  assert cohort(Scripted(flaky), GenRMConfig(), *members) == [5, 3, 1, None]
  assert members[3].status is Status.VERIFIER_ERROR


def test_a_principle_reaches_the_judge():
  asked = (Message("user", "q"),)
  delimited = comparison_messages(asked, "a", "b", roles="delimited", principle="brevity", key=1)
  assert "brevity" in delimited[-1].content
  roles = [
    m.role for m in comparison_messages(asked, "a", "b", roles="genrm", principle="p", key=1)
  ]
  assert roles == ["user", "response_1", "response_2", "principle"]


def test_settings_are_checked():
  for changes in ({"style": -1.0}, {"best_share": 0.0}, {"concurrency": 0}):
    with pytest.raises(ConfigError, match=next(iter(changes))):
      GenRMConfig(**changes).validate()
