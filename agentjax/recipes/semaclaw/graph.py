"""The tasks of a team as a graph, and which of them may run when. No clock, no files, no models.

An admin (the orchestrator) writes a *parent*: a goal and tasks that depend on each other. A task is
ready when all that it depends on have ended, in whatever way: a failed one does not stop the
others, which read its error. One agent does one task at a time; a persona, which is made for a task
and forgotten, may do several. One parent of an admin is active, the others wait in a queue.

Whoever holds a ``Board`` says what time it is: seconds for a team that works, turns for one that is
trained. So the same calls always give the same board.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args

TaskStatus = Literal["registered", "processing", "done", "error", "timeout"]
ParentStatus = Literal["queued", "active", "done"]
TERMINAL = ("done", "error", "timeout")
PERSONA = "persona:"  # before the name of a persona, as an agent
MOST_TASKS = 64  # of a parent; ours
MOST_SHOWN = 8000  # characters of a result that other tasks are shown; ours

_LABEL = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FORMAT = 1
_OURS = re.compile(r"<(?=/?(?:parent_goal|prerequisites|prerequisite|other_tasks)\b)", re.I)


class GraphError(ValueError):
  """A graph that cannot be run; the text is for whoever wrote it."""


@dataclasses.dataclass(frozen=True)
class Roster:
  """Who may be given tasks.

  Attributes:
    agents: name -> what the agent is good for.
    personas: name -> who a persona is; its agent is called ``persona:NAME``.
    max_concurrent: tasks that one persona does at once; 5 in the source.
  """

  agents: Mapping[str, str]
  personas: Mapping[str, str] = dataclasses.field(default_factory=dict)
  max_concurrent: int = 5

  def __contains__(self, agent: object) -> bool:
    return agent in self.names

  @property
  def described(self) -> dict[str, str]:
    """What each agent is good for, by its name in a task."""
    return {**self.agents, **{f"{PERSONA}{name}": text for name, text in self.personas.items()}}

  @property
  def names(self) -> tuple[str, ...]:
    """All agents, as a task names them."""
    return tuple(self.described)

  def places(self, agent: str) -> int:
    """How many tasks an agent does at once."""
    return self.max_concurrent if agent.startswith(PERSONA) else 1

  def describe(self) -> str:
    """A line for each agent."""
    return "\n".join(f"- {name}: {text}" for name, text in self.described.items())


@dataclasses.dataclass(frozen=True)
class TaskSpec:
  """A task as the orchestrator writes it."""

  label: str
  agent: str
  prompt: str
  depends_on: tuple[str, ...] = ()


def read_specs(values: Any) -> tuple[TaskSpec, ...]:
  """Tasks from JSON: ``[{label, agentName, prompt, dependsOn}]``.

  Raises:
    GraphError: something else.
  """
  if not isinstance(values, Sequence) or isinstance(values, str):
    raise GraphError(f"tasks are a {type(values).__name__}; allowed: a list of objects")
  specs = []
  for number, value in enumerate(values):
    if not isinstance(value, Mapping):
      raise GraphError(f"task {number} is a {type(value).__name__}; allowed: an object")
    label, agent, prompt = (value.get(name) for name in ("label", "agentName", "prompt"))
    needs = value.get("dependsOn") or []
    if not (isinstance(label, str) and isinstance(agent, str) and isinstance(prompt, str)):
      raise GraphError(f"task {number} needs the texts label, agentName and prompt")
    if not isinstance(needs, list) or not all(isinstance(name, str) for name in needs):
      raise GraphError(f"dependsOn of task {number} must be a list of labels")
    specs.append(TaskSpec(label, agent, prompt, tuple(dict.fromkeys(needs))))
  return tuple(specs)


def check_graph(specs: Sequence[TaskSpec], roster: Roster) -> None:
  """Raises GraphError for a graph that cannot be run to its end."""
  if not 1 <= len(specs) <= MOST_TASKS:
    raise GraphError(f"{len(specs)} tasks; allowed: 1 to {MOST_TASKS}")
  counts = collections.Counter(spec.label for spec in specs)
  for spec in specs:
    if not _LABEL.fullmatch(spec.label):
      raise GraphError(
        f"label {spec.label[:80]!r}; allowed: 1 to 64 letters, digits, '_', '.' and '-'"
      )
    if counts[spec.label] > 1:
      raise GraphError(f"{counts[spec.label]} tasks have the label {spec.label!r}; allowed: one")
    if spec.agent not in roster:
      raise GraphError(
        f"task {spec.label!r} is for {spec.agent[:80]!r}; agents: {', '.join(roster.names)}"
      )
    if not spec.prompt.strip():
      raise GraphError(f"task {spec.label!r} has an empty prompt")
    for name in spec.depends_on:
      if name not in counts:
        raise GraphError(
          f"task {spec.label!r} depends on {name[:80]!r}; labels: {', '.join(counts)}"
        )
  if cycle := find_cycle({spec.label: spec.depends_on for spec in specs}):
    raise GraphError(f"tasks depend on each other in a circle: {' -> '.join(cycle)}")


def find_cycle(needs: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
  """Labels of which each depends on the next and the last is the first; () where there are none."""
  over: set[str] = set()
  for start in needs:
    path: dict[str, Iterator[str]] = {}  # in the order of the walk, with what is left of each
    label: str | None = start if start not in over else None
    while label is not None or path:
      if label is not None:
        path[label] = iter(needs[label])
      last = next(reversed(path))
      label = next((name for name in path[last] if name not in over), None)
      if label is None:
        over.add(last)
        del path[last]
      elif label in path:
        walked = list(path)
        return (*walked[walked.index(label) :], label)
  return ()


@dataclasses.dataclass
class TeamTask:
  """One task of a parent.

  Attributes:
    parent: id of its parent.
    label: its name there.
    agent: who does it.
    depends_on: labels.
    prompt: what is to be done.
    status: where it stands.
    result: what came of it, or why it failed.
    attempts: how often it was started.
    created_at, started_at, timeout_at, completed_at: times; None before.
  """

  parent: str
  label: str
  agent: str
  depends_on: tuple[str, ...]
  prompt: str
  created_at: float
  status: TaskStatus = "registered"
  result: str = ""
  attempts: int = 0
  started_at: float | None = None
  timeout_at: float | None = None
  completed_at: float | None = None

  @property
  def id(self) -> str:
    return f"{self.parent}/{self.label}"

  @property
  def ended(self) -> bool:
    return self.status in TERMINAL

  def report(self, most: int | None = None) -> str:
    """What came of it, in a line; a result of more than ``most`` characters is cut."""
    result = self.result if most is None else _clip(self.result, most)
    return f"[{self.label}] {self.agent}, {self.status}: {result}"


@dataclasses.dataclass
class Parent:
  """A goal with its tasks, by label.

  Attributes:
    id: ``p-YYYYMMDD-0001``.
    admin: who wrote it.
    goal: what the tasks are for.
    timeout: time that one task may take from its start.
  """

  id: str
  admin: str
  goal: str
  timeout: float
  created_at: float
  status: ParentStatus = "queued"
  tasks: dict[str, TeamTask] = dataclasses.field(default_factory=dict)
  completed_at: float | None = None

  @property
  def ended(self) -> bool:
    return all(task.ended for task in self.tasks.values())

  @property
  def results(self) -> str:
    """What came of each task, for whoever waits for them."""
    return "\n".join(task.report(MOST_SHOWN) for task in self.tasks.values())


class Board:
  """All parents of a team.

  Args:
    roster: who may be given tasks.
    attempts: how often a task is started that a dead process left at work; then it is an error. 1
      is the source's rule; ours is 2, so that a team goes on and a task that kills its process
      does not kill it for ever.

  Attributes:
    parents: by id, in the order in which they were written.
    paused: admins of whose tasks none is started.
  """

  def __init__(self, roster: Roster, *, attempts: int = 2):
    if attempts < 1:
      raise ValueError(f"attempts={attempts}; allowed: >= 1")
    self.roster = roster
    self.parents: dict[str, Parent] = {}
    self.paused: set[str] = set()
    self._attempts = attempts
    self._number = 0

  def add(
    self, admin: str, goal: str, specs: Sequence[TaskSpec], *, now: float, timeout: float = 900.0
  ) -> Parent:
    """A new parent; it is active unless another one of its admin is.

    Args:
      admin: who writes it.
      goal: what the tasks are for.
      specs: the tasks.
      now: the time.
      timeout: time that a task may take from its start; 900 seconds in the source.

    Raises:
      GraphError: see ``check_graph``; the board is as before.
    """
    check_graph(specs, self.roster)
    if not timeout > 0:
      raise GraphError(f"timeoutSeconds={timeout:g}; allowed: > 0")
    if not goal.strip():
      raise GraphError("the goal is empty")
    self._number += 1
    day = datetime.datetime.fromtimestamp(now, datetime.UTC).strftime("%Y%m%d")
    parent = Parent(f"p-{day}-{self._number:04}", admin, goal, timeout, now)
    parent.tasks = {
      spec.label: TeamTask(parent.id, spec.label, spec.agent, spec.depends_on, spec.prompt, now)
      for spec in specs
    }
    self.parents[parent.id] = parent
    self._activate(admin)
    return parent

  def parent(self, id: str) -> Parent:
    """One parent.

    Raises:
      GraphError: there is none.
    """
    if id not in self.parents:
      raise GraphError(f"no parent {id[:80]!r}; parents: {', '.join(self.parents) or 'none'}")
    return self.parents[id]

  def task(self, parent: str, label: str) -> TeamTask:
    """One task.

    Raises:
      GraphError: there is none.
    """
    found = self.parent(parent)
    if label not in found.tasks:
      raise GraphError(f"no task {label[:80]!r} in {parent}; labels: {', '.join(found.tasks)}")
    return found.tasks[label]

  @property
  def tasks(self) -> Iterator[TeamTask]:
    """All tasks, in the order of parents and of their lists."""
    for parent in self.parents.values():
      yield from parent.tasks.values()

  def ready(self) -> list[TeamTask]:
    """Tasks that may start now, in the order of ``tasks``; no agent gets more than it can do."""
    busy = collections.Counter(task.agent for task in self.tasks if task.status == "processing")
    found = []
    for parent in self.parents.values():
      if parent.status != "active" or parent.admin in self.paused:
        continue
      for task in parent.tasks.values():
        open_ = task.status == "registered" and busy[task.agent] < self.roster.places(task.agent)
        if open_ and all(parent.tasks[name].ended for name in task.depends_on):
          busy[task.agent] += 1
          found.append(task)
    return found

  def start(self, task: TeamTask, *, now: float) -> None:
    """A ready task is at work."""
    if task not in self.ready():
      raise GraphError(f"task {task.id} is {task.status} and cannot start now")
    task.status, task.attempts = "processing", task.attempts + 1
    task.started_at, task.timeout_at = now, now + self.parents[task.parent].timeout

  def finish(self, task: TeamTask, status: TaskStatus, result: str, *, now: float) -> bool:
    """A task has ended; False where it had ended before, and then nothing changes."""
    if status not in TERMINAL:
      raise ValueError(f"status={status!r}; allowed: {', '.join(TERMINAL)}")
    if task.ended:
      return False
    task.status, task.result, task.completed_at = status, result, now
    parent = self.parents[task.parent]
    if parent.ended:
      parent.status, parent.completed_at = "done", now
      self._activate(parent.admin)
    return True

  def recover(self, *, now: float) -> list[TeamTask]:
    """After a restart: what was at work starts again, or has failed. Gives the failed ones."""
    failed = []
    for task in [task for task in self.tasks if task.status == "processing"]:
      if task.attempts >= self._attempts:
        self.finish(task, "error", f"the team stopped in it {task.attempts} times", now=now)
        failed.append(task)
      else:
        task.status, task.started_at, task.timeout_at = "registered", None, None
    return failed

  def cancel(self, admin: str, *, now: float) -> list[TeamTask]:
    """Ends all tasks of an admin that have not ended."""
    mine = [p for p in self.parents.values() if p.admin == admin]
    open_ = [task for parent in mine for task in parent.tasks.values() if not task.ended]
    for task in open_:
      self.finish(task, "error", "cancelled", now=now)
    return open_

  def forget(self, *, now: float, keep: float = 3600.0) -> list[str]:
    """Drops parents that were done more than ``keep`` ago (an hour in the source)."""
    old = [
      parent.id
      for parent in self.parents.values()
      if parent.status == "done" and now - (parent.completed_at or now) > keep
    ]
    for name in old:
      del self.parents[name]
    return old

  def prompt_of(self, task: TeamTask) -> str:
    """What the agent of a task reads: the goal, what it builds on, what others do, its own part."""
    parent = self.parents[task.parent]
    before = [parent.tasks[name] for name in task.depends_on]
    others = [t for t in parent.tasks.values() if t is not task and t.label not in task.depends_on]
    parts = [f"<parent_goal>\n{_tame(parent.goal)}\n</parent_goal>"]
    if before:
      said = "\n".join(
        f'<prerequisite label="{t.label}" agent="{t.agent}" status="{t.status}">\n'
        f"{_tame(t.prompt)}\nresult: {_tame(_clip(t.result))}\n</prerequisite>"
        for t in before
      )
      parts.append(f"<prerequisites>\n{said}\n</prerequisites>")
    if others:
      said = "\n".join(f"{t.label} ({t.agent}): {_tame(_clip(t.prompt, 200))}" for t in others)
      parts.append(f"<other_tasks>\n{said}\n</other_tasks>")
    return "\n".join([*parts, task.prompt])

  def to_json(self) -> dict[str, Any]:
    """The whole board but the roster, as plain JSON."""
    parents = [dataclasses.asdict(parent) for parent in self.parents.values()]
    return {
      "format": _FORMAT,
      "number": self._number,
      "paused": sorted(self.paused),
      "parents": [{**parent, "tasks": list(parent["tasks"].values())} for parent in parents],
    }

  def set_json(self, values: Mapping[str, Any]) -> None:
    """Inverse of ``to_json``.

    Raises:
      ValueError: it is none of ours.
    """
    if _read(values, "format", object) != _FORMAT:
      raise ValueError(f"a board of format {values['format']!r}; this one reads {_FORMAT}")
    parents = [_parent(value) for value in _read(values, "parents", list)]
    if len({parent.id for parent in parents}) < len(parents):
      raise ValueError("two parents have one id")
    paused, number = _read(values, "paused", list), _read(values, "number", int)
    if not all(isinstance(admin, str) for admin in paused):
      raise ValueError("paused is no list of texts")
    self.parents, self.paused = {parent.id: parent for parent in parents}, set(paused)
    self._number = number

  def _activate(self, admin: str) -> None:
    """The oldest parent of an admin becomes active where none is."""
    mine = [p for p in self.parents.values() if p.admin == admin and p.status != "done"]
    if mine and all(parent.status == "queued" for parent in mine):
      mine[0].status = "active"


_KINDS = {"str": str, "int": int, "float": (int, float), "float | None": (int, float, NoneType)}


def _parent(value: Any) -> Parent:
  _check_fields(value, Parent)
  if value.get("status", "queued") not in get_args(ParentStatus):
    raise ValueError(f"parent {value['id']} has the status {value['status']!r}")
  tasks = [_task(task) for task in _read(value, "tasks", list)]
  parent = Parent(**{**value, "tasks": {task.label: task for task in tasks}})
  needs = {task.label: task.depends_on for task in tasks}
  known = all(name in needs for names in needs.values() for name in names)
  if len(needs) < len(tasks) or not known or any(t.parent != parent.id for t in tasks):
    raise ValueError(f"the labels of the tasks of {parent.id} do not fit")
  if cycle := find_cycle(needs):
    raise ValueError(f"tasks of {parent.id} stand in a circle: {' -> '.join(cycle)}")
  return parent


def _task(value: Any) -> TeamTask:
  _check_fields(value, TeamTask)
  needs = _read(value, "depends_on", list)
  if value.get("status", "registered") not in get_args(TaskStatus):
    raise ValueError(f"a task has the status {value['status']!r}")
  if not all(isinstance(name, str) for name in needs):
    raise ValueError("depends_on is no list of labels")
  return TeamTask(**{**value, "depends_on": tuple(needs)})


def _check_fields(value: Any, kind: type[Parent | TeamTask]) -> None:
  """Raises ValueError unless a value is an object of the fields of a dataclass."""
  fields = dataclasses.fields(kind)
  for field in fields:
    if field.default is dataclasses.MISSING or field.name in value:
      _read(value, field.name, _KINDS.get(str(field.type), object))
  if unknown := set(value) - {field.name for field in fields}:
    raise ValueError(f"{sorted(unknown)[0]!r} is no field of a {kind.__name__}")


def _read(value: Any, name: str, kind: Any) -> Any:
  """A field of an object of JSON."""
  if not isinstance(value, Mapping):
    raise ValueError(f"a {type(value).__name__} stands where an object should")
  if name not in value:
    raise ValueError(f"{name!r} is missing")
  if not isinstance(value[name], kind) or isinstance(value[name], bool):
    raise ValueError(f"{name!r} is {str(value[name])[:80]!r}")
  return value[name]


def _tame(text: str) -> str:
  """Text of an agent that cannot close or open the tags around it."""
  return _OURS.sub("< ", text)


def _clip(text: str, most: int = MOST_SHOWN) -> str:
  return text if len(text) <= most else f"{text[:most]}…"
