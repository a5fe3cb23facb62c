import collections
import sys

import pytest

from agentjax.config import ConfigError
from agentjax.trajectory.record import Message, Task
from agentjax.worlds.frozen_lake.game import (
  FrozenLake,
  FrozenLakeConfig,
  frozen_lake_tasks,
  shortest_way,
)
from tests.worlds.games import begin, play, say

MAP = ["SFF", "HFF", "FFG"]
TASK = Task(0, (Message("user", "?"),), "", "frozen_lake", metadata={"map": MAP})
SURE = FrozenLakeConfig(size=3, slippery=False)


@pytest.fixture(scope="module", autouse=True)
def gymnasium():
  pytest.importorskip("gymnasium", reason="the lake is gymnasium's")


def test_the_way_leads_to_the_goal():
  assert shortest_way(MAP) == ["Right", "Down", "Down", "Right"]
  rewards, step = play(
    begin(FrozenLake(SURE), TASK),
    ["<answer>Right || Down</answer>", "<answer>Down || Right || Left</answer>"],
  )
  assert rewards == [0.0, 1.0] and step.terminated and step.answer == "Down, Right"


def test_a_hole_ends_the_game_without_reward():
  game = begin(FrozenLake(SURE), TASK)
  step = say(game, "<answer>Down || Right</answer>")
  assert step.terminated and step.reward.value == 0.0 and step.answer == "Down"
  assert game.board() == "___\nX__\n__G"


def test_the_game_ends_when_its_actions_are_used():
  rewards, step = play(begin(FrozenLake(SURE), TASK), ["<answer>Up||Up||Up||Up||Up</answer>"] * 3)
  assert rewards == [0.0, 0.0] and step.terminated and step.answer is None


def test_one_slips_to_either_side_as_often_as_one_goes_on():
  slippery = FrozenLakeConfig(size=3)
  landed = collections.Counter()
  for key in range(600):
    game = begin(FrozenLake(slippery), TASK, key)
    say(game, "<answer>Right</answer>")
    landed[game.get_state()[0]] += 1
  # Right of the start, or the hole below it, or against the wall above.
  assert set(landed) == {0, 1, 3}
  assert all(abs(count / 600 - 1 / 3) < 0.07 for count in landed.values())


def test_a_snapshot_keeps_the_slips_to_come():
  slippery = FrozenLakeConfig(size=3)
  for key in range(10):
    game, other = begin(FrozenLake(slippery), TASK, key), begin(FrozenLake(slippery), TASK, 77)
    say(game, "<answer>Right</answer>")
    other.restore(game.snapshot())
    turn = "<answer>Right || Right || Down</answer>"
    assert say(other, turn) == say(game, turn)


def test_tasks_have_a_way_and_the_sides_share_none():
  config = FrozenLakeConfig()
  train = frozen_lake_tasks(config, 20, split="train", seed=0)
  test = frozen_lake_tasks(config, 10, split="test", seed=0, first_id=50)
  maps = [{tuple(t.metadata["map"]) for t in tasks} for tasks in (train, test)]
  assert not maps[0] & maps[1]
  for task in train:
    assert task.answer.split(", ") == shortest_way(task.metadata["map"])
    board = task.prompt[0].content.splitlines()[-4:]
    assert "".join(board).count("P") == 1 and [len(row) for row in board] == [4] * 4
  assert frozen_lake_tasks(config, 20, split="train", seed=0) == train


def test_without_gymnasium_the_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "gymnasium.envs.toy_text", None)
  with pytest.raises(ConfigError, match=r"agentjax\[envs\]"):
    FrozenLake(SURE)
