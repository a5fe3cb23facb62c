"""A memory group (cgroup v2) for each run: the kernel bounds what its processes hold together.

That counts pages of any kind: of processes, of files in memory, of sockets, pipes and locks. The
operator names a folder of the group file system that is delegated to the trainer's user and that
nothing else uses; a run's group is made below it by the run's watcher, which stays outside.

Imports the standard library only, as the zygote does.

References:
  Linux kernel, Documentation/admin-guide/cgroup-v2.rst: memory, pids, delegation.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

_PREFIX = "agentjax"
_PROBED_BYTES = 1 << 24
_REMOVE_TRIES = 20  # 1 ms apart: the kernel lets go of the dead in its own time


class Groups:
  """Makes groups below a folder.

  Args:
    folder: a descriptor of it, opened where the mount may be written to.

  Raises:
    OSError: no groups can be made there, or one does not end what passes its bound.
  """

  def __init__(self, folder: int):
    self._folder, self._owner = folder, os.getpid()
    try:
      self._sweep()
      self._try()
    except OSError as error:
      raise OSError(
        f"sandboxes.NAME.cgroup grants no memory groups ({error}). It must be a folder of cgroup "
        "v2 with memory in its cgroup.subtree_control, no process in it, and this user's; the "
        "trainer must run in a group that the same user owns. Or set it to None."
      ) from error

  def new(self, memory_bytes: int, processes: int) -> Group:
    """An empty group. Raises OSError where a group cannot be made or bounded."""
    name = f"{_PREFIX}-{self._owner}-{os.urandom(8).hex()}"
    os.mkdir(name, 0o700, dir_fd=self._folder)
    group = Group(self._folder, name)
    try:
      group.write("memory.max", str(memory_bytes))
      for file, value in (
        ("memory.swap.max", "0"),
        ("memory.oom.group", "1"),  # all of the run ends, not one process of it
        ("pids.max", str(processes)),
      ):
        with contextlib.suppress(FileNotFoundError):  # not every kernel and machine has each
          group.write(file, value)
    except BaseException:
      group.remove()
      raise
    return group

  def _sweep(self) -> None:
    """Removes what was left by interpreters that were killed."""
    for name in os.listdir(self._folder):
      prefix, _, rest = name.partition("-")
      if prefix == _PREFIX and not os.path.exists(f"/proc/{rest.partition('-')[0]}"):
        with contextlib.suppress(OSError):
          os.rmdir(name, dir_fd=self._folder)

  def _try(self) -> None:
    group = self.new(_PROBED_BYTES, 2)
    try:
      waiting, go = os.pipe()
      pid = os.fork()
      if pid == 0:
        os.close(go)
        os.read(waiting, 1)
        block = b"x" * (4 * _PROBED_BYTES)
        os._exit(len(block) == 0)
      try:
        group.add(pid)
      finally:
        os.close(waiting)
        os.close(go)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
      if ended != -signal.SIGKILL or not group.ran_out():
        raise OSError("a process that passed its group's memory went on")
    finally:
      group.remove()


class Group:
  """One group; made by ``Groups.new``."""

  def __init__(self, folder: int, name: str):
    self._folder, self._name = folder, name

  def add(self, pid: int) -> None:
    """Moves a process, named as in this process's namespace, into the group. Raises OSError."""
    self.write("cgroup.procs", str(pid))

  def ran_out(self) -> bool:
    """Whether the kernel killed in it for want of memory."""
    try:
      events = os.open(f"{self._name}/memory.events", os.O_RDONLY, dir_fd=self._folder)
    except OSError:
      return False
    with open(events) as file:
      counts = dict(line.split() for line in file)
    return int(counts.get("oom_kill", 0)) > 0

  def remove(self) -> None:
    """Removes it once all in it is dead; one that cannot be is left to the next interpreter."""
    for _ in range(_REMOVE_TRIES):
      try:
        os.rmdir(self._name, dir_fd=self._folder)
        return
      except FileNotFoundError:
        return
      except OSError:
        time.sleep(0.001)

  def write(self, file: str, value: str) -> None:
    """Sets a value. Raises OSError: FileNotFoundError where this kernel knows no such file."""
    handle = os.open(f"{self._name}/{file}", os.O_WRONLY, dir_fd=self._folder)
    try:
      os.write(handle, value.encode())
    finally:
      os.close(handle)
