"""Which environment a run has, as settings."""

from __future__ import annotations

import dataclasses
from typing import Literal

from agentjax.config import Config
from agentjax.envs.environment import Environment
from agentjax.envs.question import QuestionEnvironment
from agentjax.envs.sql import SqlEnvironmentConfig, sql_world
from agentjax.envs.world import World
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import Task


@dataclasses.dataclass(unsafe_hash=True)
class EnvironmentConfig(Config):
  """The world that episodes take place in.

  Attributes:
    kind: what a task is and how it is judged; its own settings stand in the field of that name.
      "question": a question, tools, an answer. "sql": a question to a database.
    sql: see ``SqlEnvironmentConfig``.
  """

  kind: Literal["question", "sql"] = "question"
  sql: SqlEnvironmentConfig = dataclasses.field(default_factory=SqlEnvironmentConfig)


def build_environment(
  config: EnvironmentConfig, registry: ToolRegistry, *, max_turns: int, tool_timeout: float
) -> World:
  """The world of ``config.kind``; close it at the end of the run.

  Args:
    config: validated.
    registry: tools that every episode has, whatever its kind; whoever made it closes it.
    max_turns: turns of the policy in an episode.
    tool_timeout: seconds one tool call may take.
  """
  if config.kind == "sql":
    return sql_world(config.sql, registry, max_turns=max_turns, tool_timeout=tool_timeout)

  def question(task: Task) -> Environment:
    del task
    return QuestionEnvironment(registry, max_turns=max_turns, tool_timeout=tool_timeout)

  return World(make=question, tools=registry.tools)
