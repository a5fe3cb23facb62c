"""A world: one object, chosen by name, with everything that episodes need."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from agentjax.config import ConfigError, check
from agentjax.data import DataConfig, TaskSplits
from agentjax.names import Adopted, Choice, check_callable
from agentjax.rewards.graph import GroupScorer, Scorer
from agentjax.sandbox.config import Sandboxes
from agentjax.sandbox.interface import Sandbox, SandboxLimits
from agentjax.text.answers import read_marked_answer
from agentjax.tools.build import ToolsConfig
from agentjax.tools.protocol import Tool
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import Task, Trajectory
from agentjax.world.cheats import Setting, Turns
from agentjax.world.environment import Environment

_BUNDLED = "agentjax.worlds"


class Lease(NamedTuple):
  """A sandbox of a world, which closes it at its end."""

  sandbox: Sandbox
  limits: SandboxLimits


@dataclasses.dataclass(frozen=True)
class Site:
  """What a run provides to its world.

  Attributes:
    registry: the run's tools; the world does not close it.
    sandboxes: those of the run, by name.
    max_turns: turns of the policy in an episode.
    tool_timeout: seconds one tool call may take.
    read_answer: final text of a question -> its answer.
    folder: in the run's directory, for the world only, made at its first use; None if nothing is
      kept.
  """

  registry: ToolRegistry
  sandboxes: Sandboxes = dataclasses.field(default_factory=Sandboxes)
  max_turns: int = 16
  tool_timeout: float = 10.0
  read_answer: Callable[[str], str | None] = read_marked_answer
  folder: pathlib.Path | None = None

  def lease(self, name: str, path: str, *, packages: tuple[str, ...] = ()) -> Lease:
    """A new sandbox by name; it starts with its first use.

    Args:
      name: which of ``sandboxes``.
      path: dotted name of the setting that holds ``name``, for the message.
      packages: what programs there must be able to import.

    Raises:
      ConfigError: there is none of that name.
    """
    settings = self.sandboxes.settings(name, path, packages=packages)
    return Lease(settings.build(), settings.limits)


class World:
  """Base of worlds; a subclass overrides the methods that it needs.

  It is built before the policy, runs on the host, never imports jax, and serves all episodes of a
  run. ``start`` is called once, on the event loop that plays the episodes, before the first of
  them; ``close`` at the end, also where ``start`` was not called.

  Attributes:
    tools: what every episode offers; prompts, demonstrations and statistics are made with them. The
      tools of a single task may hold other data, but have the same name, description and
      parameters.
    scorers: reward parts that judge this kind of task, for ``config.reward.parts``.
    group_scorers: those that compare the episodes of one task.
  """

  tools: tuple[Tool, ...] = ()
  scorers: Mapping[str, Scorer] = {}
  group_scorers: Mapping[str, GroupScorer] = {}

  async def start(self, site: Site) -> None:
    """Starts resources that episodes share, such as servers or browsers."""

  def tasks(self, data: DataConfig) -> TaskSplits:
    """The world's own tasks, used if ``config.data.source`` is None.

    Args:
      data: how many, from where, and the seed.

    Raises:
      ConfigError: the world has none of its own.
      DataError: they cannot be read.
    """
    raise ConfigError(
      f"config.data.source=None; allowed: a source of tasks, as {type(self).__name__} has none."
    )

  def environment(self, task: Task) -> Environment:
    """A fresh environment for one episode of a task."""
    raise NotImplementedError(f"{type(self).__name__} must define environment()")

  def cheats(self, task: Task, setting: Setting) -> Mapping[str, Turns]:
    """Name -> turns of the policy that must earn nothing; {} if none are known."""
    return {}

  def solution(self, task: Task, setting: Setting) -> Turns:
    """Turns that must be paid in full; () if none are known."""
    return task.demonstration

  async def learn(self, finished: Sequence[Trajectory]) -> None:
    """Called once per step with the policy's episodes, before the step's update.

    Update memory and skills here. Episodes that begin later use the new state; with some values of
    ``config.rl.schedule`` running episodes may still use the old one.

    Args:
      finished: the scored episodes of the step, in the order of their addresses.
    """

  def get_state(self) -> bytes:
    """The state that ``learn`` changes; kept in every checkpoint."""
    return b""

  def set_state(self, state: bytes) -> None:
    """Restores the state of ``get_state``; called before any episode."""

  async def close(self) -> None:
    """Frees shared resources."""


@dataclasses.dataclass(unsafe_hash=True)
class WorldConfig(Choice):
  """Settings of a world. The folders of ``agentjax.worlds`` are built in under their names."""

  group = "agentjax.worlds"
  adopts = "a World, or a function of a task that makes its Environment"

  @classmethod
  def built_in(cls) -> Mapping[str, str]:
    spec = importlib.util.find_spec(_BUNDLED)
    folders = spec.submodule_search_locations if spec is not None else None
    names = sorted(m.name for m in pkgutil.iter_modules(folders or []) if m.ispkg)
    return {name: f"{_BUNDLED}.{name}:Settings" for name in names}

  @classmethod
  def adopt(cls, name: str, found: Any, path: str) -> Self:
    if not isinstance(found, World) and not (isinstance(found, type) and issubclass(found, World)):
      check_callable(found, f"{path}={name!r}", cls.adopts)
    return OwnWorld(name, found)  # type: ignore[return-value]

  def check_run(self, tools: ToolsConfig, data: DataConfig, path: str) -> None:
    """Raises ConfigError for tools or data that do not suit the world.

    Args:
      tools: ``config.tools``.
      data: ``config.data``; sizes must be numbers where the world's own tasks are generated.
      path: dotted name of the config.
    """
    if data.source is None:
      for name in ("train_size", "test_size"):
        size = getattr(data, name)
        check(size is not None, f"{path}.data.{name}", size, f"a number, for {self.chosen!r}")

  def without_chance(self) -> Self:
    """The same world without chance, so that a worked solution always succeeds; for gates."""
    return self

  def build(self, site: Site) -> World:
    """The world of a run; close it at the end.

    Raises:
      ConfigError: the world needs other tools, or cannot have these.
    """
    raise NotImplementedError(f"{type(self).__name__} must define build()")


def default_world() -> WorldConfig:
  """The default world, "question"."""
  return WorldConfig.from_name("question", "config.world")


@dataclasses.dataclass(unsafe_hash=True)
class OwnWorld(Adopted, WorldConfig):
  """A world without settings, named by ``module:attribute``: an object, a class or a function."""

  def check_run(self, tools: ToolsConfig, data: DataConfig, path: str) -> None:
    pass

  def build(self, site: Site) -> World:
    if isinstance(self.found, World):
      return self.found
    if isinstance(self.found, type):
      return self.found()
    return PlainWorld(self.found, site.registry.tools)


class PlainWorld(World):
  """Environments that a function makes, with the tools of the run.

  Args:
    make: the environment of one episode of a task.
    tools: what every episode offers.
    base: has all else: tasks, scorers, what it learns and keeps, servers. None has nothing.
  """

  def __init__(
    self,
    make: Callable[[Task], Environment],
    tools: tuple[Tool, ...] = (),
    base: World | None = None,
  ):
    self._make, self._base = make, World() if base is None else base
    self.tools = tools
    self.scorers, self.group_scorers = self._base.scorers, self._base.group_scorers

  def environment(self, task: Task) -> Environment:
    return self._make(task)

  def tasks(self, data: DataConfig) -> TaskSplits:
    return self._base.tasks(data)

  async def start(self, site: Site) -> None:
    await self._base.start(site)

  async def learn(self, finished: Sequence[Trajectory]) -> None:
    await self._base.learn(finished)

  def get_state(self) -> bytes:
    return self._base.get_state()

  def set_state(self, state: bytes) -> None:
    self._base.set_state(state)

  async def close(self) -> None:
    await self._base.close()
