"""Files below a directory that hostile code could write to: no link is ever followed.

Used while nothing runs in the directory, so that only what was left there can surprise. Modes do
not hold the host up: what it may not open it makes its own first.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator

from agentjax.faults import Boundary, describe, fault_of
from agentjax.sandbox.interface import BoxContentError, SandboxError

# Of what is saved. Deeper or longer paths can be made, but not opened by their names.
_MOST_LEVELS = 100
_MOST_PATH_BYTES = 1024


def write_file(root: str, path: str, content: bytes, owner: int | None) -> None:
  """Writes ``content`` at ``path`` below ``root``, creating directories; ``owner`` gets them.

  Whatever stands at ``path``, a directory too, makes way.

  Raises:
    BoxContentError: the path passes through something that is no directory, or the disk is full.
    SandboxError: the path leaves ``root``, or ``root`` cannot be opened.
  """
  *parents, name = checked_parts(path)
  with _opened(root, path, parents, create=True, owner=owner) as parent, _blamed("write", path):
    # A new file, never the old one's inode: that could be a link, a pipe, or shared.
    _remove(parent, name)
    handle = os.open(
      name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=parent
    )
    with open(handle, "wb") as file:
      file.write(content)
      if owner is not None:
        os.fchown(file.fileno(), owner, owner)


def read_file(root: str, path: str, max_bytes: int) -> bytes:
  """Content of the regular file ``path`` below ``root``.

  Raises:
    BoxContentError: no such regular file, a link on the way, or larger than ``max_bytes``.
    SandboxError: the path leaves ``root``, or ``root`` cannot be opened.
  """
  *parents, name = checked_parts(path)
  with _opened(root, path, parents, create=False, owner=None) as parent, _blamed("read", path):
    handle = _open_inner(parent, name, os.O_RDONLY | os.O_NONBLOCK)
    with open(handle, "rb") as file:
      status = os.fstat(handle)
      if not stat.S_ISREG(status.st_mode):
        raise BoxContentError(f"{path!r} in the sandbox is not a regular file")
      content = b"" if status.st_size > max_bytes else file.read(max_bytes + 1)
      if max(status.st_size, len(content)) > max_bytes:
        raise BoxContentError(
          f"{path!r} in the sandbox has {status.st_size} bytes, at most {max_bytes} are read; "
          "raise max_bytes"
        )
      return content


def pack(root: str, max_bytes: int) -> bytes:
  """A tar of the regular files, directories and links below ``root``, the same for the same files.

  All in it can be read and changed by its owner; of the other modes only "may be run" is kept.

  Raises:
    BoxContentError: the files hold more than ``max_bytes``, holes included, or lie too deep.
    SandboxError: ``root`` cannot be opened.
  """
  buffer = io.BytesIO()
  held = 0
  with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:

    def add(parent: int, above: str, levels: int) -> None:
      nonlocal held
      for name in sorted(os.listdir(parent)):
        path = f"{above}{name}"
        if levels > _MOST_LEVELS or len(os.fsencode(path)) > _MOST_PATH_BYTES:
          raise BoxContentError(
            f"the sandbox holds a path of {levels} levels and {len(os.fsencode(path))} bytes; "
            f"{_MOST_LEVELS} levels and {_MOST_PATH_BYTES} bytes can be saved"
          )
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        entry, content = tarfile.TarInfo(path), b""
        held += status.st_size * stat.S_ISREG(status.st_mode) + 512
        if held > max_bytes:
          raise BoxContentError(
            f"the sandbox's files hold more than {max_bytes} bytes; cannot snapshot"
          )
        if stat.S_ISREG(status.st_mode):
          with open(_open_inner(parent, name, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            content = file.read(status.st_size)
          entry.size, entry.mode = len(content), 0o700 if status.st_mode & 0o111 else 0o600
        elif stat.S_ISDIR(status.st_mode):
          entry.type, entry.mode = tarfile.DIRTYPE, 0o700
        elif stat.S_ISLNK(status.st_mode):
          entry.type, entry.mode = tarfile.SYMTYPE, 0o777
          entry.linkname = os.readlink(name, dir_fd=parent)
        else:
          continue
        archive.addfile(entry, io.BytesIO(content))
        if stat.S_ISDIR(status.st_mode):
          inner = _open_inner(parent, name, os.O_RDONLY | os.O_DIRECTORY)
          try:
            add(inner, f"{path}/", levels + 1)
          finally:
            os.close(inner)

    with _opened(root, ".", [], create=False, owner=None) as top, _blamed("save", "."):
      add(top, "", 1)
  return buffer.getvalue()


def unpack(root: str, archive: bytes, owner: int | None) -> None:
  """Inverse of ``pack`` into an empty ``root``; links may lead anywhere, none is followed.

  Raises:
    BoxContentError: an entry would leave ``root``, or cannot be made.
    SandboxError: ``root`` cannot be opened.
  """
  try:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
      for entry in tar:
        if entry.name in (".", ""):
          continue
        *parents, name = _parts_of_entry(entry.name)
        with _opened(root, entry.name, parents, create=True, owner=owner) as parent:
          _make(tar, entry, name, parent)
          if owner is not None:
            os.chown(name, owner, owner, dir_fd=parent, follow_symlinks=False)
  except (tarfile.TarError, OSError, ValueError) as error:
    raise _error(error, f"not a usable sandbox snapshot: {describe(error)}") from error


def _parts_of_entry(name: str) -> list[str]:
  try:
    return checked_parts(name)
  except SandboxError as error:
    raise BoxContentError(f"not a usable sandbox snapshot: {error}") from error


def _make(tar: tarfile.TarFile, entry: tarfile.TarInfo, name: str, parent: int) -> None:
  """Makes an entry in a directory. Raises TarError for one of a kind that ``pack`` leaves out."""
  if entry.isdir():
    with contextlib.suppress(FileExistsError):  # a parent of an earlier one
      os.mkdir(name, 0o700, dir_fd=parent)
  elif entry.issym():
    os.symlink(entry.linkname, name, dir_fd=parent)
  elif entry.isreg() and (content := tar.extractfile(entry)) is not None:
    mode = 0o700 if entry.mode & 0o111 else 0o600
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(name, flags, mode, dir_fd=parent), "wb") as file:
      file.write(content.read())
    os.utime(name, (entry.mtime, entry.mtime), dir_fd=parent, follow_symlinks=False)
  else:
    raise tarfile.TarError(f"{entry.name!r} is no regular file, directory or symbolic link")


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
  try:
    os.chmod(root, 0o700)  # a program may have closed it
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
  except OSError as error:
    raise SandboxError(f"the sandbox's directory cannot be opened: {error.strerror}") from error
  try:
    for part in parents:
      with _blamed("reach", path):
        if create:
          with contextlib.suppress(FileExistsError):
            os.mkdir(part, 0o700, dir_fd=handle)
            if owner is not None:
              os.chown(part, owner, owner, dir_fd=handle, follow_symlinks=False)
        inner = _open_inner(handle, part, os.O_RDONLY | os.O_DIRECTORY)
      os.close(handle)
      handle = inner
    yield handle
  finally:
    os.close(handle)


def _open_inner(parent: int, name: str, flags: int) -> int:
  """Opens an entry of a directory, never through a link, even one that nobody may open."""
  try:
    return os.open(name, flags | os.O_NOFOLLOW, dir_fd=parent)
  except PermissionError:
    if stat.S_IFMT(mode := os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode) not in (
      stat.S_IFREG,
      stat.S_IFDIR,
    ):
      raise
    entry = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent)
    try:  # of the entry itself: its name might lead elsewhere
      os.chmod(f"/proc/self/fd/{entry}", stat.S_IMODE(mode) | 0o700)
    finally:
      os.close(entry)
    return os.open(name, flags | os.O_NOFOLLOW, dir_fd=parent)


def _remove(parent: int, name: str) -> None:
  try:
    os.unlink(name, dir_fd=parent)
  except FileNotFoundError:
    pass
  except OSError:
    if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
      raise
    wipe(f"/proc/self/fd/{parent}/{name}")


@contextlib.contextmanager
def _blamed(what: str, path: str) -> Iterator[None]:
  """Turns what the system says of a file into an error of whoever is to blame."""
  try:
    yield
  except (OSError, UnicodeError) as error:
    said = error.strerror if isinstance(error, OSError) else "no name of a file"
    raise _error(error, f"cannot {what} {path!r} in the sandbox: {said}") from error


def _error(error: Exception, message: str) -> SandboxError:
  if isinstance(error, tarfile.TarError) or not fault_of(error, Boundary.FILES).masks:
    return BoxContentError(message)
  return SandboxError(message)
