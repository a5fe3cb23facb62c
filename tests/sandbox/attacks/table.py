"""The attacks: what each tries, the program that tries it, and how the run must end.

Programs are Python. Before them stand the names of ``PREAMBLE``, which say where on this machine
the things are that must stay out of reach. Besides the row's own expectations these hold for all:
``REACHED`` is never printed, no secret is shown, and ``world.World.harm`` finds nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# TRAINER: pid of the process that uses the sandbox. SECRET, FOLDER: a file and a directory of the
# trainer's user. PROJECT: this source tree. TCP, UDP: ports, STREAM, POST, DATAGRAM: unix sockets
# (two by path, one abstract), all listened on by the test. MARKER: unique, in the name of whatever
# is made.
PREAMBLE = """
import ctypes, errno, os, platform, sys, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
def attempt(what, action):
  try:
    outcome = action()
  except (OSError, ValueError, AttributeError) as error:
    print(what, "refused")
  else:
    print(what, "REACHED", repr(outcome)[:300])
def look(folder):
  # What is needed to run at all is no secret: a root of its own may show the way to it.
  way = {"box", "dev", "etc", "usr", "bin", "sbin", "lib", "lib32", "lib64"}
  foreign = set(os.listdir(folder)) - way - set((sys.prefix + os.__file__).split("/"))
  if not foreign:
    raise OSError(errno.EACCES, "nothing of others")
  return foreign
def call(number, *arguments):
  ctypes.set_errno(0)
  outcome = libc.syscall(ctypes.c_long(number), *arguments)
  if outcome == -1:
    raise OSError(ctypes.get_errno(), "refused")
  return outcome
"""


@dataclasses.dataclass(frozen=True)
class Attack:
  """One row.

  Attributes:
    name: unique.
    tries: what it is after.
    program: source.
    expected: statuses that a contained run may end with.
    prints: what its output must contain.
    limits: fields of SandboxLimits that differ from ``QUICK``.
    needs: the protection, or mechanism of one, without which the machine does not promise to
      contain it.
    after: a program run next, in a box of its own; ``prints`` and ``expected`` are about this one.
    beside: a program run at the same time, in a box of its own.
  """

  name: str
  tries: str
  program: str
  expected: tuple[str, ...] = ("ok",)
  prints: str = ""
  limits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  needs: str | None = None
  after: str = ""
  beside: str = ""


def _measured(disk_bytes: int, files: int = 10_000) -> str:
  """Program text by which the process ``first`` tells what all files take, while others write."""
  return f"""
if os.getpid() == first:
  disk = os.statvfs(".")
  made = disk.f_files - disk.f_ffree - 1
  held = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
  most = max(disk.f_blocks * disk.f_frsize, held)
  if most > {disk_bytes} or max(made, disk.f_files - 1) > {files}: print("REACHED", most, made)
  print("measured", held, made)
"""


QUICK = {"wall_seconds": 4.0, "memory_bytes": 2**27}
_SHORT = {"wall_seconds": 0.3}

_CLEAN = """
import builtins, sys, time
assert print.__self__ is builtins and len("ab") == 2 and sorted([2, 1]) == [1, 2]
assert os.listdir(".") == [], os.listdir(".")
assert "planted" not in sys.modules and not hasattr(builtins, "planted")
assert not any("MARKER" in value or "planted" in value for value in os.environ.values())
assert abs(time.time() - NOW) < 3600 and time.monotonic() > 0
import json, random, subprocess
assert json.dumps([1]) == "[1]"
out = subprocess.run([sys.executable or "python3", "-c", "print('child')"], capture_output=True)
assert out.stdout == b"child\\n", out
print("clean")
"""

ATTACKS: tuple[Attack, ...] = (
  # -- using up the machine
  Attack(
    "fork bomb",
    "processes without end",
    "while True:\n  try: os.fork()\n  except OSError: pass",
    expected=("timeout", "killed"),
    limits={"wall_seconds": 0.5, "processes": 16},
  ),
  Attack(
    "thread bomb",
    "threads without end",
    "import threading\nwhile True:\n  try: threading.Thread(target=time.sleep, args=(9,)).start()\n"
    "  except RuntimeError: break\nos._exit(5)",
    expected=("error", "killed"),
    limits={"processes": 16},
  ),
  Attack(
    "memory bomb",
    "memory in one process",
    "x = []\nwhile True: x.append(bytearray(2**24))",
    expected=("memory_limit",),
  ),
  Attack(
    "memory bomb of many",
    "memory in many processes, each within its own bound",
    "for _ in range(6):\n  if os.fork() == 0:\n    x = b'x' * 30_000_000\n    time.sleep(9)\n"
    "time.sleep(9)",
    expected=("memory_limit",),
    limits={"memory_bytes": 2**26},
  ),
  Attack(
    "memory of nobody",
    "memory that counts for no process: memfd, System V, message queues, shared memory files",
    """
attempt("memfd", lambda: os.memfd_create("x"))
attempt("memfd_secret", lambda: call(447, 0))
attempt("shmget", lambda: call(29 if X86 else 194, 0, 1 << 20, 0o1600))
attempt("semget", lambda: call(64 if X86 else 190, 0, 1, 0o1600))
attempt("msgget", lambda: call(68 if X86 else 186, 0, 0o1600))
attempt("mq_open", lambda: call(240 if X86 else 180, b"MARKER", 0o102, 0o600, None))
import struct  # 65,536 rules take 4 MiB of the kernel's memory, and each ruleset may have as many
attempt("ruleset", lambda: call(444, struct.pack("=QQ", 0, 3), 16, 0))
""",
    prints="ruleset refused",
  ),
  Attack(
    "shared memory files",
    "memory through /dev/shm",
    'attempt("shm", lambda: open("/dev/shm/" + MARKER, "w"))',
    needs="filesystem",
  ),
  Attack("busy loop", "CPU time of one thread", "while True: pass", ("timeout",), limits=_SHORT),
  Attack(
    "busy family",
    "CPU time of many processes",
    "for _ in range(3): os.fork()\nwhile True: pass",
    expected=("timeout",),
    limits=_SHORT,
  ),
  Attack(
    "endless output",
    "host memory by standard output",
    "while True: print('x' * 1000)",
    expected=("output_limit",),
    limits={"output_kill_bytes": 2**20},
  ),
  Attack(
    "endless errors",
    "host memory by standard error",
    "while True: os.write(2, b'x' * 1000)",
    expected=("output_limit",),
    limits={"output_kill_bytes": 2**20},
  ),
  Attack(
    "huge line",
    "host memory by a line without end",
    "print('x' * 3_000_000)",
    prints="bytes left out",
  ),
  Attack(
    "broken text",
    "the host's decoder and terminal",
    r"sys.stdout.flush(); os.write(1, b'\xff\xfe\x1b[2J\x00ok \xed\xa0\x80')",
    prints="ok ",
  ),
  Attack(
    "big file",
    "disk space by one file",
    "with open('big', 'wb') as file:\n  for _ in range(3): file.write(bytes(2**19))",
    expected=("error",),
    limits={"file_bytes": 2**20},
  ),
  Attack(
    "sparse file",
    "disk space by a hole",
    "attempt('truncate', lambda: open('sparse', 'wb').truncate(2**40))",
    prints="truncate refused",
  ),
  Attack(
    "many files",
    "disk space by many files",
    "for i in range(10**6): open(str(i), 'wb').write(bytes(2**20))",
    expected=("killed", "error"),
    limits={"disk_bytes": 2**24},
  ),
  Attack(
    "deleted files",
    "disk space by files without a name",
    "held = []\nfor i in range(100):\n  held.append(open('f', 'wb'))\n  os.unlink('f')\n"
    "  held[-1].write(bytes(2**20))\n  held[-1].flush()\ntime.sleep(9)",
    expected=("killed", "error"),
    limits={"disk_bytes": 2**24},
  ),
  Attack(
    "unreadable process",
    "files without a name, out of the watcher's sight",
    "if libc.prctl(4, 0, 0, 0, 0) == 0: print('REACHED')\nprint('done')",
    prints="done",
  ),
  Attack(
    "inode flood",
    "the file system's inodes",
    "for i in range(10**7): os.close(os.open(str(i), os.O_CREAT))",
    expected=("killed", "error"),
    limits={"files": 500},
  ),
  Attack(
    "deep directories",
    "the walk that measures and the one that wipes",
    "while True:\n  os.mkdir('d')\n  os.chdir('d')",
    expected=("killed", "timeout", "error"),
    limits={"files": 5000, "wall_seconds": 1.0},
  ),
  Attack(
    "descriptors",
    "open files",
    "held = []\ntry:\n  while True: held.append(os.pipe())\nexcept OSError: print('bounded')\n"
    "print(len(held) < 100)\nfor pair in held: os.close(pair[0]), os.close(pair[1])",
    prints="bounded\nTrue",
  ),
  Attack(
    "zombies",
    "the process table, by children never waited for",
    "for _ in range(20):\n  if os.fork() == 0: os._exit(0)\ntime.sleep(0.02)",
  ),
  Attack(
    "kernel queues",
    "kernel memory and machine-wide counts: asynchronous I/O, quotas",
    "attempt('io_setup', lambda: call(206 if X86 else 0, 60000, ctypes.byref(ctypes.c_long(0))))",
    prints="io_setup refused",
  ),
  # -- the directory of all boxes, and other runs seen through it
  Attack(
    "changes the parent",
    "the directory of all boxes: its mode, times, attributes and names, at which every run starts",
    """
before = os.stat("..").st_mtime
for name in ("..", "../.", "../../" + os.path.basename(os.path.dirname(os.getcwd()))):
  for mode in (0, 0o777):
    attempt("mode " + name, lambda: os.chmod(name, mode))
  try: os.utime(name, (1, 1))
  except OSError: pass
  if os.stat("..").st_mtime != before: print("times REACHED")
  attempt("attribute " + name, lambda: os.setxattr(name, "user.a", b"x"))
  attempt("owner " + name, lambda: os.chown(name, os.getuid(), os.getgid()))
  attempt("make " + name, lambda: os.mkdir(name + "/" + MARKER))
attempt("rename", lambda: os.rename("../" + os.path.basename(os.getcwd()), "../" + MARKER))
attempt("replace", lambda: os.rmdir("../" + os.path.basename(os.getcwd())))
fd = os.open("..", os.O_PATH)
attempt("mode by /proc", lambda: os.chmod(f"/proc/self/fd/{fd}", 0))
attempt("mode by descriptor", lambda: os.chmod(".", 0, dir_fd=fd))
attempt("mode by cwd", lambda: os.chmod("/proc/self/cwd/..", 0))
""",
    after=_CLEAN,
    prints="clean",
    needs="filesystem",
  ),
  Attack(
    "watches others",
    "names and times of other runs, by inotify and dnotify",
    """
import fcntl
def watch(folder):
  fd = call(253 if X86 else 26) if not hasattr(libc, "inotify_init1") else libc.inotify_init1(0)
  if fd < 0: raise OSError(errno.EPERM, "refused")
  got = libc.inotify_add_watch(fd, folder.encode(), 0xfff)
  if got < 0: raise OSError(ctypes.get_errno(), "refused")
  return got
for folder in ("..", "/", "/tmp", "/dev/shm", "../..", "/usr", FOLDER, SECRET):
  attempt("inotify " + folder, lambda: watch(folder))
attempt("fanotify", lambda: call(300 if X86 else 262, 0x200, 0))
def notify():
  fd = os.open(".", os.O_RDONLY)
  fcntl.fcntl(fd, 1026, 0x4)
attempt("dnotify", notify)
time.sleep(0.1)
""",
    beside="open('mine', 'w').write(MARKER)\ntime.sleep(0.2)\n"
    "print(os.listdir('.'), open('mine').read() == MARKER)",
    prints="dnotify refused",
    needs="filesystem",
  ),
  Attack(
    "keeps others waiting",
    "whoever opens a file of the interpreter, by a lease on it",
    """
import fcntl
fd = os.open(os.__file__, os.O_RDONLY)
for kind in (0, 1):
  attempt("lease", lambda: fcntl.fcntl(fd, 1024, kind))
""",
    prints="lease refused",
  ),
  Attack(
    "closes its own directory",
    "a fault of the machine, by a work directory that nobody may enter",
    "os.chmod('.', 0) if os.access('.', os.W_OK) else None",
    expected=("ok", "error"),
  ),
  # -- memory and disk space that no process shows
  Attack(
    "shared memory of nobody",
    "memory shared and then let go of: anonymous pages, huge pages",
    """
import mmap
attempt("anonymous", lambda: mmap.mmap(-1, 2**20))
def raw(flags, fd):
  libc.mmap.restype = ctypes.c_void_p
  libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
                        ctypes.c_long]
  got = libc.mmap(None, 2**21, 3, flags, fd, 0)
  if got in (None, ctypes.c_void_p(-1).value): raise OSError(ctypes.get_errno(), "refused")
  return got
for flags in (0x21, 0x21 | 0x8000, 0x40022, 0x40021, 0x23):
  attempt(f"flags {flags:x}", lambda: raw(flags, -1))
""",
    prints="flags 23 refused",
  ),
  Attack(
    "shared zeros",
    "memory shared through a device",
    """
import mmap
for device in ("zero", "null", "full", "random"):
  attempt(device, lambda: mmap.mmap(os.open("/dev/" + device, os.O_RDWR), 2**20))
""",
    prints="random refused",
    needs="filesystem",
  ),
  Attack(
    "memory let go of",
    "memory of many processes, each of which shared pages and let go of them",
    """
import mmap
for _ in range(8):
  if os.fork() == 0:
    held = mmap.mmap(-1, 40 * 2**20)
    for at in range(0, len(held), 2**20):
      held[at : at + 2**20] = bytes(2**20)
      held.madvise(mmap.MADV_DONTNEED, at, 2**20)
    time.sleep(2)
    os._exit(0)
codes = [os.wait()[1] for _ in range(8)]
if not any(codes): print("REACHED", codes)
""",
    expected=("ok", "memory_limit"),
    limits={"memory_bytes": 2**26},
  ),
  Attack(
    "memory behind a dead first thread",
    "memory of processes whose first thread has ended, so that /proc shows none",
    """
import threading
def hold():
  time.sleep(0.2)
  block = b"x" * (40 * 2**20)
  time.sleep(1.5)
  os.write(1, b"REACHED\\n")
  os._exit(0)
for _ in range(6):
  if os.fork() == 0:
    threading.Thread(target=hold).start()
    libc.syscall(60 if X86 else 93, 0)
time.sleep(3)
""",
    expected=("memory_limit",),
    limits={"memory_bytes": 2**26},
  ),
  Attack(
    "memory of other programs",
    "memory of many programs, each with no more than an interpreter has",
    """
import subprocess
code = "import time; x = b'x' * (6 * 2**20); time.sleep(1.5)"
held = [subprocess.Popen([sys.executable or "python3", "-S", "-c", code]) for _ in range(14)]
if not any([p.wait() for p in held]): print("REACHED")
""",
    expected=("memory_limit",),
    limits={"memory_bytes": 2**26},
  ),
  Attack(
    "spliced pages",
    "memory and space held by pipes and sockets, by pages that were spliced into them",
    """
r, w = os.pipe()
open("f", "wb").write(bytes(4096))
f = os.open("f", os.O_RDONLY)
class Vec(ctypes.Structure):
  _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
block = ctypes.create_string_buffer(4096)
vec = Vec(ctypes.addressof(block), 4096)
attempt("vmsplice", lambda: call(278 if X86 else 75, w, ctypes.byref(vec), 1, 0))
attempt("splice", lambda: call(275 if X86 else 76, f, None, w, None, 4096, 0))
r2, w2 = os.pipe()
os.write(w2, b"x")
attempt("tee", lambda: call(276 if X86 else 77, r2, w, 1, 0))
attempt("sendfile", lambda: os.sendfile(w, f, 0, 4096))
import fcntl
attempt("pipe size", lambda: fcntl.fcntl(w, 1031, 2**20))
""",
    prints="pipe size refused",
  ),
  Attack(
    "mapped deleted files",
    "disk space by files without a name or a descriptor, of which a page is mapped",
    """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
                      ctypes.c_long]
for i in range(64):
  fd = os.open("f", os.O_RDWR | os.O_CREAT)
  os.write(fd, bytes(2**20))
  libc.mmap(None, 4096, 1, 2 - i % 2, fd, 0)
  os.close(fd)
  os.unlink("f")
time.sleep(1.5)
print("REACHED")
""",
    expected=("killed", "error"),
    limits={"disk_bytes": 2**24, "file_bytes": 2**21},
  ),
  Attack(
    "descriptors in flight",
    "disk space by files that only a message nobody reads holds open",
    """
import array, socket
a, b = socket.socketpair()
def fly(fd): a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
sent = 0
for i in range(64):
  fd = os.open("f", os.O_RDWR | os.O_CREAT)
  os.write(fd, bytes(2**20))
  try:
    fly(fd)
    sent += 1
  except OSError: pass
  os.close(fd)
  os.unlink("f")
time.sleep(1.0)
if sent: print("REACHED", sent)
print("done")
""",
    prints="done",
    limits={"disk_bytes": 2**24},
  ),
  Attack(
    "files behind a dead first thread",
    "disk space by deleted files of processes whose first thread has ended",
    """
import threading
child = os.fork()
if child == 0:
  def hold():
    time.sleep(0.1)
    held = []
    for i in range(48):
      held.append(os.open("f", os.O_RDWR | os.O_CREAT))
      os.unlink("f")
      os.write(held[-1], bytes(2**20))
    time.sleep(1.5)
    os.write(1, b"REACHED\\n")
    os._exit(0)
  threading.Thread(target=hold).start()
  libc.syscall(60 if X86 else 93, 0)
time.sleep(3)
""",
    expected=("killed", "ok"),
    limits={"disk_bytes": 2**24},
  ),
  Attack(
    "files without a name",
    "disk space by files that never had a name",
    """
held = []
for i in range(64):
  held.append(os.open(".", os.O_TMPFILE | os.O_RDWR))
  os.write(held[-1], bytes(2**20))
time.sleep(1.5)
print("REACHED")
""",
    expected=("killed", "error"),
    limits={"disk_bytes": 2**24},
  ),
  # -- disks that are bounded by the kernel: nothing is over the bound at any time
  Attack(
    "many writers",
    "disk space, by 16 processes that write as fast as they can until they are ended",
    f"""
first = os.getpid()
for i in range(15):
  if os.fork() == 0: break
held, end = [], time.time() + 1.5
while time.time() < end:
  try:
    name = f"{{os.getpid()}}-{{len(held)}}"
    held.append(os.open(name, os.O_RDWR | os.O_CREAT))
    if len(held) % 2: os.unlink(name)
    for _ in range(8): os.write(held[-1], bytes(2**20))
  except OSError: held and os.close(held.pop(0))
{_measured(2**25)}""",
    limits={"disk_bytes": 2**25, "file_bytes": 2**23, "memory_bytes": 2**28},
    prints="measured",
    needs="disk_in_memory",
  ),
  Attack(
    "sparse and mapped files",
    "disk space, by pages of holes that many processes map and write to",
    f"""
first = os.getpid()
import mmap
for i in range(12):
  if os.fork() == 0:
    for n in range(4):
      with open(f"{{i}}-{{n}}", "wb+") as file:
        file.truncate(2**22)
        os.unlink(file.name)
        pages = mmap.mmap(file.fileno(), 2**22)
      for at in range(0, 2**22, 4096): pages[at] = 1
    time.sleep(9)
time.sleep(1.5)
{_measured(2**24)}""",
    limits={"disk_bytes": 2**24, "file_bytes": 2**22, "memory_bytes": 2**28},
    prints="measured",
    needs="disk_in_memory",
  ),
  Attack(
    "inode flood of many",
    "inodes, by many processes: files, directories, links of both kinds, files without a name",
    f"""
first = os.getpid()
for i in range(7):
  if os.fork() == 0: break
open("first", "a").close()
made, held, end = [], [], time.time() + 1.0
makers = [lambda n: os.mkdir(n), lambda n: os.symlink("x", n), lambda n: os.link("first", n),
          lambda n: held.append(os.open(n, os.O_CREAT)),
          lambda n: held.append(os.open(".", os.O_TMPFILE | os.O_RDWR))]
for number in range(10**6):
  try: makers[number % 5](f"{{os.getpid()}}-{{number}}")
  except OSError: pass
  if time.time() > end: break
{_measured(2**28, 500)}""",
    limits={"files": 500},
    prints="measured",
    needs="disk_in_memory",
  ),
  Attack(
    "space in attributes",
    "disk space or memory by extended attributes",
    "open('f', 'w').close()\nattempt('attribute', lambda: os.setxattr('f', 'user.a', bytes(3000)))",
    prints="attribute refused",
  ),
  # -- services by their paths
  Attack(
    "sockets by path",
    "services by the paths and names of their unix sockets, from one of a pair",
    """
import socket
def each(kind):
  a, b = socket.socketpair(socket.AF_UNIX, kind)
  a.settimeout(1.0)
  return a
class Header(ctypes.Structure):
  _fields_ = [("name", ctypes.c_void_p), ("length", ctypes.c_uint32), ("vec", ctypes.c_void_p),
              ("count", ctypes.c_size_t), ("control", ctypes.c_void_p), ("size", ctypes.c_size_t),
              ("flags", ctypes.c_int)]
for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW,
             socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK):
  for address in (POST, STREAM, DATAGRAM):
    attempt("sendto", lambda: each(kind).sendto(b"x", address))
    attempt("connect", lambda: each(kind).connect(address))
    attempt("sendmsg", lambda: each(kind).sendmsg([b"x"], [], 0, address))
  attempt("bind", lambda: each(kind).bind("\\0" + MARKER))
  attempt("bind path", lambda: each(kind).bind("bound"))
a, b = socket.socketpair()
a.sendall(b"still")
print(b.recv(9))
""",
    prints="b'still'",
  ),
  # -- not ending
  Attack(
    "signals ignored",
    "to outlive its time",
    "import signal\nfor n in (1, 2, 3, 14, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(9)",
    expected=("timeout",),
    limits=_SHORT,
  ),
  Attack(
    "stops itself",
    "to hang the caller",
    "import signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    expected=("timeout",),
    limits=_SHORT,
  ),
  Attack(
    "daemon",
    "to live on after its run: double fork and a session of its own",
    """
if os.fork() == 0:
  os.setsid()
  if os.fork() == 0:
    libc.prctl(1, 0, 0, 0, 0)
    os.execvp("sleep", ["sleep", MARKER])
  os._exit(0)
os.wait()
print("left")
""",
    prints="left",
  ),
  Attack(
    "held pipe",
    "to hang the caller by a grandchild that holds its output",
    "if os.fork() == 0:\n  time.sleep(60)\n  os._exit(0)\nprint('gone')\n"
    "sys.stdout.flush()\nos._exit(3)",
    expected=("error",),
    prints="gone",
    limits={"wall_seconds": 20.0},
  ),
  Attack(
    "exit functions",
    "to hang in what runs at the end",
    "import atexit\natexit.register(time.sleep, 60)",
    expected=("timeout", "ok"),  # a cell of a session does not end its interpreter
    limits=_SHORT,
  ),
  Attack(
    "reads standard input", "to wait for input", "print(sys.stdin.read() == '')", prints="True"
  ),
  Attack(
    "clock",
    "to set the machine's clock",
    """
import time
attempt("clock_settime", lambda: time.clock_settime(time.CLOCK_REALTIME, 0.0))
attempt("settimeofday", lambda: call(164 if X86 else 170, None, None))
attempt("adjtimex", lambda: call(159 if X86 else 171, bytes(300)))
""",
    prints="adjtimex refused",
  ),
  Attack(
    "timers",
    "more time, by its own clock and alarm",
    """
import signal, time
time.monotonic = time.time = lambda: 0.0
signal.setitimer(signal.ITIMER_REAL, 0)
while True: pass
""",
    expected=("timeout",),
    limits=_SHORT,
  ),
  Attack(
    "raised limits",
    "more of everything than it was given",
    """
import resource
for name in ("AS", "NPROC", "FSIZE", "NOFILE", "CORE", "MEMLOCK"):
  kind = getattr(resource, "RLIMIT_" + name)
  hard = resource.getrlimit(kind)[1]
  attempt(name, lambda: resource.setrlimit(kind, (hard + 1, hard + 1)))
""",
    prints="MEMLOCK refused",
  ),
  Attack(
    "last to die",
    "to be spared when the machine runs out of memory",
    'attempt("oom", lambda: open("/proc/self/oom_score_adj", "w").write("-1000"))',
    needs="filesystem",
  ),
  # -- ends that must be told apart
  Attack("crash", "the host, by a segmentation fault", "ctypes.string_at(0)", ("killed",)),
  Attack("abort", "a core file", "os.abort()", ("killed",)),
  Attack("recursion", "the stack", "def f(): f()\nf()", ("error",)),
  Attack(
    "deep syntax",
    "the compiler's stack",
    "eval('(' * 10**5)",
    expected=("error", "killed", "memory_limit"),
  ),
  Attack("silent success", "to pass for success", "sys.exit(0)", ("ok",)),
  Attack("hard exit", "to skip what runs at the end", "os._exit(0)", ("ok",)),
  # -- other processes
  Attack(
    "kills",
    "the trainer, its parent, everything",
    """
import fcntl, signal
for target in (TRAINER, os.getppid(), -1, -TRAINER):
  for number in (signal.SIGKILL, signal.SIGSTOP):
    if target != os.getpid():
      try: os.kill(target, number)
      except OSError: pass
libc.tgkill(TRAINER, TRAINER, 9)
libc.syscall(200 if X86 else 130, TRAINER, 9)
libc.syscall(129 if X86 else 138, TRAINER, 9, bytes(128))
try: signal.pidfd_send_signal(os.pidfd_open(TRAINER), signal.SIGKILL)
except OSError: pass
r, w = os.pipe()
try:
  fcntl.fcntl(r, fcntl.F_SETOWN, TRAINER)
  fcntl.fcntl(r, fcntl.F_SETSIG, 9)
  fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)
  os.write(w, b"x")
except OSError: pass
import socket, struct
for target in (TRAINER, os.getppid()):
  for command in (0x8901, 0x8902):  # the owner of a socket, who gets SIGIO
    a, b = socket.socketpair()
    attempt("owner", lambda: fcntl.ioctl(a.fileno(), command, struct.pack("i", target)))
    try:
      fcntl.ioctl(a.fileno(), 0x5452, struct.pack("i", 1))
      b.send(b"x")
    except OSError: pass
""",
    expected=("ok", "killed"),
  ),
  Attack(
    "hinders the trainer",
    "limits, priority and cores of the trainer and of its own parent",
    """
import resource
for pid in (TRAINER, os.getppid()):
  attempt("limit", lambda: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)))
  attempt("nice", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))
  attempt("cores", lambda: os.sched_setaffinity(pid, {0}))
""",
    prints="cores refused",
  ),
  Attack(
    "reads the trainer",
    "memory, environment, files and secrets of the trainer and of its own parent",
    """
for pid in (TRAINER, os.getppid(), 1, "self/.."):
  for name in ("environ", "mem", "maps", "fd/0", "root/etc/passwd", "cwd"):
    attempt(f"{pid} {name}", lambda: open(f"/proc/{pid}/{name}", "rb").read(100))
""",
    needs="filesystem",
    prints="cwd refused",
  ),
  Attack(
    "traces the trainer",
    "memory and descriptors of other processes by system calls",
    """
class Vec(ctypes.Structure):
  _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
here = ctypes.create_string_buffer(8)
local, remote = Vec(ctypes.addressof(here), 8), Vec(ctypes.addressof(here), 8)
for pid in (TRAINER, os.getppid(), 1):
  attempt("ptrace", lambda: call(101 if X86 else 117, 16, pid, 0, 0))
  attempt("seize", lambda: call(101 if X86 else 117, 0x4206, pid, 0, 0))
  for number in ((310, 311) if X86 else (270, 271)):
    attempt("vm", lambda: call(number, pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0))
  attempt("kcmp", lambda: call(312 if X86 else 272, pid, os.getpid(), 0, 0, 0))
  attempt("pidfd_getfd", lambda: call(438, os.pidfd_open(pid), 0, 0))
""",
    prints="pidfd_getfd refused",
  ),
  Attack(
    "second slot",
    "what runs beside it: its files, its processes, a message to it",
    """
import glob, signal, socket
box = os.path.dirname(os.getcwd())
attempt("boxes", lambda: look(box))
found = [p for p in range(1, 70000) if p not in (os.getpid(), os.getppid())]
seen = 0
for pid in glob.glob("/proc/[0-9]*/cmdline"):
  try: seen += MARKER.encode() in open(pid, "rb").read()
  except OSError: pass
if seen: print("REACHED", seen)
time.sleep(0.1)
print("done")
""",
    beside="open('mine', 'w').write(MARKER)\ntime.sleep(0.2)\n"
    "print(os.listdir('.'), open('mine').read() == MARKER)",
    prints="done",
    needs="filesystem",
  ),
  # -- files
  Attack(
    "reads files",
    "the machine's users, keys, the trainer's files and source",
    """
import pathlib
for path in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/root/.ssh/id_rsa", SECRET,
             PROJECT + "/pyproject.toml", PROJECT + "/.git/HEAD", "/proc/self/environ",
             "/proc/cpuinfo", "/sys/kernel/notes", "/dev/kmsg", "/dev/mem"):
  attempt(path, lambda: open(path, "rb").read(50))
for path in ("/", "/home", "/root", "/tmp", "/var/log", "/proc", "/dev/shm", FOLDER, PROJECT, ".."):
  attempt(path, lambda: look(path))
""",
    needs="filesystem",
    prints=".. refused",
  ),
  Attack(
    "ways around",
    "the same by links, parents and descriptors",
    """
os.symlink(SECRET, "link"), os.symlink("/", "root")
attempt("symlink", lambda: open("link").read())
attempt("symlink to /", lambda: open("root/etc/passwd").read())
attempt("hard link", lambda: os.link(SECRET, "hard"))
attempt("dots", lambda: open("../" * 20 + "etc/passwd").read())
attempt("/proc/self/root", lambda: open("/proc/self/root/etc/passwd").read())
attempt("/proc/self/cwd", lambda: look("/proc/self/cwd/.."))
attempt("O_PATH", lambda: look(f"/proc/self/fd/{os.open('/', os.O_PATH)}"))
attempt("bind name", lambda: os.rename(SECRET, "stolen"))
attempt("exchange", lambda: call(316 if X86 else 276, -100, SECRET.encode(), -100, b"link", 2))
def above(fd):
  parent = os.open("..", os.O_RDONLY, dir_fd=fd)
  try: return look(parent)
  finally: os.close(parent)
for fd in range(256):
  attempt(f"descriptor {fd}", lambda: look(fd))
  attempt(f"above {fd}", lambda: above(fd))
""",
    needs="filesystem",
    prints="exchange refused",
  ),
  Attack(
    "writes outside",
    "files, modes, owners, attributes and devices outside its directory",
    """
import site, sysconfig
for folder in ("/", "/tmp", "/etc", "/usr", "/usr/bin", "/dev", "/var/tmp", FOLDER, "..",
               sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"]):
  attempt(folder, lambda: open(os.path.join(folder, MARKER), "w"))
attempt("write", lambda: open(SECRET, "w"))
attempt("append", lambda: open(SECRET, "a"))
attempt("truncate", lambda: os.truncate(SECRET, 0))
attempt("open to truncate", lambda: os.open(SECRET, os.O_RDONLY | os.O_TRUNC))
attempt("mode", lambda: os.chmod(SECRET, 0))
attempt("owner", lambda: os.chown(SECRET, os.getuid(), os.getgid()))
attempt("attribute", lambda: os.setxattr(SECRET, "user.a", b"x"))
attempt("remove", lambda: os.unlink(SECRET))
attempt("device", lambda: os.mknod("disk", 0o60600, os.makedev(8, 0)))
for device in ("/dev/mem", "/dev/sda", "/dev/vda", "/dev/tty", "/dev/fuse", "/dev/kvm"):
  attempt(device, lambda: os.open(device, os.O_RDWR))
""",
    needs="filesystem",
    prints="device refused",
  ),
  Attack(
    "times of files",
    "the times by which others order their files",
    "try: os.utime(SECRET, (1, 1))\nexcept OSError: pass\nprint('tried')",
    needs="filesystem",
    prints="tried",
  ),
  Attack(
    "set-uid programs",
    "root by a set-uid program, or by one of its own",
    """
import shutil, subprocess
if libc.prctl(39, 0, 0, 0, 0) != 1: print("REACHED: may gain privileges")
data = (ctypes.c_uint32 * 6)()
libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), data)
if any(data): print("REACHED: capabilities", list(data))
for program in ("/usr/bin/su", "/bin/mount", "/usr/bin/sudo", "/usr/bin/pkexec"):
  try:
    out = subprocess.run([program, "-c", "id"], stdin=subprocess.DEVNULL, capture_output=True)
    if b"uid=0" in out.stdout: print("REACHED", program)
  except OSError: pass
attempt("setuid", lambda: os.setuid(0) if os.getuid() else os.setuid(1))
print("done")
""",
    prints="done",
  ),
  # -- network
  Attack(
    "network",
    "services of this machine and names of others",
    """
import socket
for family, kind, address in (
  (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", TCP)),
  (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", UDP)),
  (socket.AF_UNIX, socket.SOCK_STREAM, STREAM),
  (socket.AF_UNIX, socket.SOCK_DGRAM, DATAGRAM),
):
  def knock():
    s = socket.socket(family, kind)
    s.settimeout(1.0)
    s.connect(address)
    s.send(b"x")
  attempt(str(family), knock)
attempt("name", lambda: socket.getaddrinfo("example.com", 80))
attempt("listen", lambda: socket.create_server(("127.0.0.1", 0)))
""",
    prints="listen refused",
  ),
  Attack(
    "other sockets",
    "raw, packet, netlink, vsock, Bluetooth, TIPC and alg sockets, and pairs of them",
    """
for family, kind in ((2, 3), (17, 3), (16, 3), (40, 1), (31, 3), (30, 1), (38, 5), (10, 1), (1, 1)):
  attempt(f"socket {family}", lambda: call(41 if X86 else 198, family, kind, 0))
pair = (ctypes.c_int * 2)()
for family in (2, 30, 16):
  attempt(f"pair {family}", lambda: call(53 if X86 else 199, family, 1, 0, pair))
""",
    prints="pair 16 refused",
  ),
  Attack(
    "io_uring",
    "sockets and files past the filter",
    "attempt('setup', lambda: call(425, 8, bytes(120)))\n"
    "attempt('enter', lambda: call(426, 0, 1, 0, 0, None, 0))\n"
    "attempt('register', lambda: call(427, 0, 0, None, 0))",
    prints="register refused",
  ),
  # -- the kernel
  Attack(
    "namespaces",
    "a namespace in which it is root",
    """
for flag in (0x10000000, 0x20000000, 0x40000000, 0x20000, 0x2000000, 0x80, 0x4000000, 0x8000000):
  attempt(f"unshare {flag:x}", lambda: call(272 if X86 else 97, flag))
attempt("setns", lambda: call(308 if X86 else 268, 0, 0))
attempt("clone3", lambda: call(435, bytes(88), 88))
def clone():
  pid = call(56 if X86 else 220, 0x10000000 | 17, 0, 0, 0, 0)
  if pid == 0: os._exit(0)
attempt("clone", clone)
""",
    prints="clone refused",
    needs="syscalls",
  ),
  Attack(
    "mounts",
    "a file system of its own",
    """
attempt("mount", lambda: call(165 if X86 else 40, b"none", b".", b"tmpfs", 0, None))
attempt("umount", lambda: call(166 if X86 else 39, b"/proc", 2))
attempt("chroot", lambda: os.chroot("."))
attempt("pivot_root", lambda: call(155 if X86 else 41, b".", b"."))
for number in (428, 429, 430, 431, 432, 433, 442, 457, 458, 467):
  attempt(f"call {number}", lambda: call(number, 0, 0, 0, 0, 0, 0))
attempt("handle", lambda: call(304 if X86 else 265, -100, bytes(16), 0))
""",
    prints="handle refused",
    needs="syscalls",
  ),
  Attack(
    "kernel interfaces",
    "bpf, keys, tracing of faults and performance, modules, restart, the log",
    """
x86_arm = {"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
  "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
  "init_module": (175, 105), "finit_module": (313, 273), "reboot": (169, 142),
  "syslog": (103, 116), "kexec_load": (246, 104), "swapon": (167, 224), "acct": (163, 89),
  "quotactl": (179, 60), "fanotify_init": (300, 262), "move_pages": (279, 239)}
for name, numbers in x86_arm.items():
  attempt(name, lambda: call(numbers[0 if X86 else 1], 0, 0, 0, 0, 0, 0))
""",
    prints="move_pages refused",
    needs="syscalls",
  ),
  Attack(
    "other system call tables",
    "the filter, by the x32 or the 32-bit table",
    r"""
import mmap
if not X86: os.abort()
attempt("x32 getpid", lambda: call(0x40000000 | 39))
sys.stdout.flush()
page = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
                 mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, getpid; int 0x80; ret
run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
print("REACHED", run())
""",
    expected=("killed",),
    needs="syscalls",
  ),
  # -- the next run
  Attack(
    "plants for the next run",
    "what the next interpreter loads, sees or believes",
    """
import builtins, json, random, types
for name in ("sitecustomize.py", "usercustomize.py", "conftest.py", "planted.pth", "json.py"):
  open(name, "w").write("import builtins; builtins.planted = 1; print = None")
import sysconfig, site
for folder in {*sysconfig.get_paths().values(), *sys.path, site.getusersitepackages()}:
  for name in ("sitecustomize.py", "planted.pth"):
    try: open(os.path.join(folder, name), "x").write("import builtins; builtins.planted = 1")
    except OSError: pass
os.environ.update(PYTHONSTARTUP="planted", LD_PRELOAD="planted", PYTHONPATH="planted",
                  BASH_ENV="planted", PYTHONINSPECT="1")
sys.modules["planted"] = types.ModuleType("planted")
json.dumps = random.random = builtins.len = builtins.sorted = lambda *a, **k: 0
builtins.print = builtins.planted = None
""",
    after=_CLEAN,
    prints="clean",
  ),
  Attack(
    "loads a library first",
    "the next run, by LD_PRELOAD of a child that lives on",
    """
import subprocess
os.environ["LD_PRELOAD"] = os.path.abspath("evil.so")
open("evil.so", "wb").write(b"\\x7fELF")
subprocess.run(["true"])
if os.fork() == 0: time.sleep(60)
os._exit(0)
""",
    after=_CLEAN,
    prints="clean",
  ),
  Attack(
    "leaves files",
    "to hand files to the next run",
    "for p in ('f', os.path.expanduser('~/g'), os.environ['TMPDIR'] + '/h'): open(p, 'w')\n"
    "os.mkdir('locked'); open('locked/x', 'w'); os.chmod('locked', 0); os.mkfifo('pipe')",
    after=_CLEAN,
    prints="clean",
  ),
  Attack(
    "writes to every descriptor",
    "whatever the interpreter itself talks over",
    """
for fd in range(3, 300):
  for _ in range(3):
    try: os.write(fd, b"\\x00\\x00\\x00\\x00" * 3)
    except OSError: pass
  try: os.close(fd)
  except OSError: pass
""",
    expected=("ok", "killed"),
    after=_CLEAN,
    prints="clean",
  ),
)
