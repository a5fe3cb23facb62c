r"""Problems with a graph of dependencies: ``c = a + 3. a = 7. Find c.``

The answer of a problem of n operations needs n sums or differences, one after the other or side by
side; further quantities, which it does not need, stand between them. A worked solution computes
what is needed, a line a quantity::

    a = 7
    c = a + 3 = 10
    #### 10
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import string

from agentjax.config import NonNegativeInt, PositiveInt, check
from agentjax.data.config import DataConfig
from agentjax.data.source import TaskSource
from agentjax.data.splits import FIRST_TEST_ID, TaskSplits
from agentjax.text.answers import mark_answer
from agentjax.trajectory.record import Message, Task

SOURCE = "graph_problems"
_TEST_SHARE = 0.2
_LARGEST = 9  # of the numbers in a problem


@dataclasses.dataclass(unsafe_hash=True)
class GraphProblemConfig(TaskSource):
  """Which problems there are. All figures are ours.

  Attributes:
    worked: whether the training tasks have worked solutions, for the warm start; those of
      reinforcement learning have none, as both stages of a run would have all tasks in common.
    operations: that problems with a worked solution have, from one to so many.
    reinforced: operations of the problems without one. The paper finds that only the edge of what
      is known teaches.
    tested: operations of the test problems, in turn.
    distractors: quantities of a problem that its answer does not need.
  """

  worked: bool = True
  operations: PositiveInt = 4
  reinforced: PositiveInt = 5
  tested: tuple[int, ...] = (4, 5, 9)
  distractors: NonNegativeInt = 1

  def validate(self, path: str = "config.data.source") -> None:
    super().validate(path)
    right = bool(self.tested) and min(self.tested, default=0) >= 1
    check(right, f"{path}.tested", self.tested, "numbers of operations >= 1")
    most = max(self.operations, self.reinforced, *self.tested) + self.distractors
    free = len(string.ascii_lowercase) - 1
    check(
      most <= free, f"{path}.distractors", self.distractors, f"at most {free} quantities in all"
    )

  def load(self, data: DataConfig) -> TaskSplits:
    assert data.train_size is not None and data.test_size is not None
    return TaskSplits(
      train=[self._task(data.seed, i, test=False) for i in range(data.train_size)],
      test=[self._task(data.seed, i, test=True) for i in range(data.test_size)],
    )

  def _task(self, seed: int, index: int, *, test: bool) -> Task:
    for attempt in range(10_000):
      draw = random.Random(f"{seed}/{test}/{index}/{attempt}")
      worked = self.worked and not test
      if test:
        operations = self.tested[index % len(self.tested)]
      else:
        operations = draw.randint(1, self.operations) if worked else self.reinforced
      problem = make_problem(draw, operations, self.distractors)
      if _is_test(problem) == test:
        return problem.task(index + (FIRST_TEST_ID if test else 0), worked)
    raise AssertionError("ten thousand problems lie on one side")


@dataclasses.dataclass(frozen=True)
class Problem:
  """Quantities in the order in which they can be computed.

  Attributes:
    values: by name.
    parents: names that each is computed from; none for a number that is given.
    texts: the right side of each, such as ``a + 3``.
    needed: names, in order; the last is asked for.
    told: all names in the order in which the problem tells them.
  """

  values: dict[str, int]
  parents: dict[str, tuple[str, ...]]
  texts: dict[str, str]
  needed: tuple[str, ...]
  told: tuple[str, ...]

  def task(self, id: int, worked: bool) -> Task:
    """As a task; ``metadata["graph"]`` has value and parents of what is needed."""
    asked = self.needed[-1]
    facts = " ".join(f"{name} = {self.texts[name]}." for name in self.told)
    graph = {name: [self.values[name], list(self.parents[name])] for name in self.needed}
    operations = sum(bool(self.parents[name]) for name in self.needed)
    solution = (Message("assistant", self.solution()),) if worked else ()
    return Task(
      id,
      (Message("user", f"{facts} Find {asked}."),),
      str(self.values[asked]),
      SOURCE,
      demonstration=solution,
      metadata={"graph": graph, "asked": asked, "operations": operations},
    )

  def solution(self) -> str:
    """The worked solution."""
    lines = [
      f"{name} = {self.texts[name]}" + (f" = {self.values[name]}" if self.parents[name] else "")
      for name in self.needed
    ]
    return "\n".join([*lines, mark_answer(str(self.values[self.needed[-1]]))])


def make_problem(draw: random.Random, operations: int, distractors: int) -> Problem:
  """A problem whose answer needs so many operations."""
  names = draw.sample(string.ascii_lowercase, operations + distractors + 1)
  values: dict[str, int] = {}
  parents: dict[str, tuple[str, ...]] = {}
  texts: dict[str, str] = {}
  first = names[0]
  values[first] = draw.randint(1, _LARGEST)
  parents[first], texts[first] = (), str(values[first])
  chain = [first]
  for name in names[1 : operations + 1]:
    _define(draw, name, chain, values, parents, texts)
    chain.append(name)
  # What lies off the way to the last would not be needed: each is computed from the one before.
  for name in names[operations + 1 : operations + 1 + distractors]:
    _define(draw, name, [draw.choice(chain)], values, parents, texts)
  told = list(values)
  draw.shuffle(told)
  return Problem(values, parents, texts, tuple(chain), tuple(told))


def _define(
  draw: random.Random,
  name: str,
  chain: list[str],
  values: dict[str, int],
  parents: dict[str, tuple[str, ...]],
  texts: dict[str, str],
) -> None:
  """Adds a quantity that is computed from the last of the chain, and from another or a number."""
  sign = draw.choice("+-")
  other = draw.choice(chain[:-1]) if len(chain) > 1 and draw.random() < 0.5 else None
  number = draw.randint(1, _LARGEST)
  operand = number if other is None else values[other]
  values[name] = values[chain[-1]] + (operand if sign == "+" else -operand)
  parents[name] = (chain[-1],) if other is None else (chain[-1], other)
  texts[name] = f"{chain[-1]} {sign} {number if other is None else other}"


def _is_test(problem: Problem) -> bool:
  """Which side a problem is on, by its numbers and structure."""
  places = {name: i for i, name in enumerate(problem.needed)}
  content = [
    (problem.values[name], tuple(places[p] for p in problem.parents[name]))
    for name in problem.needed
  ]
  digest = hashlib.blake2b(repr(content).encode(), digest_size=8).digest()
  return int.from_bytes(digest, "big") / 2**64 < _TEST_SHARE
