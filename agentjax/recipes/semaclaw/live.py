"""A team that works on a goal of yours: an orchestrator, its graph, workers that run at once.

Every task is an episode of its own: a fresh conversation of the task's agent with its tools, behind
the permissions of its seat. What an agent says last is the task's result. All conversations are
kept as trajectories. The board stands in ``board.json``, so that a team whose process was killed
goes on (``scheduler``); the orchestrator is then told what was done before.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.adapters.seat_host import PATIENCE, SeatHost
from agentjax.config import ConfigError
from agentjax.recipes.semaclaw.graph import Board, GraphError, Parent, Roster, TeamTask, read_specs
from agentjax.recipes.semaclaw.permissions import AccessRules, SeatAccess
from agentjax.recipes.semaclaw.scheduler import Scheduler
from agentjax.recipes.semaclaw.team import (
  CREATE_PARENT,
  DISPATCH_TASK,
  LEAD_TOOLS,
  LIST_AGENTS,
  ORCHESTRATOR,
  TeamWorldConfig,
  fitting,
)
from agentjax.rewards.judges import question_key
from agentjax.rollout.guards.config import build_bridge
from agentjax.rollout.guards.permissions import Channel
from agentjax.rollout.seat_config import SeatConfig
from agentjax.sandbox.config import Sandboxes
from agentjax.schedules import at_end
from agentjax.tools.build import build_tools
from agentjax.tools.declared import DeclaredTool
from agentjax.tools.hooks import intercepted_by
from agentjax.tools.protocol import ToolContext, ToolResult, ToolStatus
from agentjax.tools.registry import ToolRegistry
from agentjax.training.experiment import Experiment, resolve
from agentjax.trajectory.record import Message, Status, Task, Trajectory
from agentjax.trajectory.store import StoreWriter
from agentjax.world.environment import Action, Step
from agentjax.world.question import QuestionEnvironment

BOARD, EPISODES = "board.json", "episodes.store"
LEADING = (
  "You lead a team. Give the team tasks with create_parent, wait for their results with "
  "dispatch_task, then say in words what came of the goal."
)


class TaskFailedError(RuntimeError):
  """An agent ended without a result."""


class LiveTeam:
  """Plays a team until its goal is reached; use it as an async context manager.

  Args:
    experiment: its world is a TeamWorldConfig, which says who is in the team, with which tools and
      permissions; its tools, limits (``rollout``), system prompt and engine are those of all.
    players: who plays each agent; the one of "" plays all others.
    folder: keeps the board and the conversations.
    personas: name -> who a persona is; made for a task, several at once.
    channels: further ways to people.

  Raises:
    ConfigError: settings that cannot be, or a folder that another process uses.
  """

  def __init__(
    self,
    experiment: Experiment,
    players: Mapping[str, SeatConfig],
    folder: str | os.PathLike[str],
    *,
    personas: Mapping[str, str] | None = None,
    channels: Sequence[Channel] = (),
  ):
    world = experiment.world
    if not isinstance(world, TeamWorldConfig):
      raise ConfigError(
        f"config.world={world.chosen!r}; allowed: agentjax.recipes.semaclaw:TeamWorldConfig, which "
        "says who is in the team."
      )
    resolve(experiment)
    self._roster = Roster(dict(world.workers), personas or {})
    agents, given = (ORCHESTRATOR, *self._roster.names), set(players)
    if not given <= {"", *agents} or not ("" in given or given >= set(agents)):
      raise ConfigError(
        f"players={sorted(given)}; allowed: one for each of {', '.join(agents)}, or for all."
      )
    self._experiment, self._world, self._players = experiment, world, dict(players)
    self._folder = pathlib.Path(folder)
    self._registry = build_tools(experiment.tools, (), Sandboxes(experiment.sandboxes))
    tools = [tool.name for tool in self._registry.tools]
    world.access.check_names(agents, tools, "config.world.access")
    bridge = build_bridge(world.permissions, "config.world.permissions", channels)
    self._rules = AccessRules(world.access, bridge)
    self._host = SeatHost(experiment)
    self._writer: StoreWriter | None = None
    self.scheduler = Scheduler(Board(self._roster), self._run, self._folder / BOARD)

  async def __aenter__(self) -> LiveTeam:
    self._folder.mkdir(parents=True, exist_ok=True)
    self.scheduler.open()  # its lock guards the store too
    self._writer = StoreWriter(self._folder / EPISODES)
    await self.scheduler.__aenter__()
    return self

  async def __aexit__(self, *error: object) -> None:
    await self.scheduler.__aexit__(*error)
    await self._registry.close()
    self._host.close()
    if self._writer is not None:
      self._writer.close()

  async def pursue(self, goal: str) -> str:
    """The orchestrator's last words about a goal.

    Raises:
      TaskFailedError: it ended without any.
    """
    board = self.scheduler.board
    before = [p for p in board.parents.values() if p.admin == ORCHESTRATOR]
    for parent in before:
      await self.scheduler.wait(parent.id)
    lead = ToolRegistry(
      [
        _LeadTool(LIST_AGENTS, self._list),
        _LeadTool(CREATE_PARENT, self._create),
        _LeadTool(DISPATCH_TASK, self._dispatch),
        *fitting(self._registry.tools, self._world.orchestrator_tools),
      ],
      timeout=PATIENCE,
      retries=0,
    )
    done = [f"Done before, for the goal {p.goal!r}:\n{p.results}" for p in before]
    prompt, number = "\n\n".join([*done, goal]), question_key(goal, len(before))
    return await self._converse(ORCHESTRATOR, prompt, LEADING, lead, number)

  async def _run(self, task: TeamTask, prompt: str) -> str:
    """A ``scheduler.RunTask``."""
    return await self.ask(task.agent, prompt, question_key(task.id, task.attempts))

  async def ask(self, agent: str, prompt: str, number: int) -> str:
    """What an agent of the team says last to a prompt, in a conversation of its own.

    Args:
      agent: of the roster.
      prompt: what it reads.
      number: of the conversation, which addresses its draws.

    Raises:
      TaskFailedError: it ended without any word.
    """
    globs = self._world.tools.get(agent, ("*",))
    registry = ToolRegistry(
      fitting(self._registry.tools, globs),
      timeout=self._experiment.tools.timeout,
      retries=self._experiment.tools.retries,
      calls_per_turn=self._experiment.tools.calls_per_turn,
    )
    who = f"You are {agent}: {self._roster.described[agent]}."
    return await self._converse(agent, prompt, who, registry, number)

  async def _converse(
    self, agent: str, prompt: str, who: str, registry: ToolRegistry, number: int
  ) -> str:
    system = self._experiment.chat.system_prompt
    opening = Message("system", "\n\n".join(filter(None, [system, who])))
    limits = at_end(self._experiment.rollout)
    task = Task(number, (opening, Message("user", prompt)), "", agent.replace(":", "_"))
    timeout = PATIENCE if agent == ORCHESTRATOR else self._experiment.tools.timeout
    trajectory = await self._host.play(
      self._players.get(agent) or self._players[""],
      task,
      lambda task: SeatEnvironment(
        registry, self._rules, agent, max_turns=limits.max_turns, tool_timeout=timeout
      ),
    )
    self._keep(trajectory)
    if trajectory.status is not Status.OK or trajectory.answer is None:
      reason = trajectory.metadata.get("reason", "no words")
      raise TaskFailedError(f"{agent} ended with {trajectory.status}: {reason}")
    return trajectory.answer

  def _keep(self, trajectory: Trajectory) -> None:
    assert self._writer is not None
    if trajectory.segments:
      self._writer.append_trajectory(trajectory)

  async def _list(self, arguments: Mapping[str, Any]) -> str:
    del arguments
    return self._roster.describe()

  async def _create(self, arguments: Mapping[str, Any]) -> str:
    specs = read_specs(arguments.get("tasks"))
    parent: Parent = self.scheduler.add(ORCHESTRATOR, str(arguments.get("goal") or ""), specs)
    return f"{parent.id}: {', '.join(parent.tasks)}"

  async def _dispatch(self, arguments: Mapping[str, Any]) -> str:
    names = [str(arguments.get(name)) for name in ("parentId", "label")]
    (task,) = await self.scheduler.wait(names[0], names[1])
    return task.report()


class _LeadTool:
  """A tool of the orchestrator, whose calls in one turn wait at the same time."""

  def __init__(self, described: DeclaredTool, answer: Any):
    self.name, self.description = described.name, described.description
    self.parameters, self._answer = described.parameters, answer

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    del context
    try:
      return ToolResult(ToolStatus.OK, await self._answer(arguments))
    except GraphError as error:
      return ToolResult(ToolStatus.ERROR, f"error: {error}")


class SeatEnvironment(QuestionEnvironment):
  """A question whose answer is the whole last turn, with the permissions of one seat.

  Args:
    registry: tools of the seat.
    rules: of the team.
    agent: the seat.
    max_turns, tool_timeout: as in QuestionEnvironment.
  """

  def __init__(
    self,
    registry: ToolRegistry,
    rules: AccessRules,
    agent: str,
    *,
    max_turns: int,
    tool_timeout: float,
  ):
    super().__init__(registry, max_turns=max_turns, tool_timeout=tool_timeout, read_answer=_words)
    self._rules, self._agent = rules, agent
    leads = agent == ORCHESTRATOR
    self._free = frozenset(t.name for t in LEAD_TOOLS) if leads else frozenset[str]()

  async def step(self, action: Action) -> Step:
    seat = SeatAccess(self._rules, self._agent, self._turn, self._free)
    with intercepted_by(seat):
      step = await super().step(action)
    return dataclasses.replace(step, guards=(*step.guards, *seat.records))


def _words(text: str) -> str | None:
  return text.strip() or None
