import asyncio
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjax.rewards.graph import (
  Combined,
  Gate,
  Part,
  RewardGraph,
  WeightedSum,
)
from agentjax.trajectory.record import Reward, Status, Task, Trajectory

TASK = Task(3, (), "19", "made")
X_PLUS_Y = WeightedSum(((1.0, Part("x")), (1.0, Part("y"))))
GOOD, HALF, BAD = Part("good"), Part("half"), Part("bad")
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
  ("node", "value"),
  [
    (GOOD, 2.0),
    (WeightedSum(((1.0, GOOD), (-2.0, HALF))), 1.0),
    (WeightedSum(((1.0, GOOD), (0.0, BAD))), 2.0),  # weight 0: only logged
    (Combined(math.prod, (GOOD, HALF, HALF)), 0.5),
    (Combined(min, (GOOD, HALF)), 0.5),
    (Combined(max, (GOOD, HALF)), 2.0),
    (Gate(GOOD, HALF, threshold=2.0), 0.5),
    (Gate(HALF, GOOD, threshold=1.0), 0.0),
    (Gate(HALF, GOOD, threshold=1.0, closed=-1.0), -1.0),
    (Gate(HALF, BAD, threshold=1.0), 0.0),  # what stands behind a closed gate is not read
    (Gate(GOOD, WeightedSum(((3.0, Combined(math.prod, (HALF, HALF))),)), threshold=1.0), 0.75),
  ],
)
def test_a_formula_gives_the_value_its_name_says(node, value):
  assert node.evaluate(PARTS) == Reward(value)


@pytest.mark.parametrize(
  "node",
  [
    BAD,
    WeightedSum(((1.0, GOOD), (1e-9, BAD))),
    Combined(math.prod, (Part("zero"), BAD)),
    Combined(min, (GOOD, BAD)),
    Combined(max, (GOOD, BAD)),
    Gate(BAD, GOOD, threshold=0.0),
    Gate(GOOD, BAD, threshold=0.0),
  ],
)
def test_an_invalid_part_makes_the_total_invalid_and_names_itself(node):
  reward = node.evaluate({**PARTS, "zero": Reward(0.0)})
  assert not reward.valid
  assert reward.reason == "bad: judge is down"


@pytest.mark.parametrize(
  "node",
  [
    WeightedSum(((1.0, GOOD), (0.0, BAD))),
    Combined(math.prod, (GOOD, BAD)),
    Combined(min, (GOOD, BAD)),
    Combined(max, (BAD, GOOD)),
    Gate(GOOD, BAD, 1.0),
  ],
)
def test_a_formula_names_the_parts_it_reads(node):
  assert node.names() == {"good", "bad"}


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=5))
def test_the_weighted_sum_of_scorers_is_numpys(pairs):
  weights, values = zip(*pairs, strict=True)
  names = [f"p{i}" for i in range(len(pairs))]
  graph = RewardGraph(
    {n: constant(v) for n, v in zip(names, values, strict=True)},
    WeightedSum(tuple((w, Part(n)) for w, n in zip(weights, names, strict=True))),
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
  graph = RewardGraph({"x": raising, "y": constant(1.0)}, Part("y"))
  one = trajectory()
  assert score(graph, one) == [Reward(1.0)]
  assert not one.reward_parts["x"].valid
  assert one.status is Status.OK


def test_a_formula_that_overflows_is_a_verifier_error():
  one = trajectory()
  [reward] = score(RewardGraph({"x": constant(1e308)}, WeightedSum(((10.0, Part("x")),))), one)
  assert "finite" in reward.reason
  assert one.status is Status.VERIFIER_ERROR


def test_an_environment_error_is_masked_without_asking_any_scorer():
  graph = RewardGraph({"x": raising}, Part("x"))
  one = trajectory(status=Status.ENV_ERROR)
  [reward] = score(graph, one)
  assert not reward.valid
  assert one.reward_parts == {}
  assert one.status is Status.ENV_ERROR


@pytest.mark.parametrize("status", [Status.OK, Status.TRUNCATED])
def test_other_endings_are_scored_and_keep_their_status(status):
  one = trajectory(status=status)
  assert score(RewardGraph({"x": constant(0.5)}, Part("x")), one) == [Reward(0.5)]
  assert one.status is status


@pytest.mark.parametrize(
  ("scorer", "value"),
  [(constant(0.5), 0.0), (constant(-0.5), -0.5), (raising, 0.0), (constant(math.nan), 0.0)],
)
def test_a_policy_error_is_never_paid_and_never_masked(scorer, value):
  one = trajectory(status=Status.POLICY_ERROR)
  assert score(RewardGraph({"x": scorer}, Part("x")), one) == [Reward(value)]
  assert one.status is Status.POLICY_ERROR


def test_cancelling_is_not_mistaken_for_a_failing_scorer():
  async def hang(trajectory, task):
    await asyncio.sleep(60)

  async def run():
    graph = RewardGraph({"x": hang}, Part("x"))
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
  graph = RewardGraph({}, Part("rank"), {"rank": lambda trajectories, task: [1.0]})
  assert [r.valid for r in score(graph, *members)] == [False, False]
  assert "1 scores for 2" in members[0].reward.reason


def test_a_trajectory_of_another_task_is_refused():
  with pytest.raises(ValueError, match="task 4 scored with task 3"):
    score(RewardGraph({"x": constant(1.0)}, Part("x")), trajectory(task_id=4))


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (({}, Part("x")), "at least one scorer"),
    (({"x": raising}, Part("y")), "reads y, which no scorer makes; parts: x"),
    (({"x": raising}, Part("x"), {"x": rank}), "scored twice: x"),
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

  graph = RewardGraph({"a": Holder("a"), "plain": lambda t, task: 0.0, "b": Holder("b")}, Part("a"))
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
    {"x": together}, Part("x"), {"rank": lambda members, task: [0.0] * len(members)}
  )
  members = [trajectory(sample=i) for i in range(3)]

  async def run():
    await asyncio.wait_for(graph.score_group(members, TASK), 20)

  asyncio.run(run())
  assert [t.reward.value for t in members] == [0.0, 1.0, 2.0]
