import os
import pathlib

import pytest

from agentjax.trajectory.record import Message, Task
from agentjax.world.text_game import TurnConfig
from agentjax.worlds.sokoban.game import (
  Level,
  Sokoban,
  SokobanConfig,
  read_levels,
  sokoban_tasks,
  solve,
)
from tests.worlds.games import begin, play, say

ROWS = ["######", "#@$ .#", "#    #", "######"]
TASK = Task(0, (Message("user", "?"),), "", "sokoban", metadata={"level": ROWS})
CONFIG = SokobanConfig()


def test_rewards_of_ragen():
  rewards, step = play(
    begin(Sokoban(CONFIG), TASK), ["<answer>Right</answer>", "<answer>Right || Right</answer>"]
  )
  assert rewards[0] == pytest.approx(-0.1)  # nearer, not yet there
  assert rewards[1] == pytest.approx(1 + 10 - 0.1)  # what came after the last box is not done
  assert step.terminated and step.answer == "Right"


def test_a_box_that_leaves_its_target_is_charged():
  rows = ["#######", "#@* $.#", "#     #", "#######"]
  game = begin(Sokoban(CONFIG), Task(0, (), "", "sokoban", metadata={"level": rows}))
  assert say(game, "<answer>Right</answer>").reward.value == pytest.approx(-1 - 0.1)


def test_walls_and_second_boxes_stop_the_player():
  level = Level.parse(["######", "#@$$.#", "#   .#", "######"])
  assert level.moved("Right") == level and level.moved("Up") == level
  assert level.moved("Down").player == (2, 1)


def test_the_board_shows_what_stands_where():
  assert Level.parse(["#####", "#+*$#", "#####"]).draw() == "#####\n#S*X#\n#####"
  with pytest.raises(ValueError, match="1 boxes, 0 targets"):
    Level.parse(["@$"])


def test_the_game_ends_with_its_actions_or_turns():
  few = SokobanConfig(turns=TurnConfig(max_turns=9, max_actions=3, actions_per_turn=2))
  _, step = play(begin(Sokoban(few), TASK), ["<answer>Down||Up||Down</answer>"] * 3)
  assert step.terminated and step.answer is None  # two actions, then one
  silent = SokobanConfig(turns=TurnConfig(max_turns=2))
  rewards, step = play(begin(Sokoban(silent), TASK), ["well", "well", "well"])
  assert rewards == [-0.1, -0.1] and step.terminated


def test_turns_say_whether_an_action_was_done():
  last = SokobanConfig(turns=TurnConfig(max_turns=1))
  for config in (CONFIG, last):
    assert say(begin(Sokoban(config), TASK), "<answer>Down</answer>").executed
    assert not say(begin(Sokoban(config), TASK), "well").executed
    cut = say(begin(Sokoban(config), TASK), "<answer>Down</answer>", truncated=True)
    assert not cut.executed


def test_an_unread_turn_is_told_what_can_be_done():
  step = say(begin(Sokoban(CONFIG), TASK), "I push it")
  assert step.observation.messages[0].content.startswith("No action read. Use Up, Down")


def test_a_snapshot_restores_the_board():
  game, other = begin(Sokoban(CONFIG), TASK), begin(Sokoban(CONFIG), TASK, 5)
  say(game, "<answer>Right</answer>")
  other.restore(game.snapshot())
  assert other.board() == game.board() != begin(Sokoban(CONFIG), TASK).board()
  assert say(other, "<answer>Right</answer>") == say(game, "<answer>Right</answer>")


def test_made_levels_are_solved_by_their_solutions_and_never_shared():
  train = sokoban_tasks(CONFIG, 12, split="train", seed=0)
  test = sokoban_tasks(CONFIG, 5, split="test", seed=0, first_id=100)
  levels = [tuple(t.metadata["level"]) for t in (*train, *test)]
  assert len(set(levels)) == 17
  for task in (*train, *test):
    way = task.answer.split(", ")
    assert 1 <= len(way) <= 10 and way == solve(Level.parse(task.metadata["level"]), 10)
    level = Level.parse(task.metadata["level"])
    for action in way:
      assert not level.is_solved
      level = level.moved(action)
    assert level.is_solved
    shown = begin(Sokoban(CONFIG), task)
    assert say(shown, task.demonstration[0].content).terminated == (len(way) <= 5)
  assert sokoban_tasks(CONFIG, 12, split="train", seed=0) == train


def test_too_few_levels_are_reported():
  tiny = SokobanConfig(size=4, walls=0.0, most_steps=1)
  with pytest.raises(ValueError, match="has only .* test tasks"):
    sokoban_tasks(tiny, 500, split="test", seed=0)


@pytest.mark.skipif("AGENTJAX_DATA" not in os.environ, reason="needs the levels of boxoban")
def test_levels_of_a_file_are_played():
  path = pathlib.Path(os.environ["AGENTJAX_DATA"]) / "boxoban" / "medium_valid_000.txt.gz"
  levels = list(read_levels(path))
  assert len(levels) == 1000
  config = SokobanConfig(levels=str(path))
  train = sokoban_tasks(config, 20, split="train", seed=0)
  test = sokoban_tasks(config, 20, split="test", seed=3)
  boards = [{tuple(t.metadata["level"]) for t in tasks} for tasks in (train, test)]
  assert len(boards[0]) == len(boards[1]) == 20 and not boards[0] & boards[1]
  game = begin(Sokoban(config), train[0])
  assert game.board().count("X") + game.board().count("*") == 4
