"""TextWorld's games: rules as its own engine has them, points once, exact snapshots."""

import asyncio
import dataclasses
import json
import os
import pathlib
import random
import tarfile

import pytest

from agentjax.config import ConfigError
from agentjax.data import DataConfig
from agentjax.data.errors import DataError
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.rollout.integrity import play_turns
from agentjax.training import load_experiment
from agentjax.trajectory.record import Message, Status
from agentjax.world.cheats import Setting
from agentjax.worlds.textworld.game import TextWorld, TextWorldConfig, TextWorldGame
from agentjax.worlds.textworld.logic import GameFileError, apply, read_game
from tests.worlds.games import begin, play, say
from tests.worlds.textworld_games import LOGIC, game, quest, write

_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
_WAY = ["take apple", "go east", "open tin box", "insert apple into tin box"]
_DATA = pathlib.Path(os.environ.get("AGENTJAX_DATA", "")) / "textworld_twc"
needs_data = pytest.mark.skipif(
  not (os.environ.get("AGENTJAX_DATA") and _DATA.is_dir()),
  reason="set AGENTJAX_DATA to a folder with textworld_twc",
)


def _tasks(folder, data=None, **settings):
  world = TextWorld(TextWorldConfig(**settings))
  return world, world.tasks(data or DataConfig(path=str(folder), train_size=None, test_size=None))


@pytest.fixture
def task(tmp_path):
  write(tmp_path)
  return _tasks(tmp_path)[1].train[0]


def _do(environment, command):
  return say(environment, f"<answer>{command}</answer>")


def test_the_walkthrough_earns_the_full_score_and_each_quest_its_share(task):
  # The cap is held: it goes onto the shelf after the apple has gone into the box.
  commands = task.answer.split("; ")
  assert commands == [*_WAY, "go west", "put red cap on shelf"]
  turns = [f"<answer>{command}</answer>" for command in commands]
  rewards, step = play(begin(TextWorldGame(TextWorldConfig()), task), turns)
  assert rewards == [0, 0, 0, pytest.approx(2 / 3), 0, pytest.approx(1 / 3)]
  assert sum(rewards) == 1.0 and step.terminated and step.answer == commands[-1]


def test_the_player_sees_the_place_and_what_can_be_done(task):
  assert task.prompt[0].content.splitlines() == [
    "Put everything where it belongs.",
    "Write one command a turn in <answer></answer>.",
    "You are in the hall.",
    "On the floor: apple.",
    "On the shelf: nothing.",
    "Exits: east.",
    "You carry: red cap.",
    "Commands: drop red cap; go east; look; put red cap on shelf; take apple.",
  ]
  environment = begin(TextWorldGame(TextWorldConfig(show_commands=False)), task)
  step = _do(environment, "Go  EAST.")
  assert step.observation.messages[0].content.splitlines() == [
    "You go east.",
    "You are in the kitchen.",
    "The tin box is closed.",
    "Exits: west.",
    "You carry: red cap.",
  ]
  opened = _do(environment, "open the tin box").observation.messages[0].content
  assert "In the tin box: nothing." in opened


@pytest.mark.parametrize(
  "text",
  ["go east", "<answer>go east; look</answer>", "<answer>fly</answer>", "<answer></answer>",
   "<answer>take apple from tin box</answer>", "<answer>open tin box</answer>"],
)  # fmt: skip
def test_what_is_no_command_here_changes_nothing(task, text):
  environment = begin(TextWorldGame(TextWorldConfig()), task)
  before = json.loads(environment.snapshot())
  step = say(environment, text)
  assert step.observation.messages[0].content.startswith("Nothing happens.\n")
  assert step.reward.value == 0 and json.loads(environment.snapshot())[:2] == before[:2]


def test_a_quest_is_paid_once_however_often_it_is_undone(task):
  environment = begin(TextWorldGame(TextWorldConfig()), task)
  paid = [
    _do(environment, command).reward.value
    for command in ("put red cap on shelf", "take red cap from shelf", "put red cap on shelf")
  ]
  assert paid == [pytest.approx(1 / 3), 0, 0]


def test_the_game_ends_in_time_and_when_it_is_lost(tmp_path, task):
  short = begin(TextWorldGame(TextWorldConfig(max_turns=2)), task)
  assert not _do(short, "look").terminated
  step = _do(short, "put red cap on shelf")
  assert step.terminated and step.reward.value == pytest.approx(1 / 3)
  cut = say(begin(TextWorldGame(TextWorldConfig()), task), "<answer>go", truncated=True)
  assert cut.truncated and cut.status is Status.TRUNCATED
  lose = [quest("in f_0 c_0", failures=["at o_0 r_0"])]
  write(tmp_path / "lost", quests=lose)
  (lost,) = _tasks(tmp_path / "lost")[1].train
  step = _do(begin(TextWorldGame(TextWorldConfig()), lost), "drop red cap")
  assert step.terminated and step.reward.value == 0


def test_a_branch_goes_on_exactly_where_the_snapshot_was_taken(task):
  first = begin(TextWorldGame(TextWorldConfig()), task)
  for command in _WAY[:3]:
    _do(first, command)
  state = first.snapshot()
  _do(first, "go west")  # what happens afterwards is not in it
  second = begin(TextWorldGame(TextWorldConfig()), task)
  second.restore(state)
  assert second.snapshot() == state
  third = TextWorldGame(TextWorldConfig())
  asyncio.run(third.resume(task, 0, state))
  for command in ("insert apple into tin box", "go west", "put red cap on shelf"):
    assert _do(second, command) == _do(third, command)
  assert second.snapshot() == third.snapshot() and sum(json.loads(second.snapshot())[3:]) == 1.0


def test_cheats_earn_nothing(task):
  world = TextWorld(TextWorldConfig())
  cheats = world.cheats(task, Setting())
  assert len(cheats) > 15
  for name, turns in cheats.items():
    played = asyncio.run(play_turns(task, turns, world.environment))
    assert played.reward_parts["environment"].value == 0, name
  right = asyncio.run(play_turns(task, world.solution(task, Setting()), world.environment))
  assert right.reward_parts["environment"].value == 1.0


def test_games_are_found_in_folders_and_archives_by_level_and_split(tmp_path):
  write(tmp_path / "plain")
  write(tmp_path / "plain", level="hard")
  write(tmp_path / "other", splits=("train",))
  (tmp_path / "packed").mkdir()
  with tarfile.open(tmp_path / "packed" / "games.tar.xz", "w:xz") as archive:
    archive.add(tmp_path / "plain" / "easy", "easy")
  for folder, levels, count in (("plain", ("easy", "hard"), 2), ("packed", ("easy",), 1)):
    _, tasks = _tasks(tmp_path / folder, levels=levels)
    assert [t.id for t in tasks.train] == list(range(count))
    assert [t.id for t in tasks.test] == [FIRST_TEST_ID + i for i in range(count)]
  one = DataConfig(path=str(tmp_path / "plain"), train_size=1, test_size=0)
  _, tasks = _tasks(tmp_path, one, levels=("easy", "hard"))
  assert (len(tasks.train), len(tasks.test)) == (1, 0)
  with pytest.raises(DataError, match=r"easy/test"):
    _tasks(tmp_path / "other")


def test_files_that_are_no_games_are_refused_by_name(tmp_path):
  def refused(match, **changes):
    write(tmp_path, **changes)
    with pytest.raises(DataError, match=rf"train\.json: not a game of TextWorld: .*{match}"):
      _tasks(tmp_path)

  refused("quests", quests=[])
  refused("no rules", KB={"logic": "type r { }"})
  refused("'logic'", KB={})
  refused("describe f_0", infos=[pair for pair in game()["infos"] if pair[0] != "f_0"])
  refused("quest 0 cannot be completed", quests=[quest("on c_0 s_0")])
  (tmp_path / "easy" / "train" / "train.json").write_text("{")
  with pytest.raises(DataError, match=r"train\.json"):
    _tasks(tmp_path)


def test_rules_without_wording_and_comments_are_left_out():
  names = [rule.name for rule in read_game(game()).logic.rules]
  assert "look/t" not in names and names.count("go/east") == 1
  assert len(names) == 11
  with pytest.raises(GameFileError, match="no rules"):
    read_game(game(KB={"logic": LOGIC.replace("commands", "words")}))


def test_the_config_names_its_folder():
  experiment = load_experiment(_CONFIGS / "textworld_commonsense.py")
  with pytest.raises(ConfigError, match=r"config\.data\.path=None"):
    experiment.validate()
  experiment.data.path = "somewhere"
  experiment.validate()
  with pytest.raises(ConfigError, match=r"config\.world\.levels=\(\)"):
    dataclasses.replace(experiment.world, levels=()).validate()


@needs_data
def test_published_games_are_won_by_their_walkthroughs():
  world, tasks = _tasks(_DATA, levels=("easy", "medium", "hard"), test_split="valid")
  assert (len(tasks.train), len(tasks.test)) == (15, 15)
  for one in (*tasks.train, *tasks.test):
    turns = world.solution(one, Setting())
    played = asyncio.run(play_turns(one, turns, world.environment))
    assert played.reward_parts["environment"].value == 1.0, one.metadata["file"]
    assert played.status is Status.OK and len(turns) <= 22


@needs_data
def test_published_games_go_as_in_textworlds_own_engine(tmp_path):
  """Commands, states and scores along random walks; needs ``pip install textworld``."""
  engine = pytest.importorskip("textworld.generator.game")
  wording = pytest.importorskip("textworld.generator.inform7")
  with tarfile.open(next(_DATA.glob("*.tar.xz"))) as archive:
    archive.extractall(tmp_path, filter="data")
  for file in sorted(tmp_path.glob("*/*/*.json"))[::5]:
    ours, theirs = read_game(json.loads(file.read_text())), engine.Game.load(str(file))
    progress, words = engine.GameProgression(theirs), wording.Inform7Game(theirs)
    facts, done, draw = ours.facts, set(), random.Random(0)
    for _ in range(20):
      known = list(progress.valid_actions)
      by_command = dict(zip(words.gen_commands_from_actions(known), known, strict=True))
      actions = ours.actions(facts)
      assert set(by_command) == set(actions)
      command = draw.choice(sorted(actions))
      progress.update(by_command[command])
      facts = apply(actions[command], facts)
      done |= {i for i, q in enumerate(ours.quests) if any(e <= facts for e in q.events)}
      assert progress.score == sum(ours.quests[i].reward for i in done)
      if progress.completed:
        break


def test_a_turn_is_an_assistants_message(task):
  assert task.demonstration == (Message("assistant", "<answer>take apple</answer>"),)
