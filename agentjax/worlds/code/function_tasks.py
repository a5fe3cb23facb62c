"""Generated functions to write: seeded, graded, tested; needs no data.

A function takes a list of integers through a chain of stages; its level is their number::

    Write `solve(numbers)` for a list of integers. Keep those above 4. Square each. Return the sum,
    0 for none.

Train and test never share a function: the hash of the chain decides on which side it falls, for any
seed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Iterator
from typing import Annotated

from agentjax.config import Range, check
from agentjax.data import DataConfig
from agentjax.data.splits import FIRST_TEST_ID, TaskSplits
from agentjax.trajectory.record import Task
from agentjax.worlds.code.sources import CodeTaskSource
from agentjax.worlds.code.tasks import code_task

SOURCE = "function_tasks"
MAX_LEVEL = 6
_TEST_SHARE = 0.2  # of all chains; a constant, since it decides which side a chain is on
_NUMBERS = range(-20, 21)  # in the tests' lists

# What a stage says, and what it does; {k} is a number from 2 to 9.
_STAGES = (
  ("Keep the even ones.", "[n for n in numbers if n % 2 == 0]"),
  ("Keep the odd ones.", "[n for n in numbers if n % 2 == 1]"),
  ("Keep those above {k}.", "[n for n in numbers if n > {k}]"),
  ("Leave out the multiples of {k}.", "[n for n in numbers if n % {k} != 0]"),
  ("Add {k} to each.", "[n + {k} for n in numbers]"),
  ("Multiply each by {k}.", "[n * {k} for n in numbers]"),
  ("Square each.", "[n * n for n in numbers]"),
  ("Take the absolute value of each.", "[abs(n) for n in numbers]"),
  ("Sort them, smallest first.", "sorted(numbers)"),
  ("Reverse their order.", "numbers[::-1]"),
  ("Leave out repetitions; the first of each stays.", "list(dict.fromkeys(numbers))"),
  ("Leave out the first {k}.", "numbers[{k}:]"),
)
_ENDS = (
  ("Return the list.", "numbers"),
  ("Return the sum, 0 for none.", "sum(numbers)"),
  ("Return the largest, 0 for none.", "max(numbers, default=0)"),
  ("Return how many are left.", "len(numbers)"),
)


@dataclasses.dataclass(unsafe_hash=True)
class FunctionTaskConfig(CodeTaskSource):
  """Generated functions; the figures are ours.

  Attributes:
    min_level, max_level: stages of a function, 1..6, each level as often.
    tests: tests of a function.
    shown_tests: those in the prompt; at least two are kept back.
  """

  min_level: int = 1
  max_level: int = 3
  tests: Annotated[int, Range(3, 100)] = 8
  shown_tests: int = 2

  def validate(self, path: str = "config.world.tasks") -> None:
    super().validate(path)
    require = self.requirements(path)
    check(
      1 <= self.min_level <= self.max_level <= MAX_LEVEL,
      f"{path}.max_level",
      (self.min_level, self.max_level),
      f"1 <= min_level <= max_level <= {MAX_LEVEL}",
    )
    require(0 <= self.shown_tests <= self.tests - 2, "shown_tests", "0..tests - 2")

  def load(self, data: DataConfig) -> TaskSplits:
    assert data.train_size is not None and data.test_size is not None
    return function_tasks(
      self, train_size=data.train_size, test_size=data.test_size, seed=data.seed
    )


def function_tasks(
  config: FunctionTaskConfig, *, train_size: int, test_size: int, seed: int
) -> TaskSplits:
  """Generated tasks; the same arguments give the same tasks."""
  config.validate()
  return TaskSplits(
    [_task(config, i, i, seed, on_test_side=False) for i in range(train_size)],
    [_task(config, FIRST_TEST_ID + i, i, seed, on_test_side=True) for i in range(test_size)],
  )


def _task(config: FunctionTaskConfig, id: int, index: int, seed: int, on_test_side: bool) -> Task:
  level = config.min_level + index % (config.max_level - config.min_level + 1)
  for attempt in _attempts(f"{seed} {on_test_side} {index}"):
    stages = [attempt.choice(_STAGES) for _ in range(level)]
    chain = [
      (said.format(k=k), done.format(k=k)) for said, done in stages for k in [_small(attempt)]
    ]
    end = attempt.choice(_ENDS)
    reference = "".join(
      [
        "def solve(numbers):\n",
        *(f"  numbers = {done}\n" for _, done in chain),
        f"  return {end[1]}\n",
      ]
    )
    if _is_for_testing(reference) != on_test_side:
      continue
    inputs = [[], *(_numbers(attempt) for _ in range(config.tests - 1))]
    attempt.shuffle(inputs)
    namespace: dict = {}
    exec(reference, namespace)  # text of this file
    results = [namespace["solve"](numbers) for numbers in inputs]
    kept_back = [repr(r) for r in results[config.shown_tests :]]
    if len(set(kept_back)) < 2:
      continue  # a constant would pass
    said = " ".join([*(said for said, _ in chain), end[0]])
    return code_task(
      id=id,
      source=SOURCE,
      text=f"Write `solve(numbers)` for a list of integers. {said}",
      reference=reference,
      tests=[f"assert solve({i!r}) == {r!r}" for i, r in zip(inputs, results, strict=True)],
      shown=config.shown_tests,
      metadata={"level": level},
    )
  raise AssertionError("attempts never end")


def _attempts(name: str) -> Iterator[random.Random]:
  attempt = 0
  while True:
    yield random.Random(f"{name} {attempt}")
    attempt += 1


def _small(draw: random.Random) -> int:
  return draw.randint(2, 9)


def _numbers(draw: random.Random) -> list[int]:
  return [draw.choice(_NUMBERS) for _ in range(draw.randint(1, 12))]


def _is_for_testing(reference: str) -> bool:
  digest = hashlib.blake2b(reference.encode(), digest_size=8).digest()
  return int.from_bytes(digest, "big") < _TEST_SHARE * 2**64
