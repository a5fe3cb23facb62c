"""ReNorm: what turns earn by their score and the outcome."""

import asyncio

import pytest

from agentjax.rewards import SCORERS, RewardConfig, TurnScores, build_rewards
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Task

TASK = Task(0, (), "7", "made")


def scored(answer, scores):
  """An episode of one turn a score, judged by a reward with the part "renorm"."""
  builder = TrajectoryBuilder(step=0, task_id=0, sample=0, source="made")
  builder.append("user", [1])
  for _ in scores:
    builder.append_sampled([2], [-1.0], [0.5], 0)
    builder.append("tool", [3])
  made = builder.build()
  made.answer = answer
  config = RewardConfig(parts=("process", "exact_match", "renorm"), weights=(0.0, 0.0, 1.0))
  judge = {"process": lambda episode, task: TurnScores.of_turns(episode, scores)}
  graph = build_rewards(config, {**SCORERS, **judge})
  asyncio.run(graph.score_group([made], TASK))
  return made


@pytest.mark.parametrize(
  ("answer", "score", "paid"), [("7", 1.0, 1.0), ("8", 1.0, 0.0), ("7", 0.0, 0.0), ("8", 0.0, -1.0)]
)
def test_a_good_turn_of_a_failure_earns_nothing(answer, score, paid):
  """The sum of the two scores would pay it 1."""
  made = scored(answer, [score])
  assert [v for v in made.turn_rewards["renorm"] if v is not None] == [paid]


@pytest.mark.parametrize("turns", [2, 6])
def test_the_reward_is_paid_by_turns_and_grows_with_their_number(turns):
  assert scored("7", [1.0] * turns).reward.value == turns
  assert scored("8", [0.0] * turns).reward.value == -turns
  assert scored("8", [1.0] * turns).reward.value == 0


def test_a_turn_that_was_not_judged_earns_nothing_unless_it_is_the_last():
  made = scored("7", [None, 0.5])
  assert [made.turn_rewards["renorm"][i] for i in (1, 3)] == [None, 0.5]


@pytest.mark.parametrize(("answer", "paid"), [("7", 1.0), ("8", -1.0)])
def test_an_answer_that_was_not_judged_earns_by_the_outcome(answer, paid):
  """So does the one turn of an episode in which nothing was judged."""
  made = scored(answer, [0.5, None])
  assert [made.turn_rewards["renorm"][i] for i in (1, 3)] == [paid / 2, paid]
  assert scored(answer, [None]).reward.value == paid


def test_without_scores_of_turns_there_is_no_verdict():
  builder = TrajectoryBuilder(step=0, task_id=0, sample=0, source="made")
  builder.append_sampled([2], [-1.0], [0.5], 0)
  made = builder.build()
  config = RewardConfig(parts=("process", "exact_match", "renorm"), weights=(0.0, 0.0, 1.0))
  graph = build_rewards(config, {**SCORERS, "process": lambda episode, task: 0.5})
  asyncio.run(graph.score_group([made], TASK))
  assert not made.reward.valid and "no turn of process" in made.reward_parts["renorm"].reason
