"""OpenSpiel's games: seats in turn, rewards for each, hidden hands, exact snapshots."""

import asyncio
import dataclasses
import pathlib
import sys

import pytest

from agentjax.config import ConfigError, Table
from agentjax.data import DataConfig
from agentjax.rollout.integrity import play_turns
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.rollout.seat_config import SnapshotSeat
from agentjax.training import Experiment, OptimizerConfig, Run, SupervisedStage, load_experiment
from agentjax.training.journal import JournalReader
from agentjax.trajectory.record import Status
from agentjax.trajectory.seats import learning_views
from agentjax.world.cheats import Setting
from agentjax.worlds.open_spiel import game as module
from agentjax.worlds.open_spiel.game import AGENTS, OpenSpiel, OpenSpielConfig, TwoPlayerGame
from tests.training.smoke import quiet
from tests.training.stages import fingerprints, staged_experiment, train_until_killed
from tests.worlds.games import begin, say

_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"

pyspiel = pytest.importorskip("pyspiel", reason="the games are OpenSpiel's: agentjax[games]")


def _world(count=2, **settings):
  config = OpenSpielConfig(**settings)
  config.validate()
  world = OpenSpiel(config)
  return world, world.tasks(DataConfig(train_size=count, test_size=1))


def _move(environment, text):
  return say(environment, f"<answer>{text}</answer>")


def test_players_take_turns_and_each_gets_its_own_reward():
  world, tasks = _world()
  environment = TwoPlayerGame(world.config)
  first = asyncio.run(environment.reset(tasks.train[0], 0))
  assert first.next == "player_1" and first.messages == tasks.train[0].prompt
  assert (
    first.messages[0].content.splitlines()[0].startswith("You play Tic Tac Toe as player 1 of 2.")
  )
  second = _move(environment, "x(0,0)")
  assert second.observation.next == "player_2" and second.reward.value == 0
  shown = second.observation.messages[0].content.splitlines()
  assert shown[0].startswith("You play Tic Tac Toe as player 2 of 2.")
  assert shown[1:4] == ["x..", "...", "..."]
  assert shown[4] == "Moves: " + " | ".join(
    f"o({r},{c})" for r in range(3) for c in range(3) if (r, c) != (0, 0)
  )
  again = _move(environment, "o(1,0)").observation
  assert again.next == "player_1" and again.messages[0].content.startswith("x..\no..\n...\nMoves:")
  _move(environment, "x(0,1)")
  _move(environment, "o(1,1)")
  last = _move(environment, " x(0,2) ")
  assert last.terminated and last.status is Status.OK
  assert last.reward.value == 1.0 and last.rewards["player_2"].value == -1.0


@pytest.mark.parametrize(
  "text", ["x(0,0)", "<answer>x(0,0) x(0,1)</answer>", "<answer>o(0,0)</answer>"]
)
def test_what_is_no_legal_move_loses_and_the_other_gains_nothing(text):
  world, tasks = _world()
  step = say(begin(TwoPlayerGame(world.config), tasks.train[0]), text)
  assert step.terminated and step.reward.value == -1.0 and step.rewards["player_2"].value == 0.0
  cut = say(begin(TwoPlayerGame(world.config), tasks.train[0]), text, truncated=True)
  assert cut.truncated and cut.status is Status.TRUNCATED and cut.reward.value == -1.0
  assert begin(TwoPlayerGame(world.config), tasks.train[0]).least_return == -1.0


def test_a_hand_is_shown_to_its_player_alone_and_drawn_from_the_key():
  world, tasks = _world(game="kuhn_poker")
  hands = set()
  for key in range(12):
    environment = TwoPlayerGame(world.config)
    first = asyncio.run(environment.reset(tasks.train[0], key))
    second = _move(environment, "Bet").observation
    shown = [o.messages[0].content.splitlines()[1] for o in (first, second)]
    assert shown[0] in ("0", "1", "2") and shown[1][0] in ("0", "1", "2")
    assert shown[1] == f"{shown[1][0]}b" and shown[0] != shown[1][0]
    hands.add((shown[0], shown[1][0]))
  assert len(hands) > 3
  ended = _move(environment, "Pass")
  assert (ended.reward.value, ended.rewards["player_1"].value) == (-1.0, 1.0)


def test_a_branch_goes_on_exactly_where_the_snapshot_was_taken():
  """Leduc poker calls chance again after the snapshot."""
  world, tasks = _world(game="leduc_poker")
  boards = set()
  for key in range(6):
    first = begin(TwoPlayerGame(world.config), tasks.train[0], key)
    _move(first, "Call")
    state = first.snapshot()
    second = TwoPlayerGame(world.config)
    asyncio.run(second.resume(tasks.train[0], 99, state))
    assert second.snapshot() == state
    for move in ("Call", "Call", "Raise"):
      one = _move(first, move)
      assert one == _move(second, move)
      boards.add(one.observation.messages[0].content)
    assert first.snapshot() == second.snapshot()
  assert len(boards) > 6


def test_openings_make_tasks_differ_and_both_players_begin():
  _, tasks = _world(count=12, opening_moves=3)
  assert len({task.prompt for task in tasks.train}) > 6
  begins = set()
  for task in (*tasks.train, *tasks.test):
    text = task.prompt[0].content
    board = "".join(text.splitlines()[1:4])
    ahead = board.count("x") - board.count("o")
    assert f"as player {1 + ahead} of 2" in text and len(board.strip(".")) <= 9
    begins.add(ahead)
  assert begins == {0, 1}
  assert _world(count=12, opening_moves=3)[1].train == tasks.train


@pytest.mark.parametrize("game", ["tic_tac_toe", "connect_four", "kuhn_poker"])
def test_a_won_game_is_paid_in_full_and_cheats_earn_nothing(game):
  world, tasks = _world(game=game)
  task = tasks.train[0]
  right = asyncio.run(play_turns(task, world.solution(task, Setting()), world.environment))
  assert right.reward_parts["environment"].value >= 1
  for name, turns in world.cheats(task, Setting()).items():
    played = asyncio.run(play_turns(task, turns, world.environment))
    assert played.reward_parts["environment"].value <= 0, name


@pytest.mark.parametrize(
  "game, named",
  [
    ("nowhere", "allowed: .*tic_tac_toe"),
    ("matrix_rps", "2 players who move at once"),
    ("hearts", "4 players"),
    ("tic_tac_toe(x=1)", "parameters"),
  ],
)
def test_games_that_are_not_for_two_in_turn_are_refused_by_name(game, named):
  with pytest.raises(ConfigError, match=rf"(?s)config\.world\.game='{game.split('(')[0]}.*{named}"):
    _world(game=game)


def test_without_openspiel_the_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "pyspiel", None)
  with pytest.raises(ConfigError, match=r"agentjax\[games\]"):
    module.load_game("tic_tac_toe")


def _self_play(directory, steps=4):
  experiment = staged_experiment(ScheduleConfig())
  experiment.world = OpenSpielConfig(game="kuhn_poker", opening_moves=1, tags=False)
  experiment.seats = Table({"player_2": SnapshotSeat(every=2)})
  experiment.rollout.rotate_seats = "sample"
  experiment.data = DataConfig(train_size=16, test_size=2)
  experiment.model = dataclasses.replace(experiment.model, d_model=32)
  lengths = {"max_length": 160, "extend_buckets": (128,)}
  experiment.engine = dataclasses.replace(experiment.engine, **lengths)
  experiment.rollout.max_total_tokens = experiment.rl.row_length = 160
  # The warm start shows that a move is "Pass" or "Bet".
  experiment.supervised = SupervisedStage(
    steps=80,
    tasks_per_step=16,
    row_length=160,
    microbatch_rows=8,
    optimizer=OptimizerConfig(learning_rate=1e-2, schedule="cosine"),
  )
  experiment.rl.steps = steps
  experiment.checkpoint.every = 2
  return Run(experiment, directory, console=quiet())


@pytest.mark.slow
def test_the_policy_plays_a_frozen_copy_and_a_killed_run_goes_on_with_the_same_bits(tmp_path):
  assert _self_play(tmp_path / "straight").train().finished
  found = JournalReader(tmp_path / "straight" / "journal.log").trajectories(lambda _: True)
  episodes = [found[address] for address in sorted(found)]
  finished = [e for e in episodes if len({s.agent for s in e.segments if s.sampled.any()}) == 2]
  assert len(finished) > len(episodes) / 4
  learnt = set()
  for episode in finished:
    first, second = (episode.agents[name].parts["environment"].value for name in AGENTS)
    if first + second == 0:  # nobody slipped: what one wins the other loses
      assert abs(first) in (1, 2)
    (view,) = learning_views([episode])  # the frozen seat is nobody's to learn from
    assert {s.policy for s in view.segments} == {"policy"}
    assert view.group.endswith(AGENTS[episode.sample % 2])
    learnt.add(view.group[-len(AGENTS[0]) :])
    frozen = [s for s in episode.segments if s.sampled.any() and s.policy != "policy"]
    assert frozen and not any(s.weights.any() for s in frozen)
  assert learnt == set(AGENTS)
  train_until_killed(_self_play(tmp_path / "cut"), 84)
  assert _self_play(tmp_path / "cut").train().finished
  assert fingerprints(tmp_path / "cut") == fingerprints(tmp_path / "straight")
  assert _self_play(tmp_path / "cut").replay(84).identical


@pytest.mark.parametrize("name", ["self_play_kuhn_poker", "self_play_two"])
def test_the_config_is_valid(name):
  experiment = load_experiment(_CONFIGS / f"{name}.py")
  experiment.validate()
  assert Experiment.from_dict(experiment.to_dict()).seats == experiment.seats
