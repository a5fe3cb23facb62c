"""A squashed repository holds the files of one commit, and nothing that came before or after."""

import os
import pathlib
import shutil
import subprocess

import pytest

from agentjax.worlds.repair.base_commit import (
  RepositoryError,
  find_history,
  main,
  squash_repository,
)

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder, *arguments):
  environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
  done = subprocess.run(
    ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder), *arguments],
    env=environment, check=True, capture_output=True, text=True,
  )  # fmt: skip
  return done.stdout.strip()


@pytest.fixture
def project(tmp_path):
  """A repository at its base commit, with the fix in a branch, a tag, a stash, a note, a pack and a
  remote, and a hook and a filter that would tell."""
  folder = tmp_path / "project"
  folder.mkdir()
  git(folder, "init", "-q", "-b", "main")
  (folder / "tests").mkdir()
  (folder / "tests" / "test_hidden.py").write_text("assert add(1, 2) == 3\n")
  (folder / "sums.py").write_text("def add(a, b):\n  return a - b\n")
  (folder / "run.sh").write_text("#!/bin/sh\n")
  (folder / "run.sh").chmod(0o755)
  (folder / "link").symlink_to("sums.py")
  (folder / ".gitattributes").write_text("*.py filter=tell export-ignore\n")
  (folder / ".gitignore").write_text("kept.txt\n")
  (folder / "kept.txt").write_text("ignored, but committed\r\n")
  cache = folder / "__pycache__"
  cache.mkdir()
  (cache / "sums.cpython-311.pyc").write_bytes(b"the-fix")
  git(folder, "add", "-A", "-f")
  git(folder, "commit", "-q", "-m", "base")
  base = git(folder, "rev-parse", "HEAD")
  (folder / "sums.py").write_text("def add(a, b):\n  return a + b  # the-fix\n")
  git(folder, "commit", "-q", "-a", "-m", "the-fix")
  git(folder, "tag", "-a", "v2", "-m", "the-fix")
  git(folder, "notes", "add", "-m", "the-fix")
  git(folder, "branch", "future")
  (folder / "sums.py").write_text("stashed the-fix\n")
  git(folder, "stash")
  git(folder, "remote", "add", "origin", "https://example.org/the-fix.git")
  git(folder, "gc", "-q")
  git(folder, "reset", "-q", "--hard", base)
  (folder / "untracked.txt").write_text("the-fix")
  told = tmp_path / "told"
  git(folder, "config", "filter.tell.smudge", f"touch {told}; cat")
  (folder / ".git" / "hooks" / "post-checkout").write_text(f"#!/bin/sh\ntouch {told}\n")
  (folder / ".git" / "hooks" / "post-checkout").chmod(0o755)
  return folder, base


def test_the_future_is_there_before_and_gone_afterwards(project, tmp_path):
  folder, base = project
  assert "the-fix" in git(folder, "log", "--all")
  assert len(find_history(folder)) >= 6
  made = tmp_path / "made"
  commit = squash_repository(folder, base, made)

  assert find_history(made) == []
  assert git(made, "log", "--all", "--format=%H") == commit
  assert git(made, "reflog", "--all") == "" and git(made, "fsck", "--lost-found") == ""
  assert git(made, "remote") == git(made, "tag") == git(made, "stash", "list") == ""
  assert git(made, "branch", "--all", "--format=%(refname)") == "refs/heads/main"
  assert git(made, "status", "--porcelain") == ""
  objects = git(made, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split()
  contents = [subprocess.run(["git", "-C", made, "cat-file", "-p", o], capture_output=True).stdout
              for o in objects]  # fmt: skip
  files = [p.read_bytes() for p in made.rglob("*") if p.is_file()]
  assert not any(b"the-fix" in data for data in contents + files)
  assert git(folder, "rev-parse", "HEAD") == base  # the source is only read


def test_the_files_are_those_of_the_commit_bit_for_bit(project, tmp_path):
  folder, base = project
  made = tmp_path / "made"
  squash_repository(folder, base, made, remove=("tests/*",))
  found = {str(p.relative_to(made)) for p in made.rglob("*") if ".git/" not in f"{p}/"}
  assert found == {"sums.py", "run.sh", "link", ".gitattributes", ".gitignore", "kept.txt"}
  assert (made / "sums.py").read_text() == "def add(a, b):\n  return a - b\n"
  assert (made / "kept.txt").read_bytes() == b"ignored, but committed\r\n"
  assert os.access(made / "run.sh", os.X_OK) and os.readlink(made / "link") == "sums.py"
  assert not (tmp_path / "told").exists()  # neither hook nor filter ran


def test_the_same_files_give_the_same_commit(project, tmp_path):
  folder, base = project
  hashes = {squash_repository(folder, base, tmp_path / name) for name in "ab"}
  assert len(hashes) == 1


def test_failures_leave_nothing_behind(project, tmp_path):
  folder, base = project
  before = set(os.listdir(tmp_path))
  with pytest.raises(RepositoryError, match="ls-tree"):
    squash_repository(folder, "0" * 40, tmp_path / "made")
  assert set(os.listdir(tmp_path)) == before
  with pytest.raises(FileExistsError):
    squash_repository(folder, base, folder)


@pytest.mark.parametrize("path", ["../out", ".git/hooks/pre-commit", "link/inside"])
def test_a_commit_made_to_write_elsewhere_is_refused(tmp_path, path):
  from agentjax.worlds.repair.base_commit import _write

  root = pathlib.Path(tmp_path / "root")
  root.mkdir()
  (root / "link").symlink_to(tmp_path)
  with pytest.raises(RepositoryError):
    _write(root, "100644", path, b"x")


def test_the_command_writes_a_repository_and_names_its_commit(project, tmp_path, capsys):
  folder, base = project
  made = tmp_path / "made"
  main([str(folder), base, str(made), "--remove", "tests/*"])
  said = capsys.readouterr().out
  assert said.strip() == f"{made}: {git(made, 'rev-parse', 'HEAD')}" and find_history(made) == []
  with pytest.raises(SystemExit) as ended:
    main([str(folder), base, str(made)])
  assert ended.value.code == 2 and "exists" in capsys.readouterr().err
