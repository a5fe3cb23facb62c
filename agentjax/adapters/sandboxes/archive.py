"""A box's files as a tar, for back ends whose work directory is out of reach.

The same form as ``files.pack`` gives, so a snapshot moves between back ends.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping

from agentjax.sandbox.files import checked_parts
from agentjax.sandbox.interface import BoxContentError


def of_files(files: Mapping[str, bytes]) -> bytes:
  """A tar of regular files. Raises SandboxError for a path that leaves the box."""
  buffer = io.BytesIO()
  with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
    for path, content in files.items():
      entry = tarfile.TarInfo("/".join(checked_parts(path)))
      entry.size, entry.mode = len(content), 0o600
      tar.addfile(entry, io.BytesIO(content))
  return buffer.getvalue()


def normalised(*archives: bytes) -> bytes:
  """The regular files, directories and links of all; a later entry replaces an earlier one.

  The same files give the same bytes: sorted, without owners and times.

  Raises:
    BoxContentError: not a tar, or an entry would leave the box.
  """
  entries: dict[tuple[str, ...], tuple[tarfile.TarInfo, bytes]] = {}
  try:
    for archive in archives:
      with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for entry in tar:
          entry.name = entry.name.removeprefix("./")
          if entry.name in ("", ".") or not (entry.isreg() or entry.isdir() or entry.issym()):
            continue
          parts = tuple(checked_parts(entry.name))
          reader = tar.extractfile(entry) if entry.isreg() else None
          plain = tarfile.TarInfo("/".join(parts))
          plain.type, plain.mode, plain.linkname = entry.type, entry.mode, entry.linkname
          content = reader.read() if reader is not None else b""
          plain.size = len(content)
          entries[parts] = plain, content
  except (tarfile.TarError, EOFError, OSError, ValueError) as error:
    raise BoxContentError(f"not a usable sandbox snapshot: {error}") from error
  buffer = io.BytesIO()
  with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as result:
    for parts in sorted(entries):
      result.addfile(entries[parts][0], io.BytesIO(entries[parts][1]))
  return buffer.getvalue()


def content_of(archive: bytes, path: str, max_bytes: int) -> bytes:
  """Content of the regular file ``path``.

  Raises:
    BoxContentError: no such regular file, or larger than ``max_bytes``.
  """
  name = "/".join(checked_parts(path))
  try:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
      found = [e for e in tar if e.name.removeprefix("./") == name]
      reader = tar.extractfile(found[-1]) if found and found[-1].isreg() else None
      if reader is None:
        raise BoxContentError(f"{path!r} in the sandbox is not a regular file")
      if found[-1].size > max_bytes:
        raise BoxContentError(
          f"{path!r} in the sandbox has {found[-1].size} bytes, at most {max_bytes} are read; "
          "raise max_bytes"
        )
      return reader.read()
  except (tarfile.TarError, EOFError, OSError, ValueError) as error:
    raise BoxContentError(f"cannot read {path!r} in the sandbox: {error}") from error
