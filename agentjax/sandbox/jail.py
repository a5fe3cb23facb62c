"""Kernel walls around a process: namespaces, Landlock, seccomp, capabilities, limits, by ctypes.

Runs inside the sandbox's own interpreter, so it imports the standard library only. Nothing here
needs privileges; each wall is probed, and what the kernel refuses is left out and reported missing.

References:
  Linux man-pages: namespaces(7), landlock(7), seccomp(2), capabilities(7), prctl(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import platform
import resource
import signal
import stat
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_fork_libc = ctypes.PyDLL(None, use_errno=True)  # holds the interpreter's lock over the call

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_NEWTIME = 0x00000080

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 1, 2, 4, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC, _MOVE_MOUNT_F_EMPTY_PATH = 1, os.O_CLOEXEC, 4

# What a run may read or open anywhere; not every system has every path.
READABLE = (
  "/usr",
  "/bin",
  "/sbin",
  "/lib",
  "/lib32",
  "/lib64",
  "/etc/ld.so.cache",
  "/etc/localtime",
)
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
# To be read only: what is written to a shared mapping of it is memory that no process shows.
ZEROS = "/dev/zero"
BOX = "/box"  # the work directory in a view, see build_view


def _checked(result: int, what: str) -> int:
  if result < 0:
    code = ctypes.get_errno()
    raise OSError(code, f"{what}: {os.strerror(code)}")
  return result


def _prctl(option: int, argument: int) -> None:
  zero = ctypes.c_ulong(0)
  _checked(_libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero), f"prctl({option})")


def _syscall(number: int, *arguments: Any) -> int:
  converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
  return _checked(_libc.syscall(ctypes.c_long(number), *converted), f"syscall {number}")


def holds(attempt: Callable[[], object]) -> bool:
  """Whether ``attempt`` succeeds, tried in a child so that its effects are lost."""
  pid = os.fork()
  if pid == 0:
    code = 1
    try:
      attempt()
      code = 0
    except BaseException:  # any failure means: this wall cannot be had
      pass
    finally:
      os._exit(code)
  return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def fork(flags: int) -> int:
  """A fork whose child alone enters new namespaces; with CLONE_NEWPID it is their pid 1.

  For a process of one thread: neither libc's nor Python's handlers for forks run, and those of
  Python take longer than the fork. With CLONE_NEWUSER the child maps its user to itself. Raises
  OSError, in the child too.
  """
  uid, gid = os.getuid(), os.getgid()
  number = _NUMBERS["clone"][list(_ARCHITECTURES).index(platform.machine())]
  zeros = [ctypes.c_long(0)] * 4
  pid = _fork_libc.syscall(ctypes.c_long(number), ctypes.c_long(flags | signal.SIGCHLD), *zeros)
  _checked(pid, "clone")
  if pid == 0 and flags & CLONE_NEWUSER:
    _map_user(uid, gid)
  return pid


def number_processes_from(pid: int) -> None:
  """Lets the next process of this namespace have the id ``pid``, where the kernel grants that."""
  with contextlib.suppress(OSError), open("/proc/sys/kernel/ns_last_pid", "w") as file:
    file.write(str(pid - 1))


def be_readable(*, value: bool) -> None:
  """Whether processes of the same user may look into this one and trace it."""
  _prctl(_PR_SET_DUMPABLE, int(value))


def die_with_parent(signal_number: int) -> None:
  _prctl(_PR_SET_PDEATHSIG, signal_number)


def adopt_orphans() -> None:
  """Makes this process the parent of every orphan among its descendants."""
  _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def no_new_privileges() -> None:
  _prctl(_PR_SET_NO_NEW_PRIVS, 1)


# -- namespaces and mounts


def unshare(flags: int) -> None:
  _checked(_libc.unshare(flags), "unshare")


def unshare_as_user(flags: int) -> None:
  """Enters new namespaces through a user namespace that maps this user to itself."""
  uid, gid = os.getuid(), os.getgid()
  unshare(CLONE_NEWUSER | flags)
  _map_user(uid, gid)


def _map_user(uid: int, gid: int) -> None:
  for name, text in (
    ("setgroups", "deny"),
    ("uid_map", f"{uid} {uid} 1"),
    ("gid_map", f"{gid} {gid} 1"),
  ):
    with open(f"/proc/self/{name}", "w") as file:
      file.write(text)


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
  _checked(
    _libc.mount(
      source.encode(),
      os.fsencode(target),
      kind.encode() if kind else None,
      ctypes.c_ulong(flags),
      data.encode() if data else None,
    ),
    f"mount {target}",
  )


def keep_mounts_private() -> None:
  _mount("none", "/", None, _MS_REC | _MS_PRIVATE)


def closed_ancestor(path: str) -> str | None:
  """The first directory on the way to ``path`` that other users may not pass, or None."""
  at = "/"
  for part in os.path.realpath(path).strip("/").split("/"):
    at = os.path.join(at, part)
    if os.path.isdir(at) and not os.stat(at).st_mode & stat.S_IXOTH:
      return at
  return None


def open_up(paths: Mapping[str, bool]) -> None:
  """Makes ``paths`` (path -> writable) reachable by any user inside this mount namespace.

  Each directory that bars the way is covered by an empty one in which only ``paths`` reappear.
  """
  blocked: dict[str, list[str]] = {}
  for path in paths:
    if (wall := closed_ancestor(path)) is not None:
      blocked.setdefault(wall, []).append(path)
  for wall, inner in blocked.items():
    handles = {p: os.open(p, os.O_PATH | os.O_DIRECTORY) for p in inner}
    targets = {p: os.path.realpath(p) for p in inner}
    _mount("tmpfs", wall, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755,size=64k")
    for path, handle in handles.items():
      os.makedirs(targets[path], mode=0o755, exist_ok=True)
      _mount(f"/proc/self/fd/{handle}", targets[path], None, _MS_BIND)
      os.close(handle)
      if not paths[path]:
        _mount("none", targets[path], None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID)


def freeze_files(writable: str) -> None:
  """Makes every mount of this namespace read-only but ``writable`` and /proc. Needs Linux 5.12.

  Unlike Landlock this also refuses changes of modes, owners, times and attributes.
  """
  _mount(writable, writable, None, _MS_BIND)
  _set_read_only("/", _AT_RECURSIVE, value=True)
  for path in (writable, "/proc"):
    _set_read_only(path, 0, value=False)


def build_view(root: str, readable: Iterable[str], devices: Iterable[str]) -> None:
  """Covers the directory ``root`` by a tree in which only these paths appear, read-only.

  ``enter_view`` makes it all that a program can name. Below it is no /proc, and one empty
  directory, ``BOX``. Needs a mount namespace of one's own.
  """
  _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755,size=64k")
  os.mkdir(root + BOX)
  for path in (*readable, *devices):
    target = root + path
    if not os.path.exists(path) or os.path.lexists(target):
      continue  # not every system has every path, and some are below others
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    if os.path.islink(path):
      os.symlink(os.readlink(path), target)
      continue
    if os.path.isdir(path):
      os.mkdir(target)
    else:
      os.close(os.open(target, os.O_CREAT | os.O_EXCL, 0o644))
    _mount(path, target, None, _MS_BIND | _MS_REC)
    if path not in devices:
      _mount("none", target, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
  _mount("none", root, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def enter_view(root: str, directory: str | int) -> None:
  """Makes ``root`` this process's file system, with ``directory`` at ``BOX``, and goes there.

  For good once capabilities are dropped. Needs a mount namespace in which no other program's
  directory is there, see ``empty_view``. No descriptor of a directory may be open.

  Args:
    root: see ``build_view``.
    directory: a path, or the descriptor of a ``copied_mount``, which is closed.
  """
  if isinstance(directory, int):
    _syscall(
        _NUMBERS["move_mount"][0], directory, b"", _AT_FDCWD, os.fsencode(root + BOX),
        _MOVE_MOUNT_F_EMPTY_PATH,
    )  # fmt: skip
    os.close(directory)
  else:
    _mount(directory, root + BOX, None, _MS_BIND)
  os.chroot(root)
  os.chdir(BOX)


def empty_view(root: str) -> None:
  """Takes the directory at ``BOX`` away again, where ``enter_view`` got as far as that."""
  unmount(root + BOX)


def mount_memory(path: str, options: str) -> None:
  """Covers a directory by an empty file system in memory, with tmpfs(5)'s ``options``."""
  _mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def bound_memory(path: str, options: str) -> None:
  """Gives a ``mount_memory`` other bounds; OSError where it holds more already."""
  _mount("none", path, None, _MS_REMOUNT | _MS_NOSUID | _MS_NODEV, options)


def copied_mount(path: str) -> int:
  """A descriptor of what is mounted at ``path``, for ``enter_view`` in any namespace. Linux 5.2."""
  flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC
  return _syscall(_NUMBERS["open_tree"][0], _AT_FDCWD, os.fsencode(path), flags)


def unmount(path: str) -> None:
  """Takes away what is mounted at ``path``, if anything is; who holds it open may go on."""
  _libc.umount2(os.fsencode(path), _MNT_DETACH)


def _set_read_only(path: str, flags: int, *, value: bool) -> None:
  attributes = struct.pack("=QQQQ", value, not value, 0, 0)  # bit 0: MOUNT_ATTR_RDONLY
  _syscall(
      _NUMBERS["mount_setattr"][0], _AT_FDCWD, os.fsencode(path), flags, attributes,
      len(attributes),
  )  # fmt: skip


# -- users, capabilities, limits


def become(uid: int) -> None:
  os.setgroups([])
  os.setresgid(uid, uid, uid)
  os.setresuid(uid, uid, uid)


def bound_capabilities() -> None:
  """Keeps all that this process starts from gaining a capability by exec."""
  for capability in range(64):
    try:
      _prctl(_PR_CAPBSET_DROP, capability)
    except OSError:  # past the last capability, or none held
      break


def drop_capabilities() -> None:
  """Empties every capability set of this process; a no-op without any."""
  header = struct.pack("=Ii", 0x20080522, 0)
  _checked(_libc.capset(header, bytes(24)), "capset")


def limit(
  limits: Mapping[str, float],
  *,
  address_space: int,
  processes: int,
  cpu_seconds: float | None,
) -> None:
  """Applies the rlimits of one run; ``limits`` is a ``SandboxLimits`` as a dict."""
  cpu = resource.RLIM_INFINITY if cpu_seconds is None else math.ceil(cpu_seconds)
  for kind, soft, hard in (
    (resource.RLIMIT_CPU, cpu, cpu if cpu_seconds is None else cpu + 1),
    (resource.RLIMIT_AS, address_space, address_space),
    (resource.RLIMIT_FSIZE, int(limits["file_bytes"]), int(limits["file_bytes"])),
    (resource.RLIMIT_NOFILE, int(limits["open_files"]), int(limits["open_files"])),
    (resource.RLIMIT_NPROC, processes, processes),
    (resource.RLIMIT_CORE, 1, 1),  # less than a file needs; 0 would still start the core's helper
    (resource.RLIMIT_MEMLOCK, 0, 0),
    (resource.RLIMIT_MSGQUEUE, 0, 0),
    (resource.RLIMIT_SIGPENDING, 1024, 1024),  # counted with those of the trainer's user
  ):
    ceiling = resource.getrlimit(kind)[1]
    if ceiling != resource.RLIM_INFINITY:
      soft, hard = min(soft, ceiling), min(hard, ceiling)
    resource.setrlimit(kind, (soft, hard))


# -- Landlock: which files may be touched, no TCP, no signals outwards

_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_FS_EXECUTE, _FS_WRITE_FILE, _FS_READ_FILE, _FS_READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_FS_REFER, _FS_TRUNCATE, _FS_IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_FS_OF_FILES = _FS_EXECUTE | _FS_WRITE_FILE | _FS_READ_FILE | _FS_TRUNCATE | _FS_IOCTL_DEV
_NET_TCP = 0b11
_SCOPE_ABSTRACT_UNIX_AND_SIGNAL = 0b11


def landlock_version() -> int:
  """The kernel's Landlock ABI, 0 when there is none."""
  try:
    return _syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1)
  except OSError:
    return 0


def file_rules(readable: Iterable[str], devices: Iterable[str]) -> int:
  """A file descriptor for ``restrict_files``: ``readable`` and ``ZEROS`` read and execute,
  ``devices`` read and write. Also refuses TCP (ABI 4), and signals and abstract sockets to
  processes outside (ABI 6).
  """
  handled, version = _handled_rights(), landlock_version()
  attributes = struct.pack("=Q", handled)
  if version >= 4:
    attributes += struct.pack("=Q", _NET_TCP)
  if version >= 6:
    attributes += struct.pack("=Q", _SCOPE_ABSTRACT_UNIX_AND_SIGNAL)
  ruleset = _syscall(_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
  for path in (*readable, ZEROS):
    _add_file_rule(ruleset, path, _FS_EXECUTE | _FS_READ_FILE | _FS_READ_DIR)
  for path in devices:
    _add_file_rule(ruleset, path, (_FS_READ_FILE | _FS_WRITE_FILE | _FS_TRUNCATE) & handled)
  return ruleset


def restrict_files(rules: int, writable: str) -> None:
  """Confines file access for good: the ``file_rules`` and in ``writable`` everything but devices.

  Closes ``rules``. Needs no_new_privileges().
  """
  _add_file_rule(rules, writable, _handled_rights() & ~_FS_IOCTL_DEV)
  _syscall(_LANDLOCK_RESTRICT_SELF, rules, 0)
  os.close(rules)


@functools.cache
def _handled_rights() -> int:
  version, handled = landlock_version(), (1 << 13) - 1
  for since, right in ((2, _FS_REFER), (3, _FS_TRUNCATE), (5, _FS_IOCTL_DEV)):
    handled |= right if version >= since else 0
  return handled


def _add_file_rule(ruleset: int, path: str, rights: int) -> None:
  try:
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
  except OSError:
    return  # not every system has every path
  if not stat.S_ISDIR(os.fstat(handle).st_mode):
    rights &= _FS_OF_FILES
  _syscall(_LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, handle), 0)
  os.close(handle)


# -- seccomp: which system calls may be made

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NUMBERS: dict[str, tuple[int, int]] = {  # name: (x86_64, aarch64), -1 where there is none
  "socket": (41, 198),
  "socketpair": (53, 199),
  "connect": (42, 203),
  "bind": (49, 200),
  "sendto": (44, 206),
  "sendmsg": (46, 211),
  "sendmmsg": (307, 269),
  "mmap": (9, 222),
  "sendfile": (40, 71),
  "splice": (275, 76),
  "tee": (276, 77),
  "vmsplice": (278, 75),
  "inotify_init": (253, -1),
  "inotify_init1": (294, 26),
  "prctl": (157, 167),
  "memfd_create": (319, 279),
  "memfd_secret": (447, 447),
  "shmget": (29, 194),
  "msgget": (68, 186),
  "semget": (64, 190),
  "mq_open": (240, 180),
  "io_setup": (206, 0),
  "modify_ldt": (154, -1),
  "clone": (56, 220),
  "clone3": (435, 435),
  "kill": (62, 129),
  "tkill": (200, 130),
  "tgkill": (234, 131),
  "rt_sigqueueinfo": (129, 138),
  "rt_tgsigqueueinfo": (297, 240),
  "pidfd_send_signal": (424, 424),
  "prlimit64": (302, 261),
  "fcntl": (72, 25),
  "ioctl": (16, 29),
  "landlock_create_ruleset": (_LANDLOCK_CREATE_RULESET, _LANDLOCK_CREATE_RULESET),
  "setpriority": (141, 140),
  "sched_setaffinity": (203, 122),
  "sched_setscheduler": (144, 119),
  "sched_setparam": (142, 118),
  "sched_setattr": (314, 274),
  "ioprio_set": (251, 30),
  "ptrace": (101, 117),
  "process_vm_readv": (310, 270),
  "process_vm_writev": (311, 271),
  "process_madvise": (440, 440),
  "process_mrelease": (448, 448),
  "pidfd_getfd": (438, 438),
  "kcmp": (312, 272),
  "migrate_pages": (256, 238),
  "move_pages": (279, 239),
  "unshare": (272, 97),
  "setns": (308, 268),
  "mount": (165, 40),
  "umount2": (166, 39),
  "pivot_root": (155, 41),
  "chroot": (161, 51),
  "open_tree": (428, 428),
  "move_mount": (429, 429),
  "fsopen": (430, 430),
  "fsconfig": (431, 431),
  "fsmount": (432, 432),
  "fspick": (433, 433),
  "mount_setattr": (442, 442),
  "open_tree_attr": (467, 467),
  "statmount": (457, 457),
  "listmount": (458, 458),
  "name_to_handle_at": (303, 264),
  "open_by_handle_at": (304, 265),
  "bpf": (321, 280),
  "perf_event_open": (298, 241),
  "userfaultfd": (323, 282),
  "io_uring_setup": (425, 425),
  "io_uring_enter": (426, 426),
  "io_uring_register": (427, 427),
  "add_key": (248, 217),
  "request_key": (249, 218),
  "keyctl": (250, 219),
  "fanotify_init": (300, 262),
  "quotactl": (179, 60),
  "quotactl_fd": (443, 443),
  "acct": (163, 89),
  "syslog": (103, 116),
  "reboot": (169, 142),
  "swapon": (167, 224),
  "swapoff": (168, 225),
  "kexec_load": (246, 104),
  "kexec_file_load": (320, 294),
  "init_module": (175, 105),
  "finit_module": (313, 273),
  "delete_module": (176, 106),
  "settimeofday": (164, 170),
  "clock_settime": (227, 112),
  "clock_adjtime": (305, 266),
  "adjtimex": (159, 171),
  "sethostname": (170, 161),
  "setdomainname": (171, 162),
  "vhangup": (153, 58),
  "truncate": (76, 45),
  "chmod": (90, -1),
  "fchmod": (91, 52),
  "fchmodat": (268, 53),
  "fchmodat2": (452, 452),
  "chown": (92, -1),
  "lchown": (94, -1),
  "fchown": (93, 55),
  "fchownat": (260, 54),
  "setxattr": (188, 5),
  "lsetxattr": (189, 6),
  "fsetxattr": (190, 7),
  "removexattr": (197, 14),
  "lremovexattr": (198, 15),
  "fremovexattr": (199, 16),
  "setxattrat": (463, 463),
  "removexattrat": (466, 466),
  "file_setattr": (469, 469),
  "utime": (132, -1),
  "utimes": (235, -1),
  "futimesat": (261, -1),
  "utimensat": (280, 88),
}
_BY_ARGUMENT = frozenset(
  "clone clone3 kill tgkill rt_sigqueueinfo rt_tgsigqueueinfo prlimit64 fcntl ioctl socketpair "
  "prctl mmap sendto".split()
)
_COPIES_BY_REFERENCE = frozenset("sendfile splice tee vmsplice".split())
_CHANGES_OF_FILES = frozenset(
  "truncate chmod fchmod fchmodat fchmodat2 chown lchown fchown fchownat removexattr "
  "lremovexattr fremovexattr removexattrat file_setattr".split()
)
_CHANGES_OF_TIMES = frozenset("utime utimes futimesat utimensat".split())
_SIGNALS = frozenset(("tkill", "pidfd_send_signal"))  # others are bound by their argument
_SCHEDULING = frozenset(
  "setpriority sched_setaffinity sched_setscheduler sched_setparam sched_setattr ioprio_set".split()
)

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NAMESPACE_FLAGS = (
  CLONE_NEWNS
  | CLONE_NEWCGROUP
  | CLONE_NEWUTS
  | CLONE_NEWIPC
  | CLONE_NEWUSER
  | CLONE_NEWPID
  | CLONE_NEWNET
)
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x10000
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15
_F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ = 1024, 1026, 1031
_FIOSETOWN, _SOCKET_COMMANDS_END = 0x8901, 0x8A00
_AF_UNIX, _SOCK_STREAM, _SOCK_FLAGS = 1, 1, 0x80800  # close-on-exec, non-blocking
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x1, 0x20, 0x40000


def seccomp_known() -> bool:
  """Whether the filter's system call numbers are known for this machine."""
  return platform.machine() in _ARCHITECTURES


def refuse_system_calls(own_pid: int, **settings: bool) -> None:
  """Installs the filter of ``system_call_filter`` for good. Needs no_new_privileges()."""
  code = filter_code(own_pid, **settings)
  buffer = ctypes.create_string_buffer(code, len(code))
  filter_program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
  zero = ctypes.c_ulong(0)
  _checked(
    _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), filter_program, zero, zero),
    "prctl(PR_SET_SECCOMP)",
  )


@functools.cache
def filter_code(own_pid: int, **settings: bool) -> bytes:
  """The filter for this machine as the kernel takes it; see ``system_call_filter``."""
  program = system_call_filter(platform.machine(), own_pid=own_pid, **settings)
  return b"".join(struct.pack("=HBBI", *step) for step in program)


def system_call_filter(
  machine: str,
  *,
  own_pid: int,
  own_pid_namespace: bool,
  own_user: bool,
  signals_scoped: bool,
  files_guarded: bool,
) -> list[tuple[int, int, int, int]]:
  """The seccomp filter of a run on a machine: (code, jump if true, if false, value).

  Refused:
    - Sockets, but a pair of connected unix streams; addresses in any call, which would reach
      services of the machine by their paths; messages that carry descriptors (``sendmsg``).
    - Memory and disk space that no process's size and no open file shows: memfd, System V, message
      queues, shared anonymous mappings, huge pages, pages put into pipes and sockets (``splice``),
      larger pipes, attributes of files, descriptors in flight or of one thread alone, rules of
      Landlock.
    - Commands of sockets: who gets their signals, and what networks the machine has.
    - Watching the files of others (inotify, dnotify), leases on them.
    - New namespaces, tracing, other processes' memory and limits, mounts, keys, bpf, io_uring,
      clocks, modules; becoming unreadable to the watcher.
    - Without a user of its own: every scheduling call that could reach another process.
    - Without a pid namespace, unless Landlock scopes signals: every signal to another process.
    - Unless files outside are guarded otherwise (another user; a view of read-only mounts): changes
      of a file's mode, owner and length by path, which Landlock lets pass; a change of its times
      then has no effect.
  """
  guard_signals = not (own_pid_namespace or signals_scoped)
  code = _FilterCode(machine)
  code.check_numbering()
  skipped = _BY_ARGUMENT | _CHANGES_OF_TIMES
  skipped |= frozenset() if guard_signals else _SIGNALS
  skipped |= _SCHEDULING if own_user else frozenset()
  skipped |= _CHANGES_OF_FILES if files_guarded else frozenset()
  for name in _NUMBERS:
    if name not in skipped:
      # Programs that copy by reference to be fast copy by reading where the kernel has no such
      # call.
      code.refuse_call(name, _ENOSYS if name in _COPIES_BY_REFERENCE else _EPERM)
  for name in frozenset() if files_guarded else _CHANGES_OF_TIMES:
    code.refuse_call(name, 0)  # as if done: archives and copies would fail over their own files
  # libc falls back from clone3, whose flags a filter cannot read, to clone.
  code.refuse_call("clone3", _ENOSYS)
  code.check_clone()
  code.check_memory_and_sockets()
  for name, allowed in _rules_by_first_argument(own_pid, guard_signals).items():
    code.allow_first_arguments(name, allowed)
  code.check_commands(guard_signals)
  return code.steps


class _FilterCode:
  """The steps of a seccomp filter for one machine, written one after the other.

  A jump goes over as many of the following steps as it says, if its comparison holds or not. Every
  ``check`` of a system call goes over its own steps for all other calls, and ends with "allow".
  """

  def __init__(self, machine: str):
    self.steps: list[tuple[int, int, int, int]] = []
    self._machine = machine
    self._column = list(_ARCHITECTURES).index(machine)

  def _step(self, code: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
    self.steps.append((code, if_true, if_false, value))

  def _refuse(self, error: int) -> None:
    self._step(_RETURN, _ERRNO | error)

  def _end(self) -> None:
    self._refuse(_EPERM)
    self._step(_RETURN, _ALLOW)

  def _of_call(self, name: str, length: int) -> None:
    """The following ``length`` steps are of this call alone."""
    self._step(_EQUAL, _NUMBERS[name][self._column], 0, length)

  def _load_argument(self, index: int, *, high: bool = False) -> None:
    self._step(_LOAD, 16 + 8 * index + 4 * high)  # a word; both architectures are little endian

  def check_numbering(self) -> None:
    """Kills programs of another architecture, and leaves the call's number loaded."""
    self._step(_LOAD, 4)
    self._step(_EQUAL, _ARCHITECTURES[self._machine], 1, 0)
    self._step(_RETURN, _KILL)
    self._step(_LOAD, 0)
    if self._machine == "x86_64":  # the x32 numbering would slip past the table
      self._step(_AT_LEAST, 0x40000000, 0, 1)
      self._refuse(_ENOSYS)

  def refuse_call(self, name: str, error: int) -> None:
    """Refuses a call with any arguments, where the machine has it."""
    if _NUMBERS[name][self._column] >= 0:
      self._of_call(name, 1)
      self._refuse(error)

  def check_clone(self) -> None:
    """Refuses new namespaces, and threads that do not share descriptors."""
    self._of_call("clone", 6)
    self._load_argument(0)
    self._step(_ANY_BIT, _NAMESPACE_FLAGS, 2, 0)
    self._step(_ANY_BIT, _CLONE_THREAD, 0, 2)
    self._step(_ANY_BIT, _CLONE_FILES, 1, 0)
    self._end()

  def check_memory_and_sockets(self) -> None:
    """Refuses shared anonymous and huge mappings, all but a unix stream pair, and addresses."""
    self._of_call("mmap", 6)
    self._load_argument(3)
    self._step(_ANY_BIT, _MAP_HUGETLB, 2, 0)
    self._step(_ANY_BIT, _MAP_ANONYMOUS, 0, 2)
    self._step(_ANY_BIT, _MAP_SHARED, 0, 1)
    self._end()
    self._of_call("socketpair", 6)
    self._load_argument(0)
    self._step(_EQUAL, _AF_UNIX, 0, 2)
    self._load_argument(1)
    self._step(_ANY_BIT, 0xFFFFFFFF & ~(_SOCK_STREAM | _SOCK_FLAGS), 0, 1)
    self._end()
    self._of_call("sendto", 6)
    self._load_argument(4)
    self._step(_EQUAL, 0, 0, 2)
    self._load_argument(4, high=True)
    self._step(_EQUAL, 0, 1, 0)
    self._end()

  def allow_first_arguments(self, name: str, allowed: tuple[int, ...]) -> None:
    """Refuses a call with any other first argument."""
    self._of_call(name, len(allowed) + 3)
    self._load_argument(0)
    for at, value in enumerate(allowed):
      self._step(_EQUAL, value & 0xFFFFFFFF, len(allowed) - at, 0)
    self._end()

  def check_commands(self, guard_signals: bool) -> None:
    """Refuses what ``prctl``, ``ioctl`` and ``fcntl`` must not do."""
    self._of_call("prctl", 4)
    self._load_argument(0)
    self._step(_EQUAL, _PR_SET_DUMPABLE, 0, 1)
    self._end()
    self._of_call("ioctl", 5)
    self._load_argument(1)
    self._step(_AT_LEAST, _FIOSETOWN, 0, 2)
    self._step(_AT_LEAST, _SOCKET_COMMANDS_END, 1, 0)
    self._end()
    commands = [_F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ]
    commands += [_F_SETOWN, _F_SETSIG, _F_SETOWN_EX] if guard_signals else []
    self._of_call("fcntl", len(commands) + 3)
    self._load_argument(1)
    for at, command in enumerate(commands):
      self._step(_EQUAL, command, len(commands) - at, 0)
    self._step(_RETURN, _ALLOW)
    self._end()


def _rules_by_first_argument(pid: int, guard_signals: bool) -> dict[str, tuple[int, ...]]:
  """System calls that pass only with one of these values as their first argument."""
  rules: dict[str, tuple[int, ...]] = {"prlimit64": (0, pid)}
  if guard_signals:
    rules["kill"] = (pid, 0, -pid)
    rules |= {name: (pid,) for name in ("tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")}
  return rules
