"""The tool that views, searches and changes the files of a workspace."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping
from typing import Any

from agentjax.config import AtLeastTwo, PositiveInt
from agentjax.sandbox.interface import PythonScript, RunStatus
from agentjax.tools import files_program
from agentjax.tools.config import ToolConfig, Workbench, workspace_seconds
from agentjax.tools.output import as_tool_result, clip, is_unicode
from agentjax.tools.protocol import Tool, ToolContext, ToolResult, ToolStatus
from agentjax.tools.workspace import Workspaces, WorkspaceTool

_NEEDS = {
  "view": ("path",),
  "create": ("path", "file_text"),
  "str_replace": ("path", "old_str"),
  "insert": ("path", "insert_line", "insert_text"),
  "search": ("pattern",),
  "list": (),
}
_TAKES = {
  "view": ("view_range",),
  "str_replace": ("new_str",),
  "search": ("path", "glob", "regex"),
  "list": ("path", "glob"),
}


@dataclasses.dataclass(unsafe_hash=True)
class FilesConfig(ToolConfig):
  """Settings of the files tool; the figures are ours.

  Attributes:
    max_characters: characters of output the policy sees, half from the head and half from the tail.
    max_file_bytes: size of a file that can be viewed, edited or searched.
    max_results: lines a search, and entries a list shows.
  """

  max_characters: AtLeastTwo = 8000
  max_file_bytes: PositiveInt = 2**20
  max_results: PositiveInt = 100

  def call_seconds(self, bench: Workbench) -> tuple[float, float]:
    return workspace_seconds(bench)

  def build(self, bench: Workbench) -> Tool:
    return FilesTool(bench.workspaces, self)


class FilesTool(WorkspaceTool):
  """Views, creates, edits and searches text files of the episode's workspace.

  Everything runs inside the sandbox: a path that leads out, a hostile pattern or a binary file
  gives an answer to the policy (status ERROR, TIMEOUT), never a fault. Files come by name, those of
  a folder before those of its folders. ``search`` and ``list`` leave out folders named ``.git``;
  ``search`` also binary files, those over ``max_file_bytes``, and links.

  Args:
    workspaces: where it works; other tools may share them.
    config: see FilesConfig.
  """

  name = "files"
  description = (
    "Looks at and changes text files of the work directory. Commands: view (a file with line "
    "numbers, or a directory), create, str_replace (old_str must occur exactly once), insert "
    "(after insert_line, 0 is the top), search (lines that hold pattern), list (files)."
  )
  parameters: Mapping[str, Any] = {
    "type": "object",
    "properties": {
      "command": {"enum": list(_NEEDS)},
      "path": {"type": "string", "description": "relative to the work directory"},
      "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": 2,
        "maxItems": 2,
        "description": "[first, last] line to view, from 1; last may be -1",
      },
      "file_text": {"type": "string", "description": "content of the file to create"},
      "old_str": {"type": "string", "description": "text to replace, spaces included"},
      "new_str": {"type": "string", "description": "text in its place; nothing when left out"},
      "insert_line": {"type": "integer", "description": "line after which to insert"},
      "insert_text": {"type": "string"},
      "pattern": {"type": "string", "description": "text to search"},
      "regex": {"type": "boolean", "description": "pattern is a regular expression of Python"},
      "glob": {"type": "string", "description": "only files whose path or name fits, as *.py"},
    },
    "required": ["command"],
    "additionalProperties": False,
  }

  def __init__(self, workspaces: Workspaces, config: FilesConfig | None = None):
    super().__init__(workspaces)
    self._config = config or FilesConfig()
    self._config.validate("files")
    self._source = inspect.getsource(files_program)

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    command = arguments["command"]
    needs, takes = _NEEDS[command], _TAKES.get(command, ())
    missing = [name for name in needs if name not in arguments]
    unused = [name for name in arguments if name not in ("command", *needs, *takes)]
    if missing or unused:
      said = [f"needs {', '.join(missing)}"] if missing else []
      said += [f"does not take {', '.join(unused)}"] if unused else []
      return ToolResult(ToolStatus.ERROR, f"error: {command} {' and '.join(said)}")
    if not is_unicode(json.dumps(dict(arguments), ensure_ascii=False)):
      return ToolResult(ToolStatus.ERROR, "error: the arguments hold half of a surrogate pair")
    request = {
      **arguments,
      "max_file_bytes": self._config.max_file_bytes,
      "max_results": self._config.max_results,
    }
    run = await self.workspaces.run(
      PythonScript(self._source), context, stdin=json.dumps(request).encode()
    )
    refused = run.status is RunStatus.ERROR and run.exit_code == files_program.REFUSED
    if run.status is RunStatus.OK or refused:
      shown = clip(run.stdout.rstrip("\n"), self._config.max_characters)
      return ToolResult(ToolStatus(run.status.value), shown, run.seconds)
    if run.status is RunStatus.ERROR:  # our program broke, whatever the policy asked for
      return ToolResult(ToolStatus.INFRA_ERROR, f"the files program failed: {run.stderr[-500:]}")
    return as_tool_result(run, self._config.max_characters)
