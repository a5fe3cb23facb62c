"""The tool "python" of the world "mle"."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from agentjax.sandbox.interface import PythonCell
from agentjax.tools.output import as_tool_result, joined
from agentjax.tools.protocol import ToolContext, ToolResult, ToolStatus
from agentjax.tools.workspace import Workspaces


class WorkspacePythonTool:
  """Runs a cell of Python in the folder of the episode; files last, variables do not.

  Args:
    workspaces: where it works; its sandbox says which packages can be imported.
    max_characters: of output that the policy sees, half from the head and half from the tail.
  """

  name = "python"
  stateful = True
  description = (
    "Runs Python code in the work directory and returns what it prints, and the value of a final "
    "expression. Files stay for later calls, variables do not; there is no network."
  )
  parameters: Mapping[str, Any] = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "Python source code"}},
    "required": ["code"],
    "additionalProperties": False,
  }

  def __init__(self, workspaces: Workspaces, max_characters: int = 2000):
    self._workspaces = workspaces
    self._max_characters = max_characters

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    program = PythonCell(arguments["code"], seed=context.seed)
    run = await self._workspaces.run(program, context)
    result = as_tool_result(run, self._max_characters)
    if result.status is ToolStatus.INFRA_ERROR:
      return result
    if problem := await self._workspaces.set_back_if_too_big(context.episode):
      output = joined(result.output, f"error: {problem}")
      return dataclasses.replace(result, status=ToolStatus.OUTPUT_LIMIT, output=output)
    return result

  async def is_healthy(self) -> bool:
    return await self._workspaces.is_healthy()
