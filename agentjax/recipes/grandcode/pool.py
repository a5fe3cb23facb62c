"""Pools of tests that separate candidates: by difference, by attack, by size.

A candidate is the source of a program that defines the problem's function. Every call runs in a
sandbox; an answer becomes a text, and two candidates are separated by an input on which their texts
differ. A call that was not made has no text and separates nothing.

* difference: of many inputs those are kept that separate candidates which no earlier one separates.
  This needs no right answer.
* attack: the reference and one candidate; inputs come closer round by round to those that caught
  others.
* size: large inputs on which the reference still answers in time.

Reference: 2604.02721 (GrandCode), three modes of its test generator; how inputs are proposed and
chosen is ours.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from agentjax.adapters.unit_tests.boxed.plain import NotPlain, encode
from agentjax.adapters.unit_tests.scorer import CallAnswer
from agentjax.config import Config, NonNegativeInt, PositiveInt, check
from agentjax.recipes.grandcode.inputs import Arguments, Domain, distinct

Kind = Literal["difference", "attack", "size"]
KINDS: tuple[Kind, ...] = ("difference", "attack", "size")
LATE = "late"
BROKEN = "broken"
OBJECT = "object"
_VALUE = "value "
_DIGITS = 9  # of floats that are compared

# Source of a candidate, inputs -> answers.
Ask = Callable[[str, Sequence[Arguments]], Awaitable[Sequence[CallAnswer]]]


@dataclasses.dataclass(unsafe_hash=True)
class PoolConfig(Config):
  """How many inputs are tried and kept; all figures are ours.

  Attributes:
    proposals: inputs that are tried for differences.
    kept: tests of one kind that are kept at most.
    rounds: of an attack on one candidate. batch: inputs of a round.
    sizes: of large inputs, ascending.
    seed: of all inputs.
  """

  proposals: PositiveInt = 60
  kept: PositiveInt = 12
  rounds: PositiveInt = 3
  batch: PositiveInt = 30
  sizes: tuple[int, ...] = (300, 3_000, 30_000)
  seed: NonNegativeInt = 0

  def validate(self, path: str = "pool") -> None:
    super().validate(path)
    ascending = all(a < b for a, b in itertools.pairwise(self.sizes))
    check(
      ascending and all(s > 0 for s in self.sizes), f"{path}.sizes", self.sizes, "ascending, > 0"
    )


@dataclasses.dataclass(frozen=True)
class PoolTest:
  """An input that separates candidates.

  Attributes:
    arguments: of the call.
    kind: how it was found.
    expected: text of the reference's answer; None without a reference.
  """

  arguments: Arguments
  kind: Kind
  expected: str | None = None


def answer_text(answer: CallAnswer) -> str | None:
  """An answer as a text: equal texts are equal answers; None for what is not known.

  Floats are compared by nine digits, True equals 1, and sets and dictionaries have no order.
  """
  if not answer.asked:
    return None
  if answer.late:
    return LATE
  if answer.answer is None:
    return BROKEN
  if "value" in answer.answer:
    try:
      return _VALUE + json.dumps(_plain(answer.answer["value"]))
    except (ValueError, TypeError, RecursionError):
      return OBJECT  # code may write to the pipe of its answers whatever it likes
  error = answer.answer.get("error")
  if isinstance(error, list) and error:
    return f"error {error[0]}"
  return OBJECT  # of the code's own, which may claim to equal anything: never a right answer


def text_of_value(value: Any) -> str | None:
  """The text of an answer with this value; None for a value that cannot cross."""
  try:
    return _VALUE + json.dumps(_plain(encode(value)))
  except NotPlain:
    return None


def is_value(text: str | None) -> bool:
  """Whether the call gave a value: no error, in time."""
  return text is not None and text.startswith(_VALUE)


def _plain(value: Any) -> Any:
  """Encoded values of ``boxed.plain`` in one form for all that are equal in Python."""
  if isinstance(value, bool):
    return int(value)
  if isinstance(value, float):
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short
  if isinstance(value, list):
    return [_plain(v) for v in value]
  if isinstance(value, dict):
    ((kind, content),) = value.items()
    inner = _plain(content) if isinstance(content, list) else content
    if kind in ("set", "frozenset"):
      return {"set": sorted(inner, key=json.dumps)}
    return {kind: sorted(inner, key=json.dumps) if kind == "dict" else inner}
  return value


def texts_of(answers: Sequence[CallAnswer]) -> list[str | None]:
  return [answer_text(a) for a in answers]


def split_pairs(texts: Sequence[str | None]) -> set[tuple[int, int]]:
  """The pairs of candidates whose texts on one input differ."""
  known = [(i, t) for i, t in enumerate(texts) if t is not None]
  return {(i, j) for (i, a), (j, b) in itertools.combinations(known, 2) if a != b}


def choose_separating(
  table: Sequence[Sequence[str | None]], most: int
) -> list[tuple[int, set[tuple[int, int]]]]:
  """Inputs, each with the pairs that it is the first to separate, those with most of them first.

  Args:
    table: texts of all candidates, by input.
    most: how many inputs at most.
  """
  left = {i: split_pairs(texts) for i, texts in enumerate(table)}
  chosen: list[tuple[int, set[tuple[int, int]]]] = []
  while left and len(chosen) < most:
    best = max(left, key=lambda i: (len(left[i]), -i))
    pairs = left.pop(best)
    if not pairs:
      break
    chosen.append((best, pairs))
    left = {i: other - pairs for i, other in left.items()}
  return chosen


class TestMaker:
  """Makes tests for one problem.

  Args:
    domain: its inputs.
    ask: runs candidates.
    config: see PoolConfig.
    reference: source of a program whose answers are right; None where nobody has one.
    salt: tells problems apart in the draws.
  """

  __test__ = False  # for pytest

  def __init__(
    self,
    domain: Domain,
    ask: Ask,
    config: PoolConfig | None = None,
    *,
    reference: str | None = None,
    salt: int = 0,
  ):
    self._domain, self._ask, self.reference = domain, ask, reference
    self.config = config or PoolConfig()
    self._salt = salt
    self._right: dict[str, str | None] = {}  # of the reference, by input

  def proposals(self) -> list[Arguments]:
    """Small inputs, without the examples: edges, then changes of examples."""
    draw = self._draw("near")
    found = [*self._domain.edges()]
    for _ in range(4 * self.config.proposals):
      if len(found) >= 2 * self.config.proposals:
        break
      found.append(self._domain.near(draw, changes=draw.randint(1, 4)))
    shown = {repr(a) for a in self._domain.examples}
    usable = (a for a in found if repr(a) not in shown and self._domain.refusal(a) is None)
    return distinct(usable)[: self.config.proposals]

  async def by_difference(
    self, candidates: Sequence[str], inputs: Sequence[Arguments] | None = None
  ) -> list[PoolTest]:
    """Inputs that separate candidates which no other kept one separates.

    An input counts if the reference gives a value, or else if most candidates with an answer do:
    errors of all are a sign of an input that is not valid.

    Args:
      candidates: sources.
      inputs: what is tried; None makes ``proposals``.
    """
    inputs = self.proposals() if inputs is None else list(inputs)
    if not inputs or not candidates:
      return []
    right = await self._expected(inputs)
    inputs = [a for a, text in zip(inputs, right, strict=True) if self._may_be(text)]
    right = [text for text in right if self._may_be(text)]
    columns = [texts_of(await self._ask(code, inputs)) for code in candidates]
    rows = [list(row) for row in zip(*columns, strict=True)]
    if self.reference is None:
      rows = [row if _mostly_values(row) else [None] * len(row) for row in rows]
    else:
      rows = [[text, *row] for text, row in zip(right, rows, strict=True)]
    chosen = choose_separating(rows, self.config.kept)
    return [PoolTest(inputs[i], "difference", right[i]) for i, _ in chosen]

  async def by_attack(self, candidate: str, around: Sequence[Arguments] = ()) -> PoolTest | None:
    """An input on which a candidate is wrong; None if no round finds one.

    Args:
      candidate: source; the attack needs a reference.
      around: inputs that caught others.
    """
    if self.reference is None:
      raise ValueError("an attack compares with a reference, and there is none")
    draw, tried = self._draw("attack", candidate), {repr(a) for a in self._domain.examples}
    for number in range(self.config.rounds):
      near = (
        self._domain.near(draw, around, changes=1 + number * 2)
        for _ in range(4 * self.config.batch)
      )
      found = [*(around if number == 0 else ()), *near]
      inputs = [
        a for a in distinct(found) if repr(a) not in tried and self._domain.refusal(a) is None
      ][: self.config.batch]
      tried |= {repr(a) for a in inputs}
      right = await self._expected(inputs)
      pairs = [(a, t) for a, t in zip(inputs, right, strict=True) if is_value(t)]
      texts = texts_of(await self._ask(candidate, [a for a, _ in pairs])) if pairs else []
      for (arguments, expected), text in zip(pairs, texts, strict=True):
        if text is not None and text != expected:
          return PoolTest(arguments, "attack", expected)
    return None

  async def by_size(self, candidates: Sequence[str]) -> list[PoolTest]:
    """Large inputs on which the reference answers in time and some candidate fails.

    Without a reference an input counts if some candidate gives a value and another is late.
    """
    draw, kept = self._draw("size"), []
    for size in self.config.sizes:
      arguments = self._domain.large(size, draw)
      if arguments is None or self._domain.refusal(arguments) is not None:
        break
      (right,) = await self._expected([arguments])
      if not self._may_be(right):
        break  # a larger one would be too large as well
      texts = [texts_of(await self._ask(code, [arguments]))[0] for code in candidates]
      if self.reference is not None:
        separates = any(t is not None and t != right for t in texts)
      else:
        separates = LATE in texts and any(map(is_value, texts))
      if separates:
        kept.append(PoolTest(arguments, "size", right))
    return kept

  async def _expected(self, inputs: Sequence[Arguments]) -> list[str | None]:
    """The reference's texts; None each without one."""
    if self.reference is None:
      return [None] * len(inputs)
    new = [a for a in inputs if repr(a) not in self._right]
    while new:
      texts = texts_of(await self._ask(self.reference, new))
      self._right |= {repr(a): t for a, t in zip(new, texts, strict=True) if t is not None}
      # It may have stopped at an input that it cannot do; the others are asked again.
      left = [a for a, t in zip(new, texts, strict=True) if t is None]
      if len(left) == len(new):
        self._right |= {repr(a): None for a in left}
        left = []
      new = left
    return [self._right[repr(a)] for a in inputs]

  def _may_be(self, right: str | None) -> bool:
    return self.reference is None or is_value(right)

  def _draw(self, *name: str) -> random.Random:
    return random.Random(repr((self.config.seed, self._salt, *name)))


def _mostly_values(row: Sequence[str | None]) -> bool:
  known = [text for text in row if text is not None]
  return 2 * sum(map(is_value, known)) > len(known)


def failed_by(tests: Sequence[PoolTest], texts: Sequence[str | None]) -> list[int]:
  """The tests that a candidate with these answers fails; those without a right answer are none."""
  pairs = enumerate(zip(tests, texts, strict=True))
  return [i for i, (t, text) in pairs if None not in (t.expected, text) and text != t.expected]


@dataclasses.dataclass(frozen=True)
class Vote:
  """Candidates with the same answers on all inputs, the largest group first.

  Attributes:
    groups: indices of candidates.
  """

  groups: tuple[tuple[int, ...], ...]

  @property
  def winner(self) -> int | None:
    """The first of the largest group; None if no candidate gave a value to any input."""
    return self.groups[0][0] if self.groups else None


def vote(answers: Sequence[Sequence[str | None]]) -> Vote:
  """Chooses a candidate by the answers that most candidates agree on.

  Candidates without any value do not vote. Equal groups stand in the order of their first members.

  Args:
    answers: texts of each candidate on the same inputs.
  """
  groups: dict[tuple[str | None, ...], list[int]] = {}
  for i, own in enumerate(answers):
    if any(map(is_value, own)):
      groups.setdefault(tuple(own), []).append(i)
  ordered = sorted(groups.values(), key=lambda members: (-len(members), members[0]))
  return Vote(tuple(map(tuple, ordered)))


async def expect_the_vote(
  tests: Sequence[PoolTest], candidates: Sequence[str], ask: Ask
) -> tuple[list[PoolTest], int | None]:
  """The tests with the answers of the candidates' vote, and who won it.

  For test time, when no reference is known. Tests to which the winner gives no value keep none.
  """
  columns = [texts_of(await ask(code, [t.arguments for t in tests])) for code in candidates]
  winner = vote(columns).winner
  if winner is None:
    return list(tests), None
  pairs = zip(tests, columns[winner], strict=True)
  settled = [dataclasses.replace(t, expected=x if is_value(x) else None) for t, x in pairs]
  return settled, winner


@dataclasses.dataclass(frozen=True)
class Separation:
  """How many wrong candidates each kind of test separates from the reference.

  Attributes:
    candidates: how many there are.
    by_kind: separated by tests of a kind.
    only: separated by no other kind.
    any: separated by some test.
  """

  candidates: int
  by_kind: Mapping[Kind, int]
  only: Mapping[Kind, int]
  any: int


def count_separations(caught: Mapping[str, frozenset[Kind]]) -> Separation:
  """Counts from the kinds of tests that caught each candidate, by its name."""
  every = caught.values()
  return Separation(
    len(caught),
    {kind: sum(kind in kinds for kinds in every) for kind in KINDS},
    {kind: sum(kinds == {kind} for kinds in every) for kind in KINDS},
    sum(bool(kinds) for kinds in every),
  )
