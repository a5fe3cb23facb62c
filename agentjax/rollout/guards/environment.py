"""Environments whose episodes are guarded."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from agentjax.config import ConfigError
from agentjax.rollout.guards.config import Guards, GuardsConfig, build_guards
from agentjax.rollout.guards.episode import EpisodeGuard, GuardError
from agentjax.rollout.guards.interface import Decision
from agentjax.rollout.guards.permissions import Channel
from agentjax.tools.hooks import intercepted_by
from agentjax.tools.protocol import Tool, ToolStatus
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import AGENT, Message, Status, Task
from agentjax.world.environment import Action, Environment, Observation, Step, take_snapshot

_SNAPSHOT_FORMAT = 3

MakeEnvironment = Callable[[Task], Environment]


def guard_environments(
  make_environment: MakeEnvironment,
  config: GuardsConfig,
  registry: ToolRegistry,
  *,
  offered: Sequence[Tool] = (),
  channels: Sequence[Channel] = (),
) -> MakeEnvironment:
  """``make_environment``, with guarded episodes if ``config`` has any guards.

  Args:
    make_environment: of a task.
    config: validated.
    registry: the run's tools, which rules are checked against and invoke.
    offered: tools that the environments bring along, which rules may be about.
    channels: further ways to people, after those the config names.

  Raises:
    ConfigError: see ``build_guards``.
  """
  guards = build_guards(config, registry, offered=offered, channels=channels)
  if not guards:
    return make_environment
  return lambda task: GuardedEnvironment(make_environment(task), guards)


class GuardedEnvironment(Environment):
  """An environment whose tool calls, answers and observations pass its run's guards.

  A call that is refused becomes an observation of status "denied". In an environment with tools, a
  turn without a call ends the policy's work. If a guard refuses this, the environment does not get
  the turn, and the policy reads why. A guard that stops ends the episode after the turn.

  Args:
    inner: calls its tools through a ``ToolRegistry`` or ``tools.hooks.intercept``.
    guards: of the run.
  """

  def __init__(self, inner: Environment, guards: Guards):
    if tuple(inner.agents) != (AGENT,):
      raise ConfigError(
        f"config.guards is set and {type(inner).__name__} has the agents "
        f"{', '.join(inner.agents)}; allowed: no guards there, which watch one agent."
      )
    self.tools = inner.tools
    self._inner = inner
    self._guards = guards
    self._episode: EpisodeGuard | None = None

  @property
  def least_return(self) -> float:
    return self._inner.least_return

  async def reset(self, task: Task, key: int) -> Observation:
    observation = await self._inner.reset(task, key)
    self.tools = self._inner.tools
    said = [m.content for m in observation.messages if m.role == "user"]
    name = f"{task.source}/{task.id}/{key}"
    self._episode = EpisodeGuard(self._guards, name, key, said[-1] if said else "")
    return _with_text(observation, await self._episode.start())

  async def step(self, action: Action) -> Step:
    episode = self._started()
    episode.begin_turn()
    finishes = bool(self.tools) and not action.tool_calls and not action.truncated
    if finishes:
      verdict = await episode.finish(action.text)
      if episode.stopped is None and verdict.decision is not Decision.CONTINUE:
        messages = (Message("user", verdict.told("")),)
        return Step(Observation(messages), executed=False, guards=episode.end_turn())
    if episode.stopped is None:
      with intercepted_by(episode):
        step = await self._inner.step(action)
      self._check_passed(step, episode)
    else:
      step = Step(Observation(()), executed=False)
    if episode.stopped is None and not (step.terminated or step.truncated):
      step = await self._judge_observation(step, episode)
    if episode.stopped is not None and step.status is Status.OK:
      status = self._guards.stop_status
      step = dataclasses.replace(
        step,
        terminated=status is not Status.TRUNCATED,
        truncated=status is Status.TRUNCATED,
        status=status,
        reason=episode.stopped,
      )
    return dataclasses.replace(step, guards=episode.end_turn())

  async def snapshot(self) -> bytes | None:
    inner = await take_snapshot(self._inner)
    if inner is None:
      return None
    state = {
      "format": _SNAPSHOT_FORMAT,
      "inner": base64.b64encode(inner).decode(),
      "guards": self._started().state(),
    }
    return json.dumps(state, sort_keys=True).encode()

  def restore(self, state: bytes) -> None:
    episode, values = self._started(), _read(state)
    self._inner.restore(base64.b64decode(values["inner"]))
    self.tools = self._inner.tools
    episode.set_state(values["guards"])

  async def resume(self, task: Task, key: int, state: bytes) -> None:
    """Hooks of the start are not called again, because the episode has started already."""
    values = _read(state)
    await self._inner.resume(task, key, base64.b64decode(values["inner"]))
    self.tools = self._inner.tools
    self._episode = EpisodeGuard(self._guards, f"{task.source}/{task.id}/{key}", key, "")
    self._episode.set_state(values["guards"])

  def discard(self, state: bytes) -> None:
    self._inner.discard(base64.b64decode(_read(state)["inner"]))

  async def close(self) -> None:
    await self._inner.close()

  def _started(self) -> EpisodeGuard:
    if self._episode is None:
      raise RuntimeError("step(), snapshot() or restore() before reset(task, key)")
    return self._episode

  def _check_passed(self, step: Step, episode: EpisodeGuard) -> None:
    """Raises GuardError where calls were run that the guards have not seen."""
    ran = [record.name for record in step.tools if record.status == ToolStatus.OK]
    if ran and not episode.intercepted:
      raise GuardError(
        f"{type(self._inner).__name__} ran {', '.join(ran)} past the guards; an environment calls "
        "its tools through a ToolRegistry or tools.hooks.intercept"
      )

  async def _judge_observation(self, step: Step, episode: EpisodeGuard) -> Step:
    text = "\n".join(message.content for message in step.observation.messages)
    verdict = await episode.observed(text)
    if verdict.decision in (Decision.CONTINUE, Decision.REFLECT):
      added = "\n".join(part for part in (verdict.text, *verdict.notes) if part)
      return dataclasses.replace(step, observation=_with_text(step.observation, added))
    withheld = verdict.told("")
    messages = tuple(Message(m.role, withheld) for m in step.observation.messages)
    return dataclasses.replace(step, observation=Observation(messages))


def _read(state: bytes) -> dict[str, Any]:
  values: dict[str, Any] = json.loads(state)
  if values["format"] != _SNAPSHOT_FORMAT:
    raise ValueError(f"snapshot format {values['format']!r}; this one reads {_SNAPSHOT_FORMAT}")
  return values


def _with_text(observation: Observation, text: str) -> Observation:
  """``text`` below the last message."""
  if not text or not observation.messages:
    return observation
  *others, last = observation.messages
  changed = dataclasses.replace(last, content=f"{last.content}\n{text}")
  return Observation((*others, changed))
