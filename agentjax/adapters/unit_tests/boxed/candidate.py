"""Runs in the box of the code under test: carries out the operations that it is sent, and reports
results.

This program shares its process with code that may be hostile. So its reports are only claims about
what the code returns; it does not know what the code should return.

  request   {"modules": [name], "cases": {case: [operation]}, "cpu_seconds": n,
             "all": bool, whether nothing counts after a case without an answer}
  result    {case: {"lines": [answer], "ended": why}}
  operation ["call", target, [argument], {name: argument}] | ["get", target, attribute]
            | ["take", target, how many]                       (the next items of an iteration)
  target    {"name": [module, attribute]} | {"ref": number of the operation that gave the object}
  answer    {"value": plain} | {"object": type} | {"error": [class, base, ...], "args": [plain]}
            | {"items": [plain], "done": bool}
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from agentjax.adapters.unit_tests.boxed.forks import run_cases, silence
from agentjax.adapters.unit_tests.boxed.plain import NotPlain, decode, encode


def main() -> None:
  """Reads a request from stdin and writes the result to stdout."""
  request = json.load(sys.stdin.buffer)
  out = silence()
  cases = ((case, _case(request, operations)) for case, operations in request["cases"].items())
  result = run_cases(cases, request["cpu_seconds"], until_failure=request["all"])
  with open(out, "w") as stream:
    json.dump(result, stream)


def _case(
  request: dict[str, Any], operations: list[str]
) -> Callable[[Callable[[str], None]], None]:
  def work(report: Callable[[str], None]) -> None:
    script = _Script(request["modules"])
    for text in operations:
      report(json.dumps(script.perform(json.loads(text))))

  return work


class _Script:
  """The operations of one case, and the objects they gave."""

  def __init__(self, modules: list[str]):
    # An error here is not an answer: it ends the case, as a failed import does.
    self._modules = {name: importlib.import_module(name) for name in modules}
    self._results: list[Any] = []
    self._iterators: dict[str, Iterator[Any]] = {}

  def perform(self, operation: list[Any]) -> dict[str, Any]:
    kind, where, *rest = operation
    target = self._refer(*next(iter(where.items())))
    try:
      if kind == "take":
        return self._take(json.dumps(where), target, rest[0])
      result = self._perform(kind, target, rest)
    except Exception as error:
      self._results.append(None)
      return _error(error)
    self._results.append(result)
    try:
      return {"value": encode(result)}
    except (NotPlain, RecursionError):
      return {"object": type(result).__name__}

  def _perform(self, kind: str, target: Any, rest: list[Any]) -> Any:
    if kind == "get":
      return getattr(target, rest[0])
    positional, named = rest
    return target(
      *(decode(a, self._refer) for a in positional),
      **{name: decode(a, self._refer) for name, a in named.items()},
    )

  def _take(self, key: str, target: Any, count: int) -> dict[str, Any]:
    self._results.append(None)
    iterator = self._iterators.setdefault(key, iter(target))
    items = list(itertools.islice(iterator, count))
    return {"items": [encode(item) for item in items], "done": len(items) < count}

  def _refer(self, kind: str, content: Any) -> Any:
    if kind == "ref":
      return self._results[content]
    module, name = content
    try:
      return getattr(self._modules[module], name)
    except AttributeError:
      os._exit(3)  # what was asked for is not there: no answer


def _error(error: Exception) -> dict[str, Any]:
  try:
    arguments = [encode(a) for a in error.args]
  except (NotPlain, RecursionError):
    arguments = []
  return {"error": [c.__name__ for c in type(error).__mro__], "args": arguments}
