"""A verdict that cannot be had: what the code does to it is the code's fault, load is nobody's."""

import asyncio
import math
import sys
import time

import pytest

from agentjax.adapters.chat_endpoint.endpoint import JudgeRefusedError
from agentjax.adapters.unit_tests.scorer import (
  UnitTestConfig,
  UnitTests,
  UnitTestVerifier,
  VerifierFault,
)
from agentjax.rewards import Combined, Part, RewardGraph, WeightedSum
from agentjax.sandbox import ProcessSandbox
from agentjax.sandbox.interface import RunStatus, SandboxError, SandboxResult
from agentjax.sandbox.result import infra_error
from agentjax.trajectory.record import Reward, Status, Task, Trajectory

linux = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

TESTS = UnitTests("assert f(3) == 9\nassert f(-2) == 4", {"solution": ("f",)})
SQUARE = "def f(x): return x * x"


@pytest.fixture(scope="module")
def verifier():
  config = UnitTestConfig(
    credit="fraction", cpu_seconds=1, wall_seconds=4.0, verdict_seconds=5.0, rounds=4
  )
  verifier = UnitTestVerifier(ProcessSandbox(), config)
  yield verifier
  asyncio.run(verifier.close())


HOSTILE = {
  "a directory where a file is": {"solution.py": SQUARE, "solution.py/x.py": "x = 1"},
  "a file where a directory is": {"a": "x", "a/b.py": "x = 1", "solution.py": "def f(x): return 1"},
  "a path of 4,060 characters": {"/".join(["d" * 202] * 20): "", "solution.py": "f = abs"},
  "a name of 300 characters": {"n" * 300: "", "solution.py": SQUARE},
  "names that are no text": {"\ud800.py": "", "solution.py": SQUARE},
  "source that is no text": {"solution.py": "def f(x): return 1 # \ud800"},
  "an import that takes for ever": {"solution.py": "import time\ntime.sleep(60)\n" + SQUARE},
  "an iterator without end": {
    "solution.py": "import itertools\ndef f(x): return itertools.count()"
  },
  "numbers too long to write": {"solution.py": "def f(x): return 10 ** 10 ** 6"},
  "a value too deep": {"solution.py": "def f(x):\n  a = []\n  for _ in range(10**5): a = [a]\n"
                                      "  return a"},
  "a report of 40 MiB": {"solution.py": "def f(x): return 'x' * 40 * 2**20"},
  "a process name that is no text": {"solution.py":
    "import ctypes\nctypes.CDLL(None).prctl(15, bytes([255, 254]), 0, 0, 0)\n"
    "def f(x):\n  while True: pass"},
  "its own end": {"solution.py": "import os, signal\nos.killpg(0, signal.SIGKILL)"},
  "a flood of processes": {"solution.py":
    "import os\ndef f(x):\n  while True:\n    try: os.fork()\n    except OSError: pass"},
  "NUL in the source": {"solution.py": "def f(x): return '\0'"},
}  # fmt: skip


@linux
@pytest.mark.parametrize("name", HOSTILE)
def test_what_the_code_does_to_its_verdict_is_a_failed_test(verifier, name):
  verdict = asyncio.run(verifier.verify(HOSTILE[name], TESTS))
  assert verdict.passed == 0 and len(verdict.cases) == 2


@pytest.mark.slow
@linux
def test_slow_neighbours_take_nothing_from_a_right_answer():
  # The slow ones take 2.5 s each, one at a time; the graph allows 4 s for a verdict.
  from agentjax.rollout.scoring import score

  config = UnitTestConfig(cpu_seconds=1, wall_seconds=2.0, verdict_seconds=2.5, concurrency=1)
  verifier = UnitTestVerifier(ProcessSandbox(), config)
  codes = ["import time\ntime.sleep(60)", "import time\ntime.sleep(60)", SQUARE]

  async def judge(trajectory, task):
    verdict = await verifier.verify({"solution.py": trajectory.answer}, TESTS)
    return float(verdict.passed == len(verdict.cases))

  task = Task(1, (), "", "made")
  episodes = [Trajectory(0, 1, i, "made", [], answer=code) for i, code in enumerate(codes)]
  graph = RewardGraph({"judge": judge}, Part("judge"))

  async def main():
    await verifier.verify({"solution.py": SQUARE}, TESTS)  # the sandbox starts
    await asyncio.gather(*(score(graph, [e], task, timeout=4.0) for e in episodes))
    await verifier.close()

  start = time.monotonic()
  asyncio.run(main())
  assert time.monotonic() - start > 4.0  # the last one waited for longer than a verdict may take
  assert [e.reward for e in episodes] == [Reward(0.0), Reward(0.0), Reward(1.0)]
  assert all(e.status is Status.OK for e in episodes)


def test_a_scorer_that_blocks_holds_up_no_other_member_of_its_group():
  from agentjax.rollout.scoring import score

  def blocking(trajectory, task):
    time.sleep(0.4)
    return 1.0

  def ranks(trajectories, task):
    return [float(t.address[2]) for t in trajectories]

  graph = RewardGraph({"blocking": blocking}, Part("blocking"), {"rank": ranks})
  group = [Trajectory(0, 1, i, "made", []) for i in range(8)]  # 3.2 s one after the other
  asyncio.run(score(graph, group, Task(1, (), "", "made"), timeout=2.0))
  assert [t.reward for t in group] == [Reward(1.0)] * 8
  assert [t.reward_parts["rank"] for t in group] == [Reward(float(i)) for i in range(8)]


class Loaded:
  """A sandbox of which runs with files end by the clock while more than one verdict is under way,
  or the first so many of them do."""

  def __init__(self, inner, late):
    self.inner, self.late, self.alone = inner, late, []
    self.places = None

  async def create(self, snapshot=None):
    box = await self.inner.create(snapshot)
    run = box.exec

    async def exec(program, *, stdin=b"", files=None, limits=None):
      if files:
        self.alone.append(self.places._taken == self.places._count)
        if self.late > 0:
          self.late -= 1
          return SandboxResult(RunStatus.TIMEOUT, "", "", -9, 1.0, "did not end")
      return await run(program, stdin=stdin, files=files, limits=limits)

    box.exec = exec
    return box

  async def close(self):
    await self.inner.close()


@linux
@pytest.mark.parametrize(("late", "right"), [(0, True), (1, True), (2, True), (3, False)])
def test_a_verdict_that_the_clock_ends_twice_is_tried_alone(late, right):
  config = UnitTestConfig()
  sandbox = Loaded(ProcessSandbox(), late)
  verifier = UnitTestVerifier(sandbox, config)
  sandbox.places = verifier._places

  async def main():
    try:
      return await verifier.verify({"solution.py": SQUARE}, TESTS)
    finally:
      await verifier.close()

  verdict = asyncio.run(main())
  assert (verdict.passed == 2) is right
  assert sandbox.alone == [False, False, True][: min(late, 2) + 1]


class Broken:
  """Fails for boxes with files in them; others work, or not."""

  def __init__(self, healthy, inner):
    self.healthy, self.inner = healthy, inner

  async def create(self, snapshot=None):
    box = await self.inner.create(snapshot)
    run = box.exec

    async def exec(program, *, stdin=b"", files=None, limits=None):
      if files:
        return infra_error("the watcher ended without a result")
      if program.source == "pass" and not self.healthy:
        raise SandboxError("no machine")
      return await run(program, stdin=stdin, files=files, limits=limits)

    box.exec = exec
    return box

  async def close(self):
    await self.inner.close()


@linux
@pytest.mark.parametrize("healthy", [True, False])
def test_code_whose_boxes_break_while_others_work_is_to_blame(healthy):
  config = UnitTestConfig()
  verifier = UnitTestVerifier(Broken(healthy, ProcessSandbox()), config)

  async def main():
    try:
      return await verifier.verify({"solution.py": SQUARE}, TESTS)
    finally:
      await verifier.close()

  if healthy:
    assert asyncio.run(main()).passed == 0
  else:
    with pytest.raises(VerifierFault) as caught:
      asyncio.run(main())
    assert caught.value.fault.cause == "sandbox"


# The reward graph.


def episode(sample, answer, **fields):
  return Trajectory(0, 1, sample, "made", [], answer=answer, **fields)


TASK = Task(1, (), "4", "made")


def fragile(trajectory, task):
  """Breaks at what is no number; an empty answer is worth nothing."""
  return float(trajectory.answer) if trajectory.answer else 0.0


def test_an_answer_that_breaks_a_scorer_gets_nothing_and_counts():
  graph = RewardGraph({"fragile": fragile}, Part("fragile"))
  for answer, value in (("1", 1.0), ("one", 0.0), ("nan", 0.0), ("1e999", 0.0), (None, 0.0)):
    trajectory = episode(0, answer)
    asyncio.run(graph.score(trajectory, TASK))
    assert trajectory.reward == Reward(value) and trajectory.status is Status.OK
    known = trajectory.metadata.get("fault")
    assert (known is None) == (answer in ("1", None))
    assert known is None or (known["owner"], known["cause"]) == ("policy", "data")


def test_what_is_worth_less_than_nothing_is_not_escaped_by_breaking_the_scorer():
  def penalty(trajectory, task):
    return -float(trajectory.answer or 1)

  graph = RewardGraph({"penalty": penalty}, Part("penalty"))
  trajectory = episode(0, "x")
  asyncio.run(graph.score(trajectory, TASK))
  assert trajectory.reward == Reward(-1.0)


@pytest.mark.parametrize(
  ("status", "masked"), [(400, False), (413, False), (401, True), (404, True)]
)
def test_an_answer_that_a_judge_refuses_counts_and_a_wrong_key_masks(status, masked):
  def judge(trajectory, task):
    if trajectory.answer:
      raise JudgeRefusedError(f"answered {status}", status)
    return 0.0

  trajectory = episode(0, "x" * 10**6)
  asyncio.run(RewardGraph({"judge": judge}, Part("judge")).score(trajectory, TASK))
  assert trajectory.status.masked is masked


@pytest.mark.parametrize("error", [ConnectionError("judge"), OSError("disk"), RuntimeError("bug")])
def test_a_verifier_that_is_gone_masks_whatever_the_answer(error):
  def judge(trajectory, task):
    if trajectory.answer:
      raise error
    return 0.0

  graph = RewardGraph({"judge": judge}, Part("judge"))
  trajectory = episode(0, "x")
  asyncio.run(graph.score(trajectory, TASK))
  assert trajectory.status is Status.VERIFIER_ERROR
  assert trajectory.metadata["fault"]["owner"] == "verifier"


def test_a_scorer_that_fails_at_nothing_too_masks():
  def judge(trajectory, task):
    return float(task.metadata["missing"])

  graph = RewardGraph({"judge": judge, "one": fragile}, WeightedSum(((1.0, Part("judge")),)))
  trajectory = episode(0, "x")  # breaks the other one by itself
  asyncio.run(graph.score(trajectory, TASK))
  assert trajectory.status is Status.VERIFIER_ERROR
  assert trajectory.metadata["fault"]["cause"] == "verifier"


def test_one_member_that_breaks_a_comparison_takes_nothing_from_its_siblings():
  def rank(members, task):
    values = [float(m.answer) if m.answer else 0.0 for m in members]
    return [v / max(*values, 1.0) for v in values]

  graph = RewardGraph({}, Combined(math.prod, (Part("rank"),)), group_scorers={"rank": rank})
  members = [episode(i, a) for i, a in enumerate(("2", "four", "4"))]
  asyncio.run(graph.score_group(members, TASK))
  assert [m.reward for m in members] == [Reward(0.5), Reward(0.0), Reward(1.0)]
  assert [m.status for m in members] == [Status.OK] * 3
  assert members[1].metadata["fault"]["owner"] == "policy"
