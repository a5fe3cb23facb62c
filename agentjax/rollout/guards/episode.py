"""Hooks, egress and rules in a running episode, in their order.

Before a call: hooks, which may change its arguments; egress; rules. After it: hooks, then rules. So
rules judge the arguments that are used and the output that is shown. Hooks act in their order;
after a refusal no further hook is asked.

All calls of a turn are checked one after the other before any runs, so verdicts do not depend on
which tool is quicker.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.rollout.guards.config import Guards
from agentjax.rollout.guards.hooks import Hook, HookAnswer, HookEvent, HookFailure
from agentjax.rollout.guards.interface import (
  SKIPPED,
  Decision,
  Entry,
  Judgement,
  Situation,
  Step,
  Verdict,
)
from agentjax.tools.egress import EgressDenied, urls
from agentjax.tools.hooks import Run
from agentjax.tools.protocol import ToolContext, ToolResult, ToolStatus
from agentjax.trajectory.record import GuardRecord, ToolCall

_log = logging.getLogger(__name__)


class GuardError(Exception):
  """A hook refused to let the episode begin."""


class EpisodeGuard:
  """Guards one episode; an ``Interceptor`` of its tools.

  Args:
    guards: of the run.
    episode: the same text for all events of this episode.
    seed: for actions of rules that belong to no call.
    user_input: the last message of the user.

  Attributes:
    stopped: why the episode must end; None while it may go on.
    intercepted: calls of this turn that were seen.
  """

  def __init__(self, guards: Guards, episode: str, seed: int, user_input: str):
    self.stopped: str | None = None
    self.intercepted = 0
    self._guards = guards
    self._episode = episode
    self._rules = None if guards.rules is None else guards.rules.start(episode, seed)
    self._user_input = user_input
    self._turn = -1
    self._steps: list[Step] = []
    self._results: list[tuple[Step, ToolResult]] = []  # of this turn
    self._observation = ""
    self._records: list[tuple[int, GuardRecord]] = []  # number of the call, record
    self._checking = asyncio.Lock()

  async def start(self) -> str:
    """Asks the hooks of the start; gives the text they add to the prompt.

    Raises:
      GuardError: one refused.
    """
    added = []
    for hook in self._guards.hooks["episode_start"]:
      verdict, answer = await self._ask_hook(hook, self._event("episode_start"), "episode_start")
      if verdict.decision is not Decision.CONTINUE:
        raise GuardError(f"hook {hook.name!r} refused the episode: {self._records[-1][1].reason}")
      if answer.additional_context:
        added.append(answer.additional_context)
    return "\n".join(added)

  def begin_turn(self) -> None:
    """The policy has taken a turn."""
    self._turn += 1
    self.intercepted = 0
    if self._rules is not None:
      self._rules.begin_turn()

  def end_turn(self) -> tuple[GuardRecord, ...]:
    """The environment has answered; gives what guards did since the last time."""
    for step, result in self._results:
      step.status, step.output, step.seconds = result.status.value, result.output, result.seconds
    self._results.clear()
    records = tuple(record for _, record in sorted(self._records, key=lambda pair: pair[0]))
    self._records.clear()
    return records

  async def __call__(self, call: ToolCall, context: ToolContext, run: Run) -> ToolResult:
    number, self.intercepted = self.intercepted, self.intercepted + 1
    async with self._checking:
      verdict, call, context = await self._before(call, context, number)
      earlier = len(self._steps)
      step = Step(self._turn, call.name, call.arguments)
      self._steps.append(step)
      if verdict.decision is not Decision.CONTINUE:
        step.status = ToolStatus.DENIED
    if verdict.decision is Decision.CONTINUE:
      result = await run(call, context)
      result = await self._after(call, context, result, verdict.notes, number, earlier)
    else:
      result = ToolResult(ToolStatus.DENIED, verdict.told(""))
    self._results.append((step, result))
    return result

  async def finish(self, text: str) -> Verdict:
    """Whether the policy may end its work with ``text``."""
    for hook in self._guards.hooks["stop"]:
      verdict, _ = await self._ask_hook(hook, self._event("stop", text=text), "finish")
      if verdict.decision is not Decision.CONTINUE:
        return verdict
    verdict, _ = await self._ask_rules(self._situation("finish", {"text": text}), None)
    return verdict

  async def observed(self, observation: str) -> Verdict:
    """The decision about an observation, if it differs from the last one."""
    changed, self._observation = observation != self._observation, observation
    if not changed or not self._listens_to("state_change"):
      return Verdict()
    situation = self._situation("state_change", observation=observation)
    verdict, _ = await self._ask_rules(situation, None)
    return verdict

  def state(self) -> dict[str, Any]:
    """All that changes, as JSON."""
    return {
      "user_input": self._user_input,
      "turn": self._turn,
      "steps": [dataclasses.asdict(step) for step in self._steps],
      "observation": self._observation,
      "rules": None if self._rules is None else self._rules.state(),
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Inverse of ``state``."""
    self._user_input, self._turn = state["user_input"], state["turn"]
    self._steps = [Step(**step) for step in state["steps"]]
    self._observation = state["observation"]
    if self._rules is not None:
      self._rules.set_state(state["rules"])
    self._records.clear()  # of the beginning, which the one who goes on from here has seen

  async def _before(
    self, call: ToolCall, context: ToolContext, number: int
  ) -> tuple[Verdict, ToolCall, ToolContext]:
    if self.stopped is not None:
      return Verdict(Decision.DENY, "denied: the episode ends here"), call, context
    notes: tuple[str, ...] = ()
    for hook in self._guards.hooks["before_tool"]:
      if not hook.fits(call.name, call.arguments):
        continue
      event = self._event("before_tool", call.name, call.arguments)
      verdict, answer = await self._ask_hook(hook, event, "before_action", number)
      if verdict.decision is not Decision.CONTINUE:
        return verdict, call, context
      if answer.updated_input is not None:
        call = dataclasses.replace(call, arguments=dict(answer.updated_input))
      if answer.additional_context:
        notes += (answer.additional_context,)
    if self._guards.egress is not None and self._guards.egress_tools.match(call.name):
      verdict = self._check_egress(call, number)
      if verdict.decision is not Decision.CONTINUE:
        return verdict, call, context
    situation = self._situation("before_action", call.arguments, call.name)
    verdict, timeout = await self._ask_rules(situation, context, number)
    if timeout is not None:
      context = dataclasses.replace(context, timeout=timeout)
    return dataclasses.replace(verdict, notes=notes + verdict.notes), call, context

  async def _after(
    self,
    call: ToolCall,
    context: ToolContext,
    result: ToolResult,
    notes: tuple[str, ...],
    number: int,
    earlier: int,
  ) -> ToolResult:
    if result.status is ToolStatus.INFRA_ERROR:
      return result  # it ends the episode, and is nothing the policy did
    verdict = Verdict()
    for hook in self._guards.hooks["after_tool"]:
      if not hook.fits(call.name, call.arguments):
        continue
      event = self._event(
        "after_tool", call.name, call.arguments, status=result.status.value, output=result.output
      )
      verdict, answer = await self._ask_hook(hook, event, "after_action", number)
      if verdict.decision is not Decision.CONTINUE:
        break
      if answer.updated_output is not None:
        result = dataclasses.replace(result, output=answer.updated_output)
      if answer.additional_context:
        notes += (answer.additional_context,)
    if verdict.decision is Decision.CONTINUE:
      if not notes and not self._listens_to("after_action"):
        return result
      situation = Situation(
        event="after_action",
        turn=self._turn,
        user_input=self._user_input,
        tool_name=call.name,
        tool_input=call.arguments,
        steps=self._steps[:earlier],
        result=result,
        observation=result.output,
      )
      verdict, _ = await self._ask_rules(situation, context, number)
    verdict = dataclasses.replace(verdict, notes=notes + verdict.notes)
    if verdict.decision is Decision.REFLECT:
      return dataclasses.replace(
        result, output="\n".join([result.output, verdict.text, *verdict.notes])
      )
    if verdict.decision is not Decision.CONTINUE:
      result = dataclasses.replace(result, status=ToolStatus.DENIED, shown=())
    return dataclasses.replace(result, output=verdict.told(result.output))

  def _check_egress(self, call: ToolCall, number: int) -> Verdict:
    assert self._guards.egress is not None
    situation = self._situation("before_action", call.arguments, call.name)
    try:
      for text in situation.texts:
        for url in urls(text):
          self._guards.egress.check_url(url)
    except EgressDenied as denied:
      self._record("before_action", call.name, "egress", Decision.DENY, str(denied), number)
      return Verdict(Decision.DENY, f"denied: {denied}")
    return Verdict()

  async def _ask_hook(
    self, hook: Hook, event: HookEvent, moment: str, number: int = -1
  ) -> tuple[Verdict, HookAnswer]:
    try:
      answer = await hook.ask(event)
    except HookFailure as failure:
      _log.warning("hook %s failed, which denies: %s", hook.name, failure)
      self._record(
        moment, event.tool_name, f"hook {hook.name}", Decision.DENY, str(failure), number
      )
      return Verdict(Decision.DENY, "denied: a check failed"), HookAnswer()
    verdict = Verdict()
    if answer.abort:
      verdict = Verdict(Decision.STOP, "denied: the episode ends here")
      self.stopped = answer.reason or f"hook {hook.name} ends the episode"
    elif answer.decision == "skip":
      verdict = Verdict(Decision.SKIP, SKIPPED, _notes(answer.additional_context))
    elif answer.decision == "reject":
      text = f"denied: {answer.reason}" if answer.reason else "denied"
      verdict = Verdict(Decision.DENY, text, _notes(answer.additional_context))
    if answer != HookAnswer():
      arguments = None if answer.updated_input is None else dict(answer.updated_input)
      reason = answer.reason or _changes(answer)
      name = f"hook {hook.name}"
      self._record(moment, event.tool_name, name, verdict.decision, reason, number, arguments)
    return verdict, answer

  def _listens_to(self, event: str) -> bool:
    return self._guards.rules is not None and self._guards.rules.listens_to(event)

  async def _ask_rules(
    self, situation: Situation, context: ToolContext | None, number: int = -1
  ) -> tuple[Verdict, float | None]:
    """The decision of the rules, and the seconds that a call may take; None is no limit."""
    if self._rules is None:
      return Verdict(), None
    try:
      judgement = await self._rules.judge(situation, context)
    except Exception as error:
      _log.warning("rules cannot judge, which denies", exc_info=error)
      reason = f"{type(error).__name__}: {error}"
      entry = Entry("rules", Decision.DENY, reason)
      judgement = Judgement(Verdict(Decision.DENY, "denied: a check failed"), (entry,))
    for entry in judgement.entries:
      self._record(
        situation.event, situation.tool_name, entry.guard, entry.decision, entry.reason, number
      )
    if judgement.stopped is not None:
      self.stopped = judgement.stopped
    return judgement.verdict, judgement.timeout

  def _situation(
    self,
    event: str,
    tool_input: Mapping[str, Any] | None = None,
    tool_name: str = "",
    observation: str = "",
  ) -> Situation:
    return Situation(
      event=event,
      turn=self._turn,
      user_input=self._user_input,
      tool_name=tool_name,
      tool_input=tool_input or {},
      steps=self._steps,
      observation=observation,
    )

  def _event(
    self,
    event: str,
    tool_name: str = "",
    tool_input: Mapping[str, Any] | None = None,
    *,
    status: str = "",
    output: str = "",
    text: str = "",
  ) -> HookEvent:
    return HookEvent(
      event=event,
      episode=self._episode,
      turn=self._turn,
      user_input=self._user_input,
      tool_name=tool_name,
      tool_input=tool_input or {},
      tool_status=status,
      tool_output=output,
      text=text,
    )

  def _record(
    self,
    event: str,
    tool: str,
    guard: str,
    decision: Decision,
    reason: str,
    number: int,
    arguments: Mapping[str, Any] | None = None,
  ) -> None:
    record = GuardRecord(self._turn, event, tool, guard, decision.name.lower(), reason, arguments)
    self._records.append((number if number >= 0 else len(self._steps), record))


def _notes(text: str) -> tuple[str, ...]:
  return (text,) if text else ()


def _changes(answer: HookAnswer) -> str:
  """Words for what a hook without a reason did."""
  changed: Sequence[tuple[str, bool]] = (
    ("skipped", answer.decision == "skip"),
    ("rejected", answer.decision == "reject"),
    ("ended the episode", answer.abort),
    ("changed the input", answer.updated_input is not None),
    ("changed the output", answer.updated_output is not None),
    ("added to the observation", bool(answer.additional_context)),
  )
  return ", ".join(what for what, done in changed if done)
