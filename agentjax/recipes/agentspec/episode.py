"""Carries out rules while an episode runs.

Rules act in the order of their text; after a refusal no further rule is asked. All enforcements of
a rule are carried out, and the strictest decides: stop, deny, skip, reflect, continue. Before a
call, limits that rules have set are checked first.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from agentjax.recipes.agentspec.binding import VARIABLES, BoundRule, RuleSet
from agentjax.recipes.agentspec.syntax import (
  Act,
  Enforcement,
  Invocation,
  Setting,
  Value,
  Variable,
)
from agentjax.rollout.guards.interface import (
  SKIPPED,
  Decision,
  Entry,
  Judgement,
  Situation,
  Verdict,
  as_json,
)
from agentjax.rollout.guards.permissions import PermissionBridge
from agentjax.tools.protocol import ToolContext, ToolResult, ToolStatus
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import ToolCall

_log = logging.getLogger(__name__)


class AgentSpecRules:
  """The rules of a run; a ``guards.interface.Rules``.

  Args:
    rules: bound to the run's tools.
    registry: runs what rules invoke.
    bridge: to the people whom ``user_inspection`` asks.
    max_reflections, reflection, tool_timeout: see ``AgentSpecConfig``.
  """

  def __init__(
    self,
    rules: RuleSet,
    registry: ToolRegistry,
    bridge: PermissionBridge,
    *,
    max_reflections: int,
    reflection: str,
    tool_timeout: float,
  ):
    self.rules, self.registry, self.bridge = rules, registry, bridge
    self.max_reflections, self.reflection = max_reflections, reflection
    self.tool_timeout = tool_timeout

  def listens_to(self, event: str) -> bool:
    return self.rules.listens_to(event)

  def start(self, episode: str, seed: int) -> AgentSpecEpisode:
    return AgentSpecEpisode(self, ToolContext(episode, seed, self.tool_timeout))


class AgentSpecEpisode:
  """The rules of one episode; a ``guards.interface.EpisodeRules``.

  Args:
    rules: of the run.
    context: for tools that rules invoke where there is no call.
  """

  def __init__(self, rules: AgentSpecRules, context: ToolContext):
    self._rules = rules
    self._context = context
    self._reflections = 0  # turns in a row that were sent back
    self._reflected = False  # this turn was
    self._settings: dict[str, float] = {}

  def begin_turn(self) -> None:
    if not self._reflected:
      self._reflections = 0
    self._reflected = False

  async def judge(self, situation: Situation, context: ToolContext | None) -> Judgement:
    context = self._context if context is None else context
    timeout = None
    if situation.event == "before_action" and self._settings:
      refusal = self._check_calls(situation)
      if refusal is not None:
        return refusal
      seconds = self._settings.get(f"tool:{situation.tool_name}:timeout")
      if seconds is not None and seconds < context.timeout:
        timeout = seconds
        context = dataclasses.replace(context, timeout=seconds)
    return dataclasses.replace(await self._apply(situation, context), timeout=timeout)

  def state(self) -> dict[str, Any]:
    return {
      "reflections": self._reflections,
      "reflected": self._reflected,
      "settings": dict(self._settings),
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    self._reflections, self._reflected = state["reflections"], state["reflected"]
    self._settings = dict(state["settings"])

  def _check_calls(self, situation: Situation) -> Judgement | None:
    """Refuses a call of a tool that was called as often as a rule allows."""
    tool = situation.tool_name
    name = f"tool:{tool}:calls"
    calls = sum(s.tool == tool and s.status != ToolStatus.DENIED for s in situation.steps)
    if name not in self._settings or calls < self._settings[name]:
      return None
    reason = f"{calls} calls of {tool} were made, all that are allowed"
    entry = Entry(f"setting {name}", Decision.DENY, reason)
    return Judgement(Verdict(Decision.DENY, f"denied: {reason}"), (entry,))

  async def _apply(self, situation: Situation, context: ToolContext) -> Judgement:
    notes: tuple[str, ...] = ()
    entries: list[Entry] = []
    for bound in self._rules.rules.triggered(situation):
      name = f"rule @{bound.rule.name}"
      try:
        holds = bound.holds(situation)
      except Exception as error:
        _log.warning("%s cannot be checked, which denies", name, exc_info=error)
        reason = f"a predicate raised {type(error).__name__}: {error}"
        entries.append(Entry(name, Decision.DENY, reason))
        verdict = Verdict(Decision.DENY, f"denied: {name} could not be checked", notes)
        return Judgement(verdict, tuple(entries))
      if not holds:
        continue
      verdict, why = await self._enforce(bound, situation, context)
      entries.append(Entry(name, verdict.decision, why))
      notes += verdict.notes
      if verdict.decision is not Decision.CONTINUE:
        stopped = verdict.decision is Decision.STOP
        return Judgement(
          dataclasses.replace(verdict, notes=notes),
          tuple(entries),
          f"{name} ended the episode at {situation.event}" if stopped else None,
        )
    return Judgement(Verdict(notes=notes), tuple(entries))

  async def _enforce(
    self, bound: BoundRule, situation: Situation, context: ToolContext
  ) -> tuple[Verdict, str]:
    """Carries out all enforcements of a rule, the strictest of which decides; and says why."""
    name = f"@{bound.rule.name}"
    decision = Decision.CONTINUE
    reasons: list[str] = []
    notes: tuple[str, ...] = ()
    for enforcement in bound.rule.enforcements:
      try:
        one, reason, note = await self._carry_out(enforcement, situation, context)
      except Exception as error:
        _log.warning("rule %s cannot be enforced, which denies", name, exc_info=error)
        one, reason, note = Decision.DENY, f"{type(error).__name__}: {error}", ""
      decision = max(decision, one)
      reasons.append(reason)
      notes += (note,) if note else ()
    texts = {
      Decision.CONTINUE: "",
      Decision.REFLECT: self._rules.reflection.replace("{rule}", name),
      Decision.SKIP: SKIPPED,
      Decision.DENY: f"denied: rule {name}",
      Decision.STOP: "denied: the episode ends here",
    }
    return Verdict(decision, texts[decision], notes), "; ".join(reasons)

  async def _carry_out(
    self, enforcement: Enforcement, situation: Situation, context: ToolContext
  ) -> tuple[Decision, str, str]:
    """Returns the decision, its reason, and text to add to the observation."""
    if isinstance(enforcement, Setting):
      name = f"{enforcement.scope}:{enforcement.component}:{enforcement.name}"
      self._settings[name] = enforcement.number
      return Decision.CONTINUE, f"{name}={enforcement.number}", ""
    if isinstance(enforcement, Invocation):
      result = await self._invoke(enforcement, situation, context)
      said = f"{enforcement.tool}: {result.output}"
      failed = result.status is not ToolStatus.OK
      reason = f"invoke_action {enforcement.tool}: {result.status}"
      return (Decision.DENY if failed else Decision.CONTINUE), reason, said
    assert isinstance(enforcement, Act)
    match enforcement.action:
      case "user_inspection":
        category = situation.tool_name or situation.event
        content = situation.observation or as_json(situation.tool_input)
        answer = await self._rules.bridge.ask(category, content)
        said = f"user_inspection: {'granted' if answer.granted else 'refused'} ({answer.by})"
        return (Decision.CONTINUE if answer.granted else Decision.SKIP), said, ""
      case "llm_self_reflect":
        decision = self._reflect()
        limit = self._rules.max_reflections
        more = "" if decision is Decision.REFLECT else f": {limit} turns in a row were sent back"
        return decision, f"llm_self_reflect{more}", ""
      case "stop":
        return Decision.STOP, "stop", ""
      case "skip":
        return Decision.SKIP, "skip", ""
      case "none":
        return Decision.CONTINUE, "none", ""
    raise AssertionError(enforcement.action)

  def _reflect(self) -> Decision:
    """Sends the turn back, unless too many turns in a row were sent back."""
    if not self._reflected:
      if self._reflections >= self._rules.max_reflections:
        return Decision.SKIP
      self._reflections += 1
      self._reflected = True
    return Decision.REFLECT

  async def _invoke(
    self, invocation: Invocation, situation: Situation, context: ToolContext
  ) -> ToolResult:
    arguments = {
      key: await self._resolve(value, situation, context) for key, value in invocation.arguments
    }
    return await self._rules.registry.run(
      ToolCall(invocation.tool, arguments),
      dataclasses.replace(context, timeout=self._rules.tool_timeout),
    )

  async def _resolve(self, value: Value, situation: Situation, context: ToolContext) -> Any:
    if isinstance(value, Variable):
      found = VARIABLES[value.name](situation)
      return found if value.key is None else found[value.key]
    if isinstance(value, Invocation):
      return (await self._invoke(value, situation, context)).output
    return value
