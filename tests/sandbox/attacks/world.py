"""What attacks are after, and whether any of it came to harm."""

from __future__ import annotations

import contextlib
import glob
import os
import pathlib
import socket
import tempfile
import time
import uuid
from collections.abc import Mapping
from typing import Any

from agentjax.sandbox import ProcessSandboxConfig
from agentjax.sandbox.measure import children
from tests.sandbox.attacks.table import PREAMBLE, QUICK, Attack
from tests.sandbox.machines import NOBODY, SECRET, Machine
from tests.sandbox.process_table import descendants, pids

_CONCURRENCY = ProcessSandboxConfig().concurrency
_PROJECT = pathlib.Path(__file__).parents[3]
_TEXT = "text-of-the-secret-file"
_TIME = 1_000_000_000  # the secret file's


class World:
  """A machine with things worth attacking: a trainer, its files, services that listen."""

  def __init__(self, machine: Machine):
    self.machine = machine
    self.marker = f"{uuid.uuid4().int % 10**9 + 10**9}"  # seconds for `sleep`, too
    self._folder = pathlib.Path(tempfile.mkdtemp(prefix="attacked-"))
    self._folder.chmod(0o755)
    self._secret = self._folder / "secret"
    self._secret.write_text(_TEXT)
    self._secret.chmod(0o644)
    os.utime(self._secret, (_TIME, _TIME))
    if os.geteuid() == 0 and not machine.is_root:  # both are the trainer's own
      os.chown(self._secret, NOBODY, NOBODY)
      os.chown(self._folder, NOBODY, NOBODY)
    self._listeners, self._names = self._listen()

  def close(self) -> None:
    for listener in self._listeners:
      listener.close()
    for path in (self._folder / "post", self._folder / "stream", self._secret):
      path.unlink(missing_ok=True)
    self._folder.rmdir()

  def carry_out(self, attack: Attack, *, as_cells: bool = False) -> list[str]:
    """Runs the attack; what of it was not contained, empty where all was."""
    results = self.results([attack], as_cells=as_cells)[0]
    return self.verdict(attack, results) + self.harm()

  def results(self, attacks: list[Attack], *, as_cells: bool = False) -> list[list[dict[str, Any]]]:
    """Runs attacks at once: for each the result of its program, then of ``after`` or ``beside``."""
    first = [self._request(a, a.program, as_cells) for a in attacks]
    beside = [self._request(a, a.beside, False) for a in attacks if a.beside]
    answers = iter(self.machine.ask({"runs": first + beside}))
    results = [[next(answers)] for _ in attacks]
    for attack, found in zip(attacks, results, strict=True):
      found += [next(answers)] if attack.beside else []
    after = [self._request(a, a.after, False) for a in attacks if a.after]
    answers = iter(self.machine.ask({"runs": after}) if after else ())
    for attack, found in zip(attacks, results, strict=True):
      found += [next(answers)] if attack.after else []
    return results

  def verdict(self, attack: Attack, results: list[Mapping[str, Any]]) -> list[str]:
    """What in the results themselves shows that the attack was not contained."""
    problems = []
    judged = results[-1] if attack.after else results[0]
    if judged["status"] not in attack.expected:
      problems.append(
        f"ended as {judged['status']} ({judged['detail']}): {judged['stderr'][-500:]}"
      )
    if attack.prints not in judged["stdout"]:
      problems.append(f"printed {judged['stdout'][-500:]!r} {judged['stderr'][-500:]}")
    if attack.beside and (results[1]["status"], results[1]["stdout"]) != ("ok", "['mine'] True\n"):
      problems.append(f"what ran beside it: {results[1]}")
    for result in results:
      if result["status"] == "infra_error":
        problems.append(f"the sandbox itself failed: {result['detail']}")
      shown = result["stdout"] + result["stderr"]
      problems += [line for line in shown.splitlines() if "REACHED" in line]
      if SECRET in shown or _TEXT in shown:
        problems.append("a secret was shown")
      if result["seconds"] > self._limits(attack)["wall_seconds"] + 8.0:
        problems.append(f"took {result['seconds']:.1f} s")
    return problems

  def harm(self) -> list[str]:
    """What is not as it was before: the trainer, its files, its services, processes left behind."""
    problems = []
    if self.machine.process.poll() is not None:
      problems.append("the trainer is dead")
    if self._state(self.machine.process.pid) in "Tt":
      problems.append("the trainer is stopped")
    if self.machine.grants("filesystem"):
      status = self._secret.stat()
      if (self._secret.read_text(), status.st_mode & 0o7777) != (_TEXT, 0o644):
        problems.append("the secret file was changed")
      if status.st_mtime != _TIME or os.listxattr(self._secret):
        problems.append("the secret file's times or attributes were changed")
      if sorted(os.listdir(self._folder)) != ["post", "secret", "stream"]:
        problems.append(f"the trainer's folder holds {os.listdir(self._folder)}")
      for folder in ("/", "/tmp", "/etc", "/usr", "/usr/bin", "/dev", "/dev/shm", "/var/tmp"):
        problems += [f"left {path}" for path in glob.glob(f"{folder}/*{self.marker}*")]
    for listener in self._listeners:
      with contextlib.suppress(BlockingIOError):
        listener.accept() if listener.type == socket.SOCK_STREAM else listener.recv(1)
        problems.append(f"{listener.getsockname()!r} was reached")
    if self._lasts(lambda: pids(self.marker)):
      problems.append(f"processes live on: {pids(self.marker)}")
    return problems

  def census(self) -> dict[str, Any]:
    """What must be the same before and after any number of runs, taken when the sandbox is idle."""
    deadline = time.monotonic() + 10.0
    while True:
      family = descendants(self.machine.process.pid)
      # Beside those wanted, each place has one that runs and one that tidies up, and all come free;
      # the interpreter lets no more stand by. Those that ended are reaped in time.
      watchers = [pid for pid in children(family[0]) if self._state(pid) != "Z"]
      known = 1 + 2 * len(watchers)
      if self.machine.grants("disk_in_memory"):
        watchers.remove(family[1])  # the keeper of the disks, which came first and has no program
        known -= 1
      beside = sum(self._state(p) != "Z" for p in family) - known
      time.sleep(0.3)  # until all that stand by are there and all that ended are gone
      steady = family == descendants(self.machine.process.pid)
      if steady and beside == 0 or time.monotonic() > deadline:
        break
    assert steady and _CONCURRENCY <= len(watchers) <= 3 * _CONCURRENCY, family
    directory = self.machine.hello["directory"]
    return {
      "beside watchers and programs that stand by": beside,
      "processes that left it": len({*pids(directory), *pids(self.marker)} - {*family}),
      "descriptors of the trainer": len(os.listdir(f"/proc/{self.machine.process.pid}/fd")),
      "descriptors of the interpreter": len(os.listdir(f"/proc/{family[0]}/fd")),
      "sockets of both": sum(self._sockets(pid) for pid in (self.machine.process.pid, family[0])),
      "work directories": len(os.listdir(directory)),
      "System V objects": sum(
        self._lines(f"/proc/sysvipc/{kind}") for kind in ("shm", "sem", "msg")
      ),
      "files in /dev/shm": len(os.listdir("/dev/shm")),
    }

  def resident_bytes(self) -> int:
    """Memory of the trainer and of the interpreter that runs are forked from."""
    family = (self.machine.process.pid, descendants(self.machine.process.pid)[0])
    total = 0
    for pid in family:
      with open(f"/proc/{pid}/statm") as file:
        total += int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    return total

  def _request(self, attack: Attack, source: str, cell: bool) -> dict[str, Any]:
    names = "".join(f"{name} = {value!r}\n" for name, value in self._names.items())
    code = names + f"NOW = {time.time()}\n" + PREAMBLE + source
    return {"code": code, "limits": self._limits(attack), "cell": cell}

  def _limits(self, attack: Attack) -> dict[str, Any]:
    return {**QUICK, **attack.limits}

  def _listen(self) -> tuple[list[socket.socket], dict[str, Any]]:
    addresses = (
      ("TCP", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
      ("UDP", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
      ("STREAM", socket.AF_UNIX, socket.SOCK_STREAM, str(self._folder / "stream")),
      ("POST", socket.AF_UNIX, socket.SOCK_DGRAM, str(self._folder / "post")),
      ("DATAGRAM", socket.AF_UNIX, socket.SOCK_DGRAM, "\0" + self.marker),
    )
    listeners, names = [], {}
    for name, family, kind, address in addresses:
      listener = socket.socket(family, kind)
      listener.bind(address)
      if kind == socket.SOCK_STREAM:
        listener.listen()
      listener.setblocking(False)
      listeners.append(listener)
      names[name] = listener.getsockname()[1] if family == socket.AF_INET else address
    for name in ("post", "stream"):
      os.chmod(self._folder / name, 0o777)
    names |= {
      "TRAINER": self.machine.process.pid, "SECRET": str(self._secret), "MARKER": self.marker,
      "FOLDER": str(self._folder), "PROJECT": str(_PROJECT),
    }  # fmt: skip
    return listeners, names

  @staticmethod
  def _lasts(condition: Any) -> bool:
    """Whether it still holds after half a second; the kernel ends processes in its own time."""
    deadline = time.monotonic() + 0.5
    while condition():
      if time.monotonic() > deadline:
        return True
      time.sleep(0.01)
    return False

  @staticmethod
  def _state(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
      return file.read().rpartition(")")[2].split()[0]
    return "X"

  @staticmethod
  def _sockets(pid: int) -> int:
    links = []
    for fd in glob.glob(f"/proc/{pid}/fd/*"):
      with contextlib.suppress(OSError):
        links.append(os.readlink(fd))
    return sum(link.startswith("socket:") for link in links)

  @staticmethod
  def _lines(path: str) -> int:
    with contextlib.suppress(OSError), open(path) as file:
      return len(file.readlines())
    return 0
