"""Which tools a run has: settings, and the registry made of them."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence

from agentjax.config import Config, ConfigError, check
from agentjax.tools.calculator import CalculatorConfig, CalculatorTool
from agentjax.tools.function import FunctionTool
from agentjax.tools.protocol import Tool
from agentjax.tools.python import PythonToolConfig, build_python_tool
from agentjax.tools.registry import ToolRegistry

_BUNDLED = ("calculator", "python")


@dataclasses.dataclass(unsafe_hash=True)
class ToolsConfig(Config):
  """The tools of a run.

  Attributes:
    names: bundled tools ("calculator", "python"), or "package.module:attribute" for a tool of your
      own (a function, typed, or any object that follows the Tool protocol).
    timeout: seconds one call may take at most, retries and waiting for a sandbox included.
    retries: further tries of a call that failed by no fault of the policy.
  """

  names: tuple[str, ...] = ("calculator",)
  timeout: float = 30.0
  retries: int = 1
  calculator: CalculatorConfig = dataclasses.field(default_factory=CalculatorConfig)
  python: PythonToolConfig = dataclasses.field(default_factory=PythonToolConfig)

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
    sandbox = self.python.sandbox
    check(
      "python" not in self.names
      or self.timeout > sandbox.limits.wall_seconds + sandbox.queue_seconds,
      f"{path}.timeout",
      self.timeout,
      f"> python.sandbox.limits.wall_seconds + python.sandbox.queue_seconds "
      f"({sandbox.limits.wall_seconds:g} + {sandbox.queue_seconds:g})",
    )


def build_tools(config: ToolsConfig, extra: Sequence[Tool] = ()) -> ToolRegistry:
  """The registry of ``config.names`` in that order, then ``extra``. Close it at the end of the run.

  Raises:
    ConfigError: a name that cannot be imported or is no tool.
    ToolSchemaError: a tool whose schema cannot be used.
  """
  tools = [_build(name, config) for name in config.names]
  return ToolRegistry([*tools, *extra], timeout=config.timeout, retries=config.retries)


def _build(name: str, config: ToolsConfig) -> Tool:
  if name == "calculator":
    return CalculatorTool(config.calculator)
  if name == "python":
    return build_python_tool(config.python)
  module, _, attribute = name.partition(":")
  try:
    found = getattr(importlib.import_module(module), attribute)
  except (ImportError, AttributeError, ValueError) as error:
    raise ConfigError(f"tools.names: {name!r} cannot be imported ({error}).") from error
  if all(hasattr(found, a) for a in ("name", "description", "parameters")) and callable(found):
    return found
  if callable(found) and not isinstance(found, type):
    return FunctionTool(found)
  raise ConfigError(
    f"tools.names: {name!r} is a {type(found).__name__}; allowed: a typed function, or an object "
    "with name, description, parameters and an async call."
  )
