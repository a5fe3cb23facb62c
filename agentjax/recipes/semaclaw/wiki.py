"""A wiki: folders of Markdown pages under git, of which every saved page is a commit.

Paths come from a policy, so none leaves the folder: no "..", no absolute path, no hidden name (and
so nothing within ``.git``), no link. Git runs without the hooks and settings of the machine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from agentjax.config import FilePath, PositiveInt, check
from agentjax.files import write_atomically
from agentjax.recipes.semaclaw.folders import held
from agentjax.tools.config import ToolConfig, Workbench
from agentjax.tools.protocol import Tool, ToolContext, ToolResult, ToolStatus

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,63}")
_DEEPEST = 8
_EXCLUDED = ".*\n"  # hidden files, such as the lock of the folder
_SECONDS = 30.0  # of one git command
_IDENTITY = ("-c", "user.name=wiki", "-c", "user.email=wiki@localhost")
_SAFE = ("-c", "core.hooksPath=/dev/null", "-c", "commit.gpgSign=false", "-c", "gc.auto=0",
         "-c", "core.fsmonitor=false")  # fmt: skip


class WikiError(ValueError):
  """A call that cannot be done; the text is for the policy."""


@dataclasses.dataclass(unsafe_hash=True)
class WikiConfig(ToolConfig):
  """Settings of the tool "wiki".

  Attributes:
    folder: of the pages; made, with its repository, at the first use.
    most_characters: of a page; ours.
    most_pages: of the wiki; ours.
  """

  folder: FilePath = ""
  most_characters: PositiveInt = 50_000
  most_pages: PositiveInt = 1000

  def check_run(self, bench: Workbench, path: str) -> None:
    check(bool(self.folder), f"{path}.folder", self.folder, "a folder for the pages")
    check(shutil.which("git") is not None, f"{path}.folder", self.folder, "none without git")

  def build(self, bench: Workbench) -> Tool:
    return WikiTool(Wiki(self))


class Wiki:
  """The pages of a folder.

  Args:
    config: validated.
  """

  def __init__(self, config: WikiConfig):
    self._config = config

  def tree(self) -> str:
    """All folders and pages, one a line."""
    with held(self._config.folder) as root:
      return "\n".join(self._names(root)) or "the wiki is empty"

  def read(self, path: str) -> str:
    """A page."""
    with held(self._config.folder) as root:
      page = self._page(root, path)
      if not page.is_file():
        raise WikiError(f"there is no page {path[:200]!r}; use tree")
      return page.read_text("utf-8", "replace")

  def mkdir(self, path: str) -> None:
    """Makes a folder; git keeps it with its first page."""
    with held(self._config.folder) as root:
      folder = self._inside(root, path)
      try:
        folder.mkdir(parents=True, exist_ok=True)
      except (FileExistsError, NotADirectoryError) as error:
        raise WikiError(f"{path[:200]!r} is a page, or in one") from error

  def save(self, path: str, text: str) -> str:
    """Writes a page and commits it; gives the commit. A page that is the same makes none."""
    if len(text) > self._config.most_characters:
      raise WikiError(
        f"the page has {len(text)} characters; allowed: {self._config.most_characters}"
      )
    with held(self._config.folder) as root:
      page = self._page(root, path)
      pages = [name for name in self._names(root) if name.endswith(".md")]
      if not page.exists() and len(pages) >= self._config.most_pages:
        raise WikiError(f"the wiki has {len(pages)} pages, and no room for more")
      if page.is_dir():
        raise WikiError(f"{path[:200]!r} is a folder")
      self._repair(root)
      try:
        write_atomically(page, text.encode("utf-8", "replace"))
      except (FileExistsError, NotADirectoryError) as error:
        raise WikiError(f"{path[:200]!r} lies in a page") from error
      return self._commit(root, f"{page.relative_to(root).as_posix()}: saved")

  def history(self, path: str) -> list[str]:
    """The commits of a page, latest first, as ``hash subject``."""
    with held(self._config.folder) as root:
      page = self._page(root, path)
      if not self._head(root):
        return []
      name = page.relative_to(root).as_posix()
      return self._git(root, "log", "--format=%h %s", "--", name).splitlines()

  def _repair(self, root: pathlib.Path) -> None:
    """The repository, made or mended: what a dead process left uncommitted is committed first."""
    for lock in [*(root / ".git").rglob("*.lock")]:  # ours alone may be at work here
      lock.unlink(missing_ok=True)
    self._git(root, "init", "-q", "-b", "main")  # completes one that is half made, changes no other
    exclude = root / ".git" / "info" / "exclude"
    if not exclude.exists() or exclude.read_text("utf-8", "replace") != _EXCLUDED:
      write_atomically(exclude, _EXCLUDED)
    self._commit(root, "recovered")

  def _commit(self, root: pathlib.Path, subject: str) -> str:
    self._git(root, "add", "-A", "--", ".")
    if self._git(root, "status", "--porcelain"):
      self._git(root, "commit", "-q", "--no-verify", "-m", subject)
    return self._head(root)

  def _head(self, root: pathlib.Path) -> str:
    """The last commit; "" where there is none yet, or no repository."""
    try:
      return self._git(root, "rev-parse", "--short", "HEAD").strip()
    except RuntimeError:
      return ""

  def _git(self, root: pathlib.Path, *words: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    environment |= {"GIT_CEILING_DIRECTORIES": str(root.resolve().parent)}
    done = subprocess.run(
      ["git", *_SAFE, *_IDENTITY, "-C", str(root), *words],
      env=environment,
      stdin=subprocess.DEVNULL,
      capture_output=True,
      timeout=_SECONDS,
      check=False,
    )
    if done.returncode:
      raise RuntimeError(f"git {words[0]} in {root}: {done.stderr.decode(errors='replace')[:300]}")
    return done.stdout.decode(errors="replace")

  def _names(self, root: pathlib.Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
      folders[:] = sorted(name for name in folders if not name.startswith("."))
      below = pathlib.Path(folder).relative_to(root)
      yield from (f"{(below / name).as_posix()}/" for name in folders)
      yield from ((below / name).as_posix() for name in sorted(files) if name.endswith(".md"))

  def _page(self, root: pathlib.Path, path: str) -> pathlib.Path:
    page = self._inside(root, path)
    if page.suffix != ".md":
      raise WikiError(f"a page ends with .md, got {path[:200]!r}")
    return page

  def _inside(self, root: pathlib.Path, path: str) -> pathlib.Path:
    parts = path.split("/")
    if len(parts) > _DEEPEST or not all(_NAME.fullmatch(part) for part in parts):
      raise WikiError(
        f"path {path[:200]!r}; allowed: up to {_DEEPEST} names with '/' between them, of letters, "
        "digits, '_', '.', '-' and blanks, none of which begins with '.', '-' or a blank"
      )
    at = root
    for part in parts:
      at = at / part
      if at.is_symlink():
        raise WikiError(f"{path[:200]!r} leads through a link")
    return at


class WikiTool:
  """Reads and writes the pages of a wiki.

  Args:
    wiki: of all episodes.
  """

  name = "wiki"
  description = "A wiki of Markdown pages: shows its tree, reads, saves a page, makes a folder."
  parameters: Mapping[str, Any] = {
    "type": "object",
    "properties": {
      "action": {"enum": ["tree", "read", "save", "mkdir"]},
      "path": {"type": "string", "description": "such as people/ann.md"},
      "text": {"type": "string", "description": "of the page to save"},
    },
    "required": ["action"],
    "additionalProperties": False,  # or what a rule looks for could stand in one
  }

  def __init__(self, wiki: Wiki):
    self._wiki = wiki

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    del context
    try:
      return ToolResult(ToolStatus.OK, await asyncio.to_thread(self._do, arguments))
    except WikiError as error:
      return ToolResult(ToolStatus.ERROR, f"error: {error}")

  def _do(self, arguments: Mapping[str, Any]) -> str:
    action, path = arguments["action"], arguments.get("path")
    if action == "tree":
      return self._wiki.tree()
    if path is None:
      raise WikiError(f"{action} needs a path")
    if action == "read":
      return self._wiki.read(path)
    if action == "mkdir":
      self._wiki.mkdir(path)
      return f"made {path}"
    if arguments.get("text") is None:
      raise WikiError("save needs a text")
    return f"saved in {self._wiki.save(path, arguments['text'])}"
