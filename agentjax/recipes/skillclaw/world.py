"""Any world with a library of skills: a catalogue in the prompt, and a tool that reads a skill."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Self

from agentjax.config import ConfigError, FilePath, check
from agentjax.data import DataConfig
from agentjax.recipes.skillclaw.library import Library
from agentjax.recipes.skillclaw.retrieval import RetrievalConfig, Retriever, catalogue
from agentjax.rewards.judges import question_text
from agentjax.tools.build import ToolsConfig
from agentjax.tools.declared import DeclaredTool
from agentjax.tools.protocol import Tool, ToolStatus
from agentjax.trajectory.record import AGENT, Message, Task, ToolCall, ToolRecord
from agentjax.world.cheats import Setting, Turns
from agentjax.world.environment import Action, Environment, Observation, Step, take_snapshot
from agentjax.world.world import PlainWorld, Site, World, WorldConfig, default_world

READ = "read_skill"
READ_TOOL = DeclaredTool(
  READ,
  "Shows the whole text of a skill of the catalogue.",
  {
    "type": "object",
    "properties": {"name": {"type": "string", "description": "of the skill"}},
    "required": ["name"],
  },
)


@dataclasses.dataclass(unsafe_hash=True)
class SkillWorldConfig(WorldConfig):
  """A world whose policy sees the skills of a library, as they were when the run was built.

  Attributes:
    inner: the world.
    library: folder of the library; "" shows no skill.
    retrieval: which skills a task is shown, and how.
  """

  inner: WorldConfig = dataclasses.field(default_factory=default_world)
  library: FilePath = ""
  retrieval: RetrievalConfig = dataclasses.field(default_factory=RetrievalConfig)

  def validate(self, path: str = "config.world") -> None:
    super().validate(path)
    nested = isinstance(self.inner, SkillWorldConfig)
    check(not nested, f"{path}.inner", self.inner.chosen, "a world without skills of its own")

  def check_run(self, tools: ToolsConfig, data: DataConfig, path: str) -> None:
    self.inner.check_run(tools, data, path)

  def without_chance(self) -> Self:
    return dataclasses.replace(self, inner=self.inner.without_chance())

  def build(self, site: Site) -> World:
    entries = Library(self.library).entries() if self.library else ()
    return SkillWorld(self.inner.build(site), Retriever(entries, self.retrieval))


class SkillWorld(PlainWorld):
  """A world with the skills of a retriever.

  Args:
    base: the world.
    retriever: chooses among them.
  """

  def __init__(self, base: World, retriever: Retriever):
    super().__init__(
      lambda task: SkilledEnvironment(base.environment(task), retriever),
      offered(base.tools, retriever),
      base,
    )

  def cheats(self, task: Task, setting: Setting) -> Mapping[str, Turns]:
    return self._base.cheats(task, setting)

  def solution(self, task: Task, setting: Setting) -> Turns:
    return self._base.solution(task, setting)


def offered(tools: Sequence[Tool], retriever: Retriever) -> tuple[Tool, ...]:
  """What a policy may call: the world's tools, and the one that reads skills."""
  return (*tools, READ_TOOL) if retriever.config.show == "names" else tuple(tools)


class SkilledEnvironment(Environment):
  """An environment whose prompt begins with a catalogue of skills.

  The catalogue stands at the beginning of the first message of the system or the user. Calls of
  ``read_skill`` are answered here; a turn with no other call does not reach the inner environment.

  Args:
    inner: of one agent.
    retriever: the skills.
  """

  def __init__(self, inner: Environment, retriever: Retriever):
    if tuple(inner.agents) != (AGENT,):
      raise ConfigError(
        f"{type(inner).__name__} has the agents {', '.join(inner.agents)}; allowed: a world of one "
        "agent, which is shown the skills."
      )
    self.tools = offered(inner.tools, retriever)
    self._inner, self._retriever = inner, retriever
    self._texts = {entry.name: entry.skill.text for entry in retriever.entries}
    self._reads = self._turn = 0

  @property
  def least_return(self) -> float:
    return self._inner.least_return

  async def reset(self, task: Task, key: int) -> Observation:
    observation = await self._inner.reset(task, key)
    self.tools = offered(self._inner.tools, self._retriever)
    chosen = await self._retriever.choose(question_text(observation.messages))
    shown = catalogue(chosen, self._retriever.config)
    if not shown:
      return observation
    return dataclasses.replace(observation, messages=_begin(observation.messages, shown))

  async def step(self, action: Action) -> Step:
    turn, self._turn = self._turn, self._turn + 1
    reading = [call for call in action.tool_calls if self._is_read(call)]
    if not reading or action.truncated:
      return await self._inner.step(action)
    records = tuple(self._read(call, turn) for call in reading)
    others = tuple(call for call in action.tool_calls if not self._is_read(call))
    if not others:
      shown = tuple(Message("tool", record.output) for record in records)
      return Step(Observation(shown), tools=records)
    step = await self._inner.step(dataclasses.replace(action, tool_calls=others))
    step = dataclasses.replace(step, tools=(*step.tools, *records))
    if step.terminated or step.truncated:
      return step
    own, told = iter(records), iter(step.observation.messages)
    merged: list[Message] = []
    for call in action.tool_calls:  # results stand in the order of their calls
      merged += [Message("tool", next(own).output)] if self._is_read(call) else islice(told, 1)
    observation = dataclasses.replace(step.observation, messages=(*merged, *told))
    return dataclasses.replace(step, observation=observation)

  async def snapshot(self) -> bytes | None:
    inner = await take_snapshot(self._inner)
    if inner is None:
      return None
    state = {"inner": base64.b64encode(inner).decode(), "reads": self._reads, "turn": self._turn}
    return json.dumps(state, sort_keys=True).encode()

  def restore(self, state: bytes) -> None:
    self._inner.restore(self._unpack(state))

  async def resume(self, task: Task, key: int, state: bytes) -> None:
    await self._inner.resume(task, key, self._unpack(state))
    self.tools = offered(self._inner.tools, self._retriever)

  def discard(self, state: bytes) -> None:
    self._inner.discard(base64.b64decode(json.loads(state)["inner"]))

  async def close(self) -> None:
    await self._inner.close()

  def _unpack(self, state: bytes) -> bytes:
    values: dict[str, Any] = json.loads(state)
    self._reads, self._turn = values["reads"], values["turn"]
    return base64.b64decode(values["inner"])

  def _is_read(self, call: ToolCall) -> bool:
    return call.name == READ and self._retriever.config.show == "names"

  def _read(self, call: ToolCall, turn: int) -> ToolRecord:
    status, output = ToolStatus.ERROR, f"error: {call.error}"
    if call.error is None:
      name, most = call.arguments.get("name"), self._retriever.config.most_reads
      self._reads += 1
      if self._reads > most:
        output = f"error: an episode reads at most {most} skills"
      elif not isinstance(name, str) or name not in self._texts:
        output = (
          f"error: there is no skill of this name; skills: {', '.join(self._texts) or 'none'}"
        )
      else:
        status, output = ToolStatus.OK, self._texts[name]
    return ToolRecord(turn, READ, dict(call.arguments), status.value, output, 0.0)


def _begin(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
  """The messages with a text at their beginning."""
  first, *rest = messages
  if first.role not in ("system", "user"):
    return (Message("system", text), *messages)
  parts = first.parts or (first.content,)
  return (Message.of(first.role, f"{text}\n\n", *parts), *rest)
