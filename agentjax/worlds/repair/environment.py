"""Repairing a small library: the policy works on its files, hidden tests judge what it leaves.

Only the changed Python files of the package are handed in, as JSON; changes of visible tests and
other files are ignored. The hidden tests run after the episode, when its folder is gone, on the
task's own files with those changes (``adapters.unit_tests``). See ``worlds.repair.tasks`` for the
metadata of a task.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import threading
from collections.abc import Mapping

from agentjax.adapters.unit_tests.scorer import (
  UnitTestConfig,
  UnitTests,
  UnitTestVerifier,
  build_verifier,
)
from agentjax.config import ConfigError, PositiveInt, check
from agentjax.data import DataConfig, TaskSplits
from agentjax.tools.build import ToolsConfig
from agentjax.tools.registry import ToolRegistry
from agentjax.tools.workspace import Workspaces
from agentjax.trajectory.record import Reward, Status, Task, Trajectory
from agentjax.world.cheats import Setting, Turns
from agentjax.world.environment import Environment
from agentjax.world.workspace import WorkspaceEnvironment
from agentjax.world.world import Site, World, WorldConfig
from agentjax.worlds.repair.cheats import repair_cheats
from agentjax.worlds.repair.tasks import RepairTaskConfig


@dataclasses.dataclass(unsafe_hash=True)
class RepairWorldConfig(WorldConfig):
  """Settings of repair episodes. The tools are those of the run: "files", "shell" or both.

  Attributes:
    max_characters: a larger repair is not judged; ours.
    tasks: which libraries get which faults.
    unit_tests: how the hidden tests run; their credit is the parts' own.
  """

  max_characters: PositiveInt = 200_000
  tasks: RepairTaskConfig = dataclasses.field(default_factory=RepairTaskConfig)
  unit_tests: UnitTestConfig = dataclasses.field(default_factory=UnitTestConfig)

  def check_run(self, tools: ToolsConfig, data: DataConfig, path: str) -> None:
    super().check_run(tools, data, path)
    check(
      bool({"files", "shell"}.intersection(tools.names)),
      f"{path}.tools.names",
      tools.names,
      "'files' or 'shell' among them in the world 'repair'",
    )

  def build(self, site: Site) -> World:
    return RepairWorld(self, site)


class RepairJudge:
  """Scores repairs; verdicts are kept, so that two parts cost one run.

  Args:
    verifier: runs tests against untrusted code.
  """

  def __init__(self, verifier: UnitTestVerifier):
    self._verifier = verifier
    self._kept: collections.OrderedDict[tuple[str, int, str], tuple[int, int]] = (
      collections.OrderedDict()
    )
    self._lock = threading.Lock()

  async def passed(self, task: Task, repair: str) -> tuple[int, int]:
    """How many hidden tests pass with a repair, and how many there are."""
    key = (task.source, task.id, repair)
    with self._lock:
      if key in self._kept:
        return self._kept[key]
    package = task.metadata["package"]
    code = {p: t for p, t in task.metadata["files"].items() if p.startswith(f"{package}/")}
    changes = json.loads(repair)
    code |= {path: text for path, text in changes.items() if counts(path, package)}
    tests = UnitTests.from_metadata(task.metadata["unit_tests"])
    verdict = await self._verifier.verify(code, tests)
    found = verdict.passed, len(verdict.cases)
    with self._lock:
      self._kept[key] = found
      while len(self._kept) > 1024:
        self._kept.popitem(last=False)
    return found

  async def score_solved(self, trajectory: Trajectory, task: Task) -> Reward:
    """1 where every hidden test passes, else 0."""
    if trajectory.answer is None or trajectory.status is Status.POLICY_ERROR:
      return Reward(0.0)
    passed, total = await self.passed(task, trajectory.answer)
    return Reward(float(passed == total))

  async def score_progress(self, trajectory: Trajectory, task: Task) -> Reward:
    """Share of the tests that failed at first and now pass, less those lost; 0..1."""
    if trajectory.answer is None or trajectory.status is Status.POLICY_ERROR:
      return Reward(0.0)
    before = task.metadata["passing"]
    passed, total = await self.passed(task, trajectory.answer)
    return Reward(max(0.0, (passed - before) / (total - before)))


def counts(path: str, package: str) -> bool:
  """Whether a file is part of the library: a Python file of the package, and no test."""
  parts = path.split("/")
  return (
    parts[0] == package
    and len(parts) > 1
    and path.endswith(".py")
    and ".." not in parts
    and "tests" not in parts
    and not parts[-1].startswith("test_")
    and parts[-1] not in ("conftest.py", "sitecustomize.py", "usercustomize.py")
  )


def hand_in_repair(task: Task, files: Mapping[str, bytes], max_characters: int) -> str | None:
  """The changed files of the package as JSON; None where none changed, or they are too large.

  A deleted file counts as unchanged.
  """
  package, given = task.metadata["package"], task.metadata["files"]
  changed = {}
  for path, content in files.items():
    text = content.decode("utf-8", "replace")
    if counts(path, package) and text != given.get(path):
      changed[path] = text
  repair = json.dumps(changed, sort_keys=True)
  return repair if changed and len(repair) <= max_characters else None


class RepairWorld(World):
  """Repair episodes: a task's files in a workspace of the run's tools.

  Scorers: ``repair_solved`` and ``repair_progress`` (see ``RepairJudge``).

  Raises:
    ConfigError: no tool of the run works on files.
  """

  def __init__(self, config: RepairWorldConfig, site: Site):
    self._config, self._site = config, site
    self._workspaces = workspaces_of(site.registry)
    self._verifier = build_verifier(config.unit_tests, site.sandboxes)  # starts when it is used
    judge = RepairJudge(self._verifier)
    self.tools = site.registry.tools
    self.scorers = {
      "repair_solved": judge.score_solved,
      "repair_progress": judge.score_progress,
    }

  def tasks(self, data: DataConfig) -> TaskSplits:
    return self._config.tasks.load(data)

  def environment(self, task: Task) -> Environment:
    return WorkspaceEnvironment(
      self._site.registry,
      self._workspaces,
      files=lambda task: {p: t.encode() for p, t in task.metadata["files"].items()},
      hand_in=lambda files: hand_in_repair(task, files, self._config.max_characters),
      max_turns=self._site.max_turns,
      tool_timeout=self._site.tool_timeout,
    )

  def cheats(self, task: Task, setting: Setting) -> Mapping[str, Turns]:
    return repair_cheats(task, setting)

  async def close(self) -> None:
    await self._verifier.close()


def workspaces_of(registry: ToolRegistry) -> Workspaces:
  """The workspaces that the run's tools "files" and "shell" share.

  Raises:
    ConfigError: the run has neither.
  """
  for tool in registry.tools:
    workspaces = getattr(tool, "workspaces", None)
    if isinstance(workspaces, Workspaces):
      return workspaces
  raise ConfigError(
    f"config.tools.names={tuple(t.name for t in registry.tools)!r} in the world 'repair'; "
    "allowed: names with 'files' or 'shell' among them, since the policy works on files"
  )
