"""Steps judged by principles: what a judge reads, what a step is worth, and without a judge."""

import pytest

from agentjax.config import ConfigError
from agentjax.recipes.ppr.principles import Principles, PrinciplesConfig, read_score
from agentjax.rewards.judges import JudgeUnavailableError
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import ToolRecord
from tests.rewards.judging import Scripted, run, task


def episode(*calls):
  """A turn for each number of calls in ``calls``: lists of statuses."""
  builder = TrajectoryBuilder(step=1, task_id=0, sample=0, source="made")
  builder.append("user", [1])
  for _ in calls:
    builder.append_sampled([2], [-1.0], [0.5], 0)
    builder.append("tool", [3])
  made = builder.build()
  made.tools = [
    ToolRecord(turn, "calculator", {"expression": f"{turn}+1"}, status, f"result {turn}", 0.1)
    for turn, statuses in enumerate(calls)
    for status in statuses
  ]
  return made


def values(scores):
  return [v for v, s in zip(scores.values, range(99), strict=False) if s % 2]


def test_without_a_judge_a_step_is_worth_its_calls_that_succeeded():
  made = episode(["ok", "error"], ["ok"], [])
  assert values(run(Principles(None, PrinciplesConfig())(made, task()))) == [0.5, 1.0, None]


def test_a_judge_reads_question_earlier_steps_and_the_step():
  judge = Scripted(lambda messages, key: 'So {"score": 15, "max": 20}.')
  found = run(Principles(judge, PrinciplesConfig(principles=("Be brief.",)))(
    episode(["ok"], ["error"], []), task()
  ))  # fmt: skip
  assert values(found) == [0.75, 0.75, None] and len(judge.asked) == 2
  first, second = sorted((asked[0][-1].content for asked in judge.asked), key=len)
  assert "result 0" in second and "error: result 1" in second and "1. Be brief." in second
  assert "result 1" not in first and "Why is the sky blue?" in first


@pytest.mark.parametrize(
  ("reply", "score"),
  [
    ('{"score": 3, "max": 4}', 0.75),
    ('{"score": 5, "max": 4}', None),
    ('{"score": 0, "max": 0}', None),
    ('{"score": true, "max": 4}', None),
    ("four", None),
  ],
)
def test_a_score_is_a_share_of_what_was_possible(reply, score):
  assert read_score(reply) == score


def test_without_a_judge_that_answers_there_is_no_reward():
  def fail(messages, key):
    raise JudgeUnavailableError("down")

  found = run(Principles(Scripted(fail), PrinciplesConfig())(episode(["ok"]), task()))
  assert not found.valid and "down" in found.reason


def test_no_principles_are_refused():
  with pytest.raises(ConfigError, match="principles"):
    PrinciplesConfig(principles=()).validate()
