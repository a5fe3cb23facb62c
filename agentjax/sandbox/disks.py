"""A file system in memory for each box, so that the kernel bounds what its files take.

One process, the keeper, makes them in mounts that it alone has: no run is ever where another's disk
has a name. Whoever needs one gets a descriptor of a copy of its mount, over a socket of the
request: the host to put files in and read them back, a run's process to attach it at its work
directory. A disk is gone with all in it when the keeper dropped it and the last copy is closed.

    host ── {disk, uid, bytes, files}, socket ──► keeper
    run or host ◄── descriptor of the mount, or why there is none ── over that socket

Imports the standard library only, as the zygote does.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import weakref
from collections.abc import Mapping
from typing import Any

from agentjax.sandbox import jail

_SECONDS = 10.0  # for the keeper to take a request and to answer it
_numbers = itertools.count()


class Disk:
  """The host's side of one disk. Its methods wait for the keeper, which takes less than 1 ms.

  The bound of a run counts from what was there when the first run began: that was given by the
  host. What is put in later has no room of its own.

  Args:
    requests: to the keeper.
    uid: owner of its root; None keeps this process's user.
    room: bytes and files that may be put in before the first run.
  """

  path = ""  # it has no name on this machine

  def __init__(self, requests: socket.socket, uid: int | None, room: tuple[int, int]):
    self._requests, self._uid = requests, uid
    self._number = next(_numbers)
    self._bounds = room
    self._given: tuple[int, int] | None = None  # before the first run
    self._descriptor: int | None = None
    self._close = lambda: None

  def root(self) -> str:
    """A path by which this process alone reaches the files. Raises OSError: no disk to be had."""
    if self._descriptor is None:
      with self.ask() as reply:
        self._descriptor = received(reply)
      self._close = weakref.finalize(self, os.close, self._descriptor)
    return f"/proc/self/fd/{self._descriptor}"

  def begin(self, limits: Any, files: Mapping[str, bytes]) -> int:
    """Sets the bounds of a run that is given ``files``; the socket on which its mount comes.

    Raises:
      OSError: the keeper is gone.
    """
    if self._given is None:
      held = (0, 0) if self._descriptor is None else used(self._descriptor)
      page = os.sysconf("SC_PAGESIZE")
      self._given = (
        held[0] + sum(-(-len(content) // page) * page for content in files.values()),
        held[1] + sum(path.count("/") + 1 for path in files),
      )
    self._bounds = (limits.disk_bytes + self._given[0], limits.files + self._given[1])
    return self.ask().detach()

  def drop(self) -> bool:
    """Lets go of the disk; whether nothing is left of it."""
    self._close()
    self._descriptor = None
    with contextlib.suppress(OSError):  # the keeper is gone, and its disks with it
      self._requests.send(json.dumps({"disk": self._number}).encode())
    return True

  def ask(self) -> socket.socket:
    """The socket on which a mount comes, with the bounds set so far. Raises OSError."""
    size, files = self._bounds
    request = {"disk": self._number, "uid": self._uid, "bytes": size, "files": files}
    ours, theirs = socket.socketpair()
    with theirs:
      try:
        socket.send_fds(self._requests, [json.dumps(request).encode()], [theirs.fileno()])
      except BaseException:
        ours.close()
        raise
    return ours


def received(reply: socket.socket) -> int:
  """The descriptor of a mount that comes on ``reply``. Raises OSError: none came."""
  reply.settimeout(_SECONDS)
  message, fds, _, _ = socket.recv_fds(reply, 4096, 1)
  if not fds:
    raise OSError(f"no disk for the box: {message.decode() or 'its keeper is gone'}")
  return fds[0]


def used(disk: str | int) -> tuple[int, int]:
  """Bytes that its files occupy, and how many files and directories there are but its root."""
  status = os.statvfs(disk)
  return (status.f_blocks - status.f_bfree) * status.f_frsize, status.f_files - status.f_ffree - 1


def keep(requests: socket.socket, directory: str) -> None:
  """The keeper: makes, bounds and drops disks until the host closes ``requests``.

  Mounts lie below ``directory``, in a namespace of this process that ends with it. Raises OSError.
  """
  jail.unshare(jail.CLONE_NEWNS)
  jail.mount_memory(directory, f"size=64k,nr_inodes={1 << 20},mode=0700")
  bounds: dict[int, tuple[int, int]] = {}  # of the disks that are there, by number
  while True:
    message, fds, _, _ = socket.recv_fds(requests, 4096, 1)
    if not message:
      return
    request = json.loads(message)
    number = request["disk"]
    place = os.path.join(directory, str(number))
    if not fds:
      if bounds.pop(number, None):
        jail.unmount(place)
        os.rmdir(place)
      continue
    with socket.socket(fileno=fds[0]) as reply, contextlib.suppress(ConnectionError):
      try:
        wanted = request["bytes"], request["files"]
        if bounds.get(number) != wanted:
          _bound(place, *wanted, uid=request["uid"], again=number in bounds)
          bounds[number] = wanted
        os.chmod(place, 0o700)  # an earlier program may have closed it
        mount = jail.copied_mount(place)
      except OSError as error:
        reply.sendall(str(error).encode())
        continue
      try:
        socket.send_fds(reply, [b"disk"], [mount])
      finally:  # who asked may be gone, and a mount that stays open keeps its memory
        os.close(mount)


def _bound(place: str, size: int, files: int, *, uid: int | None, again: bool) -> None:
  if again:  # nothing runs there; what is full stays full
    held = used(place)
    size, files = max(size, held[0]), max(files, held[1])
  # To the kernel 0 means without bound; the root counts as a file.
  options = f"size={max(size, 1)},nr_inodes={files + 1}"
  if again:
    jail.bound_memory(place, options)
    return
  with contextlib.suppress(FileExistsError):
    os.mkdir(place)
  owner = "" if uid is None else f",uid={uid},gid={uid}"
  jail.mount_memory(place, f"{options},mode=0700{owner}")
