"""Negotiation: two views, offers in turn, rewards for each agent, a run against a frozen self."""

import asyncio
import dataclasses
import pathlib

import pytest

from agentjax.config import Table
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.rollout.seat_config import SnapshotSeat
from agentjax.training import Experiment, OptimizerConfig, Run, SupervisedStage, load_experiment
from agentjax.training.journal import JournalReader
from agentjax.trajectory.packing import to_sequences
from agentjax.trajectory.record import Message, Status, Task
from agentjax.trajectory.seats import learning_views
from agentjax.worlds.negotiation.game import WORTH, Negotiation, NegotiationConfig, introduce
from tests.training.smoke import quiet
from tests.training.stages import staged_experiment
from tests.worlds.games import begin, say

_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
_PLACE = {"split": "train", "seed": 0, "first_id": 0}


def _task(offer=None):
  """Two books, one hat, three balls; worth 1, 2, 2 to the first and 4, 2, 0 to the second."""
  known = {"counts": [2, 1, 3], "values": [[1, 2, 2], [4, 2, 0]], "offer": offer}
  prompt = (Message("user", introduce(NegotiationConfig(), known, 0)),)
  return Task(0, prompt, "", "negotiation", metadata=known)


def _move(game, text):
  return say(game, f"Hello. <answer>{text}</answer>")


def test_each_sees_its_own_values_and_what_an_offer_is_worth_to_it():
  game = Negotiation(NegotiationConfig())
  first = asyncio.run(game.reset(_task(), 0))
  assert first.next == "first" and "2 books worth 1 each" in first.messages[0].content
  (rules,) = first.others["second"]
  assert "2 books worth 4 each, 1 hats worth 2 each, 3 balls worth 0 each" in rules.content
  assert "worth 4" not in first.messages[0].content
  answer = _move(game, "offer 0 1 3").observation
  assert answer.next == "second"
  assert answer.messages[0].content.splitlines() == [
    "They say: Hello.", "They offer you 2 books, 0 hats, 0 balls: worth 8 to you.",
    "You have 3 turns left.",
  ]  # fmt: skip


def test_a_deal_pays_each_the_worth_of_its_share():
  game = begin(Negotiation(NegotiationConfig()), _task())
  assert _move(game, "offer 2 1 3").reward.value == 0
  _move(game, "offer 2 0 0")
  end = _move(game, "accept")
  assert end.terminated and (end.reward.value, end.rewards["second"].value) == (0.8, 0.8)
  opened = begin(Negotiation(NegotiationConfig()), _task(offer=[2, 1, 0]))
  end = _move(opened, "accept")
  assert (end.reward.value, end.rewards["second"].value) == (0.6, 1.0)


@pytest.mark.parametrize("moves", [["leave"], ["offer 0 0 0"] * 6, ["offer 0 0 0", "leave"]])
def test_without_a_deal_both_get_nothing(moves):
  game = begin(Negotiation(NegotiationConfig()), _task())
  for move in moves:
    end = _move(game, move)
  assert end.terminated and end.status is Status.OK
  assert end.reward.value == 0 and [r.value for r in end.rewards.values()] == [0]


@pytest.mark.parametrize(
  "move", ["accept", "offer 3 0 0", "offer 1 1", "offer 1 1 1 1", "Accept!", "offer 99999 0 0"]
)
def test_what_cannot_be_read_costs_its_author_and_never_the_other(move):
  game = begin(Negotiation(NegotiationConfig()), _task())
  end = _move(game, move)
  assert end.terminated and end.reward.value == -0.5 and end.rewards["second"].value == 0
  cut = say(begin(Negotiation(NegotiationConfig()), _task()), "<answer>leave", truncated=True)
  assert cut.truncated and cut.status is Status.TRUNCATED and cut.reward.value == -0.5


def test_words_are_cut_and_can_be_written_in_any_encoding():
  game = begin(Negotiation(NegotiationConfig(words=4)), _task())
  step = say(game, "ab\ud800cdef<answer>offer 0 0 0</answer>")
  assert step.observation.messages[0].content.startswith("They say: ab?c\n")


def test_tasks_are_worth_the_same_in_all_and_a_snapshot_goes_on():
  config = NegotiationConfig()
  tasks = config.make_tasks(20, **_PLACE)
  assert tasks == config.make_tasks(20, **_PLACE)
  for task in tasks:
    for values in task.metadata["values"]:
      assert sum(n * v for n, v in zip(task.metadata["counts"], values, strict=True)) == WORTH
  assert {task.metadata["offer"] is None for task in tasks} == {True, False}
  game = begin(Negotiation(config), tasks[0])
  _move(game, "offer 1 0 0")
  twin = Negotiation(config)
  asyncio.run(twin.resume(tasks[0], 9, game.snapshot()))
  for move in ("offer 0 1 0", "accept"):
    assert _move(game, move) == _move(twin, move)


def test_the_config_gives_one_seat_to_a_frozen_self():
  experiment = load_experiment(_CONFIGS / "self_play_negotiation.py")
  experiment.validate()
  again = Experiment.from_dict(experiment.to_dict())
  assert isinstance(again.world, NegotiationConfig) and again.seats == experiment.seats


def test_a_run_against_a_frozen_self_trains_its_own_tokens_once_and_replays(tmp_path):
  experiment = staged_experiment(ScheduleConfig())
  experiment.world = NegotiationConfig(rounds=2, words=0)
  experiment.data = dataclasses.replace(experiment.data, source=None, train_size=8, test_size=2)
  experiment.seats = Table({"second": SnapshotSeat(every=1)})
  experiment.reward.parts = ("environment",)
  experiment.tools.names = ()
  experiment.evaluation.success_part = "environment"
  experiment.supervised = SupervisedStage(steps=0)
  experiment.rollout = dataclasses.replace(
    experiment.rollout, group_size=4, max_turns=2, max_total_tokens=448, rotate_seats="sample"
  )
  experiment.engine.max_length = 448
  experiment.rl = dataclasses.replace(
    experiment.rl,
    steps=2,
    row_length=512,
    microbatch_rows=2,
    optimizer=OptimizerConfig(learning_rate=1e-2),
  )
  run = Run(experiment, tmp_path / "run", console=quiet())
  assert run.train().finished
  found = JournalReader(tmp_path / "run" / "journal.log").trajectories(lambda address: True)
  episodes = list(found.values())
  for one in episodes:  # the policy plays each role in half of them
    assert [o.learns for o in one.agents.values()] == [one.sample % 2 == 0, one.sample % 2 == 1]
  sequences = to_sequences(learning_views(episodes))
  drawn = sum(int(s.sampled.sum()) for t in episodes for s in t.segments if s.policy == "policy")
  assert sum(int((s.weights > 0).sum()) for s in sequences) == drawn
  assert run.replay(2).identical
