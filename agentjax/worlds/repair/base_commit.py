"""Repositories of one commit for a task's agent, without any way to later commits.

  python -m agentjax.worlds.repair.base_commit SOURCE COMMIT DESTINATION --remove 'tests/hidden/*'

A clone at an old commit still holds later commits: in branches, tags, the reflog, packs and
remotes. ``git log --all`` has shown agents the change that they were asked to make (SWE-bench issue
465). So the history is not edited here: a new repository is made from the files of the one commit.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence

# Files compiled or cached by runs of other commits, which may reveal the fix.
CACHES = (
  "__pycache__", "*.pyc", "*.pyo", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".tox", ".nox",
  ".hypothesis", ".coverage", "*.egg-info", ".eggs",
)  # fmt: skip
_DATE = "2000-01-01T00:00:00+0000"  # the same files give the same commit, which tells no time
_LINK, _SUBMODULE = "120000", "160000"


class RepositoryError(RuntimeError):
  """git is missing, or refused."""


def squash_repository(
  source: str | os.PathLike[str],
  commit: str,
  destination: str | os.PathLike[str],
  *,
  remove: Sequence[str] = (),
  caches: Sequence[str] = CACHES,
) -> str:
  """Makes ``destination`` a repository whose one commit holds the files of ``commit``.

  Files come out of git's objects as they were committed: hooks, filters and attributes of the
  source are ignored, untracked files are not copied, and submodules stay empty.

  Args:
    source: a repository, bare or not; only read.
    commit: what the agent starts from.
    destination: a folder that does not exist; on failure it is not made.
    remove: patterns (fnmatch) of paths that are left out, e.g. ("tests/hidden/*",).
    caches: patterns of names; what has such a name at any depth is left out.

  Returns:
    The hash of the new commit.

  Raises:
    RepositoryError: no git, no such commit, or a path that leaves the repository.
    FileExistsError: ``destination`` exists.
  """
  target = pathlib.Path(destination)
  if target.exists():
    raise FileExistsError(f"{target} exists; name a folder that does not")
  target.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as beside:
    made = pathlib.Path(beside) / "repository"
    made.mkdir()
    files = [f for f in _files(source, commit) if not _left_out(f[2], remove, caches)]
    blobs = _contents(source, [identity for _, identity, _ in files if identity])
    for mode, identity, path in files:
      _write(made, mode, path, next(blobs) if identity else b"")
    _git(made, "init", "--quiet", "--initial-branch=main", "--template=")
    _git(made, "add", "--all", "--force")
    _git(made, "commit", "--quiet", "--allow-empty", "--no-verify", "--message=Base")
    shutil.rmtree(made / ".git" / "logs", ignore_errors=True)
    identity = _git(made, "rev-parse", "HEAD").decode().strip()
    os.rename(made, target)
  return identity


def find_history(repository: str | os.PathLike[str]) -> list[str]:
  """What a repository holds besides its present commit; empty if nothing else."""
  found = []
  commits = _git(repository, "rev-list", "--all", "--reflog", "HEAD").decode().split()
  if len(commits) > 1:
    found.append(f"{len(commits)} commits")
  for kind, arguments in (
    ("reflog", ("reflog", "--all")),
    ("remotes", ("remote", "--verbose")),
    ("tags", ("tag", "--list")),
    ("stash", ("stash", "list")),
    ("unreachable objects", ("fsck", "--unreachable", "--no-reflogs", "--no-progress")),
    ("notes", ("for-each-ref", "refs/notes", "refs/replace", "refs/original")),
  ):
    if text := _git(repository, *arguments).decode(errors="replace").strip():
      found.append(f"{kind}: {text.splitlines()[0]}")
  branches = _git(repository, "for-each-ref", "--format=%(refname)", "refs/heads").decode().split()
  if len(branches) > 1:
    found.append(f"branches: {', '.join(branches)}")
  folder = pathlib.Path(
    os.fspath(repository), _git(repository, "rev-parse", "--git-dir").decode().strip()
  )
  for name in ("packed-refs", "FETCH_HEAD", "ORIG_HEAD", "objects/info/alternates", "modules",
               "worktrees", "shallow"):  # fmt: skip
    if (folder / name).exists():
      found.append(name)
  return found


def _files(source: str | os.PathLike[str], commit: str) -> Iterator[tuple[str, str | None, str]]:
  """(mode, blob or None for a submodule, path) of a commit."""
  tree = f"{commit}^{{tree}}"
  listing = _git(source, "ls-tree", "-r", "-z", "--full-tree", tree)
  for entry in listing.split(b"\0")[:-1]:
    head, _, path = entry.partition(b"\t")
    mode, _, identity = head.decode().split()
    yield mode, None if mode == _SUBMODULE else identity, os.fsdecode(path)


def _contents(source: str | os.PathLike[str], blobs: Sequence[str]) -> Iterator[bytes]:
  output = _git(source, "cat-file", "--batch", input="\n".join(blobs).encode())
  at = 0
  for _ in blobs:
    start = output.index(b"\n", at) + 1  # "<blob> blob <size>"
    at = start + int(output[at:start].split()[2])
    yield output[start:at]
    at += 1


def _left_out(path: str, remove: Sequence[str], caches: Sequence[str]) -> bool:
  return any(fnmatch.fnmatch(path, pattern) for pattern in remove) or any(
    fnmatch.fnmatch(part, pattern) for part in path.split("/") for pattern in caches
  )


def _write(root: pathlib.Path, mode: str, path: str, content: bytes) -> None:
  parts = path.split("/")
  file = root.joinpath(*parts)
  above = [root.joinpath(*parts[:n]) for n in range(1, len(parts))]
  if ".." in parts or path.startswith("/") or ".git" in (p.lower() for p in parts):
    raise RepositoryError(f"the commit holds the path {path!r}, which is not one of its files")
  if any(folder.is_symlink() for folder in above):
    raise RepositoryError(f"the commit holds {path!r} behind a link")
  if mode == _SUBMODULE:
    file.mkdir(parents=True, exist_ok=True)
    return
  file.parent.mkdir(parents=True, exist_ok=True)
  if mode == _LINK:
    os.symlink(os.fsdecode(content), file)
    return
  file.write_bytes(content)
  file.chmod(0o755 if mode == "100755" else 0o644)


def _git(repository: str | os.PathLike[str], *arguments: str, input: bytes = b"") -> bytes:
  """Runs git without the user's, the system's or the templates' settings."""
  environment = {
    "PATH": os.environ.get("PATH", os.defpath),
    "HOME": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "LC_ALL": "C",
    **{f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER")
       for what, value in (("NAME", "base"), ("EMAIL", "base@localhost"), ("DATE", _DATE))},
  }  # fmt: skip
  safe = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "safe.directory=*",
          "-c", "core.autocrlf=false", "-c", "core.logAllRefUpdates=false", "-c", "gc.auto=0",
          "-c", "commit.gpgSign=false")  # fmt: skip
  try:
    done = subprocess.run(
      ["git", *safe, "-C", os.fspath(repository), *arguments],
      env=environment,
      capture_output=True,
      input=input,
    )
  except OSError as error:
    raise RepositoryError(f"git cannot be run: {error}") from error
  if done.returncode:
    said = done.stderr.decode(errors="replace").strip()
    raise RepositoryError(f"git {arguments[0]} in {os.fspath(repository)}: {said}")
  return done.stdout


def main(arguments: Sequence[str] | None = None) -> None:
  """Writes a repository of one commit, and says what it is called."""
  parser = argparse.ArgumentParser(description="Makes a repository of the files of one commit.")
  parser.add_argument("source", help="repository that is read")
  parser.add_argument("commit", help="what the agent starts from")
  parser.add_argument("destination", help="folder that does not exist")
  parser.add_argument("--remove", action="append", default=[], help="pattern of paths left out")
  given = parser.parse_args(arguments)
  try:
    made = squash_repository(given.source, given.commit, given.destination, remove=given.remove)
    held = find_history(given.destination)
  except (RepositoryError, FileExistsError) as error:
    parser.exit(2, f"error: {error}\n")
  if held:
    parser.exit(2, f"error: {given.destination} holds more than one commit: {held}\n")
  print(f"{given.destination}: {made}")


if __name__ == "__main__":
  main()
