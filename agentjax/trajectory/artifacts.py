"""Files that tools made, such as screenshots, kept by content hash for people to see. No jax."""

from __future__ import annotations

import collections
import hashlib
import logging
import os
import pathlib
import re
import threading

from agentjax.files import write_atomically

_log = logging.getLogger(__name__)
_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,8}")
_DIGEST = re.compile(r"[0-9a-f]{64}")

FOLDER = "artifacts"  # of a run's directory


class ArtifactStore:
  """A folder of files by the SHA-256 of their content; may be used from several threads.

  Args:
    directory: made when the first file is kept.
    max_bytes: of all files; beyond it the oldest are deleted. The default, 1 GiB, is ours.
  """

  def __init__(self, directory: str | os.PathLike[str], max_bytes: int = 2**30):
    self._directory = pathlib.Path(directory)
    self._max_bytes = max_bytes
    self._lock = threading.Lock()
    found = [p for p in self._directory.glob("??/*") if not p.name.startswith(".")]
    sizes = sorted((p.stat().st_mtime, p, p.stat().st_size) for p in found)
    # The oldest first.
    self._sizes = collections.OrderedDict((path, size) for _, path, size in sizes)
    self._total = sum(self._sizes.values())

  def put(self, name: str, content: bytes) -> str:
    """Stores a file, which may be deleted later; returns the hash of its content.

    A file that cannot be written, or is larger than the folder may be, is not kept.
    """
    digest = hashlib.sha256(content).hexdigest()
    path = self._directory / relative_path(name, digest)
    with self._lock:
      if path in self._sizes or len(content) > self._max_bytes:
        return digest
      try:
        write_atomically(path, content)
      except OSError as error:
        _log.warning("%s is not kept: %s", path, error)
        return digest
      self._sizes[path] = len(content)
      self._total += len(content)
      while self._total > self._max_bytes:
        oldest, size = self._sizes.popitem(last=False)
        self._total -= size
        oldest.unlink(missing_ok=True)
    return digest


def read_artifact(directory: str | os.PathLike[str], digest: str) -> bytes | None:
  """The file with this hash in a store's folder; None if the folder does not hold it (any more)."""
  if not _DIGEST.fullmatch(digest):
    return None
  for path in pathlib.Path(directory, digest[:2]).glob(f"{digest}*"):
    try:
      content = path.read_bytes()
    except OSError:  # deleted since it was listed
      continue
    if hashlib.sha256(content).hexdigest() == digest:
      return content
  return None


def relative_path(name: str, digest: str) -> pathlib.PurePosixPath:
  """Where a store keeps the content of a file called ``name``."""
  suffix = pathlib.PurePosixPath(name).suffix
  suffix = suffix if _SUFFIX.fullmatch(suffix) else ""
  return pathlib.PurePosixPath(digest[:2], digest + suffix)
