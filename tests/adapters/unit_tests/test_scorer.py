"""Unit tests pay for what the code returns, and for nothing else it does."""

import asyncio
import collections
import dataclasses
import decimal
import fractions
import json
import math
import sys
import textwrap
import threading
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentjax.adapters.unit_tests.boxed.plain import NotPlain, decode, encode
from agentjax.adapters.unit_tests.canaries import canaries
from agentjax.adapters.unit_tests.scorer import (
  UnitTestConfig,
  UnitTests,
  UnitTestScorer,
  UnitTestVerifier,
  VerifierFault,
  _read_report,
  build_verifier,
)
from agentjax.config import ConfigError
from agentjax.rewards import RewardConfig, build_rewards
from agentjax.sandbox import ProcessSandbox, Sandboxes
from agentjax.sandbox.interface import RunStatus, SandboxError, SandboxResult
from agentjax.sandbox.process import ProcessSandboxConfig
from agentjax.trajectory.record import Reward, Status, Task, Trajectory
from tests.adapters.unit_tests.test_canaries import ASYNC, PAID_BY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

SQUARES = UnitTests("assert f(3) == 9\nassert f(-2) == 4\nassert f(0) == 0", {"solution": ("f",)})
SQUARE = "def f(x): return x * x"


class Spy:
  """A sandbox that notes what goes into each of its boxes."""

  def __init__(self, inner):
    self.inner = inner
    self.runs = []
    self.boxes = []

  async def create(self, snapshot=None):
    box = await self.inner.create(snapshot)
    self.boxes.append(box)
    run = box.exec

    async def exec(program, *, stdin=b"", files=None, limits=None):
      self.runs.append((program.source, stdin, dict(files or {})))
      return await run(program, stdin=stdin, files=files, limits=limits)

    box.exec = exec
    return box

  async def close(self):
    await self.inner.close()


@pytest.fixture(scope="module")
def spy():
  return Spy(ProcessSandbox())


@pytest.fixture(scope="module")
def verifier(spy):
  verifier = UnitTestVerifier(spy, UnitTestConfig(credit="fraction", cpu_seconds=1))
  yield verifier
  asyncio.run(verifier.close())


def run(verifier, code, tests=SQUARES):
  return asyncio.run(verifier.verify({"solution.py": code}, tests))


def passed(verifier, code, tests=SQUARES):
  return [case.passed for case in run(verifier, code, tests).cases]


@pytest.mark.parametrize(
  ("code", "expected"),
  [
    (SQUARE, [True, True, True]),
    ("def f(x): return 2 * x + 3", [True, False, False]),
    ("def f(x): return float(x * x)", [True, True, True]),
    ("def f(x): return str(x * x)", [False] * 3),
    ("def f(x):\n  if x < 0: raise ValueError(x)\n  return x * x", [True, False, True]),
    ("def f(x):\n  if x < 0: import os; os._exit(0)\n  return x * x", [True, False, True]),
    ("def f(x):\n  while x < 0: pass\n  return x * x", [True, False, True]),
    ("seen = []\ndef f(x):\n  seen.append(x)\n  return x * x * len(seen)", [True] * 3),
    ("def g(x): return x * x", [False] * 3),
    ("def f(x: return", [False] * 3),
    ("", [False] * 3),
  ],
)  # fmt: skip
def test_each_test_passes_where_the_code_gives_what_it_expects(verifier, code, expected):
  assert passed(verifier, code) == expected


def test_what_is_expected_is_never_where_the_code_runs(verifier, spy):
  spy.runs.clear()
  tests = UnitTests(
    "secret = 'the-expected-value'\nassert f(1) == secret\nassert f(2) == secret + '!'",
    {"solution": ("f",)},
  )
  code = "def f(x): return 'the-' + 'expected-' + 'value' + '!' * (x - 1)  # made of parts"
  assert passed(verifier, code, tests) == [True, True]
  with_code = [r for r in spy.runs if "solution.py" in r[2]]
  without = [r for r in spy.runs if r not in with_code]
  assert with_code and without
  for source, stdin, files in with_code:
    assert "the-expected" not in source + stdin.decode() + str(files)
  for source, stdin, files in without:
    assert not files and "made of parts" not in source + stdin.decode()


def test_every_run_has_a_box_of_its_own_under_another_user(verifier, spy):
  spy.runs.clear()
  spy.boxes.clear()
  assert all(passed(verifier, SQUARE))
  assert len(spy.boxes) == len(spy.runs) >= 2
  assert len(set(spy.boxes)) == len(spy.boxes)
  assert all(box._closed for box in spy.boxes)
  if "user" in spy.inner.protections:
    assert len({box.uid for box in spy.boxes}) == len(spy.boxes)


@pytest.mark.parametrize(
  ("source", "code", "expected"),
  [
    ("def test_a():\n  x = f(2)\n  assert x == 4\n  assert f(x) == 16\n"
     "def test_b():\n  assert f(1) == 2",
     SQUARE, [True, False]),
    ("import unittest\nclass T(unittest.TestCase):\n  def setUp(self): self.n = 3\n"
     "  def test_a(self): self.assertEqual(f(self.n), 9)\n"
     "  def test_b(self):\n    with self.assertRaises(TypeError): f('a')\n"
     "  @unittest.skip('never')\n  def test_c(self): self.assertEqual(f(1), 5)",
     SQUARE, [True, True]),
    ("from solution import f as square\n"
     "class TestPlain:\n  def test_a(self): assert square(5) == 25",
     SQUARE, [True]),
    ("import solution\ntotal = 0\nfor n in range(20):\n  total += solution.f(n)\n"
     "if total != 2470: raise RuntimeError(total)", SQUARE, [True]),
    ("assert [f(n) for n in range(5)] == [0, 1, 4, 9, 16]", SQUARE, [True]),
    ("assert abs(f(0.1) - 0.01) < 1e-9\nassert f(2) > 3\nassert not f(0)", SQUARE, [True] * 3),
    ("assert list(f(2500)) == list(range(2500))", "def f(n): yield from range(n)", [True]),
    ("import itertools\nassert list(itertools.islice(f(), 3)) == [0, 1, 2]",
     "import itertools\ndef f(): return itertools.count()", [True]),
    ("a = f(1)\nb = f(2)\na.n = 5\nassert a.sum(b) == 7\nassert [len(x) for x in (a, b)] == [5, 2]",
     "class f:\n  def __init__(self, n): self.n = n\n  def sum(self, o): return self.n + o.n\n"
     "  def __len__(self): return self.n", [True, True]),
    ("assert f(3, scale=2) == 6", "def f(x, *, scale): return x * scale", [True]),
    ("assert f(int) is int", "def f(kind): return kind", [True]),
    ("try:\n  f(1)\nexcept KeyError as error:\n  seen = error.args\nassert seen == ('k', 1)",
     "class Mine(KeyError): pass\ndef f(x): raise Mine('k', x)", [True]),
  ],
)  # fmt: skip
def test_files_of_tests_in_every_usual_form(verifier, source, code, expected):
  assert passed(verifier, code, UnitTests(source, {"solution": ("f",)})) == expected


def test_files_of_the_task_are_there_and_cannot_be_replaced(verifier):
  tests = UnitTests("assert f() == 5", {"solution": ("f",)}, {"lib/five.py": "FIVE = 5"})
  code = {
    "solution.py": "from lib.five import FIVE\ndef f(): return FIVE",
    "lib/five.py": "FIVE = 6",
  }
  assert asyncio.run(verifier.verify(code, tests)).passed == 1


def test_an_import_that_fails_is_no_error_that_a_test_could_ask_for(verifier):
  tests = UnitTests(
    "import unittest\nclass T(unittest.TestCase):\n"
    "  def test_a(self):\n    with self.assertRaises(ValueError): f(-1)\n"
    "  def test_b(self):\n    with self.assertRaises(AttributeError): f(-1)",
    {"solution": ("f",)},
  )
  assert passed(verifier, "raise ValueError", tests) == [False, False]
  assert passed(verifier, "", tests) == [False, False]


def test_objects_of_the_code_equal_themselves_alone_and_are_neither_true_nor_false(verifier):
  source = "x = f()\nassert x == 3\nassert x\nassert x == f()\nassert x in [1, 2]\nassert x is x"
  tests = UnitTests(source, {"solution": ("f",)})
  code = (
    "class A:\n  def __eq__(s, o): return True\n  def __bool__(s): return True\ndef f(): return A()"
  )
  assert passed(verifier, code, tests) == [False, False, False, False, True]


ITERATED = (
  "assert all(map(lambda x: f(x) == x * x, (3, 4)))",
  "assert not list(filter(lambda x: f(x) != x * x, (3, 4)))",
  "for x, y in zip((3, 4), map(f, (3, 4))): assert y == x * x",
  "assert next(map(f, (3,)), 9) == 9",
  "assert not any(map(lambda x: f(x) - x * x, (3, 4)))",
  "import itertools\nfor x in itertools.takewhile(lambda x: f(x) == x * x, (3, 4)): assert x",
  "for x in iter(lambda: f(3), 9): assert False",
  ASYNC,
)


def test_no_exception_of_the_code_ends_an_iteration_of_the_test(verifier):
  cases = [f"def test_{n}():\n{textwrap.indent(text, '  ')}" for n, text in enumerate(ITERATED)]
  tests = UnitTests("\n".join(cases), {"solution": ("f",)})
  assert passed(verifier, SQUARE, tests) == [True] * len(cases)
  for name in ("StopIteration", "StopAsyncIteration"):
    made_up = f"class A({name}): pass\ndef f(x): raise A(9)"
    for code in (f"def f(x): raise {name}", made_up):
      assert passed(verifier, code, tests) == [False] * len(cases)


def test_no_canary_passes_the_tests_that_it_is_made_for(verifier):
  for name, code in canaries(("f",)).items():
    tests = UnitTests(PAID_BY[name].tests, {"solution": ("f",)})
    assert not any(passed(verifier, code, tests)), name


def test_an_iterator_of_the_code_may_end(verifier):
  source = (
    "it = f(2)\nassert (next(it), next(it), next(it, 'end')) == (0, 1, 'end')\n"
    "assert list(map(abs, f(2))) == [0, 1]\n"
    "def test_end():\n  try: next(f(0))\n  except StopIteration: return\n  assert False"
  )
  tests = UnitTests(source, {"solution": ("f",)})
  assert passed(verifier, "def f(n): return iter(range(n))", tests) == [True, True, True]


def test_an_object_is_neither_told_what_it_is_compared_with_nor_asked_whether_it_is_close(
  verifier, spy
):
  spy.runs.clear()
  source = (
    "secret = 31337\nassert abs(f() - secret) < 1e-9\nassert abs(secret - f()) < 1e-9\n"
    "assert secret in f()\nassert f() >= secret\nassert secret == f()\n"
    "assert round(f()) == secret\nassert f() * 1 == secret\nassert [secret] == [f()]"
  )
  assert (
    passed(verifier, canaries(("f",))["always_equal"], UnitTests(source, {"solution": ("f",)}))
    == [False] * 8
  )
  assert not any(b"31337" in stdin for _, stdin, files in spy.runs if files)


@pytest.mark.parametrize(
  "line",
  [
    '{"value": {"ref": 0}}', '{"value": {"type": "Exception"}}', '{"value": {"int": 9}}',
    '{"value": {"set": [[1]]}}', '{"outcome": "passed"}', "[]", "not JSON", '{"value": 9',
    '{"error": ["SystemExit"], "args": []}', '{"error": ["object"], "args": 3}',
    '{"items": 3, "done": true}', "[" * 100_000, '{"value": ' + "9" * 5000 + "}",
  ],
)  # fmt: skip
def test_an_answer_that_is_no_plain_value_fails_its_test(verifier, line):
  # The code takes the place of what reports for it, as it could by writing to its descriptor.
  code = f"import json\njson.dumps = lambda *_, **__: {line!r}\n{SQUARE}"
  verdict = run(verifier, code)
  assert verdict.passed == 0


def test_code_can_claim_answers_only_that_are_then_compared(verifier):
  claim = "import json\njson.dumps = lambda *_, **__: '{\"value\": 4}'\ndef f(x): pass"
  assert passed(verifier, claim) == [False, True, False]


@pytest.mark.parametrize(
  ("source", "words"),
  [
    ("assert 1 == 1", "never uses"),
    ("def test_a(): pass", "never uses"),
    ("assert f(", "cannot be run"),
    ("assert f(lambda: 1) == 1", "cannot cross"),
    ("import unittest\n@unittest.skip('all')\nclass T(unittest.TestCase):\n  def test_a(self): f()",
     "no test that runs"),
  ],
)  # fmt: skip
def test_tests_that_cannot_judge_are_a_fault_and_never_a_zero(verifier, source, words):
  with pytest.raises(VerifierFault, match=words):
    run(verifier, SQUARE, UnitTests(source, {"solution": ("f",)}))


def test_pytest_runs_the_tests_that_need_it():
  source = (
    "import pytest\nfrom solution import f\n"
    "@pytest.fixture\ndef three(): return 3\n"
    "@pytest.mark.parametrize('x', [1, 2])\ndef test_a(x): assert f(x) == x * x\n"
    "def test_b(three): assert f(three) == pytest.approx(9.0)\n"
    "def test_c():\n  with pytest.raises(TypeError): f('a')\n"
    "def test_d(): assert f(1) == 2"
  )
  tests = UnitTests(source, {"solution": ("f",)})
  config = UnitTestConfig(packages=("pytest",), cpu_seconds=10)
  sandboxes = Sandboxes({"default": ProcessSandboxConfig(queue_seconds=60.0)})
  verifier = build_verifier(config, sandboxes)
  try:
    assert passed(verifier, SQUARE, tests) == [True, True, True, False]
  finally:
    asyncio.run(verifier.close())


class Broken:
  """A sandbox that fails as told, then works no better."""

  def __init__(self, *outcomes):
    self.outcomes = list(outcomes)
    self.calls = 0

  async def create(self, snapshot=None):
    return self

  async def exec(self, program, *, stdin=b"", files=None, limits=None):
    self.calls += 1
    outcome = self.outcomes.pop(0)
    if isinstance(outcome, Exception):
      raise outcome
    return SandboxResult(outcome, "", "", None, 0.0, "no machine")

  async def close(self):
    pass


@pytest.mark.parametrize(
  ("outcomes", "calls"),
  [([RunStatus.INFRA_ERROR] * 2, 2), ([SandboxError("gone")] * 2, 2), ([RunStatus.TIMEOUT] * 2, 2)],
)
def test_faults_of_the_sandbox_are_tried_again_then_mask_the_episode(outcomes, calls):
  sandbox = Broken(*outcomes)
  scorer = UnitTestScorer(UnitTestConfig(retries=1), sandbox)
  reward = asyncio.run(score(scorer, SQUARE))
  assert not reward.valid and sandbox.calls == calls
  asyncio.run(scorer.close())


def task(tests=SQUARES, **fields):
  return Task(7, (), SQUARE, "made", metadata={"unit_tests": dataclasses.asdict(tests)}, **fields)


async def score(scorer, answer, status=Status.OK):
  return await scorer(Trajectory(0, 7, 0, "made", [], status=status, answer=answer), task())


def test_the_scorer_pays_all_or_nothing_or_the_share():
  two_of_three = "def f(x): return max(x, 0) ** 2"

  async def pay(credit):
    scorer = UnitTestScorer(UnitTestConfig(credit=credit))
    try:
      return [await score(scorer, a) for a in (SQUARE, two_of_three, None, "\0", "\ud800")] + [
        await score(scorer, SQUARE, Status.POLICY_ERROR)
      ]
    finally:
      await scorer.close()

  assert [r.value for r in asyncio.run(pay("all"))] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
  assert [r.value for r in asyncio.run(pay("fraction"))] == [1.0, 2 / 3, 0.0, 0.0, 0.0, 0.0]


def test_a_part_of_the_config_and_a_fault_masks():
  graph = build_rewards(RewardConfig(parts=("unit_tests", "turns"), weights=(1.0, 0.0)))
  good = Trajectory(0, 7, 0, "made", [], answer=SQUARE)
  without = Trajectory(0, 7, 1, "made", [], status=Status.TRUNCATED, answer=SQUARE)

  async def work():
    await graph.score(good, task())
    await graph.score(without, Task(7, (), "", "made"))
    await graph.close()

  asyncio.run(work())
  assert good.reward == Reward(1.0) and good.metadata["unit_tests"] == "3 of 3 tests passed"
  assert without.status is Status.VERIFIER_ERROR and without.metadata["ended"] == "truncated"


def test_many_threads_with_loops_of_their_own_may_ask_at_once(verifier):
  verdicts = {}

  def ask(n):
    code = SQUARE if n % 2 else "def f(x): return 9"
    verdicts[n] = passed(verifier, code)

  threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert verdicts == {n: [True] * 3 if n % 2 else [True, False, False] for n in range(8)}


@pytest.mark.parametrize(
  "metadata",
  [{}, {"source": ""}, {"source": "assert f()", "modules": {}}, {"source": 1, "modules": 2}],
)
def test_unit_tests_of_another_form_say_what_form_they_need(metadata):
  with pytest.raises(ValueError, match="unit tests"):
    UnitTests.from_metadata(metadata)


def test_impossible_settings_are_refused():
  for fields in ({"cpu_seconds": 0}, {"wall_seconds": 0.0}, {"rounds": 0}, {"retries": -1}):
    with pytest.raises(ConfigError, match=next(iter(fields))):
      UnitTestConfig(**fields).validate()


_scalars = st.one_of(
  st.none(), st.booleans(), st.integers(), st.integers(-(2**200), 2**200), st.text(), st.binary(),
  st.floats(allow_nan=False), st.complex_numbers(allow_nan=False), st.fractions(),
  st.decimals(allow_nan=False), st.sampled_from([int, str, list]),
)  # fmt: skip
_values = st.recursive(
  _scalars,
  lambda v: st.one_of(
    st.lists(v, max_size=4),
    st.lists(v, max_size=4).map(tuple),
    st.sets(_scalars, max_size=4),
    st.frozensets(_scalars, max_size=4),
    st.dictionaries(_scalars, v, max_size=4),
  ),
  max_leaves=12,
)
_json = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
  lambda v: st.lists(v, max_size=3)
  | st.dictionaries(
    st.sampled_from(["int", "set", "dict", "type", "bytes", "range", "complex", "fraction", "ref",
                     "decimal", "tuple", "frozenset", "x"]), v, max_size=2),
  max_leaves=8,
)  # fmt: skip
_PLAIN = (
  type(None), bool, int, float, str, bytes, bytearray, complex, list, tuple, dict, set, frozenset,
  range, decimal.Decimal, fractions.Fraction, type,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(_values)
def test_plain_values_cross_unchanged(value):
  back = decode(json.loads(json.dumps(encode(value))))
  assert back == value and type(back) is type(value)


@settings(max_examples=150, deadline=None)
@given(_json)
@example({"fraction": []})
def test_whatever_is_read_is_built_in_or_refused(data):
  try:
    value = decode(data)
  except NotPlain:
    return
  assert type(value) in _PLAIN


def test_subclasses_arrive_as_their_base():
  point = collections.namedtuple("point", "x y")(1, 2)
  for value, expected in (
    (collections.Counter("aab"), {"a": 2, "b": 1}),
    (collections.defaultdict(int, {1: 2}), {1: 2}),
    (point, (1, 2)),
  ):
    back = decode(encode(value))
    assert back == expected and type(back) is type(expected)
  assert math.isnan(decode(json.loads(json.dumps(encode(math.nan)))))
  with pytest.raises(NotPlain):
    encode(dataclasses)


@pytest.mark.parametrize("text", ["{},", '"",', '{"a":[],"b":{}},'])
def test_a_flood_of_values_is_no_report_and_costs_little_more_than_its_text(text: str) -> None:
  flood = '{"test": [' + text * (2**22 // len(text)) + "1]}"
  tracemalloc.start()
  try:
    assert _read_report(SandboxResult(RunStatus.OK, flood, "", 0, 0.1)) is None
    assert tracemalloc.get_traced_memory()[1] < 5 * len(flood)
  finally:
    tracemalloc.stop()


def test_a_sandbox_that_is_not_there_is_named_with_its_setting():
  own = {"unit_tests": UnitTestConfig(sandbox="none_of_that_name")}
  with pytest.raises(ConfigError, match="reward.settings.unit_tests.sandbox='none_of_that_name'"):
    build_rewards(RewardConfig(parts=("unit_tests",), settings=own))
