"""The environment protocol: reset, step, snapshot, restore, close."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

from agentjax.faults import Fault
from agentjax.tools.protocol import Tool
from agentjax.trajectory.record import (
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
  """Messages shown to the policy before it acts."""

  messages: tuple[Message, ...]


@dataclasses.dataclass(frozen=True)
class Action:
  """What the policy wrote in one turn: the text without markup, and the calls parsed from it."""

  text: str
  tool_calls: tuple[ToolCall, ...] = ()
  truncated: bool = False  # the turn ran out of tokens before its end marker


@dataclasses.dataclass(frozen=True)
class Step:
  """Result of an action. ``reward`` None means "the reward graph decides at the end"; ``reason``
  says why a status other than ok was set, and ``fault`` what failed where the status masks."""

  observation: Observation
  reward: Reward | None = None
  terminated: bool = False
  truncated: bool = False
  status: Status = Status.OK
  answer: str | None = None
  tools: tuple[ToolRecord, ...] = ()
  guards: tuple[GuardRecord, ...] = ()
  reason: str = ""
  fault: Fault | None = None


class Environment(abc.ABC):
  """One episode's world. Lives on the host, never imports jax. One instance serves one episode."""

  tools: Sequence[Tool] = ()

  @abc.abstractmethod
  async def reset(self, task: Task, key: int) -> Observation:
    """Starts the episode. ``key`` seeds every random choice the environment makes."""

  @abc.abstractmethod
  async def step(self, action: Action) -> Step:
    """Advances by one turn of the policy."""

  @abc.abstractmethod
  def snapshot(self) -> bytes:
    """The whole state of the episode, for branching and exact resume."""

  @abc.abstractmethod
  def restore(self, state: bytes) -> None:
    """Returns to a snapshot, also in a fresh instance on which reset was called with its task."""

  async def close(self) -> None:  # noqa: B027 (most environments hold nothing)
    """Frees what the episode holds; called exactly once, also after errors."""
