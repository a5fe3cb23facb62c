"""Python as a tool: each call is a fresh interpreter in a sandbox of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from agentjax.config import Config, check
from agentjax.sandbox.interface import PythonCell, Sandbox, SandboxLimits, run_once
from agentjax.sandbox.process import ProcessSandboxConfig
from agentjax.tools.output import as_tool_result
from agentjax.tools.protocol import ToolContext, ToolResult


@dataclasses.dataclass(unsafe_hash=True)
class PythonToolConfig(Config):
  """Settings of the Python tool.

  Attributes:
    sandbox: the embedded sandbox the code runs in.
    max_characters: characters of output the policy sees, half from the head and half from the tail.
  """

  sandbox: ProcessSandboxConfig = dataclasses.field(default_factory=ProcessSandboxConfig)
  max_characters: int = 2000

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    check(self.max_characters >= 2, f"{path}.max_characters", self.max_characters, ">= 2")


class PythonTool:
  """Runs a cell of Python: the policy sees what it prints, the value of a final expression, errors.

  Nothing lasts from call to call. ``random`` is seeded by the call's context, and string hashes are
  fixed, so the same call of the same episode prints the same.

  Args:
    sandbox: any back end; this tool owns it and closes it.
    limits: bounds of one run; its wall clock is cut to 0.9 of the call's time-out, so that what was
      printed until then still reaches the policy.
    max_characters: see PythonToolConfig.
  """

  name = "python"
  description = (
    "Runs Python code and returns what it prints, and the value of a final expression. "
    "Every call starts afresh; there is no network."
  )
  parameters: Mapping[str, Any] = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "Python source code"}},
    "required": ["code"],
    "additionalProperties": False,
  }

  def __init__(self, sandbox: Sandbox, limits: SandboxLimits, max_characters: int = 2000):
    self._sandbox = sandbox
    self._limits = limits
    self._max_characters = max_characters

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    limits = dataclasses.replace(
      self._limits, wall_seconds=min(self._limits.wall_seconds, 0.9 * context.timeout)
    )
    program = PythonCell(arguments["code"], seed=context.seed)
    result = await run_once(self._sandbox, program, limits=limits)
    return as_tool_result(result, self._max_characters)

  async def close(self) -> None:
    await self._sandbox.close()
