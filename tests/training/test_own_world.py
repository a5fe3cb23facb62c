"""A world that lies outside the package is trained by ``module:attribute``, with all it brings."""

import asyncio
import json

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.data import TaskSplits
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.training import Experiment, Run, load_experiment
from agentjax.training.build import Extensions, build_parts
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.journal import JournalReader
from agentjax.training.reward_gates import check_experiment
from agentjax.trajectory.record import Message, Task
from agentjax.world import World
from agentjax.world.environment import Observation
from agentjax.world.world import WorldConfig
from tests.training.smoke import quiet
from tests.training.stages import Digits, fingerprints, staged_experiment, train_until_killed

NAME = f"{__name__}:Remembering"


class Reminded(Digits):
  """Tells the policy at the start what its world has learnt."""

  def __init__(self, memory):
    self._memory = memory

  async def reset(self, task, key):
    await super().reset(task, key)
    return Observation((Message("user", f"Task {task.id} after {self._memory}."),))


class Remembering(World):
  """Counts even bytes of all that was ever drawn, in the order of addresses."""

  started: list = []  # by event loop: one start a run
  seen: list = []

  def __init__(self):
    self.memory = 0
    self.scorers = {"length": lambda trajectory, task: float(len(trajectory.answer or "") > 0)}
    self.group_scorers = {"first": lambda members, task: [float(m.sample == 0) for m in members]}

  async def start(self, site):
    self.started.append(site.folder)

  def tasks(self, data):
    def made(count, first):
      return [Task(first + i, (), "", "digits") for i in range(count)]

    return TaskSplits(made(data.train_size, 0), made(data.test_size, FIRST_TEST_ID))

  def environment(self, task):
    return Reminded(self.memory)

  def cheats(self, task, setting):
    return {"odd": (Message("assistant", "1111"),) * 2}

  def solution(self, task, setting):
    return (Message("assistant", "2222"),) * 2

  async def learn(self, finished):
    self.seen.append([t.address for t in finished])
    for trajectory in finished:  # an order of its own shows in the sum
      drawn = np.concatenate([s.token_ids[s.sampled] for s in trajectory.segments])
      self.memory = (31 * self.memory + int(np.sum(drawn % 2 == 0))) % 997

  def get_state(self):
    return json.dumps(self.memory).encode()

  def set_state(self, state):
    self.memory = json.loads(state)


def experiment(**changes) -> Experiment:
  made = staged_experiment(ScheduleConfig(), **changes)
  made.world = WorldConfig.from_name(NAME, "config.world")
  made.data.train_size, made.data.test_size = 6, 2
  made.reward.parts = ("environment", "length", "first")
  made.reward.weights = (1.0, 0.0, 0.1)
  made.checkpoint = CheckpointConfig(every=2)
  made.rl.steps = 5
  return made


@pytest.mark.slow
def test_it_is_trained_and_goes_on_with_what_it_has_learnt(tmp_path):
  Remembering.seen.clear(), Remembering.started.clear()
  assert Run(experiment(), tmp_path / "straight", console=quiet()).train().finished
  straight = list(Remembering.seen)
  assert Remembering.started == [tmp_path / "straight" / "world"]
  assert len(straight) == 5 and all(step == sorted(step) and len(step) == 8 for step in straight)
  episodes = JournalReader(tmp_path / "straight" / "journal.log").trajectories(lambda _: True)
  assert {tuple(sorted(t.reward_parts)) for t in episodes.values()} == {
    ("environment", "first", "length")
  }

  Remembering.seen.clear()
  train_until_killed(Run(experiment(), tmp_path / "killed", console=quiet()), step=4)
  saved = load_experiment(tmp_path / "killed" / "config.json")
  assert saved == experiment() and saved.world.chosen == NAME
  Run(saved, tmp_path / "killed", console=quiet()).train()
  # Step 3 is done again from the checkpoint of step 2, with the memory of that step.
  assert Remembering.seen == [*straight[:4], *straight[2:]]
  assert fingerprints(tmp_path / "killed") == fingerprints(tmp_path / "straight")
  assert Run(saved, tmp_path / "killed", console=quiet()).replay(5).identical


def test_with_environments_of_another_it_still_learns_and_keeps_its_state(tmp_path):
  given = Extensions(make_environment=lambda task: Digits())
  made = experiment()
  made.rl.steps, made.checkpoint = 2, CheckpointConfig(every=1)
  Remembering.seen.clear()
  assert Run(made, tmp_path / "run", extensions=given, console=quiet()).train().finished
  assert len(Remembering.seen) == 2
  world = build_parts(made, tmp_path / "again", given).world
  before = world.get_state()
  world.set_state(b"5")
  assert (before, world.get_state()) == (b"0", b"5")


def test_gates_play_its_cheats_and_its_solution():
  results = asyncio.run(check_experiment(experiment(), tasks=1))
  assert {r.attempt for r in results} == {"reference", "empty", "odd"}
  first_pays = [r for r in results if not r.held]  # "first" pays form alone: 0.1 for any answer
  assert {r.attempt for r in first_pays} == {"empty", "odd"}
  made = experiment()
  made.reward.weights = (1.0, 0.0, 0.0)
  assert all(r.held for r in asyncio.run(check_experiment(made, tasks=1)))


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("tests.no_such:world", "config.world='tests.no_such:world': there is no module"),
    (f"{__name__}:NAME", "is str; allowed: a World, or a function of a task"),
    ("agentjax.worlds.sql.tool:SqlConfig", "is SqlConfig; allowed: 'bandit', 'code'"),
    ("chess", "config.world='chess'; allowed: 'bandit', 'code'"),
  ],
)
def test_what_is_no_world_is_refused(name, message):
  with pytest.raises(ConfigError) as error:
    WorldConfig.from_name(name, "config.world")
  assert message in str(error.value)


@pytest.mark.parametrize(
  ("method", "outcome", "message"),
  [
    ("__init__", OSError("disk"), "' raised OSError: disk"),
    ("__init__", SystemExit(3), "' raised SystemExit: 3"),
    ("tasks", KeyError("x"), "' raised KeyError: 'x'"),
    ("tasks", 3, "' is int; allowed: one whose tasks are TaskSplits"),
  ],
)
def test_a_world_that_raises_is_named(method, outcome, message):
  class Broken(World):
    pass

  def breaks(self, *_):
    if isinstance(outcome, BaseException):
      raise outcome
    return outcome

  setattr(Broken, method, breaks)
  made = experiment()
  made.world.found = Broken
  with pytest.raises(ConfigError) as caught:
    build_parts(made.freeze(), None, Extensions())
  assert str(caught.value).startswith("config.world='") and message in str(caught.value)


def test_a_world_without_tasks_asks_for_a_source():
  class Bare(World):
    pass

  made = experiment()
  made.world.found = Bare
  with pytest.raises(ConfigError, match=r"config\.data\.source=None; .*Bare has none"):
    build_parts(made.freeze(), None, Extensions())
