import numpy as np
import pytest

from agentjax.trajectory.record import Status
from agentjax.world.text_game import TurnConfig, read_actions
from agentjax.worlds.bandit.game import Bandit, BanditConfig, bandit_tasks
from tests.worlds.games import begin, say

CONFIG = BanditConfig()
TASKS = bandit_tasks(CONFIG, 40, split="train", seed=0)


def test_the_sure_arm_pays_its_due_and_the_risky_one_by_the_key_alone():
  task = TASKS[0]
  (sure,) = set(task.metadata["arms"]) - {task.metadata["risky"]}
  for key in range(5):
    step = say(begin(Bandit(CONFIG), task, key), f"<answer>{sure}</answer>")
    assert step.terminated and step.reward.value == CONFIG.low and step.answer == sure
  risky = f"<think>high</think><answer>{task.metadata['risky']}</answer>"
  paid = [say(begin(Bandit(CONFIG), task, key), risky).reward.value for key in range(400)]
  assert set(paid) == {0.0, 1.0}
  assert np.mean(paid) == pytest.approx(CONFIG.chance, abs=0.07)
  again = [say(begin(Bandit(CONFIG), task, key), risky).reward.value for key in range(400)]
  assert paid == again


def test_a_turn_without_an_arm_costs_and_ends_the_game():
  step = say(begin(Bandit(CONFIG), TASKS[0]), TASKS[0].metadata["risky"])  # without the tags
  assert step.terminated and step.reward.value == -0.1
  cut = say(begin(Bandit(CONFIG), TASKS[0]), "<answer>", truncated=True)
  assert cut.status is Status.TRUNCATED and cut.reward.value == -0.1


def test_a_snapshot_keeps_the_draw_to_come():
  task = TASKS[0]
  risky = f"<answer>{task.metadata['risky']}</answer>"
  for key in range(20):
    game, other = begin(Bandit(CONFIG), task, key), begin(Bandit(CONFIG), task, 999)
    other.restore(game.snapshot())
    assert say(other, risky).reward == say(game, risky).reward


def test_train_and_test_share_no_pair_of_arms():
  test = bandit_tasks(CONFIG, 10, split="test", seed=0, first_id=1 << 30)
  pairs = [{frozenset(t.metadata["arms"]) for t in tasks} for tasks in (TASKS, test)]
  assert not pairs[0] & pairs[1]
  assert [t.id for t in test] == list(range(1 << 30, (1 << 30) + 10))
  assert bandit_tasks(CONFIG, 40, split="train", seed=0) == TASKS
  assert bandit_tasks(CONFIG, 40, split="train", seed=1) != TASKS


def test_the_risky_arm_stands_first_or_second_and_is_demonstrated_or_not():
  places = {t.metadata["arms"].index(t.metadata["risky"]) for t in TASKS}
  shown = {t.metadata["risky"] in t.demonstration[0].content for t in TASKS}
  assert places == {0, 1} and shown == {True, False}


@pytest.mark.parametrize(
  "text, tags, expected",
  [
    ("<answer>up||Left</answer>", True, ["Up", "Left"]),
    ("Up <answer>Down</answer> <answer>Left, Up</answer>", True, ["Left", "Up"]),
    ("Up", True, []),
    ("<answer>Up", True, []),
    ("go UP then left.", False, ["Up", "Left"]),
    ("upper leftover", False, []),
  ],
)
def test_actions_are_read_from_the_last_answer(text, tags, expected):
  assert read_actions(text, ("Up", "Down", "Left"), tags=tags) == expected


def test_settings_of_turns_are_checked():
  with pytest.raises(ValueError, match="max_turns=0"):
    TurnConfig(max_turns=0).validate()
