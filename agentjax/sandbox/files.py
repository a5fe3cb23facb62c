"""Files below a directory that hostile code could write to: no link is ever followed.

Used while nothing runs in the directory, so that only what was left there can surprise.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator

from agentjax.sandbox.interface import SandboxError


def write_file(root: str, path: str, content: bytes, owner: int | None) -> None:
  """Writes ``content`` at ``path`` below ``root``, creating directories; ``owner`` gets them.

  Raises:
    SandboxError: the path leaves ``root`` or passes through something that is no directory.
  """
  *parents, name = checked_parts(path)
  with _opened(root, path, parents, create=True, owner=owner) as parent:
    try:
      # A new file, never the old one's inode: that could be a link, a pipe, or shared.
      with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
      handle = os.open(
        name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=parent
      )
    except OSError as error:
      raise SandboxError(f"cannot write {path!r} in the sandbox: {error.strerror}") from error
    with open(handle, "wb") as file:
      file.write(content)
      if owner is not None:
        os.fchown(file.fileno(), owner, owner)


def read_file(root: str, path: str, max_bytes: int) -> bytes:
  """Content of the regular file ``path`` below ``root``.

  Raises:
    SandboxError: no such regular file, a link on the way, or larger than ``max_bytes``.
  """
  *parents, name = checked_parts(path)
  with _opened(root, path, parents, create=False, owner=None) as parent:
    try:
      handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
    except OSError as error:
      raise SandboxError(f"cannot read {path!r} in the sandbox: {error.strerror}") from error
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
      os.close(handle)
      raise SandboxError(f"{path!r} in the sandbox is not a regular file")
    with open(handle, "rb") as file:
      content = file.read(max_bytes + 1)
      if len(content) > max_bytes:
        raise SandboxError(
          f"{path!r} in the sandbox has {status.st_size} bytes, at most {max_bytes} are read; "
          "raise max_bytes"
        )
      return content


def pack(root: str, max_bytes: int) -> bytes:
  """A tar of the regular files, directories and links below ``root``, the same for the same files.

  Raises:
    SandboxError: the files hold more than ``max_bytes``.
  """
  buffer = io.BytesIO()
  held = 0

  def normalised(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    nonlocal held
    if not (entry.isreg() or entry.isdir() or entry.issym()):
      return None
    held += entry.size + 512
    if held > max_bytes:
      raise SandboxError(f"the sandbox's files hold more than {max_bytes} bytes; cannot snapshot")
    archive.inodes.clear()  # type: ignore[attr-defined]  # a second name of a file is a file too
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry

  with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
    for name in sorted(os.listdir(root)):
      archive.add(os.path.join(root, name), arcname=name, filter=normalised)
  return buffer.getvalue()


def unpack(root: str, archive: bytes, owner: int | None) -> None:
  """Inverse of ``pack`` into an empty ``root``; entries that would leave it are refused."""
  try:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
      tar.extractall(root, filter="data")
  except (tarfile.TarError, OSError) as error:
    raise SandboxError(f"not a usable sandbox snapshot: {error}") from error
  if owner is not None:
    for directory, directories, files in os.walk(root):
      for name in (*directories, *files):
        os.chown(os.path.join(directory, name), owner, owner, follow_symlinks=False)


def wipe(root: str) -> None:
  """Removes ``root`` with all below it, at any depth and whatever the modes."""
  count = 0
  with contextlib.suppress(FileNotFoundError):
    os.chmod(root, 0o700)
    while entries := _entries(root):
      for entry in entries:
        if not entry.is_dir(follow_symlinks=False):
          os.unlink(entry.path)
          continue
        os.chmod(entry.path, 0o700)
        # Lifting subdirectories to the top keeps every path short, so depth does not matter.
        for inner in _entries(entry.path):
          if inner.is_dir(follow_symlinks=False):
            os.chmod(inner.path, 0o700)  # moving a directory rewrites its ".."
            while os.path.lexists(lifted := os.path.join(root, f"{count:x}")):
              count += 1
            os.rename(inner.path, lifted)
          else:
            os.unlink(inner.path)
        os.rmdir(entry.path)
    os.rmdir(root)


def _entries(directory: str) -> list[os.DirEntry[str]]:
  with os.scandir(directory) as listing:
    return list(listing)


def checked_parts(path: str) -> list[str]:
  """The parts of a path inside a box. Raises SandboxError for one that leaves it."""
  parts = [part for part in path.split("/") if part not in ("", ".")]
  if not parts or ".." in parts or path.startswith("/") or "\0" in path:
    raise SandboxError(
      f"{path!r} is not a path inside the sandbox; give a relative path without '..'"
    )
  return parts


@contextlib.contextmanager
def _opened(
  root: str, path: str, parents: list[str], *, create: bool, owner: int | None
) -> Iterator[int]:
  handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
  try:
    for part in parents:
      if create:
        with contextlib.suppress(FileExistsError):
          os.mkdir(part, 0o700, dir_fd=handle)
          if owner is not None:
            os.chown(part, owner, owner, dir_fd=handle, follow_symlinks=False)
      try:
        inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
      except OSError as error:
        raise SandboxError(
          f"{path!r} in the sandbox: {part!r} is not a directory ({error.strerror})"
        ) from error
      os.close(handle)
      handle = inner
    yield handle
  finally:
    os.close(handle)
