"""The shell as a tool: each command runs in the episode's workspace, which keeps its files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from agentjax.config import AtLeastTwo
from agentjax.sandbox.interface import Command
from agentjax.tools.config import ToolConfig, Workbench, workspace_seconds
from agentjax.tools.output import as_tool_result, is_unicode, joined
from agentjax.tools.protocol import Tool, ToolContext, ToolResult, ToolStatus
from agentjax.tools.workspace import Workspaces, WorkspaceTool

# One stream, so that errors appear where they happened. $0 is the command, $1 the seed.
_RUN = """
exec 2>&1
command -v bash >/dev/null && exec bash -c "RANDOM=$1; $0"
exec sh -c "$0"
"""


@dataclasses.dataclass(unsafe_hash=True)
class ShellConfig(ToolConfig):
  """Settings of the shell tool.

  Attributes:
    max_characters: characters of output the policy sees, half from the head and half from the tail.
  """

  max_characters: AtLeastTwo = 4000

  def call_seconds(self, bench: Workbench) -> tuple[float, float]:
    return workspace_seconds(bench)

  def build(self, bench: Workbench) -> Tool:
    return ShellTool(bench.workspaces, self)


class ShellTool(WorkspaceTool):
  """Runs a command with bash, or sh where there is none, in the workspace of the episode.

  Standard output and error come back as one text, in the order in which they were written, then the
  exit code unless it is 0 (status ERROR then). Files are kept from call to call; variables, the
  current directory and background processes are not. ``$RANDOM`` is seeded by the call's context.

  Args:
    workspaces: where it works; other tools may share them.
    config: see ShellConfig.
  """

  name = "shell"
  description = (
    "Runs a shell command in the work directory and returns what it prints and its exit code. "
    "Files stay for later calls; variables, the current directory and background processes do "
    "not. There is no network."
  )
  parameters: Mapping[str, Any] = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "for example ls -l src | head"}},
    "required": ["command"],
    "additionalProperties": False,
  }

  def __init__(self, workspaces: Workspaces, config: ShellConfig | None = None):
    super().__init__(workspaces)
    self._config = config or ShellConfig()
    self._config.validate("shell")

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    command = arguments["command"]
    if "\0" in command or not is_unicode(command):
      return ToolResult(
        ToolStatus.ERROR, "error: the command holds a NUL character or half of a surrogate pair"
      )
    if len(command.encode()) > 100_000:  # Linux lets one argument have 128 KiB
      return ToolResult(
        ToolStatus.ERROR, "error: the command is longer than 100000 bytes; write a file instead"
      )
    program = Command(("/bin/sh", "-c", _RUN, command, str(context.seed % 2**31)))
    run = await self.workspaces.run(program, context)
    result = as_tool_result(run, self._config.max_characters)
    if result.status is ToolStatus.INFRA_ERROR:
      return result
    if problem := await self.workspaces.set_back_if_too_big(context.episode):
      output = joined(result.output, f"error: {problem}")
      return dataclasses.replace(result, status=ToolStatus.OUTPUT_LIMIT, output=output)
    return result
