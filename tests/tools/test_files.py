"""The files tool: views, edits and searches, and what it refuses."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from agentjax.config import ConfigError
from agentjax.sandbox import ProcessSandbox, SandboxLimits
from agentjax.sandbox.interface import Command
from agentjax.tools import ToolContext, ToolRegistry, ToolResult, ToolStatus
from agentjax.tools.files import FilesConfig, FilesTool
from agentjax.tools.workspace import WorkspaceConfig, Workspaces
from agentjax.trajectory.record import ToolCall

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

_START = {
  "poem.txt": b"one\ntwo\nthree\ntwo\n",
  "crlf.txt": b"a\r\nb\r\n",
  "open_end": b"x\ny",
  "src/main.py": b"def main():\n  return 1\n",
  "src/deep/er/x.py": b"import main  # TWO\n",
  "binary": b"\x00\x01two",
  "latin": "tw\xf6".encode("latin-1"),
  "large": b"two\n" * 500,
  ".git/config": b"two\n",
}


class Repository:
  """A workspace with ``_START`` in it, and calls on it."""

  def __init__(self) -> None:
    sandbox = ProcessSandbox()
    self.workspaces = Workspaces(sandbox, SandboxLimits(), WorkspaceConfig())
    config = FilesConfig(max_characters=1000, max_file_bytes=1000, max_results=4)
    self.registry = ToolRegistry([FilesTool(self.workspaces, config)])
    self._start = self.workspaces.store.put_files(_START)

  def reset(self) -> None:
    asyncio.run(self.workspaces.restore("e", self._start))

  def __call__(self, command: str, timeout: float = 10.0, **arguments: Any) -> ToolResult:
    call = ToolCall("files", {"command": command, **arguments})
    return asyncio.run(self.registry.call(call, ToolContext("e", 0, timeout)))

  def read(self, path: str) -> bytes:
    async def body() -> bytes:
      async with self.workspaces.use("e") as box:
        return await box.download(path)

    return asyncio.run(body())

  def shell(self, command: str) -> None:
    program = Command(("/bin/sh", "-c", command))
    asyncio.run(self.workspaces.run(program, ToolContext("e", 0, 10.0)))


@pytest.fixture(scope="module")
def shared() -> Iterator[Repository]:
  repository = Repository()
  yield repository
  asyncio.run(repository.registry.close())


@pytest.fixture
def files(shared: Repository) -> Repository:
  shared.reset()
  return shared


def test_view_numbers_lines_and_lists_folders(files: Repository) -> None:
  assert (
    files("view", path="poem.txt").output == "     1\tone\n     2\ttwo\n     3\tthree\n     4\ttwo"
  )
  assert files("view", path="poem.txt", view_range=[2, 3]).output == "     2\ttwo\n     3\tthree"
  assert files("view", path="poem.txt", view_range=[4.0, -1]).output == "     4\ttwo"
  assert files("view", path="src").output == "src/main.py (23 bytes)\nsrc/deep/er/"


@pytest.mark.parametrize(
  ("edit", "path", "content"),
  [
    ({"command": "create", "file_text": "new\n"}, "a/b/c.txt", b"new\n"),
    ({"command": "create", "file_text": "x"}, "poem.txt", b"x"),
    ({"command": "str_replace", "old_str": "three\ntwo", "new_str": "3"}, "poem.txt",
     b"one\ntwo\n3\n"),
    ({"command": "str_replace", "old_str": "one\n"}, "poem.txt", b"two\nthree\ntwo\n"),
    ({"command": "str_replace", "old_str": "a\r\n", "new_str": "\\1\r\n"}, "crlf.txt",
     b"\\1\r\nb\r\n"),
    ({"command": "insert", "insert_line": 0, "insert_text": "0"}, "poem.txt",
     b"0\none\ntwo\nthree\ntwo\n"),
    ({"command": "insert", "insert_line": 4, "insert_text": "5\n6\n"}, "poem.txt",
     b"one\ntwo\nthree\ntwo\n5\n6\n"),
    ({"command": "insert", "insert_line": 1, "insert_text": "-"}, "open_end", b"x\n-\ny"),
    ({"command": "insert", "insert_line": 2, "insert_text": "-"}, "open_end", b"x\ny\n-"),
  ],
)  # fmt: skip
def test_edits_change_exactly_what_they_say(
  files: Repository, edit: dict[str, Any], path: str, content: bytes
) -> None:
  assert files(**edit, path=path).status is ToolStatus.OK
  assert files.read(path) == content


def test_edit_shows_its_surroundings_and_keeps_the_mode(files: Repository) -> None:
  files.shell("chmod +x poem.txt")
  result = files("str_replace", path="poem.txt", old_str="three", new_str="3\n3½")
  assert result.output == (
    "edited poem.txt:\n     1\tone\n     2\ttwo\n     3\t3\n     4\t3½\n     5\ttwo"
  )
  tree = asyncio.run(files.workspaces.snapshot("e"))
  kinds = {e.path: e.kind for e in files.workspaces.store.entries(tree)}
  assert (kinds["poem.txt"], kinds["crlf.txt"]) == ("program", "file")


def test_search_and_list(files: Repository) -> None:
  assert files("search", pattern="two").output == "poem.txt:2: two\npoem.txt:4: two"
  assert files("search", pattern="(?i)two$", regex=True, path="src").output == (
    "src/deep/er/x.py:1: import main  # TWO"
  )
  assert files("search", pattern="main", glob="*.py").output == (
    "src/main.py:1: def main():\nsrc/deep/er/x.py:1: import main  # TWO"
  )
  assert files("search", pattern="(two").output == "(no matches)"
  many = files("search", pattern="", glob="*.txt").output
  assert many.endswith("(only the first 4; narrow the search)")
  assert files("list", glob="src/*").output == (
    "src/main.py (23 bytes)\nsrc/deep/er/x.py (19 bytes)"
  )
  assert files("list").output.endswith("(only the first 4; narrow path or glob)")
  assert ".git" not in files("list").output


@pytest.mark.parametrize(
  ("call", "message"),
  [
    ({"command": "view"}, "view needs path"),
    ({"command": "view", "path": "poem.txt", "pattern": "x"}, "does not take pattern"),
    ({"command": "view", "path": "missing"}, "there is no file 'missing'"),
    ({"command": "view", "path": "poem.txt", "view_range": [3, 9]}, "which has 4 lines"),
    ({"command": "view", "path": "../x"}, "outside the work directory"),
    ({"command": "view", "path": "/etc/passwd"}, "outside the work directory"),
    ({"command": "view", "path": "a\0b"}, "NUL"),
    ({"command": "view", "path": "\udc80"}, "surrogate"),
    ({"command": "view", "path": "binary"}, "binary file of 5 bytes"),
    ({"command": "view", "path": "latin"}, "binary file of 3 bytes"),
    ({"command": "view", "path": "large"}, "has 2000 bytes; at most 1000"),
    ({"command": "create", "path": "src", "file_text": ""}, "is a directory"),
    ({"command": "create", "path": "poem.txt/x", "file_text": ""}, "'poem.txt' is a file"),
    ({"command": "create", "path": "x", "file_text": "y" * 1001}, "would have 1001 bytes"),
    ({"command": "str_replace", "path": "poem.txt", "old_str": "two"},
     "occurs 2 times in 'poem.txt', at lines 2, 4;"),
    ({"command": "str_replace", "path": "poem.txt", "old_str": "four"}, "does not occur"),
    ({"command": "str_replace", "path": "poem.txt", "old_str": ""}, "old_str is empty"),
    ({"command": "insert", "path": "poem.txt", "insert_line": 5, "insert_text": ""}, "0 .. 4"),
    ({"command": "search", "pattern": "(", "regex": True}, "not a regular expression"),
    ({"command": "search", "pattern": "x", "path": "missing"}, "there is no 'missing'"),
    ({"command": "list", "path": "poem.txt"}, "no directory"),
    ({"command": "undo"}, "invalid arguments"),
  ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_and_changes_nothing(
  files: Repository, call: dict[str, Any], message: str
) -> None:
  result = files(**call)
  assert result.status is ToolStatus.ERROR
  assert result.output.startswith("error: ")
  assert message in result.output
  assert asyncio.run(files.workspaces.snapshot("e")) == files._start


def test_links_never_lead_out(files: Repository) -> None:
  files.shell("ln -s /etc/passwd out; ln -s / root; ln -s poem.txt in; mkfifo pipe")
  for path in ("out", "root/etc/passwd"):
    assert "outside the work directory" in files("view", path=path).output
    assert "outside" in files("create", path=path, file_text="x").output
  assert files("view", path="in", view_range=[1, 1]).output == "     1\tone"
  assert "not a regular file" in files("view", path="pipe").output
  assert files("search", pattern="root", path=".").output == "(no matches)"


def test_planted_modules_and_hostile_patterns_do_not_break_it(files: Repository) -> None:
  for name in ("fnmatch", "json", "re", "os"):
    files("create", path=f"{name}.py", file_text="print('planted'); raise SystemExit(0)")
  assert files("view", path="open_end").output == "     1\tx\n     2\ty"
  files("create", path="a", file_text="a" * 64 + "!")
  slow = files("search", pattern="(a+)+$", regex=True, path="a", timeout=1.0)
  assert slow.status is ToolStatus.TIMEOUT


def test_impossible_settings_are_refused_by_name() -> None:
  for name in ("max_characters", "max_file_bytes", "max_results"):
    with pytest.raises(ConfigError, match=name):
      FilesConfig(**{name: 0}).validate("files")
