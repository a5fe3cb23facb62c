"""A question with tools: the policy may call tools, then answers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from agentjax.faults import Fault, Owner
from agentjax.text.answers import read_marked_answer
from agentjax.tools.protocol import ToolContext, ToolResult, ToolStatus
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.messages import describe_image, message_from_json, message_to_json
from agentjax.trajectory.record import Message, Status, Task, ToolCall, ToolRecord
from agentjax.world.environment import Action, Environment, Observation, Step

_SNAPSHOT_FORMAT = 1
_numbers = itertools.count()


class QuestionEnvironment(Environment):
  """Shows the task's prompt, runs the calls of each turn, ends at the first turn without a call.

  All calls of one turn run at the same time; their results come back in the order of the calls.
  Those beyond the registry's ``calls_per_turn`` are not run, which is an error each. A call the
  policy got wrong is an observation. A tool that fails by our fault (INFRA_ERROR, after the
  registry's retries) ends the episode as ENV_ERROR.

  A snapshot holds the conversation, but not the state of tools: a restored environment first
  repeats the earlier calls to stateful tools, with the same seeds.

  Args:
    registry: the tools. It may serve many environments at once.
    max_turns: turns of the policy; calls in the last one are not run and the episode is truncated,
      because the policy could not read their results.
    tool_timeout: seconds one call may take, retries included.
    read_answer: final text -> answer, or None where it holds none. The default takes the line
      marked ``####``.
  """

  def __init__(
    self,
    registry: ToolRegistry,
    *,
    max_turns: int = 16,
    tool_timeout: float = 10.0,
    read_answer: Callable[[str], str | None] = read_marked_answer,
  ):
    if max_turns < 1:
      raise ValueError(f"max_turns={max_turns}; allowed: >= 1")
    if not tool_timeout > 0:
      raise ValueError(f"tool_timeout={tool_timeout}; allowed: seconds > 0")
    self.tools = registry.tools
    self._registry = registry
    self._max_turns = max_turns
    self._tool_timeout = tool_timeout
    self._read_answer = read_answer
    # Not only the key: environments restored from one snapshot share the key but not their tools'
    # state.
    self._number = next(_numbers)
    self._behind = False  # stateful tools have yet to see the calls of the conversation
    self._task: Task | None = None
    self._key = 0
    self._turn = 0
    self._ended = False
    self._conversation: list[Message] = []

  @property
  def conversation(self) -> tuple[Message, ...]:
    """Everything said so far, the prompt included."""
    return tuple(self._conversation)

  async def reset(self, task: Task, key: int) -> Observation:
    if self._task is not None:
      await self._registry.end_episode(self._episode)
    self._task, self._key = task, key
    self._behind = False
    self._turn, self._ended = 0, False
    self._conversation = list(task.prompt)
    return Observation(task.prompt)

  async def step(self, action: Action) -> Step:
    if self._task is None:
      raise RuntimeError("step() before reset(task, key)")
    if self._ended:
      raise RuntimeError("step() after the episode ended; reset(task, key) starts another")
    turn, self._turn = self._turn, self._turn + 1
    self._conversation.append(Message("assistant", action.text, action.tool_calls))
    if action.truncated or (action.tool_calls and self._turn >= self._max_turns):
      cut = Step(Observation(()), truncated=True, status=Status.TRUNCATED, executed=False)
      return self._end(cut)
    if not action.tool_calls:
      answer = self._read_answer(action.text)
      return self._end(Step(Observation(()), terminated=True, answer=answer))
    if self._behind and (fault := await self._catch_up(turn)):
      return self._end(Step(Observation(()), terminated=True, status=Status.ENV_ERROR, fault=fault))
    results = await self._call_tools(action.tool_calls, turn)
    records = tuple(
      [
        ToolRecord(
          turn,
          call.name,
          call.arguments,
          result.status.value,
          result.output,
          result.seconds,
          await self._kept(result),
        )
        for call, result in zip(action.tool_calls, results, strict=True)
      ]
    )
    if faults := [_fault(r) for r in results if r.status is ToolStatus.INFRA_ERROR]:
      return self._end(
        Step(
          Observation(()),
          terminated=True,
          status=Status.ENV_ERROR,
          tools=records,
          fault=faults[0],
        )
      )
    messages = tuple(_shown(result) for result in results)
    self._conversation.extend(messages)
    return Step(Observation(messages), tools=records)

  def snapshot(self) -> bytes | Awaitable[bytes]:
    return self._state()

  def _state(self) -> bytes:
    """The conversation."""
    if self._task is None:
      raise RuntimeError("snapshot() before reset(task, key)")
    state = {
      "format": _SNAPSHOT_FORMAT,
      "task": self._task.id,
      "source": self._task.source,
      "key": self._key,
      "turn": self._turn,
      "ended": self._ended,
      "conversation": [message_to_json(m) for m in self._conversation],
    }
    return json.dumps(state, sort_keys=True).encode()

  def restore(self, state: bytes) -> None:
    if self._task is None:
      raise RuntimeError("restore() before reset(task, key)")
    values = json.loads(state)
    if values["format"] != _SNAPSHOT_FORMAT:
      raise ValueError(f"snapshot format {values['format']!r}; this one reads {_SNAPSHOT_FORMAT}")
    if (values["source"], values["task"]) != (self._task.source, self._task.id):
      raise ValueError(
        f"the snapshot is of task {values['task']} of {values['source']!r}, the environment was "
        f"reset with task {self._task.id} of {self._task.source!r}; reset with the same task"
      )
    self._key, self._turn, self._ended = values["key"], values["turn"], values["ended"]
    self._conversation = [message_from_json(m) for m in values["conversation"]]
    self._behind = bool(self._registry.stateful)

  async def close(self) -> None:
    if self._task is not None:
      await self._registry.end_episode(self._episode)

  def _end(self, step: Step) -> Step:
    self._ended = True
    return step

  @property
  def _episode(self) -> str:
    assert self._task is not None
    return f"{self._task.source}/{self._task.id}/{self._key}/{self._number}"

  async def _catch_up(self, turn: int) -> Fault | None:
    """Repeats the stateful calls before ``turn``; returns why that failed, if it did."""
    assert self._task is not None
    said = self._conversation[len(self._task.prompt) :]
    turns = [message.tool_calls for message in said if message.role == "assistant"]
    stateful = self._registry.stateful
    await self._registry.end_episode(self._episode)  # what was kept may be of another past
    for earlier, calls in enumerate(turns[:turn]):
      for index, call in enumerate(calls[: self._registry.calls_per_turn]):
        if call.name in stateful:
          result = await self._registry.call(call, self._context(earlier, index))
          if result.status is ToolStatus.INFRA_ERROR:
            return _fault(result)
    self._behind = False
    return None

  def _context(self, turn: int, index: int) -> ToolContext:
    seed = _call_seed(self._key, turn, index)
    return ToolContext(episode=self._episode, seed=seed, timeout=self._tool_timeout)

  async def _kept(self, result: ToolResult) -> dict[str, str]:
    """The hashes of the files that a call made."""
    store = self._registry.artifacts
    if store is None or not result.artifacts:
      return {}
    files = result.artifacts.items()
    return {name: await asyncio.to_thread(store.put, name, content) for name, content in files}

  async def _call_tools(self, calls: Sequence[ToolCall], turn: int) -> list[ToolResult]:
    most = self._registry.calls_per_turn
    async with asyncio.TaskGroup() as group:
      running = [
        group.create_task(self._registry.call(call, self._context(turn, index)))
        for index, call in enumerate(calls[:most])
      ]
    refused = ToolResult(
      ToolStatus.ERROR,
      f"error: not run: one turn makes at most {most} calls (config.tools.calls_per_turn)",
    )
    return [task.result() for task in running] + [refused] * (len(calls) - len(running))


def _fault(result: ToolResult) -> Fault:
  return result.fault or Fault(Owner.INFRASTRUCTURE, "tool", result.output)


def _call_seed(key: int, turn: int, index: int) -> int:
  """A seed of 63 bits, one for each call of an episode."""
  return int(np.random.SeedSequence([key, turn, index]).generate_state(1, np.uint64)[0] >> 1)


def _shown(result: ToolResult) -> Message:
  """What the policy sees of a call: its text, then the files that it shows."""
  images = (describe_image(result.artifacts[name]) for name in result.shown)
  return Message.of("tool", result.output, *images)
