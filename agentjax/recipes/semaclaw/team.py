"""Any world of one agent, done by a team: an orchestrator writes a graph, workers do its tasks.

Each agent has a seat, so each may be another policy, learns from its own tokens and is paid for its
own work. The inner world sees one agent: the calls of whichever worker is at work, and the words of
the orchestrator without a call, which answer or speak to a user. The board's clock counts turns of
the team, so that the same turns always give the same episode.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from agentjax.config import ConfigError, PositiveInt, Range, Table, check
from agentjax.data import DataConfig
from agentjax.recipes.semaclaw.graph import Board, GraphError, Roster, TeamTask, read_specs
from agentjax.recipes.semaclaw.permissions import AccessConfig, AccessRules, SeatAccess
from agentjax.recipes.semaclaw.work import HAND_IN, WRITE_GRAPH, score_work
from agentjax.rollout.guards.config import build_bridge
from agentjax.rollout.guards.permissions import PermissionConfig
from agentjax.tools.build import ToolsConfig
from agentjax.tools.declared import DeclaredTool
from agentjax.tools.hooks import intercepted_by
from agentjax.tools.protocol import Tool, ToolStatus
from agentjax.trajectory.record import AGENT, Message, Reward, Task, ToolCall, ToolRecord
from agentjax.world.cheats import Setting, Turns
from agentjax.world.environment import Action, Environment, Observation, Step
from agentjax.world.world import PlainWorld, Site, World, WorldConfig, default_world

ORCHESTRATOR = "orchestrator"

LIST_AGENTS = DeclaredTool(
  "list_agents",
  "Lists the agents of the team and what each is good for.",
  {"type": "object", "properties": {}},
)
CREATE_PARENT = DeclaredTool(
  WRITE_GRAPH,
  "Gives the team a goal and tasks. A task starts when all tasks that it depends on have ended.",
  {
    "type": "object",
    "properties": {
      "goal": {"type": "string"},
      "tasks": {
        "type": "array",
        "items": {
          "type": "object",
          "properties": {
            "label": {"type": "string"},
            "agentName": {"type": "string"},
            "prompt": {"type": "string"},
            "dependsOn": {"type": "array", "items": {"type": "string"}},
          },
          "required": ["label", "agentName", "prompt"],
        },
      },
    },
    "required": ["goal", "tasks"],
  },
)
DISPATCH_TASK = DeclaredTool(
  "dispatch_task",
  "Waits until a task of a parent has ended, and shows its result.",
  {
    "type": "object",
    "properties": {"parentId": {"type": "string"}, "label": {"type": "string"}},
    "required": ["parentId", "label"],
  },
)

LEAD_TOOLS = (LIST_AGENTS, CREATE_PARENT, DISPATCH_TASK)


class NewTaskObservation(Observation):
  """The prompt of a worker's next task; ``context.WindowConfig`` begins a new history."""


@dataclasses.dataclass(unsafe_hash=True)
class TeamWorldConfig(WorldConfig):
  """A world that a team works in. The roles are the source's, all figures are ours.

  Attributes:
    inner: the world, of one agent.
    workers: name of each worker -> what it is good for, which the orchestrator reads.
    tools: worker -> globs of the inner tools that it has; a worker that is not named has all.
    orchestrator_tools: globs of the inner tools that the orchestrator has itself.
    wait: what the orchestrator waits for. "parent": ``create_parent`` answers when all its tasks
      have ended; "task": ``dispatch_task`` waits for one of them, as in the source.
    graphs: parents that an episode may have; further ones are refused.
    turns: of the inner world, for the whole team.
    task_turns: turns of a worker in one task; then the task ends with "timeout".
    refused: cost for the orchestrator of a graph that cannot be run, in the part "environment".
    access: who may call what.
    permissions: who is asked where a rule of ``access`` says "ask".
  """

  inner: WorldConfig = dataclasses.field(default_factory=default_world)
  workers: Table[str] = dataclasses.field(default_factory=lambda: Table({"worker": "does tasks"}))
  tools: Table[tuple[str, ...]] = dataclasses.field(default_factory=Table)
  orchestrator_tools: tuple[str, ...] = ()
  wait: Literal["parent", "task"] = "parent"
  graphs: PositiveInt = 4
  turns: PositiveInt = 32
  task_turns: PositiveInt = 8
  refused: Annotated[float, Range(0)] = 0.0
  access: AccessConfig = dataclasses.field(default_factory=AccessConfig)
  permissions: PermissionConfig = dataclasses.field(default_factory=PermissionConfig)

  def validate(self, path: str = "config.world") -> None:
    super().validate(path)
    check(bool(self.workers), f"{path}.workers", dict(self.workers), "at least one worker")
    for name in self.workers:
      check(name not in (ORCHESTRATOR, AGENT), f"{path}.workers", name, "another name")
    for name in self.tools:
      allowed = f"a worker, {', '.join(self.workers)}"
      check(name in self.workers, f"{path}.tools", name, allowed)
    nested = isinstance(self.inner, TeamWorldConfig)
    check(not nested, f"{path}.inner", self.inner.chosen, "a world of one agent")

  def check_run(self, tools: ToolsConfig, data: DataConfig, path: str) -> None:
    self.inner.check_run(tools, data, path)

  def without_chance(self) -> Self:
    return dataclasses.replace(self, inner=self.inner.without_chance())

  def build(self, site: Site) -> World:
    return TeamWorld(self, self.inner.build(dataclasses.replace(site, max_turns=self.turns)))


class TeamWorld(PlainWorld):
  """The inner world, its tasks and scorers, and the part "work" (``work.score_work``).

  Args:
    config: validated.
    base: the inner world.

  Raises:
    ConfigError: rules or tools that fit nobody.
  """

  def __init__(self, config: TeamWorldConfig, base: World):
    own = lead_tools(config)
    access = config.access
    names = [tool.name for tool in base.tools]
    for agent, globs in {**config.tools, ORCHESTRATOR: config.orchestrator_tools}.items():
      for glob in globs:
        check(bool(fnmatch.filter(names, glob)), f"config.world.tools.{agent}", glob, str(names))
    access.check_names((ORCHESTRATOR, *config.workers), names, "config.world.access")
    rules = AccessRules(access, build_bridge(config.permissions, "config.world.permissions"))
    guarded = bool(access.rules) or access.otherwise != "grant"
    super().__init__(
      lambda task: TeamEnvironment(base.environment(task), config, rules if guarded else None),
      (*own, *base.tools),
      base,
    )
    self.scorers = {**base.scorers, "work": score_work}

  def cheats(self, task: Task, setting: Setting) -> Mapping[str, Turns]:
    """Those of the inner world that the orchestrator can play without the workers' tools."""
    known = self._base.cheats(task, setting)
    return {name: turns for name, turns in known.items() if _without_calls(turns)}

  def solution(self, task: Task, setting: Setting) -> Turns:
    turns = self._base.solution(task, setting)
    return turns if _without_calls(turns) else ()


class TeamEnvironment(Environment):
  """One episode of a team.

  Args:
    inner: of one agent; answers the calls of a turn with one message each, in their order.
    config: validated.
    rules: who may call what; None lets all calls pass.
  """

  def __init__(self, inner: Environment, config: TeamWorldConfig, rules: AccessRules | None):
    if tuple(inner.agents) != (AGENT,):
      raise ConfigError(
        f"{type(inner).__name__} has the agents {', '.join(inner.agents)}; allowed: a world of one "
        "agent, which the team plays together."
      )
    self.agents = (ORCHESTRATOR, *config.workers)
    self._inner, self._config, self._rules = inner, config, rules
    self._acted: set[str] = set()
    self._now = self._task_turns = self._graphs = self._fined = 0
    self._board = Board(Roster(dict(config.workers)))
    self._at: TeamTask | None = None  # the task that is at work
    # Answers to the orchestrator's latest calls: a text, or the tasks whose end it waits for.
    self._answers: list[str | list[TeamTask]] = []
    self._tools: dict[str, tuple[Tool, ...]] = {}

  @property
  def least_return(self) -> float:
    return self._inner.least_return - self._config.refused * self._config.graphs

  def tools_of(self, agent: str) -> Sequence[Tool]:
    return self._tools[agent]

  async def reset(self, task: Task, key: int) -> Observation:
    observation = await self._inner.reset(task, key)
    config = self._config
    globs = {name: config.tools.get(name, ("*",)) for name in config.workers}
    globs[ORCHESTRATOR] = config.orchestrator_tools
    self._tools = {name: fitting(self._inner.tools, own) for name, own in globs.items()}
    self._tools[ORCHESTRATOR] = (*lead_tools(config), *self._tools[ORCHESTRATOR])
    first, *rest = observation.messages
    text = f"{introduction(config)}\n\n"
    shown = Message.of(first.role, text, *(first.parts or (first.content,)))
    return Observation((shown, *rest), next=ORCHESTRATOR)

  async def step(self, action: Action) -> Step:
    self._now += 1
    self._acted.add(action.agent)
    if action.agent == ORCHESTRATOR:
      return await self._lead(action)
    return await self._work(action)

  async def close(self) -> None:
    await self._inner.close()

  async def _lead(self, action: Action) -> Step:
    """The orchestrator's turn: calls, or words to the inner world."""
    if action.truncated or not action.tool_calls:
      return await self._forward(action, ())
    own = {tool.name for tool in lead_tools(self._config)}
    records, fine = [], 0.0
    inner = tuple(call for call in action.tool_calls if call.name not in own)
    step = await self._forward(action, inner) if inner else Step(Observation(()))
    told = iter(step.observation.messages)
    self._answers = []
    for call in action.tool_calls:
      if call.name not in own:
        self._answers += [message.content for message in itertools.islice(told, 1)]
        continue
      answer, accepted = self._answer(call)
      status = ToolStatus.OK if accepted else ToolStatus.ERROR
      said = answer if isinstance(answer, str) else ", ".join(task.id for task in answer)
      records.append(
        ToolRecord(self._now - 1, call.name, dict(call.arguments), status.value, said, 0.0)
      )
      fine += self._fine(call, accepted)
      self._answers.append(answer)
    step = dataclasses.replace(step, tools=(*step.tools, *records))
    if fine:
      paid = step.reward or Reward(0.0)
      step = dataclasses.replace(step, reward=_plus(paid, -fine))
    return step if step.terminated or step.truncated else self._next(step)

  async def _work(self, action: Action) -> Step:
    """A worker's turn: calls, or the result of its task."""
    task = self._at
    assert task is not None
    self._task_turns += 1
    if action.truncated:
      return self._next(self._end(task, "error", "its turn was cut off"))
    if not action.tool_calls:
      return self._next(self._end(task, "done", action.text))
    step = await self._forward(action, action.tool_calls)
    if step.terminated or step.truncated:
      return step
    if self._task_turns >= self._config.task_turns:
      most = self._config.task_turns
      ended = self._end(task, "timeout", f"not done within {most} turns")
      return self._next(dataclasses.replace(step, tools=(*step.tools, *ended.tools)))
    return step

  async def _forward(self, action: Action, calls: Sequence[ToolCall]) -> Step:
    """What the inner world answers; calls of tools that the agent does not have stay here."""
    offered = {tool.name for tool in self._tools[action.agent]}
    passed = tuple(call for call in calls if call.name in offered)
    step = Step(Observation(()))
    if passed or not calls:
      inner = dataclasses.replace(action, tool_calls=passed, agent=AGENT)
      step = self._shared(await self._guarded(inner, action.agent), action.agent)
    if len(passed) == len(calls) or step.terminated or step.truncated:
      return _to(action.agent, step)
    told, records = iter(step.observation.messages), []
    shown: list[Message] = []
    for call in calls:
      if call.name in offered:
        shown += itertools.islice(told, 1)
        continue
      text = f"error: {action.agent} has no tool {call.name[:80]!r}; its tools: {_listed(offered)}"
      shown.append(Message("tool", text))
      error = ToolStatus.ERROR.value
      records.append(ToolRecord(self._now - 1, call.name, dict(call.arguments), error, text, 0.0))
    observation = dataclasses.replace(step.observation, messages=(*shown, *told))
    step = dataclasses.replace(step, observation=observation, tools=(*step.tools, *records))
    return _to(action.agent, step)

  async def _guarded(self, inner: Action, agent: str) -> Step:
    """The inner world's step, whose calls need permission."""
    if self._rules is None:
      return await self._inner.step(inner)
    seat = SeatAccess(self._rules, agent, self._now - 1)
    with intercepted_by(seat):
      step = await self._inner.step(inner)
    if not seat.seen and any(record.status == ToolStatus.OK for record in step.tools):
      raise RuntimeError(
        f"{type(self._inner).__name__} ran calls past the permissions; an environment calls its "
        "tools through a ToolRegistry or tools.hooks.intercept"
      )
    return dataclasses.replace(step, guards=(*step.guards, *seat.records))

  def _answer(self, call: ToolCall) -> tuple[str | list[TeamTask], bool]:
    """The answer to a call of the orchestrator's own tools, and whether it was accepted."""
    try:
      if call.error is not None:
        raise GraphError(f"the call could not be read: {call.error}")
      if call.name == LIST_AGENTS.name:
        return self._board.roster.describe(), True
      if call.name == DISPATCH_TASK.name:
        names = [call.arguments.get(name) for name in ("parentId", "label")]
        return [self._board.task(*map(str, names))], True
      if self._graphs >= self._config.graphs:
        raise GraphError(f"an episode has at most {self._config.graphs} parents")
      self._graphs += 1
      specs = read_specs(call.arguments.get("tasks"))
      goal, limit = str(call.arguments.get("goal") or ""), float(self._config.turns)
      parent = self._board.add(ORCHESTRATOR, goal, specs, now=float(self._now), timeout=limit)
    except GraphError as error:
      return f"error: {error}", False
    if self._config.wait == "parent":
      return list(parent.tasks.values()), True
    return f"{parent.id}: {', '.join(parent.tasks)}", True

  def _fine(self, call: ToolCall, accepted: bool) -> float:
    """What a refused graph costs; no more of them than ``graphs``, so that losses are bounded."""
    if accepted or call.name != CREATE_PARENT.name or self._fined >= self._config.graphs:
      return 0.0
    self._fined += 1
    return self._config.refused

  def _end(self, task: TeamTask, status: Any, result: str) -> Step:
    """A step with the record of what a worker handed in."""
    self._board.finish(task, status, result, now=float(self._now))
    self._at = None
    state = ToolStatus.OK if status == "done" else ToolStatus.ERROR
    state = ToolStatus.TIMEOUT if status == "timeout" else state
    arguments = {"parentId": task.parent, "label": task.label}
    record = ToolRecord(self._now - 1, HAND_IN, arguments, state.value, result, 0.0)
    return Step(Observation(()), tools=(record,))

  def _next(self, step: Step) -> Step:
    """Gives the turn to the agent of the next ready task, or back to the orchestrator."""
    waits = [answer for answer in self._answers if not isinstance(answer, str)]
    if all(task.ended for tasks in waits for task in tasks):
      texts = [a if isinstance(a, str) else _results(a) for a in self._answers]
      shown = tuple(Message("tool", text) for text in texts)
      return dataclasses.replace(step, observation=Observation(shown, next=ORCHESTRATOR))
    task = self._board.ready()[0]  # there is one: a graph has no circle, and nobody is at work
    self._board.start(task, now=float(self._now))
    self._at, self._task_turns = task, 0
    prompt = Message("user", self._board.prompt_of(task))
    return dataclasses.replace(step, observation=NewTaskObservation((prompt,), next=task.agent))

  def _shared(self, step: Step, agent: str) -> Step:
    """What the inner world pays, it pays to all who took part so far."""
    if step.reward is None:
      return step
    others = {name: step.reward for name in sorted(self._acted - {agent})}
    return dataclasses.replace(step, rewards=others)


def lead_tools(config: TeamWorldConfig) -> tuple[DeclaredTool, ...]:
  """The orchestrator's own tools."""
  return LEAD_TOOLS if config.wait == "task" else LEAD_TOOLS[:-1]


def fitting(tools: Iterable[Tool], globs: Sequence[str]) -> tuple[Tool, ...]:
  """The tools with a name that fits one of the globs."""
  return tuple(t for t in tools if any(fnmatch.fnmatchcase(t.name, glob) for glob in globs))


def introduction(config: TeamWorldConfig) -> str:
  """What stands before the task in the orchestrator's prompt."""
  agents = Roster(dict(config.workers)).describe()
  return f"You lead a team. Give tasks with {CREATE_PARENT.name}, then answer.\n{agents}"


def _without_calls(turns: Turns) -> bool:
  return not any(turn.tool_calls for turn in turns)


def _to(agent: str, step: Step) -> Step:
  return dataclasses.replace(step, observation=dataclasses.replace(step.observation, next=agent))


def _results(tasks: Sequence[TeamTask]) -> str:
  return "\n".join(task.report() for task in tasks)


def _plus(reward: Reward, more: float) -> Reward:
  return reward if reward.value is None else Reward(reward.value + more)


def _listed(names: set[str]) -> str:
  return ", ".join(sorted(names)) or "none"
