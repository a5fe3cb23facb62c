"""Files that an episode works on: a box kept from call to call, saved and restored by content hash.

The tools that act on files (shell, files, web_page) share one ``Workspaces``, so that what one of
them writes the others see. An environment that branches or resumes keeps the hash that ``snapshot``
returns; equal trees have equal hashes, and each content is stored once.
"""

from __future__ import annotations

import asyncio
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
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from agentjax.config import Config, check
from agentjax.files import write_atomically
from agentjax.sandbox import files as sandbox_files
from agentjax.sandbox.interface import (
  Box,
  Program,
  PythonScript,
  RunStatus,
  Sandbox,
  SandboxError,
  SandboxLimits,
  SandboxResult,
)
from agentjax.sandbox.process import ProcessSandboxConfig
from agentjax.tools.protocol import ToolContext

_log = logging.getLogger(__name__)
_WRITING = threading.Lock()  # several stores may have one folder

# Links are made inside the box, where one that leads outside is harmless, and never by the host.
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
    sandbox: the embedded sandbox all of them run in, and SQL too.
    files: folder whose files every workspace starts with; None starts empty.
    store: folder of saved trees; None is a temporary one, gone when the tools are closed.
    max_open: workspaces kept open; those unused the longest are saved and closed beyond that, and
      opened again at their next call.
    max_bytes: disk space of one workspace; a shell command that leaves more sets it back.
    max_files: files and folders of one workspace, likewise.
  """

  sandbox: ProcessSandboxConfig = dataclasses.field(default_factory=ProcessSandboxConfig)
  files: str | None = None
  store: str | None = None
  max_open: int = 64
  max_bytes: int = 128 * 2**20
  max_files: int = 20_000

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    check(
      self.files is None or os.path.isdir(self.files), f"{path}.files", self.files, "a folder, None"
    )
    check(self.max_open >= 1, f"{path}.max_open", self.max_open, ">= 1")
    check(2**20 <= self.max_bytes <= 2**28, f"{path}.max_bytes", self.max_bytes, "1 .. 256 MiB")
    check(self.max_files >= 1, f"{path}.max_files", self.max_files, ">= 1")


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
  """Trees of files by the hash of what they hold; each content is stored once.

  The id of a tree is the SHA-256 of its manifest: one JSON line ``[path, kind, value]`` an entry,
  sorted by path. Times, owners and modes but the executable bit are no part of it.

  Args:
    directory: where trees are kept, made when missing; None is a temporary folder.
  """

  def __init__(self, directory: str | os.PathLike[str] | None = None):
    self._temporary = None
    if directory is None:
      self._temporary = tempfile.TemporaryDirectory(prefix="agentjax-trees-")
      directory = self._temporary.name
    self._root = Path(directory)

  def put_files(self, files: Mapping[str, bytes]) -> str:
    """Id of the tree of ``files`` (relative path -> content)."""
    return self._put([TreeEntry(p, "file", self._put_blob(c)) for p, c in files.items()])

  def put_directory(self, directory: str, max_bytes: int = 2**28) -> str:
    """Id of the tree of a folder of this machine.

    Raises:
      SandboxError: it holds more than ``max_bytes``.
    """
    return self.put(sandbox_files.pack(directory, max_bytes))

  def put(self, archive: bytes) -> str:
    """Id of the tree in ``archive``, a tar as ``Box.snapshot`` gives it."""
    entries = []
    inner = {""}  # folders with something in them
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
      for member in tar:
        inner.add(os.path.dirname(member.name))
        if member.issym():
          entries.append(TreeEntry(member.name, "link", member.linkname))
        elif member.isdir():
          entries.append(TreeEntry(member.name, "directory", ""))
        elif (file := tar.extractfile(member)) is not None:
          kind = "program" if member.mode & 0o100 else "file"
          entries.append(TreeEntry(member.name, kind, self._put_blob(file.read())))
    return self._put([e for e in entries if e.kind != "directory" or e.path not in inner])

  def entries(self, tree: str) -> tuple[TreeEntry, ...]:
    """What a tree holds, sorted by path.

    Raises:
      KeyError: no such tree in this store.
      SandboxError: what is stored is damaged.
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
    """Removes a temporary store; one in a folder of its own stays."""
    if self._temporary is not None:
      self._temporary.cleanup()

  def _put(self, entries: list[TreeEntry]) -> str:
    lines = [json.dumps([e.path, e.kind, e.value]) + "\n" for e in sorted(entries)]
    return self._write("trees", "".join(lines).encode())

  def _put_blob(self, content: bytes) -> str:
    return self._write("contents", content)

  def _write(self, kind: str, content: bytes) -> str:
    name = hashlib.sha256(content).hexdigest()
    path = self._path(kind, name)
    with _WRITING:
      if not path.exists():
        write_atomically(path, content)
    return name

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


@dataclasses.dataclass
class _Workspace:
  start: str  # tree it is set back to
  tree: str  # tree it is opened from when ``box`` is None
  box: Box | None = None
  lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
  ended: bool = False


class Workspaces:
  """A work directory for each episode, made at its first use and kept until ``end``.

  Calls of one episode run one at a time, in the order in which they were made. Nothing that a
  program starts outlives its call; files do.

  Args:
    sandbox: any back end with files and snapshots; closed with this object.
    limits: bounds of one run; its wall clock is cut to 0.9 of the call's time-out, so that what was
      printed until then still reaches the policy.
    config: initial files and bounds; its ``sandbox`` is not read here.
  """

  def __init__(self, sandbox: Sandbox, limits: SandboxLimits, config: WorkspaceConfig):
    self.store = TreeStore(config.store)
    self._sandbox = sandbox
    self._limits = limits
    self._config = config
    self._held: dict[str, _Workspace] = {}  # the one used last comes last
    files = config.files
    self._initial = self.store.put_files({}) if files is None else self.store.put_directory(files)

  @contextlib.asynccontextmanager
  async def use(self, episode: str, start: str | None = None) -> AsyncIterator[Box]:
    """The box of ``episode``, for this caller alone.

    Args:
      episode: as in ``ToolContext``.
      start: tree a workspace that does not exist yet starts from; None is the initial files.

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
    start: str | None = None,
    episode: str | None = None,
  ) -> SandboxResult:
    """Runs ``program`` in the workspace of ``episode`` (default: the context's); see ``use``."""
    wall = min(self._limits.wall_seconds, 0.9 * context.timeout)
    limits = dataclasses.replace(self._limits, wall_seconds=wall)
    async with self.use(episode or context.episode, start) as box:
      return await box.exec(program, stdin=stdin, limits=limits)

  async def snapshot(self, episode: str) -> str:
    """Saves the workspace; the id of its tree.

    Raises:
      SandboxError: it holds more than a snapshot may.
    """
    async with self.use(episode) as box:
      return await self._save(box)

  async def restore(self, episode: str, tree: str) -> None:
    """Sets the workspace to ``tree``, whatever it held; makes it where there is none.

    Raises:
      KeyError: no such tree in the store.
    """
    self.store.entries(tree)
    workspace = self._held.setdefault(episode, _Workspace(tree, tree))
    async with workspace.lock:
      await self._reset(workspace, tree)

  async def set_back_if_too_big(self, episode: str) -> str | None:
    """Where the workspace outgrew its bounds, sets it back to its start and says so."""
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
    """Wipes the workspace; what was saved of it stays in the store."""
    workspace = self._held.pop(episode, None)
    if workspace is None:
      return
    workspace.ended = True
    if workspace.box is not None:
      await workspace.box.close()  # ends what runs in it
    async with workspace.lock:  # it may be about to open
      if workspace.box is not None:
        await workspace.box.close()

  async def close(self) -> None:
    """Wipes all workspaces, closes the sandbox and a temporary store; closing twice is harmless."""
    for episode in list(self._held):
      await self.end(episode)
    await self._sandbox.close()
    self.store.close()

  @contextlib.asynccontextmanager
  async def _hold(self, episode: str, start: str | None = None) -> AsyncIterator[_Workspace]:
    """The workspace with its box open and its lock held."""
    workspace = self._held.pop(episode, None)
    if workspace is None:
      workspace = _Workspace(start or self._initial, start or self._initial)
    self._held[episode] = workspace
    async with workspace.lock:
      if workspace.box is None and not workspace.ended:
        workspace.box = await self._open(workspace.tree)
      if workspace.ended:  # perhaps while it opened; ``end`` closes the box
        raise SandboxError(f"the episode {episode!r} has ended, and its workspace with it")
      yield workspace

  async def _open(self, tree: str) -> Box:
    box = await self._sandbox.create(await asyncio.to_thread(self.store.archive, tree))
    links = [(e.path, e.value) for e in self.store.entries(tree) if e.kind == "link"]
    if links:
      made = await box.exec(PythonScript(_MAKE_LINKS), stdin=json.dumps(links).encode())
      if made.status is not RunStatus.OK:
        await box.close()
        raise SandboxError(f"cannot make the links of tree {tree}: {made.stderr or made.detail}")
    return box

  async def _save(self, box: Box) -> str:
    return await asyncio.to_thread(self.store.put, await box.snapshot())

  async def _reset(self, workspace: _Workspace, tree: str) -> None:
    box, workspace.box = workspace.box, None
    workspace.start = workspace.tree = tree
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
        try:
          workspace.tree = await self._save(box)
        except (SandboxError, OSError) as error:
          _log.warning("a workspace stays open, for it cannot be saved: %s", error)
          continue
        workspace.box = None
        await box.close()
