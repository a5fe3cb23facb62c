"""What a guard sees of an episode, what it may decide, and what rules must offer."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from agentjax.names import Choice
from agentjax.rollout.guards.permissions import PermissionBridge
from agentjax.tools.protocol import Tool, ToolContext, ToolResult
from agentjax.tools.registry import ToolRegistry

EVENTS = ("before_action", "after_action", "state_change", "finish")
SKIPPED = "skipped"  # what AgentSpec shows the policy in the place of a result


class Decision(enum.IntEnum):
  """What becomes of an action, the stricter the higher."""

  CONTINUE = 0
  REFLECT = 1
  SKIP = 2
  DENY = 3
  STOP = 4


@dataclasses.dataclass(frozen=True)
class Verdict:
  """A decision, what the policy is told where it is refused, and what is added in any case."""

  decision: Decision = Decision.CONTINUE
  text: str = ""
  notes: tuple[str, ...] = ()

  def told(self, output: str) -> str:
    """What the policy is shown: ``output`` or the refusal, and the notes."""
    return "\n".join([output if self.decision is Decision.CONTINUE else self.text, *self.notes])


@dataclasses.dataclass
class Step:
  """A call of the episode. ``status`` is "" and ``output`` empty in the turn that makes it."""

  turn: int
  tool: str
  arguments: Mapping[str, Any]
  status: str = ""
  output: str = ""
  seconds: float = 0.0

  @functools.cached_property
  def signature(self) -> str:
    """The same text for the same call, whatever the order of its arguments."""
    return f"{self.tool} {as_json(self.arguments)}"


@dataclasses.dataclass
class Situation:
  """What is about to happen, or just did. Guards only read it.

  Attributes:
    event: one of ``EVENTS``.
    turn: of the policy, from 0.
    user_input: the last message of the user in the task's prompt.
    tool_name: the tool; "" where the event is about no tool.
    tool_input: its arguments; ``{"text": ...}`` for "finish", where text is the policy's answer.
    steps: calls of the episode before this one, those of the same turn included. Results are known
      from the next turn on, so that they do not depend on which call was quicker.
    result: of the call, for "after_action".
    observation: what the policy is about to be shown, for "after_action" and "state_change".
  """

  event: str
  turn: int
  user_input: str = ""
  tool_name: str = ""
  tool_input: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  steps: Sequence[Step] = ()
  result: ToolResult | None = None
  observation: str = ""

  @functools.cached_property
  def texts(self) -> tuple[str, ...]:
    """All strings among the arguments."""
    return tuple(strings(self.tool_input))

  @functools.cached_property
  def signature(self) -> str:
    """As ``Step.signature``."""
    return f"{self.tool_name} {as_json(self.tool_input)}"


@dataclasses.dataclass(frozen=True)
class Entry:
  """What one rule did, for the record of the episode.

  Attributes:
    guard: the rule's name.
    decision: of this rule.
    reason: why.
  """

  guard: str
  decision: Decision
  reason: str


@dataclasses.dataclass(frozen=True)
class Judgement:
  """What rules say about a situation.

  Attributes:
    verdict: what becomes of the action.
    entries: what each rule did, in their order.
    stopped: why the episode must end; None where it may go on.
    timeout: seconds that the call may take, where rules allow it less than it has.
  """

  verdict: Verdict = Verdict()
  entries: tuple[Entry, ...] = ()
  stopped: str | None = None
  timeout: float | None = None


class EpisodeRules(Protocol):
  """The rules of one episode, with what they remember of it."""

  def begin_turn(self) -> None:
    """The policy has taken a turn."""
    ...

  async def judge(self, situation: Situation, context: ToolContext | None) -> Judgement:
    """What becomes of the action; an exception denies it.

    Args:
      situation: what the rules are about.
      context: that the call runs in; None for events that are about no call.
    """
    ...

  def state(self) -> dict[str, Any]:
    """All that changes, as JSON."""
    ...

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Inverse of ``state``."""
    ...


class Rules(Protocol):
  """The rules of a run, shared by its episodes."""

  def listens_to(self, event: str) -> bool:
    """Whether a rule might be triggered by an event of ``EVENTS``."""
    ...

  def start(self, episode: str, seed: int) -> EpisodeRules:
    """Rules for a new episode.

    Args:
      episode: the same text for all events of this episode.
      seed: for tools that rules invoke where no call gives one.
    """
    ...


@dataclasses.dataclass(unsafe_hash=True)
class RulesConfig(Choice):
  """Settings of rules before and after an action, in a language of their own."""

  group = "agentjax.rules"

  def bind(
    self,
    registry: ToolRegistry,
    *,
    offered: Sequence[Tool] = (),
    bridge: PermissionBridge,
    path: str,
  ) -> Rules | None:
    """The rules, bound to what a run has; None where there are none.

    Args:
      registry: the run's tools, which rules are checked against and may invoke.
      offered: tools that environments bring along, which rules may be about.
      bridge: to people who may be asked.
      path: dotted name of these settings, for messages.

    Raises:
      ConfigError: rules that the run's tools do not fit.
    """
    raise NotImplementedError(f"{type(self).__name__} must define bind()")


def strings(value: Any) -> Iterator[str]:
  """All strings in a JSON value, in its order."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, Mapping):
    for item in value.values():
      yield from strings(item)
  elif isinstance(value, list | tuple):
    for item in value:
      yield from strings(item)


def as_json(value: Any) -> str:
  """JSON with sorted keys; what has no JSON form stands as its ``str``."""
  return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
