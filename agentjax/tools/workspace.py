"""The files of an episode: a box kept from call to call, saved and restored by content hash.

The tools that act on files (shell, files, web_page) share one ``Workspaces``, so that each sees
what the others write. An environment that branches or resumes keeps the hash that ``snapshot``
returns; equal trees have equal hashes, and each content is stored once.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import os
import tarfile
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

from agentjax.config import Config, FilePath, PositiveInt, Range
from agentjax.files import write_atomically
from agentjax.sandbox import files as sandbox_files
from agentjax.sandbox.config import DEFAULT
from agentjax.sandbox.interface import (
  Box,
  BoxContentError,
  Program,
  PythonScript,
  RunStatus,
  Sandbox,
  SandboxError,
  SandboxLimits,
  SandboxResult,
  is_healthy,
)
from agentjax.tools.protocol import ToolContext

T = TypeVar("T")

_log = logging.getLogger(__name__)
_WRITING = threading.RLock()  # several stores may have one folder

# Links are made inside the box, where a link to the outside is harmless, never by the host.
_MAKE_LINKS = """
import json, os, sys
for path, target in json.load(sys.stdin):
  os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
  os.symlink(target, path)
"""
_MEASURE = """
import os
size = count = 0
def refuse(error):
  raise error
for folder, folders, files in os.walk(".", onerror=refuse):
  for name in folders + files:
    size += 512 * os.lstat(os.path.join(folder, name)).st_blocks
    count += 1
print(size, count)
"""


@dataclasses.dataclass(unsafe_hash=True)
class WorkspaceConfig(Config):
  """Settings of the workspaces that shell, files and web_page share; the figures are ours.

  Attributes:
    sandbox: name of the sandbox where all of them run, and SQL too, in ``config.sandboxes``; a back
      end with files and snapshots.
    files: folder whose files every workspace starts with; None starts empty.
    store: folder of saved trees, which keeps all of them; None is a temporary one, which only keeps
      trees that an episode can still return to and is deleted with the tools.
    max_open: workspaces kept open; those unused the longest are saved and closed beyond that, and
      opened again at their next call. Each takes memory for its files, where the sandbox's
      ``disk`` is "memory".
    max_bytes: disk space of one workspace; if a shell command leaves more, the workspace is reset
      to its start.
    max_files: files and folders of one workspace, likewise.
  """

  sandbox: str = DEFAULT
  files: FilePath | None = None
  store: FilePath | None = None
  max_open: PositiveInt = 64
  max_bytes: Annotated[int, Range(2**20, 2**28)] = 128 * 2**20
  max_files: PositiveInt = 10_000

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(self.files is None or os.path.isdir(self.files), "files", "a folder, None")


@dataclasses.dataclass(frozen=True, order=True)
class TreeEntry:
  """One entry of a saved tree.

  Attributes:
    path: relative, with "/".
    kind: "file", "program" (an executable file), "directory" (an empty one; others follow from
      their files) or "link".
    value: SHA-256 of a file's content in hex, the target of a link, empty for a directory.
  """

  path: str
  kind: str
  value: str


class TreeStore:
  """Trees of files by the hash of their contents; each content is stored once.

  The id of a tree is the SHA-256 of its manifest: one JSON line ``[path, kind, value]`` an entry,
  sorted by path. Times, owners and modes except the executable bit are not part of it.

  The caller that puts a tree holds it until ``release``. A temporary store deletes trees without
  holders; a store in a given folder keeps everything.

  Args:
    directory: where trees are kept, made when missing; None is a temporary folder.
  """

  def __init__(self, directory: str | os.PathLike[str] | None = None):
    self._temporary = None
    if directory is None:
      self._temporary = tempfile.TemporaryDirectory(prefix="agentjax-trees-")
      directory = self._temporary.name
    self._root = Path(directory)
    # Of a temporary store: who holds a tree, and how often the trees name a content.
    self._uses: collections.Counter[tuple[str, str]] = collections.Counter()

  def put_files(self, files: Mapping[str, bytes]) -> str:
    """Id of the tree of ``files`` (relative path -> content)."""
    return self._put((p, "file", c) for p, c in files.items())

  def put_directory(self, directory: str, max_bytes: int = 2**28) -> str:
    """Id of the tree of a folder of this machine.

    Raises:
      SandboxError: it holds more than ``max_bytes``.
    """
    return self.put(sandbox_files.pack(directory, max_bytes))

  def put(self, archive: bytes) -> str:
    """Id of the tree in ``archive``, a tar as ``Box.snapshot`` gives it."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
      return self._put(_members(tar))

  def hold(self, tree: str) -> None:
    """One more ``release`` of a tree that is held already."""
    with _WRITING:
      self._uses["trees", tree] += 1

  def release(self, tree: str) -> None:
    """Releases a tree of ``put``, ``put_files``, ``put_directory`` or ``hold``."""
    if self._temporary is None:
      return
    with _WRITING:
      self._uses["trees", tree] -= 1
      if self._uses["trees", tree]:
        return
      entries = self.entries(tree)
      self._delete("trees", tree)
      self._forget(entries)

  def entries(self, tree: str) -> tuple[TreeEntry, ...]:
    """The entries of a tree, sorted by path.

    Raises:
      KeyError: no such tree in this store.
      SandboxError: the stored tree is damaged.
    """
    lines = self._read("trees", tree).decode().splitlines()
    return tuple(TreeEntry(*json.loads(line)) for line in lines)

  def read(self, entry: TreeEntry) -> bytes:
    """Content of a file of a tree."""
    return self._read("contents", entry.value)

  def archive(self, tree: str) -> bytes:
    """The files and folders of a tree as a tar for ``Sandbox.create``; links are left out."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
      for entry in self.entries(tree):
        info = tarfile.TarInfo(entry.path)
        if entry.kind == "directory":
          info.type, info.mode = tarfile.DIRTYPE, 0o755
          tar.addfile(info)
        elif entry.kind != "link":
          content = self.read(entry)
          info.size, info.mode = len(content), 0o755 if entry.kind == "program" else 0o644
          tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()

  def close(self) -> None:
    """Removes a temporary store; a store in a given folder is kept."""
    if self._temporary is not None:
      with _WRITING:
        self._uses.clear()  # nothing is left to release
        self._temporary.cleanup()

  def _put(self, files: Iterable[tuple[str, str, bytes | str]]) -> str:
    """Of (path, kind, content of a file or value of another entry), one after the other."""
    entries: list[TreeEntry] = []
    try:
      for path, kind, value in files:
        name = self._write("contents", value) if isinstance(value, bytes) else value
        entries.append(TreeEntry(path, kind, name))
      parents = {"", *(os.path.dirname(e.path) for e in entries)}
      entries = [e for e in entries if e.kind != "directory" or e.path not in parents]
      lines = [json.dumps([e.path, e.kind, e.value]) + "\n" for e in sorted(entries)]
      with _WRITING:
        tree = self._write("trees", "".join(lines).encode())
        if self._uses["trees", tree] > 1:  # it was there: its contents are counted already
          self._forget(entries)
        return tree
    except BaseException:
      with _WRITING:
        self._forget(entries)
      raise

  def _write(self, kind: str, content: bytes) -> str:
    name = hashlib.sha256(content).hexdigest()
    path = self._path(kind, name)
    with _WRITING:
      self._uses[kind, name] += 1
      if not path.exists():
        if self._temporary is None:
          write_atomically(path, content)
        else:  # nobody else reads it, and it need not outlast a crash
          path.parent.mkdir(parents=True, exist_ok=True)
          path.write_bytes(content)
    return name

  def _forget(self, entries: Iterable[TreeEntry]) -> None:
    """Takes back what a tree counted; ``_WRITING`` is held."""
    for entry in entries:
      if entry.kind in ("file", "program"):
        self._uses["contents", entry.value] -= 1
        if not self._uses["contents", entry.value]:
          self._delete("contents", entry.value)

  def _delete(self, kind: str, name: str) -> None:
    del self._uses[kind, name]
    if self._temporary is not None:
      self._path(kind, name).unlink(missing_ok=True)

  def _read(self, kind: str, name: str) -> bytes:
    try:
      content = self._path(kind, name).read_bytes()
    except OSError as error:
      raise KeyError(f"no {name!r} among the {kind} of the store {self._root}") from error
    if hashlib.sha256(content).hexdigest() != name:
      raise SandboxError(f"{self._path(kind, name)} is damaged; its content has another hash")
    return content

  def _path(self, kind: str, name: str) -> Path:
    return self._root / kind / name[:2] / name


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, str, bytes | str]]:
  """(path, kind, content of a file or value of another entry) of what an archive holds."""
  for member in tar:
    if member.issym():
      yield member.name, "link", member.linkname
    elif member.isdir():
      yield member.name, "directory", ""
    elif (file := tar.extractfile(member)) is not None:
      yield member.name, "program" if member.mode & 0o100 else "file", file.read()


def _contents(archive: bytes) -> dict[str, bytes]:
  """The regular files of an archive."""
  with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
    return {path: value for path, _, value in _members(tar) if isinstance(value, bytes)}


@dataclasses.dataclass(frozen=True)
class _Saved:
  """A tree in a store; ``private`` is a store for this tree alone."""

  store: TreeStore
  tree: str
  private: bool = False


_Files = _Saved | Mapping[str, bytes]


@dataclasses.dataclass
class _Workspace:
  start: _Files  # what it is set back to
  files: _Files  # what it opens with while ``box`` is None
  box: Box | None = None
  lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
  ended: bool = False


class Workspaces:
  """A work directory for each episode, made at its first use and kept until ``end``.

  Calls of one episode run one at a time, in the order in which they were made. Processes end with
  their call; files are kept.

  Args:
    sandbox: any back end with files and snapshots; closed with this object.
    limits: bounds of one run; its wall clock is cut to 0.9 of the call's time-out, so that what was
      printed until then still reaches the policy.
    config: initial files and bounds; its ``sandbox`` is not read here.

  Raises:
    SandboxError: the back end has no files or no snapshots.
  """

  def __init__(self, sandbox: Sandbox, limits: SandboxLimits, config: WorkspaceConfig):
    if not (sandbox.capabilities.files and sandbox.capabilities.snapshot):
      raise SandboxError(
        f"{type(sandbox).__name__} cannot keep files between calls; use a back end whose "
        "capabilities name files and snapshot"
      )
    self.store = TreeStore(config.store)
    self._sandbox = sandbox
    self._limits = limits
    self._config = config
    self._held: dict[str, _Workspace] = {}  # the one used last comes last
    self._initial: _Files = {}
    if config.files is not None:
      self._initial = _Saved(self.store, self.store.put_directory(config.files))

  @contextlib.asynccontextmanager
  async def use(self, episode: str, start: Mapping[str, bytes] | None = None) -> AsyncIterator[Box]:
    """The box of ``episode``, exclusively for this caller.

    Args:
      episode: as in ``ToolContext``.
      start: files of a workspace that does not exist yet; None is the initial files.

    Raises:
      SandboxError: it cannot be opened.
    """
    async with self._hold(episode, start) as workspace:
      assert workspace.box is not None
      yield workspace.box
    await self._close_idle()

  async def run(
    self,
    program: Program,
    context: ToolContext,
    *,
    stdin: bytes = b"",
    start: Mapping[str, bytes] | None = None,
    episode: str | None = None,
  ) -> SandboxResult:
    """Runs ``program`` in the workspace of ``episode`` (default: the context's); see ``use``."""
    wall = min(self._limits.wall_seconds, 0.9 * context.timeout)
    limits = dataclasses.replace(self._limits, wall_seconds=wall)
    async with self.use(episode or context.episode, start) as box:
      return await box.exec(program, stdin=stdin, limits=limits)

  async def files(self, episode: str) -> dict[str, bytes]:
    """The regular files of the workspace, as they are now; nothing is saved.

    Raises:
      BoxContentError, SandboxError: as ``snapshot``.
    """
    return await self._pack(episode, _contents)

  async def snapshot(self, episode: str) -> str:
    """Saves the workspace; the id of its tree, which the caller holds (``TreeStore.release``).

    Raises:
      BoxContentError: its contents cannot be saved, although the sandbox works.
      SandboxError: the sandbox failed.
    """
    return await self._pack(episode, self.store.put)

  async def _pack(self, episode: str, use: Callable[[bytes], T]) -> T:
    """``use`` of the workspace's archive."""
    try:
      async with self.use(episode) as box:
        return await asyncio.to_thread(use, await box.snapshot())
    except BoxContentError:
      raise
    except SandboxError as error:  # a back end that packs inside the box cannot tell
      if not await self.is_healthy():
        raise
      raise BoxContentError(str(error)) from error

  async def is_healthy(self) -> bool:
    """Whether an idle program runs in a box of its own."""
    return await is_healthy(self._sandbox)

  async def restore(self, episode: str, tree: str) -> None:
    """Sets the workspace to ``tree``; makes it if there is none.

    The caller must hold the tree as long as the workspace exists.

    Raises:
      KeyError: no such tree in the store.
    """
    self.store.entries(tree)
    saved = _Saved(self.store, tree)
    workspace = self._held.setdefault(episode, _Workspace(saved, saved))
    async with workspace.lock:
      await self._reset(workspace, saved)

  async def set_back_if_too_big(self, episode: str) -> str | None:
    """Resets a workspace that exceeds its bounds to its start, and returns a message."""
    async with self._hold(episode) as workspace:
      assert workspace.box is not None
      found = await workspace.box.exec(PythonScript(_MEASURE))
      if found.status is RunStatus.INFRA_ERROR:
        return None  # the next call measures again
      if found.status is RunStatus.OK:
        size, count = (int(word) for word in found.stdout.split())
        if size <= self._config.max_bytes and count <= self._config.max_files:
          return None
      await self._reset(workspace, workspace.start)
    return (
      f"the workspace outgrew {self._config.max_bytes} bytes or {self._config.max_files} files, or "
      "holds folders that cannot be listed; it was set back to its first state"
    )

  async def end(self, episode: str) -> None:
    """Wipes the workspace; saved trees stay in the store."""
    workspace = self._held.pop(episode, None)
    if workspace is None:
      return
    workspace.ended = True
    if workspace.box is not None:
      await workspace.box.close()  # ends what runs in it
    async with workspace.lock:  # it may be about to open
      await self._reset(workspace, {})

  async def close(self) -> None:
    """Wipes all workspaces, closes the sandbox and a temporary store; closing twice is harmless."""
    for episode in list(self._held):
      await self.end(episode)
    await self._sandbox.close()
    self.store.close()

  @contextlib.asynccontextmanager
  async def _hold(
    self, episode: str, start: Mapping[str, bytes] | None = None
  ) -> AsyncIterator[_Workspace]:
    """The workspace with its box open and its lock held."""
    workspace = self._held.pop(episode, None)
    if workspace is None:
      files = self._initial if start is None else start
      workspace = _Workspace(files, files)
    self._held[episode] = workspace
    async with workspace.lock:
      if workspace.box is None and not workspace.ended:
        workspace.box = await self._open(workspace.files)
        _discard(workspace.files)
      if workspace.ended:  # perhaps while it opened; ``end`` closes the box
        raise SandboxError(f"the episode {episode!r} has ended, and its workspace with it")
      yield workspace

  async def _open(self, files: _Files) -> Box:
    if not isinstance(files, _Saved):
      box = await self._sandbox.create()
      return await _closed_on_error(box, _write(box, files))
    archive = await asyncio.to_thread(files.store.archive, files.tree)
    box = await self._sandbox.create(archive)
    return await _closed_on_error(box, _make_links(box, files))

  async def _reset(self, workspace: _Workspace, files: _Files) -> None:
    box, workspace.box = workspace.box, None
    _discard(workspace.files)
    workspace.start = workspace.files = files
    if box is not None:
      await box.close()

  async def _close_idle(self) -> None:
    open_ones = [w for w in self._held.values() if w.box is not None]
    for workspace in open_ones[: max(0, len(open_ones) - self._config.max_open)]:
      if workspace.lock.locked():
        continue
      async with workspace.lock:
        if (box := workspace.box) is None:
          continue
        store = TreeStore()
        try:
          tree = await asyncio.to_thread(store.put, await box.snapshot())
        except BaseException as error:
          store.close()
          if not isinstance(error, SandboxError | OSError):
            raise
          _log.warning("a workspace stays open, for it cannot be saved: %s", error)
          continue
        workspace.box, workspace.files = None, _Saved(store, tree, private=True)
        await box.close()


class WorkspaceTool:
  """Base of tools whose calls work in the episode's workspace, which ends with the episode."""

  stateful = True

  def __init__(self, workspaces: Workspaces):
    self.workspaces = workspaces

  async def end_episode(self, episode: str) -> None:
    await self.workspaces.end(episode)

  async def is_healthy(self) -> bool:
    return await self.workspaces.is_healthy()

  async def close(self) -> None:
    await self.workspaces.close()


async def _closed_on_error(box: Box, filling: Awaitable[None]) -> Box:
  try:
    await filling
  except BaseException:
    await box.close()
    raise
  return box


async def _write(box: Box, files: Mapping[str, bytes]) -> None:
  for path, content in files.items():
    await box.upload(path, content)


async def _make_links(box: Box, saved: _Saved) -> None:
  links = [(e.path, e.value) for e in saved.store.entries(saved.tree) if e.kind == "link"]
  if not links:
    return
  made = await box.exec(PythonScript(_MAKE_LINKS), stdin=json.dumps(links).encode())
  if made.status is not RunStatus.OK:
    raise SandboxError(f"cannot make links in a workspace: {made.stderr or made.detail}")


def _discard(files: _Files) -> None:
  """Removes a tree that was saved only for a closed workspace."""
  if isinstance(files, _Saved) and files.private:
    files.store.close()
