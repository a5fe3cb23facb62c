"""What a guard sees of an episode, what it may decide, and the protocol of rules."""

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
  """The decision about an action; a stricter one has a higher number."""

  CONTINUE = 0
  REFLECT = 1
  SKIP = 2
  DENY = 3
  STOP = 4


@dataclasses.dataclass(frozen=True)
class Verdict:
  """A decision, the message to the policy if it is a refusal, and notes that are always added."""

  decision: Decision = Decision.CONTINUE
  text: str = ""
  notes: tuple[str, ...] = ()

  def told(self, output: str) -> str:
    """The text for the policy: ``output`` or the refusal, and the notes."""
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
  """An action that is about to happen or just happened. Guards only read it.

  Attributes:
    event: one of ``EVENTS``.
    turn: of the policy, from 0.
    user_input: the last message of the user in the task's prompt.
    tool_name: the tool; "" where the event is about no tool.
    tool_input: its arguments; ``{"text": ...}`` for "finish", where text is the policy's answer.
    steps: calls of the episode before this one, those of the same turn included. Results are known
      from the next turn on, so that they do not depend on which call was quicker.
    result: of the call, for "after_action".
    observation: the text that will be shown to the policy, for "after_action" and "state_change".
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
  """The judgement of rules about a situation.

  Attributes:
    verdict: the decision.
    entries: what each rule did, in their order.
    stopped: why the episode must end; None where it may go on.
    timeout: seconds that the call may take, if rules allow less than the usual time.
  """

  verdict: Verdict = Verdict()
  entries: tuple[Entry, ...] = ()
  stopped: str | None = None
  timeout: float | None = None


class EpisodeRules(Protocol):
  """The rules of one episode, with their memory."""

  def begin_turn(self) -> None:
    """The policy has taken a turn."""
    ...

  async def judge(self, situation: Situation, context: ToolContext | None) -> Judgement:
    """Judges the action; an exception denies it.

    Args:
      situation: to be judged.
      context: of the call; None for events without a call.
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
    """Whether an event of ``EVENTS`` can trigger a rule."""
    ...

  def start(self, episode: str, seed: int) -> EpisodeRules:
    """Rules for a new episode.

    Args:
      episode: the same text for all events of this episode.
      seed: for tools that rules invoke outside of a call.
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
      offered: tools of environments, which rules may mention.
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
  """JSON with sorted keys; values without a JSON form are written as ``str``."""
  return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
