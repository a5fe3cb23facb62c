"""Jobs and what runs them at their times; ``semaclaw.schedule`` is the command."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import json
import math
import os
import pathlib
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from agentjax.config import ConfigError
from agentjax.faults import describe
from agentjax.files import write_atomically
from agentjax.recipes.semaclaw.graph import TaskSpec, TeamTask
from agentjax.recipes.semaclaw.live import LiveTeam

Mode = Literal["notify", "script", "agent", "script-agent"]
STATE = "schedule.json"
ADMIN = "schedule"
_SCRIPT_SECONDS = 600.0  # of a command; ours
_MOST_OUTPUT = 8000  # characters of its output that are used; ours
_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclasses.dataclass(frozen=True)
class Job:
  """A job; see the module.

  Attributes:
    every: seconds between runs; 0 where ``at`` says when.
    at: "HH:MM", or "".
  """

  name: str
  mode: Mode
  every: float = 0.0
  at: str = ""
  text: str = ""
  command: tuple[str, ...] = ()
  agent: str = ""
  prompt: str = ""
  session: Literal["isolated", "group"] = "isolated"


def read_jobs(path: str | os.PathLike[str]) -> tuple[Job, ...]:
  """The jobs of a file.

  Raises:
    ConfigError: there is none, or something in it that is no job.
  """
  try:
    values = json.loads(pathlib.Path(path).read_bytes())
  except (OSError, ValueError) as error:
    raise ConfigError(f"--jobs={path} cannot be read: {describe(error)}.") from error
  if not isinstance(values, list):
    raise ConfigError(f"--jobs={path} holds a {type(values).__name__}; allowed: a list of objects.")
  jobs = tuple(_job(value, f"--jobs={path}, job {i}") for i, value in enumerate(values))
  names = [job.name for job in jobs]
  if twice := sorted({name for name in names if names.count(name) > 1}):
    raise ConfigError(f"--jobs={path} has two jobs {twice[0]!r}; allowed: one of a name.")
  return jobs


def _job(value: Any, where: str) -> Job:
  fields = {field.name for field in dataclasses.fields(Job)}
  if not isinstance(value, Mapping) or not set(value) <= fields:
    raise ConfigError(f"{where} is {str(value)[:200]}; allowed: an object of {sorted(fields)}.")
  try:
    job = Job(**{**value, "command": tuple(value.get("command", ()))})
    texts = (job.name, job.text, job.agent, job.prompt, job.at, *job.command)
    if isinstance(value.get("command"), str):
      raise TypeError("its command is a text; allowed: a list of texts")
    if not all(isinstance(text, str) for text in texts) or not _NAME.fullmatch(job.name):
      raise TypeError("its name, text, agent, prompt, at and command are texts")
    every = float(job.every)
  except (TypeError, ValueError) as error:
    raise ConfigError(f"{where}: {error}.") from error
  needs = {"notify": ("text",), "script": ("command",), "agent": ("agent", "prompt")}
  needs["script-agent"] = ("command", "agent", "prompt")
  if job.mode not in get_args(Mode):
    raise ConfigError(f"{where}: mode={job.mode!r}; allowed: {', '.join(get_args(Mode))}.")
  if missing := [name for name in needs[job.mode] if not getattr(job, name)]:
    raise ConfigError(f"{where}: mode {job.mode!r} needs {', '.join(missing)}.")
  often, daily = 0 < every < math.inf, bool(_TIME.fullmatch(job.at))
  if not (often and not job.at or daily and every == 0):
    raise ConfigError(f"{where}: allowed: every > 0, in seconds, or at='HH:MM'.")
  if job.session not in ("isolated", "group"):
    raise ConfigError(f"{where}: session={job.session!r}; allowed: isolated, group.")
  return dataclasses.replace(job, every=every)


def next_time(job: Job, last: float | None, now: float) -> float:
  """When a job is next to run, in seconds since 1970; at most ``now`` if it is due.

  Args:
    job: the job.
    last: when it ran last; None is never.
    now: the time.
  """
  if job.every:
    return now if last is None else last + job.every
  hour, minute = map(int, job.at.split(":"))
  since = datetime.datetime.fromtimestamp(now if last is None else last)
  found = since.replace(hour=hour, minute=minute, second=0, microsecond=0)
  if found <= since:
    found = (found + datetime.timedelta(days=1)).replace(hour=hour, minute=minute)
  return found.timestamp()


class Schedule:
  """Runs jobs and remembers when.

  Args:
    jobs: in their order.
    team: does the jobs of agents; the caller enters it, after ``end_interrupted``. Its board is
      opened here.
    folder: of the team, which also keeps the state.
    tell: shows a text to people.
    clock: seconds since 1970.
  """

  def __init__(
    self,
    jobs: Sequence[Job],
    team: LiveTeam,
    folder: str | os.PathLike[str],
    *,
    tell: Callable[[str], None] = print,
    clock: Callable[[], float] = time.time,
  ):
    self._jobs, self._team, self._tell, self._clock = tuple(jobs), team, tell, clock
    team.scheduler.open()  # no other process reads or writes the state from here on
    self._path = pathlib.Path(folder) / STATE
    known = json.loads(self._path.read_bytes()) if self._path.exists() else {}
    self._last: dict[str, float] = known.get("last", {})
    self._said: dict[str, str] = known.get("said", {})
    # A job with a time of day that never ran waits from when it was first seen, by any process.
    first, now = known.get("first", {}), clock()
    self._first: dict[str, float] = {job.name: first.get(job.name, now) for job in self._jobs}
    self._save()
    self._running: set[str] = set()
    self._ended = asyncio.Event()  # one of those that were running

  def end_interrupted(self) -> None:
    """Ends with an error, and tells, what agents were doing when the last process ended.

    For a team that is not entered yet: entering it starts such tasks again.
    """
    board = self._team.scheduler.board
    for task in [task for task in board.tasks if not task.ended]:
      if board.parents[task.parent].admin.startswith(f"{ADMIN}/"):
        board.finish(task, "error", "the process ended in it", now=self._clock())
        self._note(task.label, _outcome(task))

  async def run_due(self) -> list[str]:
    """Runs all jobs that are due, at the same time; gives their names."""
    async with asyncio.TaskGroup() as group:
      return self._start_due(group)

  async def run_forever(self) -> None:
    """Until it is cancelled. No job waits for another; one that still runs is not started."""
    async with asyncio.TaskGroup() as group:
      while True:
        self._ended.clear()
        self._start_due(group)
        self._team.scheduler.forget()
        with contextlib.suppress(TimeoutError):
          async with asyncio.timeout(max(0.0, min(self._next_due() - self._clock(), 60.0))):
            await self._ended.wait()

  def _next_due(self) -> float:
    """When the next of the jobs that do not run is due."""
    now = self._clock()
    idle = [job for job in self._jobs if job.name not in self._running]
    return min((next_time(job, self._since(job), now) for job in idle), default=math.inf)

  def _since(self, job: Job) -> float | None:
    return self._last.get(job.name, self._first[job.name] if job.at else None)

  def _start_due(self, group: asyncio.TaskGroup) -> list[str]:
    now = self._clock()
    idle = [job for job in self._jobs if job.name not in self._running]
    due = [job for job in idle if next_time(job, self._since(job), now) <= now]
    if due:
      self._last |= {job.name: now for job in due}
      self._save()  # before any of them: none runs twice for one time
    for job in due:
      self._running.add(job.name)
      work = group.create_task(self._run(job), name=job.name)
      work.add_done_callback(lambda work: self._note_end(work.get_name()))
    return [job.name for job in due]

  def _note_end(self, name: str) -> None:
    self._running.discard(name)
    self._ended.set()

  async def _run(self, job: Job) -> None:
    try:
      said = job.text
      if job.command:
        said = await run_command(job.command)
      if job.agent:
        said = await self._ask(job, said if job.command else "")
    except Exception as error:  # one job must not end the others
      said = f"failed: {describe(error)}"
    self._note(job.name, said)

  def _note(self, name: str, said: str) -> None:
    self._said[name] = said
    self._save()
    self._tell(f"[{name}] {said}")

  async def _ask(self, job: Job, output: str) -> str:
    parts = []
    if job.session == "group" and job.name in self._said:
      parts.append(f"<previous>\n{self._said[job.name]}\n</previous>")
    if job.command:
      parts.append(f"<output>\n{output}\n</output>")
    spec = TaskSpec(job.name, job.agent, "\n".join([*parts, job.prompt]))
    # As a parent of its own admin: an agent that is at work is not asked twice at once.
    parent = self._team.scheduler.add(f"{ADMIN}/{job.name}", job.name, [spec])
    (task,) = await self._team.scheduler.wait(parent.id)
    return _outcome(task)

  def _save(self) -> None:
    values = {"first": self._first, "last": self._last, "said": self._said}
    write_atomically(self._path, json.dumps(values, indent=1) + "\n")


def _outcome(task: TeamTask) -> str:
  return task.result if task.status == "done" else f"{task.status}: {task.result}"


async def run_command(words: Sequence[str]) -> str:
  """What a command writes, with its errors; never through a shell. Its processes end with it.

  Raises:
    OSError: it cannot be started.
    TimeoutError: it does not end in time.
  """
  loop, kept = asyncio.get_running_loop(), bytearray()
  ours, theirs = os.pipe()
  os.set_blocking(ours, False)

  def read() -> bool:
    """Reads on, and keeps the beginning; False where there is nothing to read."""
    try:
      data = os.read(ours, 1 << 16)
    except BlockingIOError:
      return False
    if not data:
      loop.remove_reader(ours)
    kept.extend(data[: 4 * _MOST_OUTPUT - len(kept)])  # a character has at most 4 bytes
    return bool(data)

  with contextlib.ExitStack() as stack:
    stack.callback(os.close, ours)
    with open(theirs, "wb") as output:
      # A pipe of our own: with asyncio's, the wait for a process is one for all that hold its pipe.
      process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
        start_new_session=True,
      )  # fmt: skip
    loop.add_reader(ours, read)
    stack.callback(loop.remove_reader, ours)
    try:
      async with asyncio.timeout(_SCRIPT_SECONDS):
        await process.wait()
    finally:
      with contextlib.suppress(ProcessLookupError):  # what it has started too
        os.killpg(process.pid, signal.SIGKILL)
      await process.wait()
    while len(kept) < 4 * _MOST_OUTPUT and read():
      pass
  text = kept.decode(errors="replace")[:_MOST_OUTPUT].strip()
  return text if process.returncode == 0 else f"exit status {process.returncode}\n{text}"
