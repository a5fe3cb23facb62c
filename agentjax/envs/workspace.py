"""A folder of files that the policy works in, and the tools it has there.

The files are held here, not in the sandbox: each call runs in a box of its own that is given the
files and whose files are taken back. So nothing of one call outlives it but files, and a snapshot
of an episode is its files.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentjax.envs.environment import Observation
from agentjax.envs.question import QuestionEnvironment
from agentjax.sandbox.interface import (
  Command,
  Program,
  PythonCell,
  RunStatus,
  Sandbox,
  SandboxError,
  SandboxResult,
)
from agentjax.tools.protocol import Tool, ToolContext, ToolResult, ToolStatus
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import Task

_MOST_BYTES = 16 * 2**20  # of all files together
_MOST_FILES = 500


class Workspace:
  """The files of one episode, by relative path.

  Args:
    sandbox: where programs run on them; whoever made it closes it.
    files: what is there at first.
  """

  def __init__(self, sandbox: Sandbox, files: Mapping[str, bytes] | None = None):
    self._sandbox = sandbox
    self._busy = asyncio.Lock()  # calls of one turn take effect in their order
    self.files: dict[str, bytes] = dict(files or {})

  async def run(self, program: Program) -> SandboxResult:
    """Runs a program on the files and keeps what it made of them, unless that is too much."""
    async with self._busy:
      box = await self._sandbox.create()
      try:
        result = await box.exec(program, files=self.files)
        if result.status is RunStatus.INFRA_ERROR:
          return result
        try:
          self.files = _unpacked(await box.snapshot())
        except SandboxError as error:
          detail = f"{error}; the files stay as they were"
          return dataclasses.replace(result, status=RunStatus.ERROR, detail=detail)
        return result
      finally:
        await box.close()

  async def edit(self, change: Callable[[dict[str, bytes]], str]) -> str:
    """Applies ``change`` to the files, after the calls that came before; gives what it says."""
    async with self._busy:
      return change(self.files)

  def to_json(self) -> dict[str, str]:
    """Plain JSON of the files."""
    return {path: base64.b64encode(data).decode() for path, data in sorted(self.files.items())}

  def from_json(self, values: Mapping[str, str]) -> None:
    """Inverse of ``to_json``."""
    self.files = {path: base64.b64decode(data) for path, data in values.items()}


class WorkspaceEnvironment(QuestionEnvironment):
  """A question whose answer is what the policy made of its files when it ends its last turn.

  Args:
    registry: tools, those over ``workspace`` among them.
    workspace: this episode's; filled from the task at reset.
    files: the files of a task.
    hand_in: the files at the end -> the answer that is judged; None where there is none.
    max_turns, tool_timeout: as in ``QuestionEnvironment``.
  """

  def __init__(
    self,
    registry: ToolRegistry,
    workspace: Workspace,
    *,
    files: Callable[[Task], Mapping[str, bytes]],
    hand_in: Callable[[Mapping[str, bytes]], str | None],
    max_turns: int,
    tool_timeout: float,
  ):
    super().__init__(
      registry,
      max_turns=max_turns,
      tool_timeout=tool_timeout,
      read_answer=lambda text: hand_in(workspace.files),
    )
    self._workspace = workspace
    self._files = files

  async def reset(self, task: Task, key: int) -> Observation:
    self._workspace.files = dict(self._files(task))
    return await super().reset(task, key)

  def snapshot(self) -> bytes:
    state = {"episode": super().snapshot().decode(), "files": self._workspace.to_json()}
    return json.dumps(state, sort_keys=True).encode()

  def restore(self, state: bytes) -> None:
    values = json.loads(state)
    super().restore(values["episode"].encode())
    self._workspace.from_json(values["files"])


@dataclasses.dataclass(frozen=True)
class WorkspaceTool:
  """A tool over a workspace: ``run(workspace, arguments, context)``."""

  name: str
  description: str
  parameters: Mapping[str, Any]
  run: Callable[[Workspace, Mapping[str, Any], ToolContext], Any]
  workspace: Workspace | None = None  # None where the tool is only to be described

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    if self.workspace is None:
      raise RuntimeError(f"{self.name} has no workspace; environments make one for each episode")
    try:
      return await self.run(self.workspace, arguments, context)
    except SandboxError as error:
      return ToolResult(ToolStatus.INFRA_ERROR, str(error))
    except _Refused as refused:
      return ToolResult(ToolStatus.ERROR, f"error: {refused}")


class _Refused(Exception):
  """What the policy asked for cannot be done."""


def workspace_tools(
  names: Sequence[str], workspace: Workspace | None, *, characters: int
) -> list[Tool]:
  """The tools ``names``, of "shell", "python", "read", "write" and "replace".

  Args:
    names: which, in this order.
    workspace: what they work on; None only describes them.
    characters: longest output the policy sees, half from its head and half from its tail.
  """

  async def shell(
    workspace: Workspace, arguments: Mapping[str, Any], context: ToolContext
  ) -> ToolResult:
    result = await workspace.run(Command(("/bin/sh", "-c", arguments["command"])))
    return _shown(result, characters)

  async def python(
    workspace: Workspace, arguments: Mapping[str, Any], context: ToolContext
  ) -> ToolResult:
    result = await workspace.run(PythonCell(arguments["code"], seed=context.seed))
    return _shown(result, characters)

  async def read(
    workspace: Workspace, arguments: Mapping[str, Any], context: ToolContext
  ) -> ToolResult:
    path = arguments["path"]
    text = await workspace.edit(lambda files: _content(files, path))
    return ToolResult(ToolStatus.OK, _clip(text, characters))

  async def write(
    workspace: Workspace, arguments: Mapping[str, Any], context: ToolContext
  ) -> ToolResult:
    path, content = _checked(arguments["path"]), arguments["content"]

    def change(files: dict[str, bytes]) -> str:
      files[path] = _encoded(content)
      _check_size(files)
      return f"wrote {path}"

    return ToolResult(ToolStatus.OK, await workspace.edit(change))

  async def replace(
    workspace: Workspace, arguments: Mapping[str, Any], context: ToolContext
  ) -> ToolResult:
    path, old, new = arguments["path"], arguments["old"], arguments["new"]

    def change(files: dict[str, bytes]) -> str:
      text = _content(files, path)
      if (count := text.count(old) if old else 0) != 1:
        raise _Refused(f"the old text occurs {count} times in {path}; it must occur once")
      files[path] = _encoded(text.replace(old, new))
      return f"replaced in {path}"

    return ToolResult(ToolStatus.OK, await workspace.edit(change))

  known = {
    "shell": (shell, "Runs a command with /bin/sh in the folder.", ("command",)),
    "python": (python, "Runs Python code in the folder; shows what it prints.", ("code",)),
    "read": (read, "Shows a file.", ("path",)),
    "write": (write, "Writes a file, in place of what it held.", ("path", "content")),
    "replace": (replace, "Replaces a text that occurs once in a file.", ("path", "old", "new")),
  }
  return [
    WorkspaceTool(name, known[name][1], _text_parameters(known[name][2]), known[name][0], workspace)
    for name in names
  ]


def _text_parameters(names: Sequence[str]) -> dict[str, Any]:
  return {
    "type": "object",
    "properties": {name: {"type": "string"} for name in names},
    "required": list(names),
    "additionalProperties": False,
  }


def _shown(result: SandboxResult, characters: int) -> ToolResult:
  text = "\n".join(part.rstrip("\n") for part in (result.stdout, result.stderr) if part.strip())
  if result.status is not RunStatus.OK:
    text = "\n".join(part for part in (text, f"error: {result.detail}") if part)
  text = _clip(text or "(no output)", characters)
  return ToolResult(ToolStatus(result.status.value), text, result.seconds)


def _clip(text: str, limit: int) -> str:
  if len(text) <= limit:
    return text
  tail = limit // 2
  return f"{text[: limit - tail]}\n[... left out ...]\n{text[len(text) - tail :]}"


def _checked(path: str) -> str:
  parts = path.split("/")
  if not path or path.startswith("/") or "\0" in path or {"", ".", ".."} & set(parts):
    raise _Refused(f"{path!r} is not a relative path inside the folder")
  return path


def _content(files: Mapping[str, bytes], path: str) -> str:
  if path not in files:
    raise _Refused(f"no file {path!r}; there are: {', '.join(sorted(files)[:50])}")
  return files[path].decode("utf-8", "replace")


def _encoded(text: str) -> bytes:
  return text.encode("utf-8", "replace")


def _check_size(files: Mapping[str, bytes]) -> None:
  held = sum(map(len, files.values()))
  if held > _MOST_BYTES or len(files) > _MOST_FILES:
    raise SandboxError(
      f"{len(files)} files of {held} bytes; allowed: {_MOST_FILES} of {_MOST_BYTES} together"
    )


def _unpacked(archive: bytes) -> dict[str, bytes]:
  """The regular files of a box, without byte code and without links."""
  files: dict[str, bytes] = {}
  with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
    for entry in tar:
      if not entry.isreg() or "__pycache__" in entry.name.split("/"):
        continue
      content = tar.extractfile(entry)
      assert content is not None
      files[entry.name] = content.read()
  _check_size(files)
  return files
