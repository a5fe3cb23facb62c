r"""Time of one Python snippet in the embedded sandbox, beside a fresh interpreter and bubblewrap.

  python benchmarks/sandbox.py [--runs=200] [--concurrency=2]

Rounds are interleaved: each runs the same snippet (NumPy imported, one product) ten times each way,
so that whatever else the machine does meets all alike. Printed are the median and the 95th
percentile of the wall time, and the CPU time of a run with all processes that it took, in
milliseconds; then runs a second with ``concurrency`` at once. A cell of a session meets an
interpreter that is kept.
Bubblewrap (``bwrap``) is left out where it is not installed or may not make namespaces.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

from absl import app, flags

from agentjax.sandbox import (
  ProcessSandbox,
  ProcessSandboxConfig,
  PythonCell,
  RunStatus,
  jail,
  run_once,
)

_RUNS = flags.DEFINE_integer("runs", 200, "rounds, and runs when several are made at once")
_CONCURRENCY = flags.DEFINE_integer("concurrency", 2, "runs at once in the second part")

_SNIPPET = "import numpy as np\nprint(int((np.arange(9).reshape(3, 3) @ np.eye(3)).sum()))"
_EXPECTED = "36\n"
_BLOCK = 10  # runs of one way in a row
_SETTLE_SECONDS = 0.1  # in which all is made ready for further runs; its CPU time counts
Way = Callable[[], Awaitable[str]]


def main(argv: list[str]) -> None:
  del argv
  asyncio.run(_compare())


async def _compare() -> None:
  config = ProcessSandboxConfig(
    concurrency=max(_CONCURRENCY.value, 1), packages=("numpy",), allow_unisolated=True
  )
  jail.adopt_orphans()  # bubblewrap leaves its child to whoever reaps, and with it the time it took
  sandbox = ProcessSandbox(config)
  protections = await sandbox.start()
  box = await sandbox.create()
  session = await box.session()

  async def embedded() -> str:
    result = await run_once(sandbox, PythonCell(_SNIPPET))
    assert result.status is RunStatus.OK, result
    return result.stdout

  async def cell() -> str:
    return (await session.run(_SNIPPET)).stdout

  ways: dict[str, Way] = {
    "embedded sandbox": embedded,
    "cell of a session": cell,
    "python -I": lambda: _child([sys.executable, "-I", "-c", _SNIPPET]),
  }
  if (wrapped := await _bubblewrap()) is not None:
    ways["bubblewrap, python -I"] = wrapped
  print(f"protections: {', '.join(sorted(protections))}; {os.cpu_count()} cores")
  print(f"load before: {os.getloadavg()[0]:.1f}\n")
  print(f"{'one at a time':24} {'p50 ms':>8} {'p95 ms':>8} {'CPU ms':>8}")
  seconds: dict[str, list[float]] = {name: [] for name in ways}
  cpu = dict.fromkeys(ways, 0.0)
  for n in range(1 + -(-_RUNS.value // _BLOCK)):
    for name, way in ways.items():
      before = _cpu_seconds(sandbox)
      for _ in range(_BLOCK):
        start = time.perf_counter()
        output = await way()
        if n:  # the first round loads what stays
          seconds[name].append(time.perf_counter() - start)
        assert output == _EXPECTED, (name, output)
      await _settle()
      cpu[name] += _cpu_seconds(sandbox) - before if n else 0.0
  for name, times in seconds.items():
    times.sort()
    p50, p95 = times[len(times) // 2], times[int(len(times) * 0.95)]
    print(f"{name:24} {1e3 * p50:8.2f} {1e3 * p95:8.2f} {1e3 * cpu[name] / len(times):8.2f}")
  print(f"\n{f'{_CONCURRENCY.value} at once':24} {'runs/s':>8} {'CPU ms':>8}")
  for name, way in ways.items():
    if name == "cell of a session":
      continue
    before, start = _cpu_seconds(sandbox), time.perf_counter()
    turns = asyncio.Semaphore(_CONCURRENCY.value)
    await asyncio.gather(*(_in_turn(turns, way) for _ in range(_RUNS.value)))
    took = time.perf_counter() - start
    await _settle()
    used = _cpu_seconds(sandbox) - before
    print(f"{name:24} {_RUNS.value / took:8.1f} {1e3 * used / _RUNS.value:8.2f}")
  await sandbox.close()


async def _in_turn(turns: asyncio.Semaphore, way: Way) -> None:
  async with turns:
    await way()


async def _settle() -> None:
  """Waits until all is made ready for further runs, and takes in what was left to this process."""
  await asyncio.sleep(_SETTLE_SECONDS)
  with open(f"/proc/self/task/{os.getpid()}/children") as file:
    for pid in file.read().split():
      os.waitpid(int(pid), os.WNOHANG)


async def _child(command: list[str]) -> str:
  process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
  output, _ = await process.communicate()
  assert process.returncode == 0, command
  return output.decode()


async def _bubblewrap() -> Way | None:
  """The snippet under bwrap with new namespaces and read-only system; None where it cannot run."""
  program = shutil.which("bwrap")
  if program is None:
    print("bubblewrap is not installed (Debian: apt-get install bubblewrap); left out")
    return None
  readable = [p for p in ("/usr", "/lib", "/lib64", "/bin", sys.prefix, sys.base_prefix)
              if os.path.exists(p)]  # fmt: skip
  binds = [part for path in readable for part in ("--ro-bind", path, path)]
  command = [
      program, "--unshare-all", "--die-with-parent", "--new-session", *binds, "--dev", "/dev",
      "--proc", "/proc", "--tmpfs", "/tmp", "--chdir", "/tmp", sys.executable, "-I", "-c", _SNIPPET,
  ]  # fmt: skip
  try:
    await _child(command)
  except AssertionError:
    print("bubblewrap is installed but may not make namespaces here; left out")
    return None
  return lambda: _child(command)


def _cpu_seconds(sandbox: ProcessSandbox) -> float:
  """CPU time of this process, of children that it waited for, and of the sandbox's processes."""
  usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
  assert sandbox._zygote is not None
  ticks, family = 0, [sandbox._zygote._process.pid]
  for pid in family:  # grows while it is walked
    try:
      with open(f"/proc/{pid}/stat") as file:
        ticks += sum(int(v) for v in file.read().rpartition(")")[2].split()[11:15])
      with open(f"/proc/{pid}/task/{pid}/children") as file:
        family += [int(child) for child in file.read().split()]
    except OSError:
      continue  # it ended meanwhile, and its parent has its time
  own = sum(u.ru_utime + u.ru_stime for u in usage)
  return own + ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
  app.run(main)
