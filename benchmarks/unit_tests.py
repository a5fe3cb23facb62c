r"""Verdicts of the unit-test verifier: time of one, and how many a second.

  python benchmarks/unit_tests.py
  python benchmarks/unit_tests.py --tasks=64 --concurrency=8

Generated functions with 8 tests each, judged with their reference and with code that never ends.
A first verdict also runs the tests without code, to learn what they ask; "first" and "later" tell
these apart. "fork" is the sandbox's own time for a program that does nothing. Wall seconds.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from absl import app, flags

from agentjax.adapters.unit_tests.scorer import UnitTestConfig, UnitTests, UnitTestVerifier
from agentjax.sandbox.interface import PythonScript, run_once
from agentjax.sandbox.process import ProcessSandbox
from agentjax.worlds.code.function_tasks import FunctionTaskConfig, function_tasks

_TASKS = flags.DEFINE_integer("tasks", 32, "Tasks.")
_CONCURRENCY = flags.DEFINE_integer("concurrency", 4, "Verdicts at once.")


async def _measure() -> None:
  config = UnitTestConfig()
  sandbox = ProcessSandbox(config.sandbox)
  verifier = UnitTestVerifier(sandbox, config)
  tasks = function_tasks(FunctionTaskConfig(), train_size=_TASKS.value, test_size=0, seed=0).train
  await sandbox.start()
  alone = [(await run_once(sandbox, PythonScript("pass"))).seconds for _ in range(32)]
  print(f"fork: median {1000 * statistics.median(alone):.1f} ms")

  async def judge(code: str, tests: UnitTests) -> float:
    start = time.perf_counter()
    await verifier.verify({"solution.py": code}, tests)
    return time.perf_counter() - start

  pairs = [(t.answer, UnitTests.from_metadata(t.metadata["unit_tests"])) for t in tasks]
  for name in ("first", "later"):
    seconds = [await judge(*pair) for pair in pairs]
    print(f"{name}, one at a time: median {1000 * statistics.median(seconds):.1f} ms")
  turn = asyncio.Semaphore(_CONCURRENCY.value)

  async def bounded(code: str, tests: UnitTests) -> float:
    async with turn:
      return await judge(code, tests)

  for name, code in (("reference", None), ("endless", "def solve(n):\n  while True: pass")):
    chosen = pairs if code is None else [(code, tests) for _, tests in pairs[:4]]
    start = time.perf_counter()
    await asyncio.gather(*(bounded(*pair) for pair in chosen))
    rate = len(chosen) / (time.perf_counter() - start)
    print(f"{name}, {_CONCURRENCY.value} at once: {rate:.1f} verdicts/s")
  await verifier.close()


def main(argv: list[str]) -> None:
  del argv
  asyncio.run(_measure())


if __name__ == "__main__":
  app.run(main)
