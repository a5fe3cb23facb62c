"""A tool as a choice: settings that build it, and shared resources for building."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Self

from agentjax.names import Adopted, Choice, wrong
from agentjax.sandbox.config import Sandboxes
from agentjax.sandbox.interface import Sandbox
from agentjax.tools.function import FunctionTool
from agentjax.tools.protocol import Tool
from agentjax.tools.workspace import WorkspaceConfig, Workspaces

_HERE = "agentjax.tools"
_ADAPTERS = "agentjax.adapters.tools"
_TOOL = "a typed function, or an object with name, description, parameters and an async call"


class Workbench:
  """Shared resources of the tools of a run.

  Args:
    sandboxes: those of the run.
    workspace: settings of the folders that tools share.
  """

  def __init__(self, sandboxes: Sandboxes, workspace: WorkspaceConfig):
    self.sandboxes = sandboxes
    self.workspace = workspace
    self.settings = sandboxes.settings(workspace.sandbox, "config.tools.workspace.sandbox")

  @functools.cached_property
  def sandbox(self) -> Sandbox:
    """The back end of all workspaces."""
    return self.settings.build()

  @functools.cached_property
  def workspaces(self) -> Workspaces:
    """The folders that shell, files and web_page share."""
    return Workspaces(self.sandbox, self.settings.limits, self.workspace)


@dataclasses.dataclass(unsafe_hash=True)
class ToolConfig(Choice):
  """Settings of a tool."""

  group = "agentjax.tools"
  adopts = _TOOL

  @classmethod
  def built_in(cls) -> Mapping[str, str]:
    return {
      "calculator": f"{_HERE}.calculator:CalculatorConfig",
      "fetch": f"{_ADAPTERS}.fetch:FetchConfig",
      "files": f"{_HERE}.files:FilesConfig",
      "python": f"{_HERE}.python:PythonToolConfig",
      "search": f"{_ADAPTERS}.search:SearchConfig",
      "shell": f"{_HERE}.shell:ShellConfig",
      "sql": "agentjax.worlds.sql.tool:SqlConfig",
      "web_page": f"{_ADAPTERS}.web_page:WebPageConfig",
    }

  @classmethod
  def adopt(cls, name: str, found: Any, path: str) -> Self:
    described = all(hasattr(found, a) for a in ("name", "description", "parameters"))
    plain = callable(found) and not isinstance(found, type)
    if not (plain or (described and callable(found))):
      raise wrong(name, path, found, _TOOL)
    return OwnTool(name, found if described else FunctionTool(found))  # type: ignore[return-value]

  def call_seconds(self, bench: Workbench) -> tuple[float, float]:
    """Wall clock of one call, and the overhead that a call may add; zeros if there is no bound."""
    del bench
    return 0.0, 0.0

  def check_run(self, bench: Workbench, path: str) -> None:
    """Raises ConfigError if the settings do not suffice for a run.

    Args:
      bench: what the tool would be built on.
      path: dotted name of these settings.
    """

  def build(self, bench: Workbench) -> Tool:
    """The tool of a run."""
    raise NotImplementedError(f"{type(self).__name__} must define build()")


@dataclasses.dataclass(unsafe_hash=True)
class OwnTool(Adopted, ToolConfig):
  """A tool that has no settings, named by ``module:attribute``."""


def workspace_seconds(bench: Workbench) -> tuple[float, float]:
  """``ToolConfig.call_seconds`` of a tool that runs programs in the workspaces' sandbox."""
  return bench.settings.limits.wall_seconds, bench.settings.overhead_seconds
