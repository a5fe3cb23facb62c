"""Runs candidates and input generators in sandboxes, for pools, checks of hypotheses and seats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentjax.adapters.unit_tests.boxed.plain import NotPlain, decode
from agentjax.adapters.unit_tests.scorer import (
  CallAnswer,
  UnitTestConfig,
  UnitTests,
  UnitTestVerifier,
  Verdict,
  build_verifier,
)
from agentjax.recipes.grandcode.inputs import Arguments
from agentjax.recipes.grandcode.pool import Ask
from agentjax.sandbox.config import DEFAULT, Sandboxes

GENERATOR = "inputs"  # the function that a program of the test generator defines
_AS_LIST = """

def as_list_{function}(*arguments):
  found = {function}(*arguments)
  return list(found) if hasattr(type(found), "__next__") else found
"""
MOST_INPUTS = 64  # of one generator; further ones are not looked at


class Runner:
  """Calls of untrusted code, each in a process of its own.

  Args:
    verifier: owned and closed by this.
  """

  def __init__(self, verifier: UnitTestVerifier):
    self._verifier = verifier

  def of(self, function: str) -> Ask:
    """Calls of ``function``; those after one without an answer are not made.

    An iterator that it returns is gone through: what it gives counts, as a list.
    """
    name, wrapper = f"as_list_{function}", _AS_LIST.format(function=function)

    async def ask(code: str, inputs: Sequence[Arguments]) -> Sequence[CallAnswer]:
      return await self._verifier.call(_source(code) + wrapper, name, inputs)

    return ask

  async def verify(self, code: str, tests: UnitTests) -> Verdict:
    """The task's own tests against code."""
    return await self._verifier.verify({"solution.py": _source(code)}, tests)

  async def inputs(self, generator: str, seed: int) -> list[Any]:
    """What ``inputs(seed)`` of a generator's program returns; [] if it gives no list.

    Nothing says yet that they are inputs of the problem (``inputs.Domain.refusal``).
    """
    (answer,) = await self._verifier.call(_source(generator), GENERATOR, [(seed,)])
    if answer.answer is None or "value" not in answer.answer:
      return []
    try:
      found = decode(answer.answer["value"])
    except NotPlain:
      return []
    return list(found)[:MOST_INPUTS] if isinstance(found, list | tuple) else []

  async def close(self) -> None:
    await self._verifier.close()


def open_runner(
  sandboxes: Sandboxes | None = None,
  *,
  sandbox: str = DEFAULT,
  cpu_seconds: int = 1,
  wall_seconds: float = 60.0,
  concurrency: int = 4,
) -> Runner:
  """A runner over a sandbox by name.

  Args:
    sandboxes: of the run.
    sandbox: its name there.
    cpu_seconds: CPU time of one call; later it is late.
    wall_seconds: of all calls of one candidate together.
    concurrency: candidates at once.
  """
  config = UnitTestConfig(
    cpu_seconds=cpu_seconds,
    wall_seconds=wall_seconds,
    verdict_seconds=wall_seconds,
    concurrency=concurrency,
    sandbox=sandbox,
  )
  return Runner(build_verifier(config, sandboxes))


def _source(code: str) -> str:
  """Code as a file can hold it; a NUL is no Python, and makes it fail."""
  return code.encode("utf-8", "replace").decode()
