"""Settings of a run's tools, and the registry that is built from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from agentjax.config import Config, NonNegativeInt, PositiveFloat, PositiveInt, Table, check
from agentjax.names import check_name, is_own, known_names
from agentjax.sandbox.config import Sandboxes
from agentjax.tools.config import ToolConfig, Workbench
from agentjax.tools.protocol import Tool
from agentjax.tools.registry import ToolRegistry
from agentjax.tools.workspace import WorkspaceConfig


@dataclasses.dataclass(unsafe_hash=True)
class ToolsConfig(Config):
  """The tools of a run.

  Attributes:
    names: what is offered, in this order: a built-in tool ("calculator", "fetch", "files",
      "python", "search", "shell", "sql", "web_page"), a name of ``settings``, that of an entry
      point, or ``module:attribute`` of a tool of your own (a function, typed, or any object that
      follows the Tool protocol).
    settings: of tools that do not have the defaults, by name.
    timeout: seconds one call may take at most, retries included; waiting for places that other
      episodes hold is not counted.
    retries: further tries of a call that failed without the policy's fault.
    calls_per_turn: calls of one turn that are run; each further one is answered with an error.
    workspace: where shell, files and web_page work, one for each episode, and the sandbox of SQL.
  """

  names: tuple[str, ...] = ("calculator",)
  settings: Table[ToolConfig] = dataclasses.field(default_factory=Table)
  timeout: PositiveFloat = 30.0
  retries: NonNegativeInt = 1
  calls_per_turn: PositiveInt = 16
  workspace: WorkspaceConfig = dataclasses.field(default_factory=WorkspaceConfig)

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    for name in self.names:
      check_name(name, f"{path}.names", (*known_names(ToolConfig), *self.settings))
    check(len(set(self.names)) == len(self.names), f"{path}.names", self.names, "distinct names")
    for name in self.settings:
      check(name in self.names, f"{path}.settings", name, f"one of {path}.names = {self.names}")

  def tool(self, name: str) -> ToolConfig:
    """Settings of one of ``names``; a copy if the tool has its defaults."""
    return self.settings.get(name) or ToolConfig.from_name(name, "config.tools.names")

  def check_sandboxes(self, sandboxes: Sandboxes, path: str = "config.tools") -> None:
    """Raises ConfigError if a built-in tool cannot work in the sandboxes of a run."""
    require = self.requirements(path)
    bench = Workbench(sandboxes, self.workspace)
    for name in self.names:
      if is_own(name):
        continue  # it is imported when the run is built
      settings, where = self.tool(name), f"{path}.settings.{name}"
      settings.check_run(bench, where)
      seconds = settings.call_seconds(bench)
      require(  # else the machine's slowness would read as the policy's own
        self.timeout > sum(seconds),
        "timeout",
        f"> the wall clock and the overhead of {name} ({seconds[0]:g} + {seconds[1]:g} s)",
      )


def build_tools(
  config: ToolsConfig, extra: Sequence[Tool] = (), sandboxes: Sandboxes | None = None
) -> ToolRegistry:
  """The registry of ``config.names`` in that order, then ``extra``. Close it at the end of the run.

  Args:
    config: validated.
    extra: further tools.
    sandboxes: those of the run; None is the default one.

  Raises:
    ConfigError: a name that cannot be imported or is no tool.
    ToolSchemaError: a tool whose schema cannot be used.
  """
  bench = Workbench(sandboxes or Sandboxes(), config.workspace)
  tools = [config.tool(name).build(bench) for name in config.names]
  return ToolRegistry(
    [*tools, *extra],
    timeout=config.timeout,
    retries=config.retries,
    calls_per_turn=config.calls_per_turn,
  )
