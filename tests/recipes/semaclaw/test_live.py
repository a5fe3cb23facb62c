"""A team that works: its answer, its conversations, permissions, and a process that dies."""

import asyncio
import pathlib

import pytest

from agentjax.config import ConfigError
from agentjax.recipes.semaclaw import AccessConfig, scheduler
from agentjax.recipes.semaclaw.live import EPISODES, LiveTeam, TaskFailedError
from agentjax.recipes.semaclaw.scripted import Counter, CounterSeat
from agentjax.rollout.seats import SeatPlayer
from agentjax.training import load_experiment
from agentjax.trajectory.store import read_store
from tests.recipes.semaclaw.test_scheduler import Killed

_CONFIG = pathlib.Path(__file__).parents[3] / "configs" / "semaclaw_team.py"
GOAL = "What is (2 + 3) * (4 + 5)?"


def work(folder, *, goal=GOAL, seat=None, access=None):
  experiment = load_experiment(_CONFIG)
  if access is not None:
    experiment.world.access = access
  team = LiveTeam(experiment, {"": seat or CounterSeat()}, folder)

  async def main():
    async with team:
      return await team.pursue(goal)

  return asyncio.run(main()), team


def test_a_team_reaches_its_goal_and_keeps_what_was_said(tmp_path):
  answer, team = work(tmp_path)
  assert answer == "It is 45."
  results = {task.label: (task.agent, task.result) for task in team.scheduler.board.tasks}
  assert results == {
    "left": ("counter", "It is 5."),
    "right": ("counter", "It is 9."),
    "join": ("checker", "It is 45."),
  }
  kept = list(read_store(tmp_path / EPISODES))
  assert sorted(t.source for t in kept) == ["checker", "counter", "counter", "orchestrator"]
  assert all(t.answer.startswith("It is") and not t.reward.valid for t in kept)


def test_a_team_whose_process_dies_goes_on(tmp_path, monkeypatch):
  written, real = [], scheduler.write_atomically

  def write(path, data):
    real(path, data)
    written.append(data)
    if len(written) == 5:  # empty, parent, left begins, left ends, right begins
      raise Killed

  monkeypatch.setattr(scheduler, "write_atomically", write)
  with pytest.raises(KeyboardInterrupt):
    work(tmp_path)
  answer, team = work(tmp_path)
  first, second = team.scheduler.board.parents.values()
  assert answer == "It is 45." and first.status == second.status == "done"
  assert [task.attempts for task in first.tasks.values()] == [1, 2, 1]


def test_a_worker_without_permission_says_so_and_the_team_goes_on(tmp_path):
  access = AccessConfig(rules=("ask checker calculator",), otherwise="grant")
  answer, team = work(tmp_path, access=access)
  join = team.scheduler.board.task(next(iter(team.scheduler.board.parents)), "join")
  assert join.status == "done" and "denied" in join.result and "No result" in answer
  (checker,) = [t for t in read_store(tmp_path / EPISODES) if t.source == "checker"]
  assert checker.tools[0].status == "denied"
  assert checker.metadata["guards"][0]["guard"] == "permission checker"


def test_a_worker_whose_model_fails_is_an_error_of_its_task_alone(tmp_path):
  class Failing(Counter):
    async def turn(self, messages, tools, *, key):
      if "You are checker" in messages[0].content:
        raise RuntimeError("no model")
      return await super().turn(messages, tools, key=key)

  class FailingSeat(CounterSeat):
    def play(self, bank, name):
      return SeatPlayer(name, bank.chat, service=Failing())

  answer, team = work(tmp_path, seat=FailingSeat())
  statuses = [task.status for task in team.scheduler.board.tasks]
  assert statuses == ["done", "done", "error"] and "no model" in answer


def test_what_cannot_be_is_refused(tmp_path):
  experiment = load_experiment(_CONFIG)
  with pytest.raises(ConfigError, match=r"allowed: one for each of orchestrator, counter"):
    LiveTeam(experiment, {"eve": CounterSeat()}, tmp_path)
  with pytest.raises(ConfigError, match="in use by another process"):

    async def twice():
      async with LiveTeam(load_experiment(_CONFIG), {"": CounterSeat()}, tmp_path):
        async with LiveTeam(load_experiment(_CONFIG), {"": CounterSeat()}, tmp_path):
          raise AssertionError("two teams hold one folder")

    asyncio.run(twice())
  with pytest.raises(TaskFailedError, match="orchestrator ended with"):
    experiment = load_experiment(_CONFIG)
    experiment.rollout.max_turns = 1

    async def short():
      async with LiveTeam(experiment, {"": CounterSeat()}, tmp_path / "short") as team:
        await team.pursue(GOAL)

    asyncio.run(short())
