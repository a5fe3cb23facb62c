"""Writing functions: tools while there are turns left, then code in a final block.

The episode's answer is the code. The scorer "unit_tests" judges it after the episode, when all its
processes are dead (``adapters.unit_tests``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from agentjax.config import PositiveInt
from agentjax.data import DataConfig, TaskSplits
from agentjax.tools.build import ToolsConfig
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import Task
from agentjax.world.cheats import Setting, Turns
from agentjax.world.environment import Environment
from agentjax.world.question import QuestionEnvironment
from agentjax.world.world import Site, World, WorldConfig
from agentjax.worlds.code.cheats import code_cheats
from agentjax.worlds.code.code_block import read_code
from agentjax.worlds.code.function_tasks import FunctionTaskConfig
from agentjax.worlds.code.sources import CodeTaskSource


@dataclasses.dataclass(unsafe_hash=True)
class CodeWorldConfig(WorldConfig):
  """Settings of function writing; the figures are ours.

  Attributes:
    max_characters: longer code is no answer.
    tasks: which functions are to be written: "function_tasks", generated, or "code_tasks", MBPP and
      QuixBugs.
  """

  max_characters: PositiveInt = 50_000
  tasks: CodeTaskSource = dataclasses.field(default_factory=FunctionTaskConfig)

  def check_run(self, tools: ToolsConfig, data: DataConfig, path: str) -> None:
    if data.source is None:
      self.tasks.check_data(data, f"{path}.data")

  def build(self, site: Site) -> World:
    return CodeWorld(self, site)


class CodeWorld(World):
  """Episodes that end with code; the scorer "unit_tests" judges it."""

  def __init__(self, config: CodeWorldConfig, site: Site):
    self._config, self._site = config, site
    self.tools = site.registry.tools

  def tasks(self, data: DataConfig) -> TaskSplits:
    return self._config.tasks.load(data)

  def environment(self, task: Task) -> Environment:
    site = self._site
    return build_code_environment(
      self._config, site.registry, max_turns=site.max_turns, tool_timeout=site.tool_timeout
    )

  def cheats(self, task: Task, setting: Setting) -> Mapping[str, Turns]:
    return code_cheats(task, setting)


def build_code_environment(
  config: CodeWorldConfig,
  registry: ToolRegistry,
  *,
  max_turns: int = 16,
  tool_timeout: float = 10.0,
) -> QuestionEnvironment:
  """One episode's environment: a question whose answer is the last code block of the final turn.

  Args:
    config: see CodeWorldConfig.
    registry, max_turns, tool_timeout: as in QuestionEnvironment; ``python`` is the tool that lets
      the policy try its code.
  """

  def read(text: str) -> str | None:
    code = read_code(text)
    return code if code is not None and len(code) <= config.max_characters else None

  return QuestionEnvironment(
    registry, max_turns=max_turns, tool_timeout=tool_timeout, read_answer=read
  )
