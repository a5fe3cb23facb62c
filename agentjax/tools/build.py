"""Which tools a run has: settings, and the registry made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from agentjax import names
from agentjax.config import Config, check
from agentjax.sandbox.build import SandboxConfig, build_sandbox
from agentjax.sandbox.interface import Sandbox
from agentjax.tools.calculator import CalculatorConfig, CalculatorTool
from agentjax.tools.fetch import FetchConfig, FetchTool
from agentjax.tools.files import FilesConfig, FilesTool
from agentjax.tools.function import FunctionTool
from agentjax.tools.protocol import Tool
from agentjax.tools.python import PythonToolConfig, build_python_tool
from agentjax.tools.registry import ToolRegistry
from agentjax.tools.search import Corpus, SearchConfig, SearchTool, read_corpus
from agentjax.tools.shell import ShellConfig, ShellTool
from agentjax.tools.sql import SqlConfig, SqlTool
from agentjax.tools.web_page import WebPageConfig, WebPageTool
from agentjax.tools.workspace import WorkspaceConfig, Workspaces

_BUNDLED = ("calculator", "fetch", "files", "python", "search", "shell", "sql", "web_page")
_ON_WORKSPACES = {"files", "shell", "sql", "web_page"}


@dataclasses.dataclass(unsafe_hash=True)
class ToolsConfig(Config):
  """The tools of a run.

  Attributes:
    names: bundled tools ("calculator", "fetch", "files", "python", "search", "shell", "sql",
      "web_page"), or "package.module:attribute" for a tool of your own (a function, typed, or any
      object that follows the Tool protocol).
    timeout: seconds one call may take at most, retries included; waiting for places that other
      episodes hold is not counted.
    retries: further tries of a call that failed by no fault of the policy.
    calls_per_turn: calls of one turn that are run; each further one is answered with an error.
    workspace: where shell, files and web_page work, one for each episode, and the sandbox of SQL.
    calculator, fetch, files, python, search, shell, sql, web_page: settings of each; read where it
      is among ``names``.
  """

  names: tuple[str, ...] = ("calculator",)
  timeout: float = 30.0
  retries: int = 1
  calls_per_turn: int = 16
  calculator: CalculatorConfig = dataclasses.field(default_factory=CalculatorConfig)
  fetch: FetchConfig = dataclasses.field(default_factory=FetchConfig)
  files: FilesConfig = dataclasses.field(default_factory=FilesConfig)
  python: PythonToolConfig = dataclasses.field(default_factory=PythonToolConfig)
  search: SearchConfig = dataclasses.field(default_factory=SearchConfig)
  shell: ShellConfig = dataclasses.field(default_factory=ShellConfig)
  sql: SqlConfig = dataclasses.field(default_factory=SqlConfig)
  web_page: WebPageConfig = dataclasses.field(default_factory=WebPageConfig)
  workspace: WorkspaceConfig = dataclasses.field(default_factory=WorkspaceConfig)

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    for name in self.names:
      check(
        name in _BUNDLED or ":" in name,
        f"{path}.names",
        self.names,
        f"{', '.join(_BUNDLED)}, package.module:attribute",
      )
    check(len(set(self.names)) == len(self.names), f"{path}.names", self.names, "distinct names")
    check(self.timeout > 0, f"{path}.timeout", self.timeout, "> 0")
    check(self.retries >= 0, f"{path}.retries", self.retries, ">= 0")
    check(self.calls_per_turn >= 1, f"{path}.calls_per_turn", self.calls_per_turn, ">= 1")
    # Else the machine's slowness would read as the policy's own.
    for used, room, seconds in (
      ({"python"}, "python.sandbox", _seconds(self.python.sandbox)),
      ({"files", "shell", "sql"}, "workspace.sandbox", _seconds(self.workspace.sandbox)),
      ({"web_page"}, "web_page", (self.web_page.seconds, 0.0)),
    ):
      check(
        used.isdisjoint(self.names) or self.timeout > sum(seconds),
        f"{path}.timeout",
        self.timeout,
        f"> the wall clock and the overhead of {room} ({seconds[0]:g} + {seconds[1]:g} s)",
      )
    wall = self.workspace.sandbox.limits.wall_seconds
    check(
      "sql" not in self.names or self.sql.statement_seconds < wall,
      f"{path}.sql.statement_seconds",
      self.sql.statement_seconds,
      f"< workspace.sandbox.limits.wall_seconds ({wall:g})",
    )
    check(
      "search" not in self.names or bool(self.search.corpus),
      f"{path}.search.corpus",
      self.search.corpus,
      "JSONL files, at least one",
    )
    check(
      "fetch" not in self.names or bool(self.fetch.egress.allow),
      f"{path}.fetch.egress.allow",
      self.fetch.egress.allow,
      "hosts that may be reached, at least one",
    )


def _seconds(sandbox: SandboxConfig) -> tuple[float, float]:
  return sandbox.limits.wall_seconds, sandbox.overhead_seconds


def build_tools(config: ToolsConfig, extra: Sequence[Tool] = ()) -> ToolRegistry:
  """The registry of ``config.names`` in that order, then ``extra``. Close it at the end of the run.

  Raises:
    ConfigError: a name that cannot be imported or is no tool.
    ToolSchemaError: a tool whose schema cannot be used.
  """
  shared, sandbox = None, None
  if _ON_WORKSPACES.intersection(config.names):
    sandbox = build_sandbox(config.workspace.sandbox)
  if sandbox is not None and {"files", "shell", "web_page"}.intersection(config.names):
    shared = Workspaces(sandbox, config.workspace.sandbox.limits, config.workspace)
  tools = [_build(name, config, sandbox, shared) for name in config.names]
  return ToolRegistry(
    [*tools, *extra],
    timeout=config.timeout,
    retries=config.retries,
    calls_per_turn=config.calls_per_turn,
  )


def _build(
  name: str, config: ToolsConfig, sandbox: Sandbox | None, shared: Workspaces | None
) -> Tool:
  if name == "calculator":
    return CalculatorTool(config.calculator)
  if name == "fetch":
    return FetchTool(config.fetch)
  if name == "python":
    return build_python_tool(config.python)
  if name == "search":
    return SearchTool(Corpus(read_corpus(config.search.corpus), config.search), config.search)
  if name == "sql":
    assert sandbox is not None
    own = dataclasses.replace(config.workspace, files=None)
    return SqlTool(Workspaces(sandbox, config.workspace.sandbox.limits, own), config.sql)
  if name == "web_page":
    return WebPageTool(shared, config.web_page)
  if name in ("shell", "files"):
    assert shared is not None
    if name == "shell":
      return ShellTool(shared, config.shell)
    return FilesTool(shared, config.files)
  allowed = "a typed function, or an object with name, description, parameters and an async call"
  found = names.load(name, "config.tools.names", allowed)
  if all(hasattr(found, a) for a in ("name", "description", "parameters")) and callable(found):
    return found
  if callable(found) and not isinstance(found, type):
    return FunctionTool(found)
  raise names.wrong(name, "config.tools.names", found, allowed)
