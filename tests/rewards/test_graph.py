import asyncio
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.config import ConfigError, with_numbers
from agentjax.rewards import SCORERS, RewardConfig, build_rewards
from agentjax.rewards.formula import TERMS, Formula
from agentjax.rewards.graph import RewardGraph, TurnScores
from agentjax.schedules import LinearSchedule
from agentjax.training.flags import set_field
from agentjax.trajectory.record import Reward, Status, Task, Trajectory
from agentjax.trajectory.store import from_record, to_record

TASK = Task(3, (), "19", "made")
X_PLUS_Y = Formula("x + y")
PARTS = {"good": Reward(2.0), "half": Reward(0.5), "bad": Reward.invalid("judge is down")}


def trajectory(**fields):
  return Trajectory(
    **{
      "step": 0,
      "task_id": 3,
      "sample": 0,
      "source": "made",
      "segments": [],
      "answer": "19",
      **fields,
    }
  )


def score(graph, *trajectories):
  async def run():
    if graph.needs_groups:
      await graph.score_group(trajectories, TASK)
    else:
      for one in trajectories:
        await graph.score(one, TASK)

  asyncio.run(run())
  return [t.reward for t in trajectories]


def constant(value):
  return lambda trajectory, task: value


def raising(trajectory, task):
  raise OSError("socket closed")


@pytest.mark.parametrize(
  ("text", "value"),
  [
    ("good", 2.0),
    ("good - 2 * half", 1.0),
    ("good * half * half", 0.5),
    ("min(good, half)", 0.5),
    ("max(good, half, 1)", 2.0),
    ("half if good >= 2 else 0", 0.5),
    ("good if half >= 1 else -1", -1.0),
    ("bad if half >= 1 else 0", 0.0),  # the other side of a choice is not read
    ("3 * half * half if good >= 1 else bad", 0.75),
    ("1 if good > 2 else 0.5 if good > 1 else bad", 0.5),  # tiers
    ("half + 0.1 * (good > 0) * (half == 0.5)", 0.6),
    ("1 if good > 1 and not half > 1 else 0", 1.0),
    ("1 if half > 1 or good != 2 else -half", -0.5),
    ("good / half + good / (half - half) + good / -1", 4.0),  # nothing is divided by 0 or less
    ("'good' + w * half", 7.0),
  ],
)
def test_a_formula_gives_the_value_that_it_says(text, value):
  formula = Formula(text, {"w": 10.0})
  assert formula.evaluate(PARTS).value == pytest.approx(value, abs=1e-15)


@pytest.mark.parametrize(
  "text",
  [
    "bad",
    "good + 1e-9 * bad",
    "zero * bad",
    "min(good, bad)",
    "good if bad >= 0 else 1",
    "bad if good >= 0 else 1",
    "1 if zero and bad or bad else 0",
  ],
)
def test_an_invalid_part_makes_the_total_invalid_and_names_itself(text):
  reward = Formula(text).evaluate({**PARTS, "zero": Reward(0.0)})
  assert not reward.valid
  assert reward.reason == "bad: judge is down"


@pytest.mark.parametrize(
  "text",
  ["good + 0 * bad", "max('bad', good)", "good if bad >= 1 else w", "1 if w and bad else good"],
)
def test_a_formula_names_the_parts_it_reads(text):
  assert Formula(text, {"w": 1.0}).names() == {"good", "bad"}


@pytest.mark.parametrize(
  ("text", "culprit"),
  [
    ("good +", "no expression"),
    ("good; half", "no expression"),
    ("open('x')", "open"),
    ("good.value", "good.value"),
    ("good ** 2", "good ** 2"),
    ("min(good)", "min(good)"),
    ("max(*good)", "max"),
    ("0 < good < 1", "0 < good < 1"),
    ("good in half", "good in half"),
    ("1 if True else 0", "True"),
    ("lambda: good", "lambda"),
    ("good if half > 1 else [half]", "[half]"),  # where it is not read either
    ("~good", "~good"),
  ],
)
def test_a_text_that_is_no_formula_is_refused_and_its_wrong_part_is_named(text, culprit):
  with pytest.raises(ConfigError, match=re.escape(culprit)):
    Formula(text)


_TERM = st.sampled_from(("a", "b", "0.5 * a", "min(a, b)", "-b", "(a > b)", "2"))
_SUM = st.recursive(
  _TERM,
  lambda inner: st.one_of(
    st.tuples(inner, st.sampled_from("+-"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
    st.tuples(inner, inner, inner).map(lambda t: f"({t[0]} if {t[1]} else {t[2]})"),
  ),
  max_leaves=8,
)


@settings(deadline=None)
@given(_SUM, st.floats(-5, 5), st.floats(-5, 5))
def test_terms_add_up_to_the_reward_and_the_reward_is_pythons(text, a, b):
  formula = Formula(text)
  parts = {"a": Reward(a), "b": Reward(b)}
  terms = formula.terms(parts)
  reward = formula.evaluate(parts).value
  assert sum(value for _, value in terms) == reward
  expected = eval(text, {"a": a, "b": b, "min": min})
  assert reward == pytest.approx(float(expected), abs=1e-9)
  for term, value in terms:
    assert value == pytest.approx(float(eval(term, {"a": a, "b": b, "min": min})), abs=1e-12)


def test_the_terms_of_a_formula_are_kept_with_the_episode():
  config = RewardConfig(
    parts=("exact_match", "turns"), formula="exact_match - 0.1 * turns if exact_match >= 1 else -1"
  )
  right, wrong = trajectory(), trajectory(answer="20")
  graph = build_rewards(config)
  assert score(graph, right, wrong) == [Reward(1.0), Reward(-1.0)]
  assert right.metadata[TERMS] == [["exact_match", 1.0], ["-(0.1 * turns)", -0.0]]
  assert wrong.metadata[TERMS] == [["-1", -1.0]]
  assert right.reward_parts["turns"] == Reward(0.0)
  again = from_record(to_record(right))
  assert again.metadata[TERMS] == right.metadata[TERMS]


def test_weights_keep_no_terms_and_pay_as_they_say():
  config = RewardConfig(parts=("exact_match", "length", "zero"), weights=(2.0, -0.25, 0.0))
  own = {
    "exact_match": SCORERS["exact_match"],
    "length": lambda one, task: len(one.answer),
    "zero": raising,
  }
  right, wrong = trajectory(), trajectory(answer="200")
  assert score(build_rewards(config, own), right, wrong) == [Reward(1.5), Reward(-0.75)]
  assert TERMS not in right.metadata


def test_numbers_of_schedules_stand_in_a_formula():
  config = RewardConfig(
    parts=("exact_match", "turns"),
    formula="w * turns + (1 - w) * exact_match",
    numbers={"w": LinearSchedule(start=0.5, steps=10)},
  )
  config.validate()
  graph = build_rewards(config)
  assert score(graph, trajectory()) == [Reward(1.0)]  # the last number, outside training
  for step, value in ((0, 0.5), (5, 0.75), (10, 1.0), (99, 1.0)):
    at = graph.at(lambda c, t=step: with_numbers(c, lambda _, s: s.number(t, None)))
    one = trajectory()
    assert score(at, one) == [Reward(value)]
    assert dict(one.metadata[TERMS])["(1 - w) * exact_match"] == value


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"formula": "exact_match + other"}, "formula"),
    ({"formula": "exact_match", "weights": (2.0,)}, "weights"),
    ({"numbers": {"w": LinearSchedule(end=1.0, steps=2)}}, "numbers"),
    ({"formula": "exact_match", "numbers": {"w": LinearSchedule(end=1.0, steps=2)}}, "numbers"),
    ({"formula": "w * exact_match", "numbers": {"w": LinearSchedule(end=1.0)}}, "numbers.w.steps"),
  ],
)
def test_a_formula_that_does_not_go_with_the_rest_is_refused_with_the_field(changes, field):
  with pytest.raises(ConfigError, match=rf"config\.reward\.{re.escape(field)}="):
    RewardConfig(**changes).validate()


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=5))
def test_the_weighted_sum_of_scorers_is_numpys(pairs):
  weights, values = zip(*pairs, strict=True)
  names = [f"p{i}" for i in range(len(pairs))]
  graph = RewardGraph(
    {n: constant(v) for n, v in zip(names, values, strict=True)},
    Formula(" + ".join(f"{w!r} * {n}" for w, n in zip(weights, names, strict=True))),
  )
  one = trajectory()
  [reward] = score(graph, one)
  assert reward.value == pytest.approx(np.dot(weights, values), abs=1e-12)
  assert one.reward_parts == {n: Reward(v) for n, v in zip(names, values, strict=True)}


def test_scorers_may_be_coroutines_and_may_answer_in_typed_rewards():
  async def slow(trajectory, task):
    await asyncio.sleep(0)
    return Reward(0.25)

  graph = RewardGraph({"x": slow, "y": constant(True)}, X_PLUS_Y)
  assert score(graph, trajectory()) == [Reward(1.25)]


@pytest.mark.parametrize(
  ("scorer", "reason"),
  [
    (raising, "OSError: socket closed"),
    (constant(float("nan")), "finite"),
    (constant(float("inf")), "finite"),
    (constant("yes"), "could not convert"),
    (constant(None), "TypeError"),
    (constant(Reward.invalid("no verdict")), "no verdict"),
  ],
)
def test_what_cannot_be_scored_is_invalid_and_a_verifier_error_never_a_number(scorer, reason):
  graph = RewardGraph({"x": scorer, "y": constant(1.0)}, X_PLUS_Y)
  one = trajectory()
  [reward] = score(graph, one)
  assert reward.value is None
  assert reason in reward.reason
  assert reason in one.reward_parts["x"].reason
  assert one.reward_parts["y"] == Reward(1.0)
  assert one.status is Status.VERIFIER_ERROR


def test_a_scorer_that_is_only_logged_may_fail_without_harm():
  graph = RewardGraph({"x": raising, "y": constant(1.0)}, Formula("y"))
  one = trajectory()
  assert score(graph, one) == [Reward(1.0)]
  assert not one.reward_parts["x"].valid
  assert one.status is Status.OK


def test_a_formula_that_overflows_is_a_verifier_error():
  one = trajectory()
  [reward] = score(RewardGraph({"x": constant(1e308)}, Formula("10 * x")), one)
  assert "finite" in reward.reason
  assert one.status is Status.VERIFIER_ERROR


def test_an_environment_error_is_masked_without_asking_any_scorer():
  graph = RewardGraph({"x": raising}, Formula("x"))
  one = trajectory(status=Status.ENV_ERROR)
  [reward] = score(graph, one)
  assert not reward.valid
  assert one.reward_parts == {}
  assert one.status is Status.ENV_ERROR


@pytest.mark.parametrize("status", [Status.OK, Status.TRUNCATED])
def test_other_endings_are_scored_and_keep_their_status(status):
  one = trajectory(status=status)
  assert score(RewardGraph({"x": constant(0.5)}, Formula("x")), one) == [Reward(0.5)]
  assert one.status is status


@pytest.mark.parametrize(
  ("scorer", "value"),
  [(constant(0.5), 0.0), (constant(-0.5), -0.5), (raising, 0.0), (constant(math.nan), 0.0)],
)
def test_a_policy_error_is_never_paid_and_never_masked(scorer, value):
  one = trajectory(status=Status.POLICY_ERROR)
  assert score(RewardGraph({"x": scorer}, Formula("x")), one) == [Reward(value)]
  assert one.status is Status.POLICY_ERROR


def test_cancelling_is_not_mistaken_for_a_failing_scorer():
  async def hang(trajectory, task):
    await asyncio.sleep(60)

  async def run():
    graph = RewardGraph({"x": hang}, Formula("x"))
    await asyncio.wait_for(graph.score(trajectory(), TASK), timeout=0.02)

  with pytest.raises(TimeoutError):
    asyncio.run(run())


def rank(trajectories, task):
  order = sorted(range(len(trajectories)), key=lambda i: float(trajectories[i].answer))
  return [float(order.index(i)) for i in range(len(trajectories))]


def test_a_group_scorer_compares_the_members_that_have_an_outcome():
  members = [trajectory(answer=a, sample=i) for i, a in enumerate(["9", "1", "5"])]
  members.append(trajectory(answer=None, sample=3, status=Status.ENV_ERROR))
  graph = RewardGraph({"x": constant(10.0)}, X_PLUS_Y, {"y": rank})
  assert graph.needs_groups
  rewards = score(graph, *members)
  assert rewards[:3] == [Reward(12.0), Reward(10.0), Reward(11.0)]
  assert not rewards[3].valid
  assert "y" not in members[3].reward_parts
  with pytest.raises(ValueError, match="parts y compare.*score_group"):
    asyncio.run(graph.score(members[0], TASK))


def test_a_group_scorer_that_answers_for_too_few_invalidates_the_group():
  members = [trajectory(sample=i) for i in range(2)]
  graph = RewardGraph({}, Formula("rank"), {"rank": lambda trajectories, task: [1.0]})
  assert [r.valid for r in score(graph, *members)] == [False, False]
  assert "1 scores for 2" in members[0].reward.reason


def test_turns_keep_nothing_of_a_comparison_that_failed():
  def pay(trajectories, task):
    if sum(bool(t.answer) for t in trajectories) > 1:
      raise ValueError("no two answers at once")
    return [TurnScores([1.0] * len(t.segments)) for t in trajectories]

  members = [trajectory(sample=i) for i in range(2)]
  graph = RewardGraph({"x": constant(1.0)}, Formula("x"), {"pay": pay})
  assert score(graph, *members) == [Reward(1.0)] * 2
  for one in members:
    assert not one.reward_parts["pay"].valid and one.turn_rewards == {}


def test_a_trajectory_of_another_task_is_refused():
  with pytest.raises(ValueError, match="task 4 scored with task 3"):
    score(RewardGraph({"x": constant(1.0)}, Formula("x")), trajectory(task_id=4))


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (({}, Formula("x")), "at least one scorer"),
    (({"x": raising}, Formula("y")), "reads y, which no scorer makes; parts: x"),
    (({"x": raising}, Formula("x"), {"x": rank}), "scored twice: x"),
  ],
)
def test_a_graph_that_cannot_work_is_refused_when_built(arguments, message):
  with pytest.raises(ValueError, match=message):
    RewardGraph(*arguments)


def test_closing_a_graph_closes_the_scorers_that_hold_something():
  closed = []

  class Holder:
    def __init__(self, name):
      self.name = name

    def __call__(self, trajectory, task):
      return 1.0

    async def close(self):
      closed.append(self.name)

  graph = RewardGraph(
    {"a": Holder("a"), "plain": lambda t, task: 0.0, "b": Holder("b")}, Formula("a")
  )
  asyncio.run(graph.close())
  assert closed == ["a", "b"]


def test_the_members_of_a_group_are_scored_at_once():
  waiting = []

  async def together(trajectory, task):
    waiting.append(trajectory.sample)
    while len(waiting) < 3:  # for ever, where they come one after the other
      await asyncio.sleep(0.001)
    return float(trajectory.sample)

  graph = RewardGraph(
    {"x": together}, Formula("x"), {"rank": lambda members, task: [0.0] * len(members)}
  )
  members = [trajectory(sample=i) for i in range(3)]

  async def run():
    await asyncio.wait_for(graph.score_group(members, TASK), 20)

  asyncio.run(run())
  assert [t.reward.value for t in members] == [0.0, 1.0, 2.0]


def test_flags_set_a_formula_and_the_numbers_in_it():
  config = RewardConfig(parts=("exact_match", "turns"))
  for field, text in (
    ("formula", "a * exact_match - w * turns"),
    ("numbers.a", "2.0"),
    ("numbers.w", "linear"),
    ("numbers.w.end", "0.5"),
    ("numbers.w.steps", "10"),
  ):
    set_field(config, field.split("."), text)
  config.validate()
  assert config.numbers == {"a": 2.0, "w": LinearSchedule(end=0.5, steps=10)}
  assert RewardConfig.from_dict(config.to_short_dict()) == config
  assert score(build_rewards(config), trajectory()) == [Reward(2.0)]
