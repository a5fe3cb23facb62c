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
from agentjax.text.printable import printable

Mode = Literal["notify", "script", "agent", "script-agent"]
STATE = "schedule.json"
ADMIN = "schedule"
_SCRIPT_SECONDS = 600.0  # of a command; ours
_MOST_OUTPUT = 8000  # characters of its output that are used; ours
_MOST_ERRORS = 2000  # characters of the end of its errors that are used; ours
_INTERRUPTED = "the process ended in it"
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
  except (OSError, RecursionError, ValueError) as error:
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
    if not isinstance(value.get("command", []), list):
      raise TypeError(f"its command is {value['command']!r}; allowed: a list of texts")
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
    tell: shows a text to people; it has no control characters.
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
    known = _read_state(self._path)
    self._last: dict[str, float] = known.get("last", {})
    self._said: dict[str, str] = known.get("said", {})
    # A job with a time of day that never ran waits from when it was first seen, by any process.
    first, now = known.get("first", {}), clock()
    self._first: dict[str, float] = {job.name: first.get(job.name, now) for job in self._jobs}
    # Jobs at work, and the parent of each that asks an agent; those of the last process.
    self._running: dict[str, str] = {}
    self._interrupted: dict[str, str] = known.get("running", {})
    self._save()
    self._ended = asyncio.Event()  # one of those that were running

  def end_interrupted(self) -> None:
    """Ends with an error, and tells, what jobs were doing when the last process ended.

    For a team that is not entered yet: entering it starts such tasks again.
    """
    board = self._team.scheduler.board
    left = dict.fromkeys(self._interrupted, f"failed: {_INTERRUPTED}")
    for task in board.tasks:
      open_ = not task.ended and board.parents[task.parent].admin.startswith(f"{ADMIN}/")
      if open_:
        board.finish(task, "error", _INTERRUPTED, now=self._clock())
      if open_ or self._interrupted.get(task.label) == task.parent:  # it ended and was not told
        left[task.label] = _outcome(task)
    for name, said in left.items():
      self._note(name, said)

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
      self._running |= {job.name: "" for job in due}
      self._save()  # before any of them: none runs twice for one time
    for job in due:
      work = group.create_task(self._run(job), name=job.name)
      work.add_done_callback(lambda work: self._ended.set())
    return [job.name for job in due]

  async def _run(self, job: Job) -> None:
    try:
      said, done = job.text, True
      if job.command:
        done, said = await run_command(job.command)
      if job.agent:
        if not done:  # people read it too, whatever the agent says of it
          self._show(job.name, said)
        said = await self._ask(job, said if job.command else "")
    except Exception as error:  # one job must not end the others
      said = f"failed: {describe(error)}"
    self._note(job.name, said)

  def _note(self, name: str, said: str) -> None:
    self._said[name] = said
    self._running.pop(name, None)
    self._interrupted.pop(name, None)
    self._save()
    self._show(name, said)

  def _show(self, name: str, said: str) -> None:
    # Further lines are indented, or one could look like what another job says.
    self._tell(printable(f"[{name}] {said}").replace("\n", "\n  "))

  async def _ask(self, job: Job, output: str) -> str:
    parts = []
    if job.session == "group" and job.name in self._said:
      parts.append(f"<previous>\n{self._said[job.name]}\n</previous>")
    if job.command:
      parts.append(f"<output>\n{output}\n</output>")
    spec = TaskSpec(job.name, job.agent, "\n".join([*parts, job.prompt]))
    # As a parent of its own admin: an agent that is at work is not asked twice at once.
    parent = self._team.scheduler.add(f"{ADMIN}/{job.name}", job.name, [spec])
    self._running[job.name] = parent.id
    self._save()
    (task,) = await self._team.scheduler.wait(parent.id)
    return _outcome(task)

  def _save(self) -> None:
    values = {
      "first": self._first,
      "last": self._last,
      "said": self._said,
      "running": self._interrupted | self._running,
    }
    write_atomically(self._path, json.dumps(values, indent=1) + "\n")


def _read_state(path: pathlib.Path) -> dict[str, dict[str, Any]]:
  """What ``Schedule._save`` wrote; {} where there is no file.

  Raises:
    ConfigError: something else.
  """
  if not path.exists():
    return {}
  try:
    state = json.loads(path.read_bytes())
    if not isinstance(state, dict):
      raise ValueError(f"it holds a {type(state).__name__}")
    kinds: dict[str, Any] = {
      "first": (int, float),
      "last": (int, float),
      "said": str,
      "running": str,
    }
    for name, kind in kinds.items():
      values = state.get(name, {})
      fits = isinstance(values, dict) and all(isinstance(v, kind) for v in values.values())
      if not fits:
        raise ValueError(f"{name!r} is {str(values)[:80]!r}")
  except (RecursionError, ValueError) as error:
    raise ConfigError(
      f"{path} is no state of a schedule: {describe(error)}. Give another folder, or remove it: "
      "then all jobs are new."
    ) from error
  return state


def _outcome(task: TeamTask) -> str:
  return task.result if task.status == "done" else f"{task.status}: {task.result}"


async def run_command(words: Sequence[str]) -> tuple[bool, str]:
  """Runs a command, never through a shell; its processes end with it.

  Returns:
    Whether it ended well, and what it wrote: its output, then its errors. If it failed or took too
    long, the first line says so, and its errors come first.

  Raises:
    OSError: it cannot be started.
  """
  # A character has at most 4 bytes.
  first, last = slice(4 * _MOST_OUTPUT), slice(-4 * _MOST_ERRORS, None)
  with _Pipe(first) as output, _Pipe(last) as errors:
    process = await asyncio.create_subprocess_exec(
      *words, stdin=asyncio.subprocess.DEVNULL, stdout=output.end, stderr=errors.end,
      start_new_session=True,
    )  # fmt: skip
    output.begin()
    errors.begin()
    failure = ""
    try:
      async with asyncio.timeout(_SCRIPT_SECONDS):
        await process.wait()
    except TimeoutError:
      failure = f"failed: not done within {_SCRIPT_SECONDS:g} s"
    finally:
      with contextlib.suppress(ProcessLookupError):  # what it has started too
        os.killpg(process.pid, signal.SIGKILL)
      await process.wait()
    output.read_rest()
    errors.read_rest()
  if not failure and process.returncode:
    failure = f"failed: {_ending(process.returncode)}"
  written = output.text[:_MOST_OUTPUT].strip()
  complained = errors.text[-_MOST_ERRORS:].strip()
  parts = [failure, complained, written] if failure else [written, complained]
  return not failure, "\n".join(filter(None, parts))


def _ending(status: int) -> str:
  """How a process ended, from its ``returncode``."""
  if status > 0:
    return f"exit status {status}"
  try:
    return f"killed by {signal.Signals(-status).name}"
  except ValueError:
    return f"killed by signal {-status}"


class _Pipe:
  """A pipe from a process, of whose bytes a part is kept; a context manager.

  With asyncio's own, the wait for a process is one for all that hold its pipe.

  Args:
    keep: the part; it begins at the first byte or ends at the last.
  """

  def __init__(self, keep: slice):
    self._keep, self._kept = keep, b""
    self._ours, self.end = os.pipe()
    os.set_blocking(self._ours, False)
    self._loop = asyncio.get_running_loop()

  def __enter__(self) -> _Pipe:
    return self

  def __exit__(self, *error: object) -> None:
    self._loop.remove_reader(self._ours)
    os.close(self._ours)
    if self.end >= 0:
      os.close(self.end)

  def begin(self) -> None:
    """Reads from now on; the process has its end."""
    os.close(self.end)
    self.end = -1
    self._loop.add_reader(self._ours, self._read)

  def read_rest(self) -> None:
    """Reads what is there; not for ever, as others may still write into it."""
    for _ in range(16):
      if not self._read():
        break

  @property
  def text(self) -> str:
    return self._kept.decode(errors="replace")

  def _read(self) -> bool:
    """Reads on; False where there is nothing to read."""
    try:
      data = os.read(self._ours, 1 << 16)
    except BlockingIOError:
      return False
    if not data:
      self._loop.remove_reader(self._ours)
    self._kept = (self._kept + data)[self._keep]
    return bool(data)
