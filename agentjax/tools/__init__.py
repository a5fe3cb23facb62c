"""Tools that a policy may call: protocol, registry, the bundled ones, your own functions."""

from agentjax.tools.build import ToolsConfig, build_tools
from agentjax.tools.calculator import CalculatorTool
from agentjax.tools.files import FilesTool
from agentjax.tools.function import ToolError, function_tool
from agentjax.tools.protocol import Tool, ToolContext, ToolResult, ToolStatus
from agentjax.tools.python import PythonSessionTool, PythonTool
from agentjax.tools.registry import ToolRegistry, ToolSchemaError
from agentjax.tools.shell import ShellTool
from agentjax.tools.workspace import TreeStore, Workspaces

__all__ = [
  "CalculatorTool",
  "FilesTool",
  "PythonSessionTool",
  "PythonTool",
  "ShellTool",
  "Tool",
  "ToolContext",
  "ToolError",
  "ToolRegistry",
  "ToolResult",
  "ToolSchemaError",
  "ToolStatus",
  "ToolsConfig",
  "TreeStore",
  "Workspaces",
  "build_tools",
  "function_tool",
]
