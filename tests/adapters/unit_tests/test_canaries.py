"""Every canary is paid by a runner that trusts it, of those in ``trusting_runners``.

A canary that no runner pays would say nothing where the verifier gives it 0.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import pathlib
import subprocess
import sys
import sysconfig

import pytest

from agentjax.adapters.unit_tests.canaries import canaries
from agentjax.sandbox.interface import PythonScript, SandboxLimits, run_once
from agentjax.sandbox.process import ProcessSandbox, ProcessSandboxConfig
from tests.adapters.unit_tests import trusting_runners
from tests.sandbox.machines import NoMachine, _interpreter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

RUNNERS = {name for name, value in vars(trusting_runners).items() if inspect.isfunction(value)} - {
  "python", "read", "write"
}  # fmt: skip
TESTS = "assert f(3) == 9\nassert f(4) == 16"
THROUGH_MAP = "assert all(map(lambda x: f(x) == x * x, (3, 4)))"
ASYNC = """
import asyncio
class Cases:
  given = iter((3, 4))
  def __aiter__(self): return self
  async def __anext__(self):
    for x in self.given: return f(x) == x * x
    raise StopAsyncIteration
async def check():
  async for right in Cases(): assert right
asyncio.run(check())
"""
CLOSED = """
def check():
  try: yield
  finally: assert f(3) == 9
case = check()
next(case)
case.close()
"""
RIGHT, WRONG = "def f(x): return x * x", "def f(x): return None"


@dataclasses.dataclass(frozen=True)
class Paid:
  """A runner that pays a canary, with its tests and a right program where they are its own."""

  runner: str
  tests: str = TESTS
  right: str = RIGHT


PAID_BY = {
  "exit_at_import": Paid("exit_code"),
  "os_exit_at_import": Paid("exit_code"),
  "system_exit_at_import": Paid("exit_code"),
  "exit_in_call": Paid("exit_code"),
  "os_exit_in_call": Paid("exit_code"),
  "always_equal": Paid("exit_code"),
  "always_equal_number": Paid("exit_code", "assert isinstance(f(3), int) and f(3) == 9"),
  "always_equal_list": Paid(
    "exit_code", "assert isinstance(f(3), list) and f(3) == [9]", "def f(x): return [x * x]"
  ),
  "always_in_sets": Paid("exit_code", "assert f(3) in {9}"),
  "not_implemented": Paid("exit_code", "assert f(3)"),
  "stop_iteration": Paid("exit_code", THROUGH_MAP),
  "stop_iteration_by_another_name": Paid("exit_code", THROUGH_MAP),
  "stop_async_iteration": Paid("exit_code", ASYNC),
  "generator_exit": Paid("exit_code", CLOSED),
  "interrupt": Paid("excused_timeouts"),
  "skip_test": Paid("unittest_in_process"),
  "endless_answer": Paid("excused_timeouts", "assert sum(f(3)) == 9", "def f(x): return [x] * x"),
  "test_files": Paid("used_folder"),
  "patched_test_classes": Paid("unittest_in_process"),
  "patched_builtins": Paid("all_in_process"),
  "reward_file": Paid("reward_file"),
  "daemon": Paid("reward_file_read_later"),
  "printed_verdict": Paid("stdout"),
  "forged_answers": Paid("pipe"),
  "killed_driver": Paid("no_news_is_good_news"),
  "reads_the_tests": Paid("tests_in_the_folder"),
  "frames_and_objects": Paid("tests_in_memory"),
}
ALSO = [("test_files", Paid("used_folder_with_pytest"))]
CASES = [*PAID_BY.items(), *ALSO]


@pytest.fixture(scope="module")
def runs():
  """Whether a runner pays a program, for many at once."""
  sandbox = ProcessSandbox(ProcessSandboxConfig(packages=("pytest",)))

  async def one(paid, code):
    files = {"solution.py": code, "tests.py": paid.tests, "runner": paid.runner}
    files = {name: text.encode() for name, text in files.items()}
    limits = SandboxLimits(wall_seconds=30.0)
    program = PythonScript(inspect.getsource(trusting_runners))
    result = await run_once(sandbox, program, files=files, limits=limits)
    (word,) = {"PAID", "NOT"} & set(result.stdout.split("\n"))
    return word == "PAID"

  async def work(cases):
    try:
      return [await one(paid, code) for paid, code in cases]
    finally:
      await sandbox.close()

  return lambda cases: asyncio.run(work(cases))


def test_every_canary_is_paid_by_a_runner_that_trusts_it(runs):
  programs = canaries(("f",))
  assert set(PAID_BY) == set(programs)
  paid = runs([(by, programs[name]) for name, by in CASES])
  assert [name for (name, _), value in zip(CASES, paid, strict=True) if not value] == []


@pytest.mark.slow
def test_these_runners_tell_right_from_wrong_where_nobody_cheats(runs):
  used = list(dict.fromkeys(by for _, by in CASES))
  assert {by.runner for by in used} == RUNNERS
  paid = runs([(by, code) for by in used for code in (by.right, WRONG)])
  assert paid == [True, False] * len(used)


def passed_as_user(cases):
  """How many tests each program passes where the verifier runs as an ordinary user."""
  try:
    interpreter = _interpreter("user")
  except NoMachine as reason:
    pytest.skip(str(reason))
  tag = sysconfig.get_config_var("SOABI")  # it shares this Python's packages
  asked = [interpreter, "-c", "import sysconfig; print(sysconfig.get_config_var('SOABI'))"]
  if subprocess.check_output(asked, text=True).strip() != tag:
    pytest.skip(f"no {tag} that an ordinary user can read")
  script = pathlib.Path(__file__).with_name("as_user.py")
  done = subprocess.run(
    [interpreter, "-B", str(script), sysconfig.get_paths()["purelib"]],
    input=json.dumps(cases), capture_output=True, text=True, cwd="/", timeout=300, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  report = json.loads(done.stdout)
  assert report["uid"] != 0
  assert {"limits", "descendants", "network", "processes", "filesystem"} <= set(
    report["protections"]
  )
  return report["passed"]


def canary_cases(names):
  programs = canaries(("f",))
  return {name: [programs[name], PAID_BY[name].tests] for name in names}


def test_the_verifier_as_an_ordinary_user_tells_right_from_wrong_and_from_cheats():
  names = ("exit_at_import", "always_equal", "always_equal_list", "endless_answer", "test_files",
           "daemon", "killed_driver")  # fmt: skip
  own = {"right": [RIGHT, TESTS], "wrong": [WRONG, TESTS]}
  passed = passed_as_user({**own, **canary_cases(names)})
  assert passed == {"right": 2, "wrong": 0, **dict.fromkeys(names, 0)}


@pytest.mark.slow
def test_the_verifier_as_an_ordinary_user_pays_no_canary():
  assert set(passed_as_user(canary_cases(PAID_BY)).values()) == {0}
