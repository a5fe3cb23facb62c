"""The embedded sandbox as its callers use it."""

from __future__ import annotations

import asyncio
import os
import signal
import site
import subprocess
import uuid
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from agentjax.config import ConfigError
from agentjax.places import Places
from agentjax.sandbox import (
  Command,
  ProcessSandbox,
  ProcessSandboxConfig,
  Program,
  PythonCell,
  PythonScript,
  RunStatus,
  SandboxError,
  SandboxLimits,
  SandboxResult,
  jail,
  run_once,
)
from agentjax.sandbox.measure import children
from tests.sandbox.machines import NOBODY, Machine
from tests.sandbox.process_table import alive

QUICK = SandboxLimits(wall_seconds=5.0)


def use(body: Callable[[ProcessSandbox], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
  """Runs ``body`` with a sandbox that is closed afterwards."""

  async def main() -> Any:
    sandbox = ProcessSandbox(ProcessSandboxConfig(**{"concurrency": 2, **settings}))
    try:
      return await body(sandbox)
    finally:
      await sandbox.close()

  return asyncio.run(main())


def boxes(sandbox: ProcessSandbox) -> tuple[list[str], int]:
  """What there is of boxes: names on the machine, and descriptors of this process."""
  assert sandbox._zygote is not None
  return os.listdir(sandbox._zygote.directory), len(os.listdir("/proc/self/fd"))


Run = Callable[..., SandboxResult]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
  """Runs one program; the tests of this module share the sandbox."""
  sandbox = ProcessSandbox(ProcessSandboxConfig(concurrency=2))

  def run_program(program: Program, **arguments: Any) -> SandboxResult:
    return asyncio.run(run_once(sandbox, program, **{"limits": QUICK, **arguments}))

  yield run_program
  asyncio.run(sandbox.close())


def test_cell_shows_its_last_value_and_a_script_does_not(run: Run) -> None:
  source = "x = 6\nprint('x')\nx * 7"
  assert run(PythonCell(source)).stdout == "x\n42\n"
  assert run(PythonScript(source)).stdout == "x\n"
  assert run(PythonCell("None")).stdout == ""
  assert run(PythonCell("")).status is RunStatus.OK


@pytest.mark.parametrize(
  ("source", "exit_code", "message"),
  [
    ("raise ValueError('why')", 1, "ValueError: why"),
    ("def f(:", 1, "SyntaxError"),
    ("import sys; sys.exit(3)", 3, ""),
    ("exit('gone')", 1, "gone"),
    ("import os; os._exit(7)", 7, ""),
    ("def f(): f()\nf()", 1, "RecursionError"),
    ("x = 'a\0b'", 1, "null bytes"),
    ("raise BaseException('deep')", 1, "deep"),
  ],
)
def test_failures_come_back_as_exit_code_and_traceback(
  run: Run, source: str, exit_code: int, message: str
) -> None:
  result = run(PythonScript(source))
  assert (result.status, result.exit_code) == (RunStatus.ERROR, exit_code)
  assert message in result.stderr


def test_traceback_shows_the_programs_own_lines_only(run: Run) -> None:
  stderr = run(PythonScript("def f():\n  return 1 / 0\nf()")).stderr
  assert stderr.count("File ") == 2
  assert "return 1 / 0" in stderr
  assert "zygote" not in stderr


def test_future_flags_and_main_block_work_as_in_a_file(run: Run) -> None:
  source = (
    "from __future__ import annotations\ndef f(x: undefined): return 'ran'\n"
    "if __name__ == '__main__': print(f(1))"
  )
  assert run(PythonScript(source)).stdout == "ran\n"
  assert "NameError" in run(PythonScript("def f(x: undefined): pass")).stderr


def test_threads_and_atexit_functions_finish_before_the_end(run: Run) -> None:
  source = (
    "import atexit, threading, time\natexit.register(print, 'last')\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()"
  )
  assert run(PythonScript(source)).stdout == "thread\nlast\n"


def test_same_seed_same_random_numbers_and_same_hashes(run: Run) -> None:
  source = "import random\nprint(random.random(), hash('a'), list({'x', 'y', 'z'}))"
  first, second = run(PythonScript(source, seed=5)), run(PythonScript(source, seed=5))
  other = run(PythonScript(source, seed=6))
  assert first.stdout == second.stdout
  assert first.stdout.split()[0] != other.stdout.split()[0]


def test_invalid_utf8_survives_as_escapes(run: Run) -> None:
  source = "import sys\nsys.stdout.buffer.write('é'.encode() + b'\\xff\\x00\\x1b[31m')"
  result = run(PythonScript(source))
  assert result.stdout == "é\\xff\x00\x1b[31m"
  assert run(PythonScript("print('\\udcff \\ud800')")).status is RunStatus.ERROR


def test_long_output_keeps_exactly_its_head_and_tail(run: Run) -> None:
  limits = SandboxLimits(wall_seconds=5.0, output_bytes=11)
  result = run(PythonScript("print('0123456789' * 10, end='')"), limits=limits)
  assert result.stdout == "012345\n[... 89 bytes left out ...]\n56789"
  assert (result.status, result.truncated) == (RunStatus.OK, True)
  exact = run(PythonScript("print('01234567890', end='')"), limits=limits)
  assert (exact.stdout, exact.truncated) == ("01234567890", False)


def test_cpu_time_is_bounded_apart_from_wall_time(run: Run) -> None:
  limits = SandboxLimits(wall_seconds=30.0, cpu_seconds=1.0)
  result = run(PythonScript("while True: pass"), limits=limits)
  assert result.status is RunStatus.TIMEOUT
  assert "CPU" in result.detail
  assert result.seconds < 20.0


def test_stdin_and_files_reach_the_program(run: Run) -> None:
  source = (
    "import sys, helper\nprint(len(sys.stdin.read()), helper.value, open('data/in.txt').read())"
  )
  result = run(
    PythonScript(source),
    stdin=b"from stdin" * 20_000,
    files={"helper.py": b"value = 3", "data/in.txt": b"from a file"},
  )
  assert result.stdout == "200000 3 from a file\n"


def test_commands_run_without_a_shell_and_a_missing_one_is_an_error(run: Run) -> None:
  assert run(Command(("echo", "$HOME", "a b"))).stdout == "$HOME a b\n"
  missing = run(Command(("no-such-program",)))
  assert (missing.status, missing.exit_code) == (RunStatus.ERROR, 127)
  assert "No such file" in missing.stderr
  nested = run(Command(("python3", "-c", "print(sum(range(10)))")))
  assert nested.stdout == "45\n"


_ORDINARY = {
  "copies": "import shutil\nopen('a', 'wb').write(b'x' * 10**6)\n"
  "print(shutil.copyfile('a', 'b'), len(open('b', 'rb').read()))",
  "a database": "import sqlite3\nd = sqlite3.connect('d')\nd.execute('pragma journal_mode=wal')\n"
  "d.execute('create table t as select 3 as x')\nprint(*d.execute('select x from t'))",
  "a mapped file": "import mmap\nf = open('a', 'w+b')\nf.truncate(99)\n"
  "m = mmap.mmap(f.fileno(), 0)\nm[:2] = b'ab'\nprint(f.read(2))",
  "a process and a pipe": "import multiprocessing as m\na, b = m.Pipe()\n"
  "p = m.Process(target=b.send, args=([1] * 9,))\np.start()\nprint(len(a.recv()), p.join())",
  "a loop with a process": "import asyncio\nasync def f():\n"
  "  p = await asyncio.create_subprocess_exec('cat', stdin=-1, stdout=-1)\n"
  "  return await p.communicate(b'fed')\nprint(asyncio.run(f()))",
  "threads": "from concurrent.futures import ThreadPoolExecutor as T\n"
  "print(*T(4).map(abs, range(-3, 0)))",
  "a shell": "import subprocess\nprint(subprocess.run('head -c 9 /dev/zero > z; cp z y; cat y z |"
  " wc -c', shell=True, capture_output=True).stdout)",
}
_ORDINARY_OUTPUT = "b 1000000|(3,)|b'ab'|9 None|(b'fed', None)|3 2 1|b'18\\n'".split("|")


@pytest.mark.parametrize("machine", ["native", "user", "container"])
def test_ordinary_programs_do_not_meet_the_walls(start_machine: Any, machine: str) -> None:
  granted = start_machine(machine)
  for (name, code), output in zip(_ORDINARY.items(), _ORDINARY_OUTPUT, strict=True):
    result = granted.run(code)
    assert (result["status"], result["stdout"].strip()) == ("ok", output), (name, result)
  granted.close()


def test_a_program_cannot_shut_its_box_to_later_runs_and_to_us() -> None:
  async def body(sandbox: ProcessSandbox) -> None:
    box = await sandbox.create()
    shut = PythonCell("import os\nopen('f', 'w').write('kept')\nos.chmod('.', 0)")
    for read in (
      lambda: box.exec(PythonCell("print(open('f').read())"), limits=QUICK),
      lambda: box.download("f"),
      lambda: box.upload("g", b""),
      lambda: box.snapshot(),
    ):
      assert (await box.exec(shut, limits=QUICK)).status in (RunStatus.OK, RunStatus.ERROR)
      seen = await read()
      assert not isinstance(seen, SandboxResult) or seen.stdout == "kept\n", seen

  use(body)


@pytest.mark.parametrize("disk", ["memory", "directory"])
def test_box_keeps_files_between_runs_and_is_wiped_at_its_end(disk: str) -> None:
  async def body(sandbox: ProcessSandbox) -> None:
    await sandbox.start()
    before = boxes(sandbox)
    box = await sandbox.create()
    hostile = (
      "import os\nopen('kept', 'w').write('yes')\nos.mkdir('locked')\nopen('locked/x', 'w')\n"
      "os.chmod('locked', 0)\nos.symlink('/', 'root')\n"
      "for _ in range(1050):\n  os.mkdir('d')\n  os.chdir('d')"
    )
    assert (await box.exec(PythonScript(hostile), limits=QUICK)).status is RunStatus.OK
    result = await box.exec(PythonScript("print(open('kept').read())"), limits=QUICK)
    assert result.stdout == "yes\n"
    await box.close()
    await box.close()
    assert boxes(sandbox) == before
    with pytest.raises(SandboxError, match="closed"):
      await box.exec(PythonScript("1"))

  use(body, disk=disk)


def test_one_run_never_sees_the_files_of_another() -> None:
  async def body(sandbox: ProcessSandbox) -> None:
    one, two = await sandbox.create(), await sandbox.create()
    await one.upload("secret", b"one")
    result = await two.exec(
      PythonScript(f"import os\nprint(os.listdir('.'))\nopen({one._root()!r} + '/secret')"),
      limits=QUICK,
    )
    assert result.stdout == "[]\n"
    assert "PermissionError" in result.stderr or "FileNotFoundError" in result.stderr

  use(body)
  use(body, disk="directory")


def test_snapshot_opens_in_another_box_with_the_same_files() -> None:
  async def body(sandbox: ProcessSandbox) -> None:
    box = await sandbox.create()
    source = (
      "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').write('deep')\nopen('d', 'w').write('x')"
    )
    await box.exec(PythonScript(source), limits=QUICK)
    state = await box.snapshot()
    assert state == await box.snapshot()
    await box.close()
    copy = await sandbox.create(state)
    result = await copy.exec(PythonScript("open('d', 'a').write(open('a/b/c').read())"))
    assert result.status is RunStatus.OK, result
    assert await copy.download("d") == b"xdeep"
    with pytest.raises(SandboxError, match="snapshot"):
      await sandbox.create(b"not a snapshot")

  use(body)


def test_links_left_by_a_program_are_never_followed(tmp_path: Any) -> None:
  outside = tmp_path / "outside"
  outside.write_text("untouched")

  async def body(sandbox: ProcessSandbox) -> None:
    box = await sandbox.create()
    source = (
      f"import os\nos.symlink({str(outside)!r}, 'f')\n"
      f"os.symlink({str(tmp_path)!r}, 'd')\nos.mkfifo('p')"
    )
    await box.exec(PythonScript(source), limits=QUICK)
    for path in ("f", "d/outside", "p", "missing"):
      with pytest.raises(SandboxError):
        await box.download(path)
    await box.upload("f", b"mine")
    assert await box.download("f") == b"mine"
    with pytest.raises(SandboxError):
      await box.upload("d/outside", b"overwritten")
    assert outside.read_text() == "untouched"

  use(body)


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", ".", "a\0b"])
def test_paths_that_leave_the_box_are_refused(path: str) -> None:
  async def body(sandbox: ProcessSandbox) -> None:
    box = await sandbox.create()
    with pytest.raises(SandboxError, match="not a path inside"):
      await box.upload(path, b"x")

  use(body)


def test_download_refuses_what_is_larger_than_asked_for() -> None:
  async def body(sandbox: ProcessSandbox) -> None:
    box = await sandbox.create()
    await box.upload("big", bytes(100))
    assert len(await box.download("big", max_bytes=100)) == 100
    with pytest.raises(SandboxError, match="max_bytes"):
      await box.download("big", max_bytes=99)

  use(body)


def test_cancelled_run_is_dead_and_its_directory_gone_when_the_caller_hears_of_it() -> None:
  marker = f"{uuid.uuid4().int % 10**9 + 10**9}"

  async def body(sandbox: ProcessSandbox) -> None:
    await sandbox.start()
    before = boxes(sandbox)[0]
    task = asyncio.create_task(run_once(sandbox, Command(("sleep", marker))))
    while not alive(f"sleep\0{marker}"):
      await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    assert not alive(f"sleep\0{marker}")
    assert boxes(sandbox)[0] == before
    assert (await run_once(sandbox, PythonCell("1"), limits=QUICK)).stdout == "1\n"

  use(body)


def test_closing_a_box_ends_its_run() -> None:
  async def body(sandbox: ProcessSandbox) -> SandboxResult:
    box = await sandbox.create()
    task = asyncio.create_task(box.exec(PythonScript("while True: pass")))
    await asyncio.sleep(0.3)
    await box.close()
    return await task

  result = use(body)
  assert result.status is RunStatus.KILLED
  assert result.seconds < 5.0


def test_many_runs_at_once_keep_their_own_results() -> None:
  async def body(sandbox: ProcessSandbox) -> list[SandboxResult]:
    return await asyncio.gather(
      *(run_once(sandbox, PythonCell(f"print({i})\n{i} * {i}"), limits=QUICK) for i in range(60))
    )

  results = use(body, concurrency=3)
  assert [r.stdout for r in results] == [f"{i}\n{i * i}\n" for i in range(60)]


def test_waiting_for_a_place_counts_neither_as_time_nor_as_timeout() -> None:
  limits = SandboxLimits(wall_seconds=0.8)

  async def body(sandbox: ProcessSandbox) -> list[SandboxResult]:
    program = PythonCell("import time\ntime.sleep(0.4)")
    return await asyncio.gather(*(run_once(sandbox, program, limits=limits) for _ in range(3)))

  assert {r.status for r in use(body, concurrency=1)} == {RunStatus.OK}
  full = use(body, concurrency=1, queue_seconds=0.2)
  assert sorted(r.status for r in full) == ["infra_error", "infra_error", "ok"]
  assert "concurrency" in [r for r in full if r.status is RunStatus.INFRA_ERROR][0].detail


def test_killed_interpreter_is_an_infrastructure_error_once_and_then_replaced() -> None:
  async def body(sandbox: ProcessSandbox) -> None:
    await sandbox.start()
    assert sandbox._zygote is not None
    os.kill(sandbox._zygote._process.pid, signal.SIGKILL)
    statuses = []
    for _ in range(3):
      statuses.append((await run_once(sandbox, PythonCell("1"), limits=QUICK)).status)
    assert statuses[-1] is RunStatus.OK
    assert set(statuses) <= {RunStatus.OK, RunStatus.INFRA_ERROR}

  use(body)


def test_sandbox_serves_one_event_loop_after_another() -> None:
  sandbox = ProcessSandbox(ProcessSandboxConfig(concurrency=1))

  async def several() -> list[SandboxResult]:
    runs = (run_once(sandbox, PythonCell("1"), limits=QUICK) for _ in range(3))
    return await asyncio.gather(*runs)

  for _ in range(2):
    assert {r.stdout for r in asyncio.run(several())} == {"1\n"}
  asyncio.run(sandbox.close())


def test_close_leaves_no_process_and_no_file() -> None:
  sandbox = ProcessSandbox(ProcessSandboxConfig(concurrency=2))

  async def body() -> tuple[str, int]:
    box = await sandbox.create()
    await box.exec(PythonCell("open('x', 'w')"), limits=QUICK)
    assert sandbox._zygote is not None
    directory, pid = sandbox._zygote.directory, sandbox._zygote._process.pid
    await sandbox.close()
    return directory, pid

  directory, pid = asyncio.run(body())
  assert not os.path.exists(directory)
  assert not alive(directory)  # the directory's name is in the command line of all of them
  assert not os.path.exists(f"/proc/{pid}")


def test_this_process_is_never_forked(monkeypatch: pytest.MonkeyPatch) -> None:
  def refuse() -> int:
    raise AssertionError("forked")

  monkeypatch.setattr(os, "fork", refuse)
  monkeypatch.setattr(os, "forkpty", refuse)
  result = use(lambda sandbox: run_once(sandbox, PythonCell("2"), limits=QUICK))
  assert result.stdout == "2\n"


_GRANTS = """
import sys, types
sys.path.insert(0, sys.argv[1])
import jail
flags = jail.CLONE_NEWPID | jail.CLONE_NEWNET | jail.CLONE_NEWIPC | jail.CLONE_NEWUTS
flags |= jail.CLONE_NEWNS
print(any(jail.holds(lambda: enter(flags)) for enter in (jail.unshare, jail.unshare_as_user)))
"""


@pytest.mark.parametrize("name", ["native", "user"])
def test_a_run_has_a_namespace_of_processes_where_there_can_be_one(
  name: str, start_machine: Callable[..., Machine]
) -> None:
  machine = start_machine(name)
  try:
    folder = os.path.dirname(jail.__file__)
    user: dict[str, Any] = (
      {} if os.geteuid() or name == "native" else {"user": NOBODY, "extra_groups": []}
    )
    code = [machine.process.args[0], "-B", "-c", _GRANTS, folder]
    done = subprocess.run(code, capture_output=True, text=True, check=True, cwd="/", **user)
    ids = machine.run("import os\nos.getpid(), os.getppid()")["stdout"]
    assert (ids == "(2, 1)\n") == (done.stdout == "True\n"), ids
  finally:
    machine.close()


# Finds words of a form in all memory of the process that the C library's heap and Python's are in.
_SCAN = """
import ctypes, gc, os, re
own, found = "own-" + "0123456789abcdef" * 2, set()
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
reader, writer = os.pipe()

def scan(places):
  for place in places:
    # Where nothing is, the kernel refuses to read; this process would die. Words may cross pages.
    if (count := libc.write(writer, ctypes.c_void_p(place), 4096 + 64)) > 0:
      page = os.read(reader, count)
      found.update(re.findall(rb"(?:source|stdin|out|err|file|own)-[0-9a-f]{32}", page))

top = libc.sbrk(0) >> 12 << 12
scan(range(top - (16 << 20), top, 1 << 12))  # first, before it is used again
objects = gc.get_objects()
near = {id(x) >> 20 for o in objects for x in (o, *gc.get_referents(o))}
for block in {n + d for n in near for d in (-1, 0, 1)}:
  scan(range(block << 20, (block + 1) << 20, 1 << 12))
print(*(word.decode() for word in found))
"""


@pytest.mark.parametrize("name", ["native", "container", "user"])
def test_a_program_finds_nothing_of_an_earlier_run_in_its_memory(
  name: str, start_machine: Callable[..., Machine]
) -> None:
  machine = start_machine(name, {"concurrency": 1})
  try:
    words = {k: f"{k}-{uuid.uuid4().hex}" for k in ("source", "stdin", "out", "err", "file")}
    code = (
      f"word = {words['source']!r}\nimport sys\nprint({words['out']!r} * 900)\n"
      f"print({words['err']!r}, sys.stdin.read(), file=sys.stderr)\n"
      f"open({words['file']!r}, 'w').close()"
    )
    for _ in range(4):  # as many watchers as there can be, and more
      earlier = machine.ask({"runs": [{"code": code, "stdin": words["stdin"]}]})[0]
      assert words["stdin"] in earlier["stderr"], earlier
    for _ in range(4):
      found = machine.run(_SCAN, wall_seconds=30.0, cpu_seconds=20.0)
      assert found["status"] == "ok", found
      assert found["stdout"].split() == ["own-" + "0123456789abcdef" * 2], found
  finally:
    machine.close()


def test_watchers_serve_run_after_run_and_are_replaced_after_one_that_was_ended() -> None:
  async def body(sandbox: ProcessSandbox) -> list[set[int]]:
    await sandbox.start()
    assert sandbox._zygote is not None
    own_disks = "disk_in_memory" in sandbox.mechanisms
    keeper = set(children(sandbox._zygote._process.pid)[:own_disks])
    seen: list[set[int]] = []
    for source in ("1",) * 12 + ("import time; time.sleep(9)",) * 4:
      limits = SandboxLimits(wall_seconds=5.0 if source == "1" else 0.3)
      await run_once(sandbox, PythonCell(source), limits=limits)
      seen.append(set(children(sandbox._zygote._process.pid)) - keeper)
    return seen

  seen = use(body, concurrency=1)
  assert len(set.union(*seen[:12])) <= 4
  assert len(set.union(*seen[11:])) >= 5  # each of the last four ended one


@pytest.mark.slow
def test_no_more_watchers_stand_by_than_there_is_room_for() -> None:
  """Even where far more run at once than stand by, as if all but a few had yet to tidy up."""

  async def body(sandbox: ProcessSandbox) -> list[int]:
    await sandbox.start()
    assert sandbox._zygote is not None
    sandbox.places = Places(12)
    left = []
    for _ in range(3):
      cells = (run_once(sandbox, PythonCell("1"), limits=QUICK) for _ in range(36))
      assert {result.status for result in await asyncio.gather(*cells)} == {RunStatus.OK}
      await asyncio.sleep(1.5)  # those that ended are reaped within a second
      keeper = "disk_in_memory" in sandbox.mechanisms
      left.append(len(children(sandbox._zygote._process.pid)) - keeper)
    return left

  assert all(2 <= count <= 6 for count in use(body, concurrency=2))


def test_a_package_that_starts_threads_is_refused(tmp_path: Any) -> None:
  (tmp_path / "eager.py").write_text(
    "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
  )
  with pytest.MonkeyPatch.context() as patch, pytest.raises(SandboxError, match="start 1 threads"):
    patch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    use(lambda sandbox: sandbox.start(), packages=("eager",))


def test_packages_asked_for_can_be_imported_and_others_cannot(run: Run) -> None:
  pytest.importorskip("numpy")
  program = PythonCell("import numpy as np\nint(np.arange(5).sum()), np.random.rand() > 0")

  async def body(sandbox: ProcessSandbox) -> SandboxResult:
    return await run_once(sandbox, program, limits=SandboxLimits(wall_seconds=20.0))

  assert "No module named 'numpy'" in run(program).stderr
  assert use(body, packages=("numpy",)).stdout == "(10, True)\n"


def test_package_that_does_not_exist_is_named_at_start() -> None:
  with pytest.raises(SandboxError, match="no_such_package"):
    use(lambda sandbox: sandbox.start(), packages=("no_such_package",))


@pytest.mark.parametrize(
  ("settings", "field"),
  [
    ({"concurrency": 0}, "concurrency"),
    ({"require": ("walls",)}, "require"),
    ({"limits": SandboxLimits(wall_seconds=0.0)}, "limits.wall_seconds"),
    ({"limits": SandboxLimits(output_kill_bytes=1)}, "limits.output_kill_bytes"),
    ({"packages": ["numpy"]}, "packages"),
  ],
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
  with pytest.raises(ConfigError, match=field.replace(".", r"\.")):
    ProcessSandbox(ProcessSandboxConfig(**settings))
