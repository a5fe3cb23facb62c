import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjax.trajectory.record import Status, Task
from agentjax.worlds.countdown.game import Countdown, CountdownConfig, countdown_tasks, solves
from tests.worlds.games import begin, say

TASK = Task(0, (), "", "countdown", metadata={"numbers": [3, 5, 2], "target": 16})


@pytest.mark.parametrize(
  "text, expected",
  [
    ("(3+5)*2", True),
    ("2 * (5 + 3)", True),
    ("3+5*2", False),
    ("8*2", False),  # not the numbers given
    ("(3+5)*2*2/2", False),  # one of them thrice
    ("(3+5)/(2-2)", False),
    ("(3+5)**2", None),
    ("__import__('os')", None),
    ("3+", None),
    ("1e1", None),
    ("True+3+5", None),
    ("(" * 300, None),
    ("9" * 150 + "*" + "9" * 100, None),
  ],
)
def test_what_solves_and_what_is_no_expression(text, expected):
  assert solves(text, [3, 5, 2], 16) is expected


def test_divisions_are_exact():
  assert solves("8/(3-8/3)", [8, 3, 8, 3], 24) is True


@given(st.text(alphabet="0123456789+-*/() .=a", max_size=40))
def test_no_text_breaks_the_judge(text):
  assert solves(text, [1, 2], 3) in (True, False, None)


@pytest.mark.parametrize(
  "text, reward",
  [
    ("<think>hm</think><answer>(3+5)*2 = 16</answer>", 1.0),
    ("<answer>3+5+2</answer>", 0.1),
    ("<answer>I cannot</answer>", 0.0),
    ("(3+5)*2", 0.0),
  ],
)
def test_rewards(text, reward):
  step = say(begin(Countdown(CountdownConfig()), TASK), text)
  assert step.terminated and step.reward.value == reward


def test_a_cut_turn_truncates_and_bare_answers_are_read_where_told():
  cut = say(begin(Countdown(CountdownConfig()), TASK), "<answer>3", truncated=True)
  assert cut.status is Status.TRUNCATED
  assert say(begin(Countdown(CountdownConfig(tags=False)), TASK), "(3+5)*2").reward.value == 1.0


def test_tasks_are_solved_by_their_demonstrations_and_the_sides_share_none():
  config = CountdownConfig()
  train = countdown_tasks(config, 60, split="train", seed=0)
  test = countdown_tasks(config, 20, split="test", seed=0, first_id=99)
  for task in (*train, *test):
    assert solves(task.answer, task.metadata["numbers"], task.metadata["target"]) is True
    assert say(begin(Countdown(config), task), task.demonstration[0].content).reward.value == 1.0
    assert str(task.metadata["target"]) in task.prompt[0].content
  contents = [
    {(*sorted(t.metadata["numbers"]), t.metadata["target"]) for t in tasks}
    for tasks in (train, test)
  ]
  assert not contents[0] & contents[1] and len(contents[0]) == 60
