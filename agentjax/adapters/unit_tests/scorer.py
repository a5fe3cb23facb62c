"""Unit tests as a reward that cannot be bought: code and tests never share a process.

    tests ──► box of the tests ── what is f(3)? ──► us ──► box of the code ── f(3) gave 9 ──► us
                    ▲                                                                         │
                    └────────────────────────── f(3) gave 9 ◄─────────────────────────────────┘

The box of the code runs the code and answers calls: a function and arguments go in, a plain value
or the name of an exception comes out. The box of the tests runs the tests against stand-ins, takes
the answers as data and gives the verdict. So the code cannot see the expected values. Its exit
code, output, files, patches and background processes have no effect. An object that equals
everything does not cross, because only exact built-in types do. Code that does not answer fails.

Boxes cannot exchange messages while they run: a test whose call has no answer yet is run again when
the answer is known (``boxed.tests``). A round uses two boxes; a test with one call needs one round.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import importlib.resources
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agentjax.adapters.sandboxes.reports import bounded_json
from agentjax.adapters.unit_tests.boxed.plain import encode
from agentjax.config import NonNegativeInt, PositiveFloat, PositiveInt
from agentjax.faults import FAULT, Boundary, Fault, Owner, fault_of
from agentjax.places import Clock, Places
from agentjax.rewards.graph import Scorer
from agentjax.rewards.scorer_config import ScorerConfig
from agentjax.sandbox.config import DEFAULT, Sandboxes
from agentjax.sandbox.interface import (
  PythonScript,
  RunStatus,
  Sandbox,
  SandboxError,
  SandboxLimits,
  SandboxResult,
  is_healthy,
  run_once,
)
from agentjax.threads import LoopThread
from agentjax.trajectory.record import Reward, Status, Task, Trajectory

Report = dict[str, dict[str, Any]]  # what a driver in a box prints: see ``boxed.forks``

_NOT_ASKED = "it was not asked"
UNIT_TESTS = "unit_tests"  # in the metadata of a task: the tests, as a mapping of UnitTests' fields
SOLUTION = "solution"  # the module that a final answer becomes
_OUT_OF_TIME = "time ran out"  # what ``boxed.forks`` says of a case that its clock has ended
_CPU_OUT = "CPU time ran out"  # and of one that used its CPU time
_REMEMBERED = 4096  # tasks whose first operations are known without a run of their tests
_ANSWER_BYTES = 16 * 2**20
_ANSWER_VALUES = 500_000
_PACKAGES = (
  "agentjax",
  "agentjax.adapters",
  "agentjax.adapters.unit_tests",
  "agentjax.adapters.unit_tests.boxed",
)
_DRIVER_MODULES = ("plain", "forks")

# Our modules under their names, without the packages around them, which a box does not have.
_BOOT = """
import sys, types
for name in {packages!r}:
  package = types.ModuleType(name)
  package.__path__ = []
  sys.modules[name] = package
for name, source in {sources!r}:
  module = types.ModuleType(name)
  sys.modules[name] = module
  exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
module.main()
"""


class VerifierFault(RuntimeError):
  """No verdict, and not by the code's fault: a broken sandbox, or tests that cannot be run.

  Attributes:
    fault: its kind.
  """

  def __init__(self, message: str, cause: str = "verifier"):
    super().__init__(message)
    owner = Owner.VERIFIER if cause == "verifier" else Owner.INFRASTRUCTURE
    self.fault = Fault(owner, cause, message)


@dataclasses.dataclass(unsafe_hash=True)
class UnitTestConfig(ScorerConfig):
  """The part "unit_tests": how they are run and paid; all figures are ours.

  Attributes:
    credit: "all" pays 1 where every test passes and 0 otherwise; "fraction" pays the share of tests
      that pass, so a program that is right only on easy cases is paid too.
    cpu_seconds: CPU time of the code, and of the test, for one test; 5 times that on the clock.
    wall_seconds: time of one box, with all tests.
    verdict_seconds: time of all boxes of a verdict; code that needs more fails the remaining tests.
      Must be less than ``rollout.reward_timeout``. Waiting for a place does not count in either.
    concurrency: verdicts at once; no more than the sandbox runs.
    rounds: how often tests are run again at most, with further answers.
    retries: further tries where the sandbox failed.
    sandbox: name of the sandbox of both boxes, in ``config.sandboxes``; its ``limits.memory_bytes``
      and ``limits.processes`` hold for each.
    packages: what code and tests may import beyond the standard library (pytest for tests that need
      it); the embedded sandbox has them then.
  """

  credit: Literal["all", "fraction"] = "all"
  cpu_seconds: PositiveInt = 3
  wall_seconds: PositiveFloat = 60.0
  verdict_seconds: PositiveFloat = 100.0
  concurrency: PositiveInt = 4
  rounds: PositiveInt = 16
  retries: NonNegativeInt = 1
  sandbox: str = DEFAULT
  packages: tuple[str, ...] = ()

  def build(self, sandboxes: Sandboxes) -> Scorer:
    return UnitTestScorer(self, sandboxes=sandboxes)


@dataclasses.dataclass(frozen=True)
class UnitTests:
  """A file of tests: asserts at top level, functions ``test*`` or ``unittest`` classes; a file with
  none of these is one test. A test that imports pytest is run by pytest.

  Arguments cross as copies, so a function is judged by what it returns, not by changes of its
  arguments. Objects of the code's own classes stay in its box; the tests only see the plain values
  that they return.

  Attributes:
    source: Python. Runs with the standard library and the names under test, nothing else.
    modules: module of the code -> its functions and classes that the tests use; they are there both
      as names and for import.
    files: further files of the code's box, by path, such as a module that the code imports. They
      replace the code's own files of that name.
  """

  source: str
  modules: Mapping[str, tuple[str, ...]]
  files: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @classmethod
  def from_metadata(cls, values: Mapping[str, Any]) -> UnitTests:
    """From plain data, as a task carries it under ``UNIT_TESTS``.

    Raises:
      ValueError: it is not of that form.
    """
    try:
      modules = {m: tuple(names) for m, names in values["modules"].items()}
      tests = cls(values["source"], modules, dict(values.get("files", {})))
    except (KeyError, TypeError, AttributeError) as error:
      raise ValueError(
        f"unit tests are {{'source': text, 'modules': {{module: [name]}}}}: {error!r}"
      ) from error
    if not tests.source.strip() or not any(tests.modules.values()):
      raise ValueError("unit tests need a source, and a name under test in 'modules'")
    return tests


@dataclasses.dataclass(frozen=True)
class CaseResult:
  """One test: whether it passed, else why not."""

  name: str
  passed: bool
  reason: str = ""


@dataclasses.dataclass(frozen=True)
class Verdict:
  """All tests of a task, in the order of the file; at least one."""

  cases: tuple[CaseResult, ...]

  @property
  def passed(self) -> int:
    return sum(case.passed for case in self.cases)

  def describe(self) -> str:
    """One line: how many passed, and the message of the first that did not."""
    failed = [case for case in self.cases if not case.passed]
    line = f"{self.passed} of {len(self.cases)} tests passed"
    return line + (f"; {failed[0].name}: {failed[0].reason}"[:300] if failed else "")


@dataclasses.dataclass(frozen=True)
class CallAnswer:
  """What a function of untrusted code gave.

  Attributes:
    answer: parsed JSON, an ``answer`` of ``boxed.candidate``; None without one.
    ended: why there is none, else "".
    seconds: CPU time of the call, import included, as its own box claims.
  """

  answer: Mapping[str, Any] | None
  ended: str = ""
  seconds: float = 0.0

  @property
  def late(self) -> bool:
    """Whether its time ran out."""
    return self.ended in (_OUT_OF_TIME, _CPU_OUT)

  @property
  def asked(self) -> bool:
    """Whether the call was made; with ``credit="all"`` none is made after one without answer."""
    return self.ended != _NOT_ASKED


class UnitTestVerifier:
  """Runs tests against code; see the module. Safe to use from many threads and event loops.

  Args:
    sandbox: back end of all boxes; owned and closed by this.
    config: see UnitTestConfig.
    limits: of a run, if neither the verifier nor the config sets them.
  """

  def __init__(
    self,
    sandbox: Sandbox,
    config: UnitTestConfig | None = None,
    limits: SandboxLimits | None = None,
  ):
    self._sandbox = sandbox
    self._config = config or UnitTestConfig()
    self._limits = limits or SandboxLimits()
    self._config.validate()
    self._places = Places(self._config.concurrency)
    self._plans: collections.OrderedDict[Any, dict[str, list[str]]] = collections.OrderedDict()
    # Verdicts of all threads take turns in one loop: the sandbox counts its runs there.
    self._thread = LoopThread("unit tests")

  async def verify(self, code: Mapping[str, str], tests: UnitTests) -> Verdict:
    """Runs ``tests`` against the files ``code`` (path -> source).

    A test that timed out twice, while other verdicts ran, is run a third time while no other
    verdict runs; if it times out again, the code is slow.

    Raises:
      VerifierFault: there is no verdict, and the code is not at fault.
    """
    return await self._thread.wait(self._verify(code, tests))

  async def call(
    self, code: str, function: str, inputs: Sequence[Sequence[Any]]
  ) -> list[CallAnswer]:
    """Calls a function of the module ``code`` with each of ``inputs``, each in its own process.

    Nothing is compared: this is for tests whose results are not known yet.

    Args:
      code: source of the module.
      function: its name there.
      inputs: positional arguments of each call, plain values.

    Raises:
      VerifierFault: as ``verify``.
      NotPlain: an argument that cannot cross.
    """
    return await self._thread.wait(self._call(code, function, inputs)) if inputs else []

  async def close(self) -> None:
    """Closes the sandbox; closing twice is harmless."""
    if self._thread.alive:
      await self._thread.wait(self._sandbox.close())
      await asyncio.to_thread(self._thread.close)

  async def _call(
    self, code: str, function: str, inputs: Sequence[Sequence[Any]]
  ) -> list[CallAnswer]:
    target = {"name": [SOLUTION, function]}
    cases = {
      str(i): [json.dumps(["call", target, [encode(a) for a in own], {}])]
      for i, own in enumerate(inputs)
    }
    tests = UnitTests("", {SOLUTION: (function,)})
    async with self._places.one():
      report = await self._ask({f"{SOLUTION}.py": code}, tests, cases, self._config.verdict_seconds)
    return [_answer_of(report[case]) for case in cases]

  async def _verify(self, code: Mapping[str, str], tests: UnitTests) -> Verdict:
    plan = await self._plan(tests)
    results: dict[str, CaseResult] = {}
    left = dict(plan)
    with Clock() as clock:
      for exclusive in (False, False, True):
        async with self._places.one(exclusive=exclusive):
          found, late = await self._try(code, tests, left, clock)
        results |= found
        left = {case: plan[case] for case in left if case in late}
        if not left:
          break
    return Verdict(tuple(results[case] for case in plan))

  async def _try(
    self, code: Mapping[str, str], tests: UnitTests, cases: Mapping[str, list[str]], clock: Clock
  ) -> tuple[dict[str, CaseResult], set[str]]:
    """Runs some tests; returns the results, and those that timed out.

    Tests that were skipped because an earlier one timed out count as timed out.
    """
    waiting = dict(cases)
    results: dict[str, CaseResult] = {}
    late: set[str] = set()
    for _ in range(self._config.rounds):
      left = self._config.verdict_seconds - clock.elapsed
      if left <= 0:  # of all tries together: there is no time for another one
        break
      report = await self._ask(code, tests, waiting, left)
      answers = {
        case: [list(pair) for pair in zip(operations, report[case]["lines"], strict=False)]
        for case, operations in waiting.items()
      }
      outcomes = await self._judge(tests, answers, left)
      still: dict[str, list[str]] = {}
      for case, asked in waiting.items():
        outcome, given = outcomes[case], len(answers[case])
        if outcome is None or isinstance(outcome, str):
          results[case] = CaseResult(case, False, outcome or "the test did not come to an end")
          late |= {case} if outcome == _OUT_OF_TIME else set()
          continue
        operations = outcome["operations"]
        if outcome["answered"] == len(operations):
          passed = outcome["outcome"] == "passed"
          results[case] = CaseResult(case, passed, outcome["reason"] or outcome["outcome"])
        elif outcome["answered"] == given < len(asked) and operations[given] == asked[given]:
          reason = report[case]["ended"] or "it ended early"
          results[case] = CaseResult(case, False, f"no answer: {reason}")
          late |= {case} if reason == _OUT_OF_TIME else set()
        else:  # it asks more, or something else than it was thought to
          still[case] = operations
      waiting = still
      if not waiting:
        break
    for case in waiting:
      results[case] = CaseResult(
        case,
        False,
        f"unfinished after {self._config.rounds} rounds or {self._config.verdict_seconds:g} s",
      )
    if late:
      late |= {c for c, result in results.items() if result.reason.endswith(_NOT_ASKED)}
    return results, late

  async def _plan(self, tests: UnitTests) -> dict[str, list[str]]:
    """The first operations of every test, before any code has run.

    An error here is the tests' fault.
    """
    key = (tests.source, tuple(sorted(tests.modules.items())))
    if (plan := self._plans.get(key)) is not None:
      self._plans.move_to_end(key)
      return plan
    result = await self._run("tests", self._request(tests, None), {})
    if result.status is RunStatus.TIMEOUT:
      async with self._places.one(exclusive=True):
        result = await self._run("tests", self._request(tests, None), {})
    report = await asyncio.to_thread(_read_report, result)
    if report is None:
      raise VerifierFault(f"the tests cannot be run: {result.detail} {result.stderr[-500:]}")
    plan = {}
    for case in report:
      outcome = _outcome(report[case])
      if outcome is None:
        raise VerifierFault(f"test {case!r} cannot be run: {report[case]['ended']}")
      if outcome["outcome"] == "skipped":
        continue
      if outcome["outcome"] == "unusable":
        raise VerifierFault(f"test {case!r} cannot be run: {outcome['reason']}")
      if not outcome["operations"]:
        raise VerifierFault(
          f"test {case!r} never uses {', '.join(map(str, tests.modules.values()))}: whatever the "
          f"code is, it {outcome['outcome']} ({outcome['reason']})"
        )
      plan[case] = outcome["operations"]
    if not plan:
      raise VerifierFault("the file holds no test that runs")
    self._plans[key] = plan
    if len(self._plans) > _REMEMBERED:
      self._plans.popitem(last=False)
    return plan

  async def _ask(
    self,
    code: Mapping[str, str],
    tests: UnitTests,
    cases: Mapping[str, list[str]],
    seconds: float,
  ) -> Report:
    """The code's answers to the operations of each case; no line without an answer."""
    request = {
      "modules": list(tests.modules),
      "cases": cases,
      "cpu_seconds": self._config.cpu_seconds,
      "all": self._config.credit == "all",
    }
    files = {
      path: text.encode("utf-8", "backslashreplace")
      for path, text in (*code.items(), *tests.files.items())
    }
    result = await self._run("candidate", request, files, seconds)
    report = await asyncio.to_thread(_read_report, result) or {}
    reason = result.detail or (_NOT_ASKED if report else "its report is damaged")
    if result.status is RunStatus.TIMEOUT:
      reason = _OUT_OF_TIME
    silent: dict[str, Any] = {"lines": [], "ended": reason}
    return {case: report.get(case, silent) for case in cases}

  async def _judge(
    self, tests: UnitTests, answers: Mapping[str, list[list[str]]], seconds: float
  ) -> dict[str, dict[str, Any] | str | None]:
    """The outcome of each test with the answers; the reason if it could not end."""
    result = await self._run("tests", self._request(tests, answers), {}, seconds)
    report = await asyncio.to_thread(_read_report, result) or {}
    unknown = _OUT_OF_TIME if result.status is RunStatus.TIMEOUT else None
    return {
      case: _outcome(report[case]) or report[case]["ended"] if case in report else unknown
      for case in answers
    }

  def _request(self, tests: UnitTests, cases: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
      "source": tests.source,
      "modules": {m: list(names) for m, names in tests.modules.items()},
      "cases": cases,
      "cpu_seconds": self._config.cpu_seconds,
    }

  async def _run(
    self,
    driver: str,
    request: dict[str, Any],
    files: Mapping[str, bytes],
    seconds: float = math.inf,
  ) -> SandboxResult:
    """One run of a driver. Failures of the box that the code's files cause count as an end of the
    run."""
    seconds = min(self._config.wall_seconds, seconds)
    limits = dataclasses.replace(
      self._limits,
      wall_seconds=seconds,
      cpu_seconds=seconds,  # forks count for themselves
      output_bytes=_ANSWER_BYTES,
      output_kill_bytes=_ANSWER_BYTES,
    )
    program, stdin = PythonScript(_driver(driver)), json.dumps(request).encode()
    for _ in range(self._config.retries + 1):
      try:
        result = await run_once(self._sandbox, program, stdin=stdin, files=files, limits=limits)
      except (SandboxError, OSError, ValueError) as error:
        fault = fault_of(error, Boundary.FILES)
      else:
        if result.status is not RunStatus.INFRA_ERROR:
          return result
        fault = result.fault or Fault(Owner.INFRASTRUCTURE, "sandbox", result.detail)
      if not fault.masks:
        break
    # If the code's files break a box while other boxes work, it is the code's fault.
    ours = (
      not files or fault.cause == "queue" or (fault.masks and not await is_healthy(self._sandbox))
    )
    if ours:
      raise VerifierFault(
        f"sandbox: {fault.detail}", "queue" if fault.cause == "queue" else "sandbox"
      )
    return SandboxResult(RunStatus.KILLED, "", "", None, 0.0, f"no box: {fault.detail}")


def build_verifier(
  config: UnitTestConfig, sandboxes: Sandboxes | None = None, sandbox: Sandbox | None = None
) -> UnitTestVerifier:
  """The verifier of a run.

  Args:
    config: its settings.
    sandboxes: those of the run, where ``config.sandbox`` is looked up.
    sandbox: used instead of that one; owned and closed by the verifier.
  """
  settings = (sandboxes or Sandboxes()).settings(
    config.sandbox, "config.reward.settings.unit_tests.sandbox", packages=config.packages
  )
  return UnitTestVerifier(sandbox or settings.build(), config, settings.limits)


class UnitTestScorer:
  """The unit tests in ``task.metadata["unit_tests"]`` against the final answer, as a scorer.

  0 without an answer or after a policy error; invalid without a verdict.
  ``trajectory.metadata["unit_tests"]`` has the result in words.
  """

  def __init__(
    self,
    config: UnitTestConfig | None = None,
    sandbox: Sandbox | None = None,
    sandboxes: Sandboxes | None = None,
  ):
    self.config = config or UnitTestConfig()
    self._verifier = build_verifier(self.config, sandboxes, sandbox)

  async def __call__(self, trajectory: Trajectory, task: Task) -> Reward:
    if UNIT_TESTS not in task.metadata:
      return Reward.invalid(f"task {task.id} of {task.source!r} has no unit tests")
    if trajectory.answer is None or trajectory.status is Status.POLICY_ERROR:
      return Reward(0.0)
    tests = UnitTests.from_metadata(task.metadata[UNIT_TESTS])
    if "\0" in trajectory.answer:
      return Reward(0.0)  # no Python source holds one
    code = {f"{SOLUTION}.py": trajectory.answer.encode("utf-8", "replace").decode()}
    try:
      verdict = await self._verifier.verify(code, tests)
    except VerifierFault as error:
      trajectory.metadata[FAULT] = error.fault.to_dict()
      return Reward.invalid(str(error))
    trajectory.metadata[UNIT_TESTS] = verdict.describe()
    share = verdict.passed / len(verdict.cases)
    return Reward(share if self.config.credit == "fraction" else float(share == 1.0))

  async def close(self) -> None:
    """Ends the sandbox."""
    await self._verifier.close()


@functools.cache
def _driver(name: str) -> str:
  folder = importlib.resources.files("agentjax.adapters.unit_tests.boxed")
  sources = [
    (f"{_PACKAGES[-1]}.{module}", folder.joinpath(f"{module}.py").read_text(encoding="utf-8"))
    for module in (*_DRIVER_MODULES, name)
  ]
  return _BOOT.format(packages=_PACKAGES, sources=sources)


def _read_report(result: SandboxResult) -> Report | None:
  """A driver's report; None if it is malformed. It may come from hostile code."""
  if result.status is not RunStatus.OK:
    return None
  try:
    report = bounded_json(
      result.stdout,
      max_characters=_ANSWER_BYTES,
      max_values=_ANSWER_VALUES,
      max_depth=4,
    )
  except ValueError:
    return None
  if not isinstance(report, dict):
    return None
  for entry in report.values():
    if not (
      isinstance(entry, dict)
      and isinstance(entry.get("ended"), str)
      and isinstance(entry.get("lines"), list)
      and all(isinstance(line, str) for line in entry["lines"])
    ):
      return None
  return report


def _outcome(entry: dict[str, Any]) -> dict[str, Any] | None:
  """What a test reported as its last word, or None."""
  return json.loads(entry["lines"][-1]) if entry["lines"] and not entry["ended"] else None


def _answer_of(entry: Mapping[str, Any]) -> CallAnswer:
  """The one answer of a case, from the report of a box."""
  seconds = entry.get("seconds", 0.0)
  seconds = float(seconds) if isinstance(seconds, int | float) else 0.0
  try:
    answer = json.loads(entry["lines"][0]) if entry["lines"] else None
  except (ValueError, RecursionError):
    answer = None
  if not isinstance(answer, dict) or entry["ended"]:
    return CallAnswer(None, entry["ended"] or "it gave no answer", seconds)
  return CallAnswer(answer, "", seconds)
