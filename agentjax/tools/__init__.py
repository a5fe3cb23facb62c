"""Tools that a policy may call: protocol, registry, calculator, Python, your own functions."""

from agentjax.tools.build import ToolsConfig, build_tools
from agentjax.tools.calculator import CalculatorTool
from agentjax.tools.function import ToolError, function_tool
from agentjax.tools.protocol import Tool, ToolContext, ToolResult, ToolStatus
from agentjax.tools.python import PythonSessionTool, PythonTool
from agentjax.tools.registry import ToolRegistry, ToolSchemaError

__all__ = [
  "CalculatorTool",
  "PythonSessionTool",
  "PythonTool",
  "Tool",
  "ToolContext",
  "ToolError",
  "ToolRegistry",
  "ToolResult",
  "ToolSchemaError",
  "ToolStatus",
  "ToolsConfig",
  "build_tools",
  "function_tool",
]
