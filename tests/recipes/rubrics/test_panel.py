"""Verdicts of several judges as one."""

import pytest

from agentjax.recipes.rubrics.panel import combine_verdicts, panel
from agentjax.rewards.judges import JudgeUnavailableError
from agentjax.trajectory.record import Reward
from tests.rewards.judging import run

INVALID = Reward.invalid("unreadable")


@pytest.mark.parametrize(
  ("how", "verdicts", "value"),
  [
    ("median", [Reward(0.0), Reward(1.0), Reward(1.0)], 1.0),
    ("min", [Reward(0.0), Reward(1.0), Reward(1.0)], 0.0),
    ("mean", [Reward(0.0), Reward(1.0), Reward(0.5)], 0.5),
    ("median", [Reward(1.0), Reward(0.5), INVALID], 0.75),
    ("median", [Reward(1.0), INVALID], None),
    ("min", [INVALID, INVALID, Reward(1.0)], None),
  ],
)
def test_panels_combine_what_more_than_half_of_them_say(how, verdicts, value):
  assert combine_verdicts(verdicts, how).value == value


def test_a_judge_that_stays_away_does_not_stop_a_panel(monkeypatch):
  async def question(judge):
    return await judge()

  async def there():
    return Reward(1.0)

  async def away():
    raise JudgeUnavailableError("no route")

  assert run(panel([there, away, there], question, "min")).value == 1.0
  alone = run(panel([away], question))
  assert not alone.valid and "no route" in alone.reason
