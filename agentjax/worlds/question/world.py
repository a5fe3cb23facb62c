"""Questions with an answer, and the tools of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from agentjax.data import DataConfig, TaskSplits
from agentjax.trajectory.record import Task
from agentjax.world.cheats import Setting, Turns, say
from agentjax.world.environment import Environment
from agentjax.world.question import QuestionEnvironment
from agentjax.world.world import Site, World, WorldConfig
from agentjax.worlds.question.cheats import question_cheats
from agentjax.worlds.question.word_problems import WordProblemConfig


@dataclasses.dataclass(unsafe_hash=True)
class QuestionWorldConfig(WorldConfig):
  """A question, tools, an answer. Its own tasks are word problems; ``config.data.source`` names
  others."""

  def build(self, site: Site) -> World:
    return QuestionWorld(site)


class QuestionWorld(World):
  """Episodes that end with a final text, whose answer the reward graph judges."""

  def __init__(self, site: Site):
    self._site = site
    self.tools = site.registry.tools

  def tasks(self, data: DataConfig) -> TaskSplits:
    return WordProblemConfig().load(data)

  def environment(self, task: Task) -> Environment:
    site = self._site
    return QuestionEnvironment(
      site.registry,
      max_turns=site.max_turns,
      tool_timeout=site.tool_timeout,
      read_answer=site.read_answer,
    )

  def cheats(self, task: Task, setting: Setting) -> Mapping[str, Turns]:
    return question_cheats(task, setting)

  def solution(self, task: Task, setting: Setting) -> Turns:
    if not task.demonstration and task.answer:
      return say(setting.form(task.answer))
    return task.demonstration
