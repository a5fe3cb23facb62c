"""Which environment a run has, as settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, get_args

from agentjax.config import Config, check
from agentjax.envs.bandit import Bandit, BanditConfig, bandit_tasks
from agentjax.envs.code import CodeEnvironmentConfig, build_code_environment
from agentjax.envs.countdown import Countdown, CountdownConfig, countdown_tasks
from agentjax.envs.environment import Environment
from agentjax.envs.frozen_lake import FrozenLake, FrozenLakeConfig, frozen_lake_tasks
from agentjax.envs.mle import MleEnvironmentConfig, mle_world
from agentjax.envs.pivot import PivotEnvironment
from agentjax.envs.question import QuestionEnvironment
from agentjax.envs.repair import HiddenTests, RepairEnvironmentConfig, repair_world
from agentjax.envs.sokoban import Sokoban, SokobanConfig, sokoban_tasks
from agentjax.envs.sql import SqlEnvironmentConfig, sql_world
from agentjax.envs.world import World
from agentjax.names import check_callable, check_name, is_own, load
from agentjax.sandbox.config import Sandboxes
from agentjax.text.answers import read_marked_answer
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import Task

Kind = Literal[
  "question",
  "code",
  "sql",
  "repair",
  "mle",
  "pivot",
  "bandit",
  "frozen_lake",
  "sokoban",
  "countdown",
]


@dataclasses.dataclass(unsafe_hash=True)
class EnvironmentConfig(Config):
  """The world that episodes take place in.

  Attributes:
    kind: what a task is and how it is judged; its own settings stand in the field of that name.
      "question": a question, tools, an answer (no settings). "code": functions to be written.
      "sql": a question to a database. "repair": a library to be mended. "mle": a data set to be
      learnt from. "pivot": one turn of a recorded conversation, whose tools are not run (no
      settings). "bandit", "frozen_lake", "sokoban", "countdown": games, which make their own tasks
      (``config.data.source="environment"``) and give their own reward (part "environment").
      "module:attribute": a ``World`` of your own, or a function that makes the ``Environment`` of a
      task.
    code, sql, repair, mle, bandit, frozen_lake, sokoban, countdown: see the class of
      each.
  """

  kind: Kind | str = "question"
  code: CodeEnvironmentConfig = dataclasses.field(default_factory=CodeEnvironmentConfig)
  sql: SqlEnvironmentConfig = dataclasses.field(default_factory=SqlEnvironmentConfig)
  repair: RepairEnvironmentConfig = dataclasses.field(default_factory=RepairEnvironmentConfig)
  mle: MleEnvironmentConfig = dataclasses.field(default_factory=MleEnvironmentConfig)
  bandit: BanditConfig = dataclasses.field(default_factory=BanditConfig)
  frozen_lake: FrozenLakeConfig = dataclasses.field(default_factory=FrozenLakeConfig)
  sokoban: SokobanConfig = dataclasses.field(default_factory=SokobanConfig)
  countdown: CountdownConfig = dataclasses.field(default_factory=CountdownConfig)

  def validate(self, path: str = "config.environment") -> None:
    super().validate(path)
    check_name(self.kind, f"{path}.kind", get_args(Kind))


GAMES: Mapping[str, tuple[Callable[..., Environment], Callable[..., list[Task]]]] = {
  "bandit": (Bandit, bandit_tasks),
  "frozen_lake": (FrozenLake, frozen_lake_tasks),
  "sokoban": (Sokoban, sokoban_tasks),
  "countdown": (Countdown, countdown_tasks),
}


def without_chance(config: EnvironmentConfig) -> EnvironmentConfig:
  """The same world in which a worked solution always succeeds, for gates: nothing slips, and the
  better arm of the bandit pays 1, the other nothing."""
  return dataclasses.replace(
    config,
    bandit=dataclasses.replace(config.bandit, low=0.0, high=1.0, chance=1.0),
    frozen_lake=dataclasses.replace(config.frozen_lake, slippery=False),
  )


def environment_tasks(
  config: EnvironmentConfig, sizes: tuple[int, int], *, seed: int, first_ids: tuple[int, int]
) -> tuple[list[Task], list[Task]]:
  """Tasks of a game, to learn from and to be measured on.

  Raises:
    ConfigError: a kind that makes none, too few levels, or a missing extra.
  """
  check(config.kind in GAMES, "config.environment.kind", config.kind, ", ".join(GAMES))
  _, make = GAMES[config.kind]
  settings = getattr(config, config.kind)
  train, test = (
    make(settings, size, split=split, seed=seed, first_id=first)
    for size, split, first in zip(sizes, ("train", "test"), first_ids, strict=True)
  )
  return train, test


def build_environment(
  config: EnvironmentConfig,
  registry: ToolRegistry,
  hidden_tests: HiddenTests,
  *,
  max_turns: int,
  tool_timeout: float,
  read_answer: Callable[[str], str | None] = read_marked_answer,
  sandboxes: Sandboxes | None = None,
) -> World:
  """The world of ``config.kind``; close it at the end of the run.

  Args:
    config: validated.
    registry: the run's tools; whoever made it closes it.
    hidden_tests: runs unit tests against code that is not to be trusted.
    max_turns: turns of the policy in an episode.
    tool_timeout: seconds one tool call may take.
    read_answer: final text of a question -> its answer.
    sandboxes: those of the run.

  Raises:
    ConfigError: tools that the kind cannot do without, or cannot have.
  """
  if is_own(config.kind):
    return _named_world(config.kind, registry)
  if config.kind in GAMES:
    game, _ = GAMES[config.kind]
    return World(make=lambda task: game(getattr(config, config.kind)), tools=())
  if config.kind == "pivot":
    return World(make=lambda task: PivotEnvironment(), tools=())
  if config.kind == "sql":
    return sql_world(
      config.sql, registry, max_turns=max_turns, tool_timeout=tool_timeout, sandboxes=sandboxes
    )
  if config.kind == "repair":
    return repair_world(
      config.repair, registry, hidden_tests, max_turns=max_turns, tool_timeout=tool_timeout
    )
  if config.kind == "mle":
    return mle_world(
      config.mle, registry, max_turns=max_turns, tool_timeout=tool_timeout, sandboxes=sandboxes
    )

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


def _named_world(name: str, registry: ToolRegistry) -> World:
  """What ``module:attribute`` names; environments alone have the run's tools."""
  path, allowed = "config.environment.kind", "a World, or a function of a task"
  found = load(name, path, allowed)
  if isinstance(found, World):
    return found
  check_callable(found, f"{path}={name!r}", allowed)
  return World(make=found, tools=registry.tools)
