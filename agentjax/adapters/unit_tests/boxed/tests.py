"""Runs in the box of the tests, which never holds the code under test: runs the tests against
stand-ins.

A stand-in turns every use of a function into an operation (see ``candidate``). If the answer is
known, the test continues with it. If not, the test continues with a guess, only to find its further
operations, and its outcome does not count. A test is run again, from its beginning, until all its
operations are answered.

  request   {"source": text, "modules": {module: [name]}, "files": {path: text},
             "cases": null | {case: [[operation, answer]]}, "cpu_seconds": n}
  result    {case: {"lines": [report], "ended": why}}
  report    {"operations": [operation], "answered": how many of them, "reason": text,
             "outcome": "passed" | "failed" | "skipped" | "unusable"}
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from agentjax.adapters.unit_tests.boxed.forks import run_cases, silence
from agentjax.adapters.unit_tests.boxed.plain import NotPlain, decode, encode

_MOST_OPERATIONS = 10_000  # of one case
_MOST_GUESSES = 2000  # operations without an answer, of one run
_CHUNK = 1000  # items of an iteration that are asked for at once
_MODULE = "tests_of_the_task"


class _Stop(BaseException):
  """Ends a run with an outcome that does not count."""


class _Unusable(BaseException):
  """The test does something that is not possible between two boxes."""


def main() -> None:
  """Reads a request from stdin and writes the result to stdout."""
  request = json.load(sys.stdin.buffer)
  out = silence()
  suite = _Suite(request)
  known = request["cases"]
  if known is None:
    known = {case: [] for case in suite.cases}
  cases = ((case, suite.work(case, answers)) for case, answers in known.items())
  result = run_cases(cases, request["cpu_seconds"])
  with open(out, "w") as stream:
    json.dump(result, stream)


class _Suite:
  """The cases of a file: its asserts at top level, test functions, methods of test classes; the
  whole file where it has none of these.
  """

  def __init__(self, request: dict[str, Any]):
    self._request = request
    self._tree = ast.parse(request["source"])
    self.cases: dict[str, Callable[[], str]] = {}
    body = self._tree.body
    for at, node in enumerate(body):
      if isinstance(node, ast.Assert):
        before = [n for n in body[:at] if not isinstance(n, ast.Assert)]
        self.cases[f"assert {len(self.cases) + 1}"] = self._script([*before, node])
      elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
        self.cases[node.name] = self._function(node.name)
      elif isinstance(node, ast.ClassDef):
        for method in node.body:
          if isinstance(method, ast.FunctionDef) and method.name.startswith("test"):
            self.cases[f"{node.name}.{method.name}"] = self._method(node.name, method.name)
    if not self.cases:
      self.cases["the whole file"] = self._script(body)

  def work(self, case: str, known: list[list[str]]) -> Callable[[Callable[[str], None]], None]:
    def run(report: Callable[[str], None]) -> None:
      dialogue = _Dialogue(known)
      self._offer_stand_ins(dialogue)
      outcome, reason = "failed", ""
      try:
        outcome = self.cases[case]()
      except _Unusable as error:
        outcome, reason = "unusable", str(error)
      except BaseException as error:
        dialogue.close()
        reason = _describe(error)
      if dialogue.unusable:
        outcome, reason = "unusable", dialogue.unusable
      if dialogue.malformed:
        outcome, reason = "failed", f"an answer is malformed: {dialogue.malformed}"
      report(
        json.dumps(
          {
            "operations": dialogue.operations,
            "answered": dialogue.answered,
            "outcome": outcome,
            "reason": reason,
          }
        )
      )

    return run

  def _offer_stand_ins(self, dialogue: _Dialogue) -> None:
    for name, attributes in self._request["modules"].items():
      module = _module(name)
      module.__dict__["__all__"] = list(attributes)
      for attribute in attributes:
        setattr(module, attribute, StandIn(dialogue, {"name": [name, attribute]}, "function"))

  def _namespace(self) -> dict[str, Any]:
    module = types.ModuleType(_MODULE)
    sys.modules[_MODULE] = module
    for name, attributes in self._request["modules"].items():
      module.__dict__.update((a, getattr(sys.modules[name], a)) for a in attributes)
    return module.__dict__

  def _execute(self, body: list[ast.stmt]) -> dict[str, Any]:
    namespace = self._namespace()
    tree = ast.Module(body, type_ignores=[])
    exec(compile(tree, _MODULE, "exec", dont_inherit=True), namespace)
    return namespace

  def _script(self, body: list[ast.stmt]) -> Callable[[], str]:
    def run() -> str:
      self._execute(body)
      return "passed"

    return run

  def _definitions(self) -> list[ast.stmt]:
    return [n for n in self._tree.body if not isinstance(n, ast.Assert)]

  def _function(self, name: str) -> Callable[[], str]:
    def run() -> str:
      if self._uses_pytest():
        return self._pytest(name)
      self._execute(self._definitions())[name]()
      return "passed"

    return run

  def _method(self, name: str, method: str) -> Callable[[], str]:
    def run() -> str:
      if self._uses_pytest():
        return self._pytest(f"{name}::{method}")
      import unittest  # takes longer to load than most tests to run

      found = self._execute(self._definitions())[name]
      if not issubclass(found, unittest.TestCase):
        getattr(found(), method)()
        return "passed"
      result = unittest.TestResult()
      unittest.TestSuite([found(method)]).run(result)
      if result.skipped:
        return "skipped"
      if not result.wasSuccessful() or result.testsRun != 1:
        raise AssertionError((result.errors + result.failures + [("", "")])[0][1][-400:])
      return "passed"

    return run

  def _uses_pytest(self) -> bool:
    for node in ast.walk(self._tree):
      names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
      if isinstance(node, ast.ImportFrom):
        names = [node.module or ""]
      if any(name.partition(".")[0] == "pytest" for name in names):
        return True
    return False

  def _pytest(self, case: str) -> str:
    try:
      import pytest
    except ImportError as error:
      raise _Unusable("the tests need pytest; name it in the sandbox's packages") from error

    reports: list[Any] = []

    class Plugin:
      def pytest_runtest_logreport(self, report: Any) -> None:
        reports.append(report)

    path = f"test_{_MODULE}.py"
    with open(path, "w") as file:
      file.write(self._request["source"])
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-c", os.devnull, "--rootdir=.", "--confcutdir=.", "--noconftest",
               "-p", "no:cacheprovider", "--import-mode=importlib", "--assert=plain", "-q",
               f"{path}::{case}"]  # fmt: skip
    pytest.main(options, plugins=[Plugin()])
    failures = [r for r in reports if r.failed]
    if failures:
      raise AssertionError(str(failures[0].longrepr)[-400:])
    if any(r.skipped for r in reports):
      return "skipped"
    if not any(r.when == "call" and r.passed for r in reports):
      raise AssertionError("pytest ran no test")
    return "passed"


def _module(name: str) -> types.ModuleType:
  """A made-up module of that name, with made-up packages above it."""
  parts = name.split(".")
  for end in range(1, len(parts) + 1):
    part = ".".join(parts[:end])
    module = types.ModuleType(part)
    if end < len(parts):
      module.__path__ = []
      if part in sys.modules:
        continue
    sys.modules[part] = module
    if end > 1:
      setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
  return module


class _Dialogue:
  """The operations of one run of a case, and the answers known so far.

  Answers are valid as long as the run asks the same operations as before.
  """

  def __init__(self, known: list[list[str]]):
    self._known = known
    self.operations: list[str] = []
    self.answered = 0
    self.malformed = ""
    self.unusable = ""
    self._closed = False

  def close(self) -> None:
    """The test is over: later operations, such as those for the text of an error, do not count."""
    self._closed = True

  def ask(self, operation: list[Any]) -> Any:
    """The answer: a plain value, a stand-in for an object, a raised exception, or a guess."""
    if self._closed:
      raise _Stop
    number = len(self.operations)
    if number >= _MOST_OPERATIONS or number - self.answered >= _MOST_GUESSES:
      raise _Stop
    text = json.dumps(operation)
    self.operations.append(text)
    if number != self.answered or number >= len(self._known) or self._known[number][0] != text:
      return Guess(self, {"ref": number}, "guess")
    self.answered += 1
    return self._read(self._known[number][1], number)

  def _read(self, text: str, number: int) -> Any:
    try:
      answer = json.loads(text)
      if set(answer) == {"value"}:
        return decode(answer["value"])
      if set(answer) == {"items", "done"}:
        return [decode(item) for item in answer["items"]], answer["done"] is not False
      if set(answer) == {"object"}:
        return StandIn(self, {"ref": number}, str(answer["object"])[:100])
      error = _exception(answer["error"], decode(answer["args"]))
    except (ValueError, TypeError, KeyError, RecursionError, MemoryError) as problem:
      self.malformed = f"{type(problem).__name__}: {problem}"[:200]
      raise _Stop from problem
    raise error

  def encode(self, value: Any) -> Any:
    try:
      return encode(value, _target_of)
    except (NotPlain, RecursionError) as error:
      self.unusable = f"an argument cannot cross to the code under test: {error}"
      raise _Unusable(self.unusable) from error


def _target_of(value: Any) -> dict[str, Any] | None:
  """What a stand-in stands for; it has no public attribute, which would hide one of the code's."""
  return value._target if isinstance(value, StandIn) else None


def _describe(error: BaseException) -> str:
  try:
    return f"{type(error).__name__}: {error}"[:500]
  except BaseException:  # its text would need an answer
    return type(error).__name__


def _exception(names: list[str], arguments: list[Any]) -> Exception:
  """The nearest built-in exception; one that the code under test made up becomes that as well.

  One that ends an iteration becomes a RuntimeError, as in a generator (PEP 479): in ``map`` or
  ``async for`` the test would take it for the end of its own cases, and pass.
  """
  for name in names:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
      if issubclass(kind, StopIteration | StopAsyncIteration):
        return RuntimeError(f"the code under test raised {kind.__name__}")
      try:
        return kind(*arguments)
      except TypeError:
        return Exception(*arguments)
  raise ValueError(f"no exception: {names}")


class StandIn:
  """A function or an object of the code under test, as its tests see it.

  It equals only itself, has no truth value, and cannot be subtracted from: otherwise the code's
  object could choose the results, and would learn what it is compared with.
  """

  __slots__ = ("_ask", "_encode", "_kind", "_target")

  def __init__(self, dialogue: _Dialogue, target: dict[str, Any], kind: str):
    for name, value in (
      ("_ask", dialogue.ask),
      ("_encode", dialogue.encode),
      ("_kind", kind),
      ("_target", target),
    ):
      object.__setattr__(self, name, value)

  def __call__(self, *arguments: Any, **named: Any) -> Any:
    positional = [self._encode(a) for a in arguments]
    return self._ask(
      ["call", self._target, positional, {n: self._encode(a) for n, a in named.items()}]
    )

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):
      raise AttributeError(name)
    return self._ask(["get", self._target, name])

  def __setattr__(self, name: str, value: Any) -> None:
    self._method("__setattr__", name, value)

  def _method(self, name: str, *arguments: Any) -> Any:
    try:
      method = self._ask(["get", self._target, name])
    except AttributeError as error:
      raise TypeError(f"{self!r} has no {name}") from error
    return method(*arguments)

  def __iter__(self) -> Iterator[Any]:
    iterator, done = self._method("__iter__"), False
    if not isinstance(iterator, StandIn):
      raise TypeError(f"{self!r} cannot be iterated")
    while not done:
      items, done = self._ask(["take", iterator._target, _CHUNK])
      yield from items

  def __next__(self) -> Any:
    items, _ = self._ask(["take", self._target, 1])
    if not items:
      raise StopIteration
    return items[0]

  def __bool__(self) -> bool:
    raise TypeError(f"{self!r} has no truth value here")

  def __repr__(self) -> str:
    return f"<{self._kind} of the code under test>"

  def __str__(self) -> str:
    return self._method("__str__")

  def __len__(self) -> int:
    return self._method("__len__")

  def __getitem__(self, key: Any) -> Any:
    return self._method("__getitem__", key)

  def __setitem__(self, key: Any, value: Any) -> None:
    self._method("__setitem__", key, value)

  def __int__(self) -> int:
    return self._method("__int__")

  def __float__(self) -> float:
    return self._method("__float__")

  __hash__ = object.__hash__


class Guess(StandIn):
  """Stands for an unknown answer: it agrees with everything that a test compares it with.

  Such a run does not count; only its list of operations is used.
  """

  __slots__ = ()

  def _agree(self, *_: Any) -> bool:
    return True

  def _itself(self, *_: Any) -> Any:
    return self

  def _stop(self, *_: Any) -> Any:
    raise _Stop

  __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _agree
  __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _itself
  __rtruediv__ = __neg__ = __abs__ = __round__ = _itself
  __iter__ = __next__ = __len__ = __int__ = __float__ = __str__ = __getitem__ = _stop
  __index__ = __setitem__ = _stop
  __hash__ = object.__hash__
