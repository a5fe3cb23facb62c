"""Jobs at their times, what they may be, and what a restart makes up for."""

import asyncio
import contextlib
import datetime
import json
import sys
import time
import tracemalloc

import pytest

from agentjax.config import ConfigError
from agentjax.recipes.semaclaw import jobs as jobs_module
from agentjax.recipes.semaclaw.graph import Board, Roster
from agentjax.recipes.semaclaw.jobs import STATE, Job, Schedule, next_time, read_jobs
from agentjax.recipes.semaclaw.live import LiveTeam
from agentjax.recipes.semaclaw.scheduler import Scheduler
from agentjax.recipes.semaclaw.scripted import CounterSeat
from agentjax.training import load_experiment
from tests.recipes.semaclaw.test_live import _CONFIG
from tests.recipes.semaclaw.test_scheduler import Killed


def at(hour, minute, day=1):
  return datetime.datetime(2026, 5, day, hour, minute).timestamp()


def test_a_job_is_due_every_so_often_or_at_its_time_of_day():
  often = Job("a", "notify", every=60.0, text="x")
  assert next_time(often, None, 5.0) == 5.0 and next_time(often, 100.0, 500.0) == 160.0
  daily = Job("b", "notify", at="08:30", text="x")
  assert next_time(daily, at(8, 0), at(9, 0)) == at(8, 30)
  assert next_time(daily, at(8, 30), at(9, 0)) == at(8, 30, day=2)
  assert next_time(daily, at(8, 30), at(9, 0, day=5)) == at(8, 30, day=2)  # once, not four times


@pytest.mark.parametrize(
  ("value", "message"),
  [
    ({}, "missing"),
    ({"name": "a", "mode": "dance", "every": 1}, "mode='dance'"),
    ({"name": "a", "mode": "notify", "every": 1}, "needs text"),
    ({"name": "a", "mode": "script", "every": 1}, "needs command"),
    ({"name": "a", "mode": "agent", "every": 1, "agent": "x"}, "needs prompt"),
    ({"name": "a", "mode": "notify", "text": "x"}, "every > 0"),
    ({"name": "a", "mode": "notify", "text": "x", "at": "25:00"}, "every > 0"),
    ({"name": "a", "mode": "notify", "text": "x", "every": 1, "at": "08:00"}, "every > 0"),
    ({"name": "a", "mode": "notify", "text": "x", "every": -5, "at": "08:00"}, "every > 0"),
    ({"name": "a", "mode": "notify", "text": "x", "every": float("nan"), "at": "08:00"}, "every"),
    ({"name": "a", "mode": "notify", "text": "x", "every": float("nan")}, "every > 0"),
    ({"name": "a", "mode": "notify", "text": "x", "every": float("inf")}, "every > 0"),
    ({"name": "../a", "mode": "notify", "text": "x", "every": 1}, "are texts"),
    ({"name": "a", "mode": "notify", "text": "x", "every": 1, "shell": "rm"}, "an object of"),
    ({"name": "a", "mode": "script", "command": [1], "every": 1}, "are texts"),
    ({"name": "a", "mode": "script", "command": "df -h", "every": 1}, "a list of texts"),
    ({"name": "a", "mode": "script", "command": {"df": 1}, "every": 1}, "a list of texts"),
    ({"name": "a", "mode": "notify", "text": "x", "every": "often"}, "could not convert"),
  ],
)
def test_what_is_no_job_is_refused(tmp_path, value, message):
  path = tmp_path / "jobs.json"
  path.write_text(json.dumps([value]))
  with pytest.raises(ConfigError, match=message):
    read_jobs(path)


def run_timed(*words):
  """(what a command came to, seconds)."""
  begun = time.monotonic()
  done, said = asyncio.run(jobs_module.run_command(words))
  assert done != said.startswith("failed: ")
  return said, time.monotonic() - begun


@pytest.mark.parametrize(
  ("script", "said"),
  [
    (
      "sleep 60; echo x",
      "failed: not done within 0.5 s",
    ),  # the shell waits for a child, which holds the pipe
    ("sleep 60 & echo begun", "begun"),
    ("setsid sleep 5 & echo begun", "begun"),  # in a session of its own
  ],
)
def test_no_child_of_a_command_holds_the_schedule(monkeypatch, script, said):
  monkeypatch.setattr(jobs_module, "_SCRIPT_SECONDS", 0.5)
  found, seconds = run_timed("sh", "-c", script)
  assert found == said and seconds < 4


@pytest.mark.parametrize(
  ("script", "said"),
  [
    ("echo out; echo bad >&2; exit 3", "failed: exit status 3\nbad\nout"),
    ("echo bad >&2; kill -9 $$", "failed: killed by SIGKILL\nbad"),
    ("kill -34 $$", "failed: killed by SIGRTMIN"),
    ("echo bad >&2; sleep 60", "failed: not done within 0.5 s\nbad"),
    ("echo note >&2; echo out", "out\nnote"),
    ("yes x | head -n 99999; seq 30000 >&2; echo last >&2; exit 1", None),
  ],
)
def test_a_command_that_fails_says_how_and_its_last_errors(monkeypatch, script, said):
  monkeypatch.setattr(jobs_module, "_SCRIPT_SECONDS", 0.5 if "sleep" in script else 60)
  found, _ = run_timed("sh", "-c", script)
  if said is not None:
    assert found == said
    return
  first, *lines = found.splitlines()
  assert first == "failed: exit status 1" and len(found) < 11_000
  assert lines[: lines.index("x")][-2:] == ["30000", "last"]


def test_children_of_a_command_end_with_it(monkeypatch, tmp_path):
  monkeypatch.setattr(jobs_module, "_SCRIPT_SECONDS", 0.5)
  for script in ("(sleep 1; touch late); :", "(sleep 1; touch late) & :"):
    run_timed("sh", "-c", f"cd {tmp_path}; {script}")
  time.sleep(1.2)
  assert not (tmp_path / "late").exists()


def test_only_the_beginning_of_a_long_output_is_kept():
  tracemalloc.start()
  said, _ = run_timed("head", "-c", "30000000", "/dev/zero")
  most = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert said == "\0" * 8000 and most < 4e6  # bytes
  said, _ = run_timed(sys.executable, "-c", "print('é🙂' * 9000)")
  assert said == "é🙂" * 4000


def test_a_number_of_seconds_may_be_written_as_a_text(tmp_path):
  path = tmp_path / "jobs.json"
  path.write_text(json.dumps([{"name": "a", "mode": "notify", "text": "x", "every": "60"}]))
  (job,) = read_jobs(path)
  assert next_time(job, 100.0, 500.0) == 160.0


JOBS = (
  Job("tell", "notify", every=10.0, text="hello"),
  Job("list", "script", every=10.0, command=(sys.executable, "-c", "print('out'); exit(3)")),
  Job("sum", "agent", every=10.0, agent="counter", prompt="Count 2 + 3"),
  Job("again", "agent", every=10.0, agent="counter", prompt="Count 4 + 5", session="group"),
  Job(
    "both",
    "script-agent",
    every=10.0,
    command=(sys.executable, "-c", "print('7')"),
    agent="checker",
    prompt="Count 1 + 1",
  ),
)


def live(folder, clock, times=1, jobs=JOBS):
  """What was told, and the prompts that agents read, by job."""
  told = []

  async def main():
    async with LiveTeam(load_experiment(_CONFIG), {"": CounterSeat()}, folder) as team:
      schedule = Schedule(jobs, team, folder, tell=told.append, clock=clock)
      for _ in range(times):
        await schedule.run_due()
      board = team.scheduler.board
      return {task.label: task.prompt for task in board.tasks}

  return told, asyncio.run(main())


def test_jobs_of_all_kinds_run_once_for_a_time_and_go_on_after_a_restart(tmp_path):
  now = [at(8, 0)]
  told, prompts = live(tmp_path, lambda: now[0], times=2)
  assert sorted(told) == [
    "[again] It is 9.",
    "[both] It is 2.",
    "[list] failed: exit status 3\n  out",
    "[sum] It is 5.",
    "[tell] hello",
  ]
  assert "<output>\n7\n</output>" in prompts["both"] and "<previous>" not in prompts["again"]
  assert live(tmp_path, lambda: now[0])[0] == []  # another process, the same time
  now[0] += 100.0
  told, prompts = live(tmp_path, lambda: now[0], times=2)
  assert len(told) == 5
  assert prompts["again"].startswith("<previous>\nIt is 9.\n</previous>")
  assert "<previous>" not in prompts["sum"]


class Bench:
  """A team whose agent does what ``run`` says."""

  def __init__(self, folder, run=None):
    self.scheduler = Scheduler(Board(Roster({"ann": "works"})), run, folder / "board.json")


def test_a_time_of_day_counts_from_when_a_job_was_first_seen_by_any_process(tmp_path):
  jobs = (Job("tell", "notify", at="08:30", text="hello"),)
  told = []

  async def once(hour, minute, day):
    bench = Bench(tmp_path)
    now = at(hour, minute, day)
    schedule = Schedule(jobs, bench, tmp_path, tell=told.append, clock=lambda: now)
    async with bench.scheduler:
      await schedule.run_due()

  seen = []
  for time_ in ((8, 40, 1), (8, 20, 2), (8, 40, 2), (8, 50, 2), (9, 0, 5), (9, 10, 5)):
    asyncio.run(once(*time_))
    seen.append(len(told))
  assert seen == [0, 0, 1, 1, 2, 2]


def test_an_agent_whose_process_dies_is_not_asked_again_and_people_are_told(tmp_path):
  jobs = (Job("ask", "agent", every=60.0, agent="ann", prompt="go", session="group"),)
  asked, told, now = [], [], [at(8, 0)]

  async def hang(task, prompt):
    asked.append(task.id)
    await asyncio.sleep(60)

  async def answer(task, prompt):
    asked.append(task.id)
    return prompt

  async def life(run, limit):
    bench = Bench(tmp_path, run)
    schedule = Schedule(jobs, bench, tmp_path, tell=told.append, clock=lambda: now[0])
    schedule.end_interrupted()
    async with bench.scheduler:
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit):
          await schedule.run_due()
      await asyncio.sleep(0.05)
    return list(bench.scheduler.board.tasks)

  (task,) = asyncio.run(life(hang, 0.05))
  assert task.status == "processing" and told == []
  (task,) = asyncio.run(life(answer, 10))
  assert asked == [task.id] and task.status == "error"
  assert told == ["[ask] error: the process ended in it"]
  now[0] += 60.0
  asyncio.run(life(answer, 10))
  assert len(asked) == len(told) == 2
  assert "<previous>\n  error: the process ended in it\n  </previous>" in told[1]


async def _life(jobs, bench, folder, told):
  """A process that runs what is due."""
  schedule = Schedule(jobs, bench, folder, tell=told.append, clock=lambda: 100.0)
  schedule.end_interrupted()
  async with bench.scheduler:
    await schedule.run_due()


@pytest.mark.parametrize("ran", [False, True])
def test_a_command_in_which_the_process_dies_is_told_and_not_repeated(tmp_path, monkeypatch, ran):
  jobs = (Job("out", "script", every=60.0, command=("mkdir", str(tmp_path / "made"))),)
  told, real = [], jobs_module.run_command

  async def die(words):
    if ran:
      await real(words)
    raise Killed

  with monkeypatch.context() as patched:
    patched.setattr(jobs_module, "run_command", die)
    with pytest.raises(KeyboardInterrupt):
      asyncio.run(_life(jobs, Bench(tmp_path), tmp_path, told))
  for _ in range(2):
    asyncio.run(_life(jobs, Bench(tmp_path), tmp_path, told))
  assert told == ["[out] failed: the process ended in it"] and (tmp_path / "made").exists() == ran


def test_a_result_that_stood_on_the_board_when_the_process_died_is_told(tmp_path, monkeypatch):
  jobs = (Job("ask", "agent", every=60.0, agent="ann", prompt="go"),)
  told = []

  async def answer(task, prompt):
    return "the result"

  def die(self, name, said):
    raise Killed

  with monkeypatch.context() as patched:
    patched.setattr(Schedule, "_note", die)
    with pytest.raises(KeyboardInterrupt):
      asyncio.run(_life(jobs, Bench(tmp_path, answer), tmp_path, told))
  for _ in range(2):
    asyncio.run(_life(jobs, Bench(tmp_path, answer), tmp_path, told))
  assert told == ["[ask] the result"]


def test_people_read_too_that_the_command_of_an_agent_failed(tmp_path):
  failing = (sys.executable, "-c", "print('7'); raise SystemExit('bad')")
  both = Job("both", "script-agent", 10.0, command=failing, agent="checker", prompt="Count 1 + 1")
  told, prompts = live(tmp_path, lambda: 0.0, jobs=(both,))
  assert told == ["[both] failed: exit status 1\n  bad\n  7", "[both] It is 2."]
  assert "<output>\nfailed: exit status 1\nbad\n7\n</output>" in prompts["both"]


def test_a_slow_job_stops_no_other_and_is_not_started_while_it_runs(tmp_path):
  jobs = (
    Job("slow", "agent", every=0.2, agent="ann", prompt="go"),
    Job("tick", "notify", every=0.1, text="tick"),
  )
  told, begun = [], []

  async def slow(task, prompt):
    begun.append(time.monotonic())
    await asyncio.sleep(0.5)
    return "over"

  async def main():
    bench = Bench(tmp_path, slow)
    schedule = Schedule(jobs, bench, tmp_path, tell=told.append)
    async with bench.scheduler:
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.3):
          await schedule.run_forever()

  asyncio.run(main())
  assert told.index("[slow] over") >= 3  # ticks come first
  assert 2 <= len(begun) <= 3 and begun[1] - begun[0] >= 0.5


@pytest.mark.parametrize(
  "text",
  ["", "null", "[]", "7", "[" * 100_000, "\xff", '{"last": []}', '{"last": {"tell": "x"}}',
   '{"first": {"tell": null}}', '{"said": {"tell": 7}}', '{"running": ["tell"]}'],
)  # fmt: skip
def test_a_damaged_state_is_refused_by_name_and_stays_as_it_is(tmp_path, text):
  path = tmp_path / STATE
  path.write_text(text, "latin-1")
  with pytest.raises(ConfigError, match=r"schedule.json is no state of a schedule: .*remove it"):
    live(tmp_path, lambda: 0.0, jobs=JOBS[:1])
  assert path.read_text("latin-1") == text


def test_a_terminal_shows_what_a_job_says_and_does_not_obey_it(tmp_path):
  rude = "\x1b]0;x\x07\r[tell] all is well\n[tell] Grüße"
  jobs = (
    Job("text", "notify", every=1.0, text=rude),
    Job("bad", "script", every=1.0, command=("/no/such/\x1b[2J",)),
    Job("out", "script", every=1.0, command=(sys.executable, "-c", f"print({rude!r}); exit(1)")),
  )
  told, _ = live(tmp_path, lambda: 0.0, jobs=jobs)
  shown = "\\x1b]0;x\\x07\\r[tell] all is well\n  [tell] Grüße"
  assert f"[text] {shown}" in told and len(told) == 3
  assert not any("\x1b" in text or "\n[" in text for text in told)


def test_a_job_that_cannot_run_says_so_and_stops_no_other(tmp_path):
  jobs = (Job("bad", "script", every=1.0, command=("/no/such/program",)), JOBS[0])
  told, _ = live(tmp_path, lambda: 0.0, jobs=jobs)
  assert told[0].startswith("[tell]") or told[1].startswith("[tell]")
  assert any("FileNotFoundError" in text for text in told)
  assert json.loads((tmp_path / STATE).read_text())["last"] == {"bad": 0.0, "tell": 0.0}
