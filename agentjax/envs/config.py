"""Which environment a run has, as settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from agentjax.config import Config
from agentjax.envs.code import CodeEnvironmentConfig, build_code_environment
from agentjax.envs.environment import Environment
from agentjax.envs.mle import MleEnvironmentConfig, mle_world
from agentjax.envs.pivot import PivotEnvironment
from agentjax.envs.question import QuestionEnvironment
from agentjax.envs.repair import HiddenTests, RepairEnvironmentConfig, repair_world
from agentjax.envs.sql import SqlEnvironmentConfig, sql_world
from agentjax.envs.world import World
from agentjax.text.answers import read_marked_answer
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import Task


@dataclasses.dataclass(unsafe_hash=True)
class EnvironmentConfig(Config):
  """The world that episodes take place in.

  Attributes:
    kind: what a task is and how it is judged; its own settings stand in the field of that name.
      "question": a question, tools, an answer (no settings). "code": functions to be written.
      "sql": a question to a database. "repair": a library to be mended. "mle": a data set to be
      learnt from. "pivot": one turn of a recorded conversation, whose tools are not run (no
      settings).
    code, sql, repair, mle: see the ``...EnvironmentConfig`` of each.
  """

  kind: Literal["question", "code", "sql", "repair", "mle", "pivot"] = "question"
  code: CodeEnvironmentConfig = dataclasses.field(default_factory=CodeEnvironmentConfig)
  sql: SqlEnvironmentConfig = dataclasses.field(default_factory=SqlEnvironmentConfig)
  repair: RepairEnvironmentConfig = dataclasses.field(default_factory=RepairEnvironmentConfig)
  mle: MleEnvironmentConfig = dataclasses.field(default_factory=MleEnvironmentConfig)


def build_environment(
  config: EnvironmentConfig,
  registry: ToolRegistry,
  hidden_tests: HiddenTests,
  *,
  max_turns: int,
  tool_timeout: float,
  read_answer: Callable[[str], str | None] = read_marked_answer,
) -> World:
  """The world of ``config.kind``; close it at the end of the run.

  Args:
    config: validated.
    registry: the run's tools; whoever made it closes it.
    hidden_tests: runs unit tests against code that is not to be trusted.
    max_turns: turns of the policy in an episode.
    tool_timeout: seconds one tool call may take.
    read_answer: final text of a question -> its answer.

  Raises:
    ConfigError: tools that the kind cannot do without, or cannot have.
  """
  if config.kind == "pivot":
    return World(make=lambda task: PivotEnvironment(), tools=())
  if config.kind == "sql":
    return sql_world(config.sql, registry, max_turns=max_turns, tool_timeout=tool_timeout)
  if config.kind == "repair":
    return repair_world(
      config.repair, registry, hidden_tests, max_turns=max_turns, tool_timeout=tool_timeout
    )
  if config.kind == "mle":
    return mle_world(config.mle, registry, max_turns=max_turns, tool_timeout=tool_timeout)

  def make(task: Task) -> Environment:
    del task
    if config.kind == "code":
      return build_code_environment(
        config.code, registry, max_turns=max_turns, tool_timeout=tool_timeout
      )
    return QuestionEnvironment(
      registry, max_turns=max_turns, tool_timeout=tool_timeout, read_answer=read_answer
    )

  return World(make=make, tools=registry.tools)
