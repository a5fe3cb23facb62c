"""The system call filter, run on paper: for both architectures, on whatever machine tests run."""

from __future__ import annotations

import platform

import pytest

from agentjax.sandbox import jail

_ALLOWED, _EPERM, _ENOSYS, _DONE = "allowed", 1, 38, 0
_PID = 4321


def outcome(
  machine: str, name: str | int, *arguments: int, arch: str = "", **walls: bool
) -> object:
  """What the filter does with a call: "allowed", "killed", or the error number it returns."""
  settings = dict.fromkeys(
    ("own_pid_namespace", "own_user", "signals_scoped", "files_guarded"), False
  )
  settings |= walls
  program = jail.system_call_filter(machine, own_pid=_PID, **settings)
  column = ("x86_64", "aarch64").index(machine)
  number = name if isinstance(name, int) else jail._NUMBERS[name][column]
  data = {0: number, 4: jail._ARCHITECTURES[arch or machine]}
  for i, value in enumerate((*arguments, *[0] * 6)[:6]):
    data |= {16 + 8 * i: value & 0xFFFFFFFF, 20 + 8 * i: value >> 32 & 0xFFFFFFFF}
  at = accumulator = 0
  while True:
    code, if_true, if_false, value = program[at]
    at += 1
    match code:
      case 0x20:
        accumulator = data[value]
      case 0x06:
        action = value & 0xFFFF0000
        names = {0x7FFF0000: _ALLOWED, 0x80000000: "killed"}
        return names.get(action, value & 0xFFFF)
      case _:
        holds = {
          0x15: accumulator == value,
          0x35: accumulator >= value,
          0x45: bool(accumulator & value),
        }[code]
        at += if_true if holds else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_on_both_architectures(machine: str) -> None:
  def of(name: str | int, *arguments: int, **walls: bool) -> object:
    return outcome(machine, name, *arguments, **walls)

  other = "aarch64" if machine == "x86_64" else "x86_64"
  assert outcome(machine, "socket", arch=other) == "killed"
  assert of("socket", 2, 1) == _EPERM
  assert of("clone3") == _ENOSYS
  assert (of("clone", 17), of("clone", jail.CLONE_NEWUSER | 17)) == (_ALLOWED, _EPERM)
  assert of("clone", jail.CLONE_NEWNET) == _EPERM
  for name in ("ptrace", "unshare", "mount", "bpf", "io_uring_setup", "memfd_create", "shmget"):
    walls = {"own_pid_namespace": True, "own_user": True, "signals_scoped": True}
    assert of(name, files_guarded=True, **walls) == _EPERM, name
  assert (of("prctl", 4), of("prctl", 15)) == (_EPERM, _ALLOWED)
  assert (of("prlimit64", 0), of("prlimit64", _PID), of("prlimit64", 1)) == (
    _ALLOWED,
    _ALLOWED,
    _EPERM,
  )
  assert of(5000) == _ALLOWED


_THREAD = 0x3D0F00  # the flags with which libc makes one
_PRIVATE, _SHARED, _ANONYMOUS, _HUGE = 2, 1, 0x20, 0x40000


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize(
  ("call", "allowed", "refused"),
  [
    # (family, type)
    ("socketpair", [(1, 1), (1, 0x80801)], [(1, 2), (1, 3), (1, 5), (1, 0x80802), (30, 1), (2, 1)]),
    # (descriptor, buffer, length, flags, address, its length)
    ("sendto", [(3, 9, 1, 0, 0, 0)], [(3, 9, 1, 0, 9, 5), (3, 9, 1, 0, 1 << 32, 5)]),
    ("sendmsg", [], [(3,)]),
    ("sendmmsg", [], [(3,)]),
    ("connect", [], [(3,)]),
    ("bind", [], [(3,)]),
    # (address, length, protection, flags, descriptor)
    (
      "mmap",
      [(0, 9, 3, _PRIVATE | _ANONYMOUS, -1), (0, 9, 3, _PRIVATE, 3), (0, 9, 3, _SHARED, 3)],
      [
        (0, 9, 3, _SHARED | _ANONYMOUS, -1),
        (0, 9, 3, _SHARED | _ANONYMOUS | 0x8000, -1),
        (0, 9, 3, _PRIVATE | _ANONYMOUS | _HUGE, -1),
        (0, 9, 3, _SHARED | _HUGE, 3),
      ],
    ),
    ("clone", [(17,), (_THREAD,), (0x4111,)], [(_THREAD & ~0x400,)]),
    # (descriptor, command)
    ("fcntl", [(3, 1), (3, 4), (3, 6), (3, 1030)], [(3, 1024), (3, 1026), (3, 1031)]),
    # (descriptor, command): FIOSETOWN and SIOCSPGRP send signals to any process
    ("ioctl", [(3, 0x5401), (3, 0x5421), (3, 0x8A00)], [(3, 0x8901), (3, 0x8902), (3, 0x8912)]),
    ("landlock_create_ruleset", [], [()]),
    ("setxattr", [], [()]),
    ("inotify_init1", [], [()]),
  ],
)
def test_calls_that_hide_memory_or_files_or_reach_a_path_are_refused_on_all_machines(
  machine: str, call: str, allowed: list[tuple[int, ...]], refused: list[tuple[int, ...]]
) -> None:
  for granted in (False, True):
    names = ("own_pid_namespace", "own_user", "signals_scoped", "files_guarded")
    walls = dict.fromkeys(names, granted)
    for arguments in allowed:
      assert outcome(machine, call, *arguments, **walls) == _ALLOWED, arguments
    for arguments in refused:
      assert outcome(machine, call, *arguments, **walls) == _EPERM, arguments
    for copy in ("sendfile", "splice", "tee", "vmsplice"):
      assert outcome(machine, copy, **walls) == _ENOSYS


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_signals_go_to_itself_only_unless_another_wall_scopes_them(machine: str) -> None:
  for target, alone in (
    (_PID, _ALLOWED),
    (0, _ALLOWED),
    (-_PID, _ALLOWED),
    (-1, _EPERM),
    (1, _EPERM),
  ):
    assert outcome(machine, "kill", target) == alone, target
    assert outcome(machine, "kill", target, signals_scoped=True) == _ALLOWED
    assert outcome(machine, "kill", target, own_pid_namespace=True) == _ALLOWED
  for name in ("tkill", "pidfd_send_signal"):
    assert outcome(machine, name, _PID) == _EPERM
    assert outcome(machine, name, _PID, signals_scoped=True) == _ALLOWED
  assert outcome(machine, "fcntl", 3, 8) == _EPERM  # F_SETOWN
  assert outcome(machine, "fcntl", 3, 4) == _ALLOWED
  # Neither Landlock nor a namespace, whose pid 1 is the watcher, keeps from scheduling others.
  walls = {"signals_scoped": True, "own_pid_namespace": True}
  assert outcome(machine, "sched_setaffinity", 1, **walls) == _EPERM
  assert outcome(machine, "sched_setaffinity", 1, own_user=True) == _ALLOWED


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_changes_of_files_are_refused_where_nothing_else_guards_them(machine: str) -> None:
  assert outcome(machine, "fchmodat") == _EPERM
  assert outcome(machine, "utimensat") == _DONE  # as if it had been done
  assert outcome(machine, "fchmodat", files_guarded=True) == _ALLOWED
  assert outcome(machine, "utimensat", files_guarded=True) == _ALLOWED


def test_x32_calls_do_not_slip_past_the_table() -> None:
  assert outcome("x86_64", 0x40000000 | 41) == _ENOSYS


def test_tables_name_each_call_once_an_architecture() -> None:
  for column in (0, 1):
    numbers = [n[column] for n in jail._NUMBERS.values() if n[column] >= 0]
    assert len(numbers) == len(set(numbers))
  assert jail.seccomp_known() == (platform.machine() in jail._ARCHITECTURES)
