"""A team at work: order, failures, time, cancelling, and death at every write of its file."""

import asyncio
import json

import pytest

from agentjax.config import ConfigError
from agentjax.recipes.semaclaw import scheduler
from agentjax.recipes.semaclaw.graph import Board, GraphError, Roster, TaskSpec
from agentjax.recipes.semaclaw.scheduler import Scheduler

ROSTER = Roster({"ann": "reads", "bob": "writes"})
DIAMOND = (
  TaskSpec("top", "ann", "begin"),
  TaskSpec("left", "ann", "one half", ("top",)),
  TaskSpec("right", "bob", "other half", ("top",)),
  TaskSpec("end", "bob", "join", ("left", "right")),
)


class Team:
  """Agents that note what they do; one that is asked twice at once is an error of the test."""

  def __init__(self, **answers):
    self.answers, self.log, self.busy = answers, [], set()

  async def __call__(self, task, prompt):
    assert task.agent not in self.busy, f"{task.agent} was asked twice at once"
    self.busy.add(task.agent)
    try:
      self.log.append(task.label)
      await asyncio.sleep(0.001)
      answer = self.answers.get(task.label, f"did {task.label}")
      if isinstance(answer, BaseException):
        raise answer
      if callable(answer):
        return await answer(prompt)
      return answer
    finally:
      self.busy.discard(task.agent)


def play(team, specs=DIAMOND, path=None, **settings):
  async def main():
    async with Scheduler(Board(ROSTER), team, path) as running:
      parent = running.add("lead", "goal", specs, **settings)
      return await running.wait(parent.id)

  return {task.label: (task.status, task.result) for task in asyncio.run(main())}


def test_a_diamond_runs_in_order_with_results_handed_on():
  seen = []

  async def join(prompt):
    seen.append(prompt)
    return "joined"

  team = Team(end=join)
  assert play(team)["end"] == ("done", "joined")
  assert (
    team.log[0] == "top"
    and team.log[-1] == "end"
    and sorted(team.log) == sorted(spec.label for spec in DIAMOND)
  )
  assert "result: did left" in seen[0] and "result: did right" in seen[0]


def test_a_task_that_raises_ends_with_its_error_and_the_rest_goes_on():
  found = play(Team(left=RuntimeError("broken"), right=TimeoutError("its own")))
  assert found["left"] == ("error", "RuntimeError: broken")
  assert found["right"] == ("error", "TimeoutError: its own")
  assert found["end"] == ("done", "did end")


def test_a_slow_task_times_out():
  async def slow(prompt):
    await asyncio.sleep(60)

  found = play(Team(top=slow), timeout=0.05)
  assert found["top"] == ("timeout", "not done within 0.05 s") and found["end"][0] == "done"


def test_two_admins_never_have_one_agent_at_once():
  async def main():
    async with Scheduler(Board(ROSTER), Team()) as running:
      parents = [running.add(who, "goal", DIAMOND) for who in ("lead", "other")]
      return [await running.wait(parent.id) for parent in parents]

  assert all(task.status == "done" for tasks in asyncio.run(main()) for task in tasks)


def test_a_cancelled_task_cleans_up_before_its_agent_is_asked_again():
  async def stubborn(prompt):
    try:
      await asyncio.sleep(60)
    finally:
      await asyncio.sleep(0.02)  # Team.busy still holds the agent

  async def main():
    async with Scheduler(Board(ROSTER), Team(first=stubborn)) as running:
      first = running.add("lead", "goal", [TaskSpec("first", "ann", "p")])
      second = running.add("other", "goal", [TaskSpec("second", "ann", "p")])
      await asyncio.sleep(0.01)
      await running.cancel("lead")
      (cancelled,) = await running.wait(first.id, "first")
      (done,) = await running.wait(second.id)
      return cancelled.result, done.result

  assert asyncio.run(main()) == ("cancelled", "did second")


def test_an_agent_whose_task_is_cancelled_before_its_first_step_gets_work_again():
  async def main():
    team = Team()
    async with Scheduler(Board(ROSTER), team) as running:
      waiting = running.add("other", "goal", [TaskSpec("one", "ann", "p")])
      await running.cancel("other")
      first = running.add("lead", "goal", [TaskSpec("two", "ann", "p")])
      async with asyncio.timeout(10):
        (two,) = await running.wait(first.id)
      return waiting.tasks["one"].result, two.result, team.log

  assert asyncio.run(main()) == ("cancelled", "did two", ["two"])


def test_a_task_that_waits_for_an_agent_starts_when_its_task_is_cancelled_at_once():
  async def main():
    async with Scheduler(Board(ROSTER), Team()) as running:
      running.add("lead", "goal", [TaskSpec("one", "ann", "p")])
      waiting = running.add("other", "goal", [TaskSpec("two", "ann", "p")])
      await running.cancel("lead")
      async with asyncio.timeout(10):
        (two,) = await running.wait(waiting.id)
      return two.result

  assert asyncio.run(main()) == "did two"


def test_a_paused_admin_starts_nothing():
  async def main():
    team = Team()
    async with Scheduler(Board(ROSTER), team) as running:
      running.pause("lead")
      parent = running.add("lead", "goal", DIAMOND)
      await asyncio.sleep(0.01)
      assert team.log == []
      running.resume("lead")
      await running.wait(parent.id)
      with pytest.raises(GraphError, match="no parent"):
        await running.wait("p-1")
    return team.log

  assert asyncio.run(main())[0] == "top"


class Killed(KeyboardInterrupt):
  """The process ends here; of a kind that asyncio lets through at once."""


def _dying(monkeypatch, at, before):
  """Writes count up over all processes; number ``at`` kills, before or after the file is there."""
  written, real = [], scheduler.write_atomically

  def write(path, data):
    written.append(data)
    if len(written) == at and before:
      raise Killed
    real(path, data)
    if len(written) == at:
      raise Killed

  monkeypatch.setattr(scheduler, "write_atomically", write)
  return written


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("at", range(2, 11))
def test_killed_at_any_write_the_team_goes_on_to_the_same_end(at, before, tmp_path, monkeypatch):
  path, runs = tmp_path / "board.json", []
  written = _dying(monkeypatch, at, before)

  async def life():
    team = Team()
    try:
      async with Scheduler(Board(ROSTER), team, path) as running:
        if not running.board.parents:
          running.add("lead", "goal", DIAMOND)
        await asyncio.wait_for(running.wait(next(iter(running.board.parents))), 60)
    finally:
      runs.append(team.log)

  for _ in range(3):
    try:
      asyncio.run(life())
    except Killed:
      continue
    break
  board = json.loads(path.read_text())
  (parent,) = board["parents"]
  assert parent["status"] == "done" and len(runs) == 2 and len(written) >= at
  assert {t["label"]: t["result"] for t in parent["tasks"]} == {
    spec.label: f"did {spec.label}" for spec in DIAMOND
  }
  twice = [label for label in runs[0] if label in runs[1]]
  assert len(twice) <= 2  # only what was at work: one task of each agent
  assert sum(t["attempts"] for t in parent["tasks"]) <= 6


def test_a_second_process_is_refused(tmp_path):
  path = tmp_path / "board.json"

  async def twice():
    async with Scheduler(Board(ROSTER), Team(), path):
      async with Scheduler(Board(ROSTER), Team(), path):
        raise AssertionError("two schedulers hold one board")

  with pytest.raises(ConfigError, match="in use by another process"):
    asyncio.run(twice())


def _board_json():
  board = Board(ROSTER)
  board.add("lead", "goal", DIAMOND, now=0.0)
  return board.to_json()


def _damaged(**changes):
  return {**_board_json(), **changes}


def _damaged_parent(**changes):
  (parent,) = _board_json()["parents"]
  return _damaged(parents=[{**parent, **changes}])


def _damaged_task(**changes):
  first, *others = _board_json()["parents"][0]["tasks"]
  return _damaged_parent(tasks=[{**first, **changes}, *others])


@pytest.mark.parametrize(
  "value",
  [
    "",
    "[" * 100_000,
    b"\xff",
    None,
    7,
    [],
    {},
    {"format": 9},
    _damaged(parents=None),
    _damaged(parents={"a": 1}),
    _damaged(parents=[[]]),
    _damaged(parents=_board_json()["parents"] * 2),
    _damaged(number="x"),
    _damaged(number=None),
    _damaged(paused=7),
    _damaged(paused=[[]]),
    _damaged_parent(tasks=None),
    _damaged_parent(tasks=["x"]),
    _damaged_parent(status="lost"),
    _damaged_parent(status=[]),
    _damaged_parent(timeout="long"),
    _damaged_parent(timeout=True),
    _damaged_parent(more=1),
    _damaged_task(agent=None),
    _damaged_task(attempts="2"),
    _damaged_task(status=None),
    _damaged_task(depends_on="ab"),
    _damaged_task(depends_on=["nobody"]),
    _damaged_task(depends_on=["end"]),
    _damaged_task(label="end"),
    _damaged_task(parent="p-1"),
  ],
)
def test_a_damaged_board_is_refused_by_name_and_stays_as_it_is(tmp_path, value):
  path = tmp_path / "board.json"
  text = value if isinstance(value, str | bytes) else json.dumps(value)
  before = text if isinstance(text, bytes) else text.encode()
  path.write_bytes(before)

  async def main():
    async with Scheduler(Board(ROSTER), Team(), path):
      raise AssertionError("it is no board")

  with pytest.raises(ConfigError, match=r"board.json is no board of a team: .* remove it"):
    asyncio.run(main())
  assert path.read_bytes() == before
