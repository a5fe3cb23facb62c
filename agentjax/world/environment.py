"""The environment protocol: reset, step, close; snapshot and restore if it can be branched."""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Awaitable, Mapping, Sequence

from agentjax.faults import Fault
from agentjax.tools.protocol import Tool
from agentjax.trajectory.record import (
  AGENT,
  GuardRecord,
  Message,
  Reward,
  Status,
  Task,
  ToolCall,
  ToolRecord,
)


@dataclasses.dataclass(frozen=True)
class Observation:
  """Messages shown to the policy before it acts.

  Attributes:
    messages: shown to the agent who acts next.
    next: that agent, if there are several.
    others: messages for other agents, who read them when they act next.
  """

  messages: tuple[Message, ...]
  next: str = AGENT
  others: Mapping[str, tuple[Message, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Action:
  """What the policy wrote in one turn: the text without markup, and the calls parsed from it."""

  text: str
  tool_calls: tuple[ToolCall, ...] = ()
  truncated: bool = False  # the turn ran out of tokens before its end marker
  agent: str = AGENT  # whose turn it was


@dataclasses.dataclass(frozen=True)
class Step:
  """Result of an action. ``reward`` None means "the reward graph decides at the end"; ``reason``
  says why a status other than ok was set, and ``fault`` what failed where the status masks.
  ``executed`` is False where the action was not carried out: it was cut off, could not be read or
  was refused. A tool call that failed says so in its record.

  ``reward`` is paid to the agent who acted, ``rewards`` by name to further ones."""

  observation: Observation
  reward: Reward | None = None
  terminated: bool = False
  truncated: bool = False
  status: Status = Status.OK
  executed: bool = True
  answer: str | None = None
  tools: tuple[ToolRecord, ...] = ()
  guards: tuple[GuardRecord, ...] = ()
  reason: str = ""
  fault: Fault | None = None
  rewards: Mapping[str, Reward] = dataclasses.field(default_factory=dict)


class Environment(abc.ABC):
  """One episode's world. Lives on the host, never imports jax. One instance serves one episode.

  An environment of several agents names them in ``agents``. ``Observation.next`` then says who acts
  next and ``Observation.others`` what others see; ``Action.agent`` is who acted.
  """

  tools: Sequence[Tool] = ()
  agents: Sequence[str] = (AGENT,)

  def tools_of(self, agent: str) -> Sequence[Tool]:
    """The tools of ``agent``; called after ``reset``."""
    del agent
    return self.tools

  @property
  def least_return(self) -> float:
    """The lowest possible sum of an episode's rewards, 0 or below.

    An episode that the policy ends by a breach (``Status.POLICY_ERROR``), such as made-up markup,
    gets this sum, whatever it had earned: a breach must not be worth more than losing.
    """
    return 0.0

  @abc.abstractmethod
  async def reset(self, task: Task, key: int) -> Observation:
    """Starts the episode. ``key`` seeds every random choice the environment makes."""

  @abc.abstractmethod
  async def step(self, action: Action) -> Step:
    """Advances by one turn of the policy."""

  def snapshot(self) -> bytes | None | Awaitable[bytes | None]:
    """The whole state of the episode, from which others can continue; may be a coroutine.

    None, or NotImplementedError, means that this environment has no snapshots. Samplers that branch
    then refuse it; others never call this.
    """
    return None

  def restore(self, state: bytes) -> None:
    """Returns to a snapshot, also in a fresh instance on which reset was called with its task."""
    raise NotImplementedError(f"{type(self).__name__} must define restore() or resume()")

  async def resume(self, task: Task, key: int, state: bytes) -> None:
    """Starts a fresh instance at ``state`` of another, instead of ``reset``."""
    await self.reset(task, key)
    self.restore(state)

  def discard(self, state: bytes) -> None:  # noqa: B027 (most snapshots hold nothing outside)
    """``state`` is no longer needed: frees its resources, also after ``close``."""

  async def close(self) -> None:  # noqa: B027 (most environments hold nothing)
    """Frees what the episode holds; called exactly once, also after errors."""


async def take_snapshot(environment: Environment) -> bytes | None:
  """``environment.snapshot()``, sync or async; None if there is none, or no ``restore``."""
  kind = type(environment)
  if kind.restore is Environment.restore and kind.resume is Environment.resume:
    return None
  try:
    state = environment.snapshot()
    return await state if inspect.isawaitable(state) else state
  except NotImplementedError:
    return None
