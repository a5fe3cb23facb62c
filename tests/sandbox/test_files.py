"""What a program left in its box is read, saved, replaced and wiped, or is the program's fault."""

import io
import os
import socket
import sys
import tarfile

import pytest

from agentjax.adapters.sandboxes import archive
from agentjax.faults import Boundary, Owner, fault_of
from agentjax.sandbox import files
from agentjax.sandbox.interface import BoxContentError, SandboxError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


def nested(root, levels, name="d"):
  before = os.getcwd()
  os.chdir(root)
  try:
    for _ in range(levels):
      os.mkdir(name)
      os.chdir(name)
  finally:
    os.chdir(before)


def sparse(root):
  with open(root / "hole", "wb") as file:
    file.truncate(2**30)


def changing(root):
  (root / "a").write_bytes(b"x")
  os.mkfifo(root / "pipe")
  with socket.socket(socket.AF_UNIX) as sock:
    sock.bind(os.path.relpath(root / "socket"))


def locked(root):
  (root / "closed" / "inner").mkdir(parents=True)
  (root / "closed" / "inner" / "file").write_bytes(b"x")
  for path in (root / "closed" / "inner" / "file", root / "closed" / "inner", root / "closed"):
    path.chmod(0)
  root.chmod(0)


def odd(root):
  for name in (b"a\xff", b"b\nc", "\u2028".encode()):
    (root / os.fsdecode(name)).write_bytes(name)
  os.utime(root / "b\nc", (-(10**9), -(10**9)))
  (root / "b\nc").chmod(0o7777)
  os.link(root / "b\nc", root / "second")
  os.symlink("loop", root / "loop")
  os.symlink("/etc/passwd", root / "out")


LEFT = {  # what is left -> whether it can be saved
  "600 levels": (lambda root: nested(root, 600), False),
  "1,200 levels": (lambda root: nested(root, 1200), False),
  "4,060 characters": (lambda root: nested(root, 20, "d" * 202), False),
  "a sparse file": (sparse, False),
  "pipes and sockets": (changing, True),
  "nothing may be opened": (locked, True),
  "odd names, times, modes and links": (odd, True),
}


@pytest.mark.parametrize("name", LEFT)
def test_a_box_can_be_saved_or_its_program_is_to_blame(tmp_path, name):
  make, can = LEFT[name]
  root = tmp_path / "box"
  root.mkdir()
  make(root)
  try:
    if not can:
      with pytest.raises(BoxContentError) as caught:
        files.pack(str(root), 2**28)
      assert fault_of(caught.value, Boundary.STEP).owner is Owner.POLICY
      return
    packed = files.pack(str(root), 2**28)
    assert archive.normalised(packed)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
      assert all(e.mode & 0o600 == 0o600 and e.mode < 0o1000 for e in tar)
  finally:
    files.wipe(str(root))
  assert not root.exists()


def test_a_user_who_owns_no_box_still_reads_what_its_programs_closed(tmp_path):
  # As the user of the files, who is not root: modes hold.
  if os.geteuid():
    pytest.skip("needs root, to become another user")
  (tmp_path / "box" / "d").mkdir(parents=True)
  (tmp_path / "box" / "d" / "f").write_bytes(b"content")
  for path in (tmp_path / "box" / "d" / "f", tmp_path / "box" / "d", tmp_path / "box"):
    os.chown(path, 65534, 65534)
    path.chmod(0)
  for path in tmp_path.parents:
    if path.stat().st_mode & 0o001 == 0:
      path.chmod(path.stat().st_mode | 0o001)
  tmp_path.chmod(0o711)
  child = os.fork()
  if child == 0:
    code = 1
    try:
      os.setgroups([])
      os.setgid(65534)
      os.setuid(65534)
      held = files.pack(str(tmp_path / "box"), 2**20)
      whole = files.read_file(str(tmp_path / "box"), "d/f", 100)
      code = 0 if b"content" in held and whole == b"content" else 2
    finally:
      os._exit(code)
  assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
  ("path", "left"),
  [
    ("a/b", "file a"),
    ("gone", "nothing"),
    ("d", "directory d"),
    ("l", "link l"),
    ("p", "pipe p"),
    ("/".join(["d" * 202] * 20), "nothing"),
    ("n" * 300, "nothing"),
    ("\ud800", "nothing"),
    ("big", "big"),
  ],
)
def test_a_file_that_is_not_there_as_expected_is_the_programs_fault(tmp_path, path, left):
  kind, _, name = left.partition(" ")
  target = tmp_path / (name or "x")
  if kind == "file":
    target.write_bytes(b"")
  elif kind == "directory":
    target.mkdir()
  elif kind == "link":
    target.symlink_to("/etc/passwd")
  elif kind == "pipe":
    os.mkfifo(target)
  elif kind == "big":
    with open(tmp_path / "big", "wb") as file:
      file.truncate(2**40)
  with pytest.raises(BoxContentError):
    files.read_file(str(tmp_path), path, 2**20)


def test_whatever_stands_in_the_way_of_a_file_makes_room_but_a_file_for_a_folder(tmp_path):
  (tmp_path / "d" / "e").mkdir(parents=True)
  (tmp_path / "d" / "e").chmod(0)
  files.write_file(str(tmp_path), "d", b"now a file", None)
  assert (tmp_path / "d").read_bytes() == b"now a file"
  for path in ("d/x", "n" * 300, "\ud800"):
    with pytest.raises(BoxContentError):
      files.write_file(str(tmp_path), path, b"", None)


def test_a_box_that_is_gone_is_a_fault_of_ours(tmp_path):
  for work in (
    lambda: files.pack(str(tmp_path / "gone"), 2**20),
    lambda: files.read_file(str(tmp_path / "gone"), "x", 1),
  ):
    with pytest.raises(SandboxError) as caught:
      work()
    assert fault_of(caught.value, Boundary.STEP).owner is Owner.INFRASTRUCTURE
