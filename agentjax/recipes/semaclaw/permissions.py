"""Who may call what: rules that grant, refuse or ask, for each seat of a team or for one agent.

A rule is a line ``DECISION AGENT TOOL [PATTERN]``: "grant", "refuse" or "ask", globs of the agent
and of the tool, and a regular expression that must be found in the arguments as JSON. The first
rule that fits decides. "ask" goes to people through the bridge of guards
(``rollout.guards.permissions``): only the agent that asks waits, the first answer counts, and
where nobody answers in time ``permissions.when_nobody`` does.

The parameters of a guarded tool should be closed (``additionalProperties: false``): in an argument
that the tool does not know, an agent could write what an expression looks for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from agentjax.config import ConfigError, check
from agentjax.rollout.guards.interface import (
  Decision,
  Entry,
  Judgement,
  RulesConfig,
  Situation,
  Verdict,
  as_json,
)
from agentjax.rollout.guards.permissions import PermissionBridge
from agentjax.tools.hooks import Run
from agentjax.tools.protocol import Tool, ToolContext, ToolResult, ToolStatus
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import AGENT, GuardRecord, ToolCall

Access = Literal["grant", "ask", "refuse"]
_SHOWN = 200  # characters of arguments that people see, as in the source


@dataclasses.dataclass(frozen=True)
class AccessRule:
  """A line of the rules; see the module."""

  access: Access
  agent: str
  tool: str
  pattern: re.Pattern[str] | None
  text: str

  def fits(self, agent: str, tool: str, arguments: str) -> bool:
    return (
      fnmatch.fnmatchcase(agent, self.agent)
      and fnmatch.fnmatchcase(tool, self.tool)
      and (self.pattern is None or self.pattern.search(arguments) is not None)
    )


def read_rule(text: str, path: str) -> AccessRule:
  """A rule from its line.

  Raises:
    ConfigError: it is none.
  """
  words = text.split(None, 3)
  if len(words) < 3 or words[0] not in get_args(Access):
    raise ConfigError(
      f"{path}={text!r}; allowed: DECISION AGENT TOOL [PATTERN], the decision one of "
      f"{', '.join(get_args(Access))}, such as 'ask * shell rm '."
    )
  try:
    pattern = re.compile(words[3]) if len(words) == 4 else None
  except re.error as error:
    raise ConfigError(f"{path}={text!r} ends with no regular expression: {error}.") from error
  return AccessRule(words[0], words[1], words[2], pattern, text)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Ruling:
  """Whether a call is allowed, and which rule or person said so."""

  granted: bool
  by: str
  asked: bool = False


@dataclasses.dataclass(unsafe_hash=True)
class AccessConfig(RulesConfig):
  """Settings of permissions; also chosen by ``config.guards.rules`` for a single agent.

  Attributes:
    rules: in their order; see the module.
    otherwise: what happens to a call that no rule fits.
  """

  rules: tuple[str, ...] = ()
  otherwise: Access = "grant"

  def validate(self, path: str = "config.guards.rules") -> None:
    super().validate(path)
    self.read(path)

  def read(self, path: str) -> tuple[AccessRule, ...]:
    """The rules.

    Raises:
      ConfigError: a line that is none.
    """
    return tuple(read_rule(text, f"{path}.rules[{i}]") for i, text in enumerate(self.rules))

  def check_names(self, agents: Sequence[str], tools: Sequence[str], path: str) -> None:
    """Raises ConfigError for a rule that fits no agent or no tool: it would guard nothing."""
    for i, rule in enumerate(self.read(path)):
      for what, glob, names in (("agent", rule.agent, agents), ("tool", rule.tool, tools)):
        found = any(fnmatch.fnmatchcase(name, glob) for name in names)
        check(found, f"{path}.rules[{i}]", rule.text, f"one for the {what}s {', '.join(names)}")

  def bind(
    self,
    registry: ToolRegistry,
    *,
    offered: Sequence[Tool] = (),
    bridge: PermissionBridge,
    path: str,
  ) -> AccessRules | None:
    if not self.rules and self.otherwise == "grant":
      return None
    names = dict.fromkeys(tool.name for tool in (*registry.tools, *offered))
    self.check_names([AGENT], list(names), path)
    return AccessRules(self, bridge)


class AccessRules:
  """The rules of a run or of a team. As ``guards.Rules`` they watch the one agent.

  Args:
    config: validated.
    bridge: to people.
  """

  def __init__(self, config: AccessConfig, bridge: PermissionBridge):
    self._rules, self._otherwise = config.read("rules"), config.otherwise
    self._bridge = bridge

  async def rule(self, agent: str, tool: str, arguments: Mapping[str, Any]) -> Ruling:
    """Whether an agent may make a call now."""
    written = as_json(arguments)
    found = next((r for r in self._rules if r.fits(agent, tool, written)), None)
    access = self._otherwise if found is None else found.access
    by = f"otherwise {access}" if found is None else found.text
    if access != "ask":
      return Ruling(access == "grant", by)
    asked = f"{agent}: {written}"
    answer = await self._bridge.ask(tool, asked if len(asked) <= _SHOWN else asked[:_SHOWN])
    return Ruling(answer.granted, f"{by}; {answer.by}", asked=True)

  def listens_to(self, event: str) -> bool:
    return event == "before_action"

  def start(self, episode: str, seed: int) -> AgentAccess:
    del episode, seed
    return AgentAccess(self)


class AgentAccess:
  """The rules for the one agent of an episode, as ``guards.EpisodeRules``; has no memory."""

  def __init__(self, rules: AccessRules):
    self._rules = rules

  def begin_turn(self) -> None:
    """Nothing depends on turns."""

  async def judge(self, situation: Situation, context: ToolContext | None) -> Judgement:
    del context
    if situation.event != "before_action":
      return Judgement()
    ruling = await self._rules.rule(AGENT, situation.tool_name, situation.tool_input)
    if ruling.granted:
      entries = (Entry("permission", Decision.CONTINUE, ruling.by),) if ruling.asked else ()
      return Judgement(entries=entries)
    denied = Verdict(Decision.DENY, refusal(ruling))
    return Judgement(denied, (Entry("permission", Decision.DENY, ruling.by),))

  def state(self) -> dict[str, Any]:
    return {}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """There is none."""


def refusal(ruling: Ruling) -> str:
  """What an agent reads in the place of a result."""
  return "denied: no permission was given" if ruling.asked else "denied: not allowed"


class SeatAccess:
  """An ``Interceptor`` for the calls of one seat in one turn; they are asked about one by one.

  Args:
    rules: of the team.
    agent: whose calls they are.
    turn: of the team, for the record.
    free: tools that need no permission.

  Attributes:
    records: what was decided.
    seen: number of calls.
  """

  def __init__(self, rules: AccessRules, agent: str, turn: int, free: frozenset[str] = frozenset()):
    self._rules, self._agent, self._turn, self._free = rules, agent, turn, free
    self._asking = asyncio.Lock()
    self.records: list[GuardRecord] = []
    self.seen = 0

  async def __call__(self, call: ToolCall, context: ToolContext, run: Run) -> ToolResult:
    self.seen += 1
    if call.name in self._free:
      return await run(call, context)
    async with self._asking:
      ruling = await self._rules.rule(self._agent, call.name, call.arguments)
    if ruling.asked or not ruling.granted:
      decision, guard = "continue" if ruling.granted else "deny", f"permission {self._agent}"
      self.records.append(
        GuardRecord(self._turn, "before_action", call.name, guard, decision, ruling.by)
      )
    if not ruling.granted:
      return ToolResult(ToolStatus.DENIED, refusal(ruling))
    return await run(call, context)
