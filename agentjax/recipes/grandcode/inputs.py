"""Inputs of a function to be written: read from its examples, changed, enlarged, and checked.

The policy sees a few asserts of a task. Their arguments say what an input looks like: a new input
is an example with changes, and an input of a test generator is refused unless it looks like them.
"""

from __future__ import annotations

import ast
import dataclasses
import random
from collections.abc import Iterable, Sequence
from typing import Any

from agentjax.rewards.judges import question_text
from agentjax.trajectory.record import Task

Arguments = tuple[Any, ...]

_LISTS = "as_lists"  # of tests of the code world: around a call whose result may be an iterator
_LETTERS = "abcXYZ 019"
_SMALL = 12  # items of a container in a small input, and the room around the numbers of examples
_MOST_VALUES = 200_000  # in all arguments of one input
_MOST_BITS = 10_000  # of a whole number: Python writes none of more than 4300 digits


@dataclasses.dataclass(frozen=True)
class Example:
  """A call of which the task says what it gives."""

  arguments: Arguments
  expected: Any


@dataclasses.dataclass(frozen=True)
class Problem:
  """A function to be written.

  Attributes:
    id: of the task.
    text: what it must do.
    function: its name.
    examples: those that the text shows; at least one.
  """

  id: int
  text: str
  function: str
  examples: tuple[Example, ...]


def read_problem(task: Task) -> Problem | None:
  """The problem of a task of the code world; None without an example that can be read."""
  text = question_text(task.prompt)
  names = task.metadata.get("entry_points", ())
  for name in names:
    asserts = (line for line in text.split("\n") if line.startswith("assert "))
    examples = tuple(e for line in asserts if (e := _read_assert(line, name)) is not None)
    if examples and len({len(e.arguments) for e in examples}) == 1:
      return Problem(task.id, text, name, examples)
  return None


def _read_assert(line: str, function: str) -> Example | None:
  """The call of ``assert f(ARGUMENTS) == VALUE``; None for any other line."""
  try:
    (node,) = ast.parse(line).body
    test = node.test if isinstance(node, ast.Assert) else None
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
      return None
    call = test.left
    if isinstance(call, ast.Call) and len(call.args) == 1 and ast.unparse(call.func) == _LISTS:
      call = call.args[0]
    if not isinstance(call, ast.Call) or call.keywords or ast.unparse(call.func) != function:
      return None
    arguments = tuple(ast.literal_eval(a) for a in call.args)
    return Example(arguments, ast.literal_eval(test.comparators[0]))
  except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
    return None


@dataclasses.dataclass(frozen=True)
class _Kind:
  """What values at one place of the examples look like.

  Attributes:
    types: their types.
    negative: whether some number is below 0.
    letters: of texts.
    items: what their items look like, keys and values of dictionaries included; None without any.
  """

  types: frozenset[type]
  negative: bool
  letters: str
  items: _Kind | None

  @classmethod
  def of(cls, values: Sequence[Any]) -> _Kind:
    items = [item for value in values for item in _items(value)]
    numbers = [v for v in values if isinstance(v, int | float)]
    letters = "".join(sorted({c for v in values if isinstance(v, str) for c in v}))
    return cls(
      frozenset(map(type, values)),
      any(n < 0 for n in numbers),
      letters,
      cls.of(items) if items else None,
    )

  def refusal(self, value: Any) -> str | None:
    types = self.types | ({int} if float in self.types else set())
    if type(value) not in types:
      return f"a {type(value).__name__} where examples have {_names(self.types)}"
    if isinstance(value, int | float) and not isinstance(value, bool):
      if value != value or value in (float("inf"), float("-inf")):
        return "a number that is not finite"
      if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"a number of more than {_MOST_BITS} bits"
      if value < 0 and not self.negative:
        return "a number below 0 where examples have none"
    for item in _items(value):
      if self.items is None:
        return "items where the examples of the container are empty"
      if (reason := self.items.refusal(item)) is not None:
        return reason
    return None


class Domain:
  """The inputs that a problem may have.

  Args:
    problem: with its examples.
  """

  def __init__(self, problem: Problem):
    self.examples = tuple(e.arguments for e in problem.examples)
    self._kinds = [_Kind.of(values) for values in zip(*self.examples, strict=True)]
    self._lengths = _length_arguments(self.examples)

  def refusal(self, arguments: Any) -> str | None:
    """Why an input is not valid; None where it looks like the examples."""
    if not isinstance(arguments, tuple | list):
      return f"a {type(arguments).__name__} in the place of the arguments"
    if len(arguments) != len(self._kinds):
      return f"{len(arguments)} arguments in the place of {len(self._kinds)}"
    try:
      count = sum(map(_count, arguments))
    except RecursionError:
      return "containers that are nested too deep"
    if count > _MOST_VALUES:
      return f"more than {_MOST_VALUES} values"
    for kind, value in zip(self._kinds, arguments, strict=True):
      if (reason := kind.refusal(value)) is not None:
        return reason
    for place, container in self._lengths.items():
      if arguments[place] != len(arguments[container]):
        return f"argument {place + 1} is not the length of argument {container + 1}"
    return None

  def near(
    self, draw: random.Random, around: Sequence[Arguments] = (), changes: int = 1
  ) -> Arguments:
    """An input with small changes against an example, or against one of ``around``."""
    arguments = list(draw.choice([*self.examples, *around]))
    if not arguments:
      return ()
    for _ in range(changes):
      at = draw.randrange(len(arguments))
      arguments[at] = _change(arguments[at], self._kinds[at], draw)
    return self._with_lengths(arguments)

  def edges(self) -> list[Arguments]:
    """Inputs at the edges: each argument in turn empty, one item, all equal, reversed, 0 or 1."""
    found: list[Arguments] = []
    for example in self.examples:
      for at, value in enumerate(example):
        for edge in _edges(value):
          found.append(self._with_lengths([*example[:at], edge, *example[at + 1 :]]))
    return distinct(a for a in found if self.refusal(a) is None)

  def large(self, size: int, draw: random.Random) -> Arguments | None:
    """An input with containers and texts of ``size`` items, or else numbers around ``size``.

    None for a problem in which nothing grows.
    """
    arguments = list(draw.choice(self.examples))
    grows = [i for i, v in enumerate(arguments) if isinstance(v, list | tuple | str) and len(v)]
    if grows:
      # A tuple that always has one length is a record, not a sequence.
      grows = [i for i in grows if not self._is_record(i)]
      for at in grows:
        arguments[at] = _grow(arguments[at], self._kinds[at], size, draw)
    if not grows:
      grows = [i for i, v in enumerate(arguments) if type(v) is int]
      for at in grows:
        arguments[at] = size + draw.randrange(max(1, size // 10))
    return self._with_lengths(arguments) if grows else None

  def _is_record(self, at: int) -> bool:
    lengths = {len(e[at]) for e in self.examples}
    return isinstance(self.examples[0][at], tuple) and len(lengths) == 1 and len(self.examples) > 1

  def _with_lengths(self, arguments: Sequence[Any]) -> Arguments:
    fixed = list(arguments)
    for place, container in self._lengths.items():
      fixed[place] = len(fixed[container])
    return tuple(fixed)


def distinct(inputs: Iterable[Arguments]) -> list[Arguments]:
  """The inputs without repetitions, in their order."""
  return list({repr(a): a for a in inputs}.values())


def _length_arguments(examples: Sequence[Arguments]) -> dict[int, int]:
  """Argument that is the length of another in each example -> that other one."""
  found: dict[int, int] = {}
  for place, value in enumerate(examples[0]):
    if type(value) is not int:
      continue
    for container, other in enumerate(examples[0]):
      if isinstance(other, list | str | tuple) and all(
        type(e[place]) is int
        and isinstance(e[container], list | str | tuple)
        and e[place] == len(e[container])
        for e in examples
      ):
        found[place] = container
        break
  return found


def _items(value: Any) -> list[Any]:
  if isinstance(value, dict):
    return [*value.keys(), *value.values()]
  if isinstance(value, list | tuple | set | frozenset):
    return list(value)
  return []


def _count(value: Any) -> int:
  """Values inside one, each character of a text included."""
  if isinstance(value, str):
    return len(value)
  return 1 + sum(map(_count, _items(value)))


def _names(types: Iterable[type]) -> str:
  return " or ".join(sorted(t.__name__ for t in types))


def _change(value: Any, kind: _Kind, draw: random.Random) -> Any:
  """A value of the same type, a little different."""
  if isinstance(value, bool):
    return not value
  if isinstance(value, int | float):
    changed = draw.choice(
      [value + draw.randint(-3, 3), value * 2, value // 2, draw.randint(-_SMALL, _SMALL), 0, 1]
    )
    changed = type(value)(changed)
    return changed if kind.negative else abs(changed)
  if isinstance(value, str):
    letters = list(value)
    _change_items(letters, draw, lambda: draw.choice(kind.letters or _LETTERS))
    return "".join(letters)
  if isinstance(value, list | tuple | set | frozenset):
    items = sorted(value, key=repr) if isinstance(value, set | frozenset) else list(value)
    if kind.items is not None:
      inner = kind.items
      pool = items or [None]

      def fresh() -> Any:
        one = draw.choice(pool)
        return _blank(inner, draw) if one is None else _change(one, inner, draw)

      if isinstance(value, tuple) and draw.random() < 0.5 and items:  # perhaps a record
        at = draw.randrange(len(items))
        items[at] = _change(items[at], inner, draw)
      else:
        _change_items(items, draw, fresh)
    return type(value)(items)
  if isinstance(value, dict) and value and kind.items is not None:
    at = draw.choice(sorted(value, key=repr))
    if draw.random() < 0.3:
      return {k: v for k, v in value.items() if k != at}
    return value | {at: _change(value[at], kind.items, draw)}
  return value


def _change_items(items: list[Any], draw: random.Random, fresh: Any) -> None:
  """Changes a list in place: an item more, fewer, twice, moved or another; or all in order."""
  what = draw.choice(("add", "add", "drop", "twice", "swap", "other", "sort", "reverse"))
  at = draw.randrange(len(items) + 1)
  if what == "add" or not items:
    items.insert(at, fresh())
    return
  at = min(at, len(items) - 1)
  if what == "drop":
    del items[at]
  elif what == "twice":
    items.insert(at, items[at])
  elif what == "swap":
    other = draw.randrange(len(items))
    items[at], items[other] = items[other], items[at]
  elif what == "other":
    items[at] = fresh()
  elif what == "reverse":
    items.reverse()
  else:
    items.sort(key=lambda v: (type(v).__name__, v) if isinstance(v, int | float | str) else ("", 0))


def _blank(kind: _Kind, draw: random.Random) -> Any:
  """A value of a kind, from nothing."""
  for of in (int, float, str, list, tuple, dict):
    if of in kind.types:
      return of(draw.randint(0, _SMALL)) if of in (int, float, str) else of()
  return None


def _edges(value: Any) -> list[Any]:
  if isinstance(value, bool):
    return [not value]
  if isinstance(value, int | float):
    return [type(value)(n) for n in (0, 1, 2, -1)]
  if isinstance(value, str):
    return ["", value[:1], value[::-1], value[:1] * len(value), value * 2]
  if isinstance(value, list | tuple):
    return [value[:0], value[:1], value[::-1], value[:1] * len(value), value * 2]
  return []


def _grow(value: Any, kind: _Kind, size: int, draw: random.Random) -> Any:
  """A text or container of ``size`` items that look like those of ``value``."""
  if isinstance(value, str):
    return "".join(draw.choice(value) for _ in range(size))
  inner = kind.items
  assert inner is not None

  def item() -> Any:
    one = draw.choice(value)
    if type(one) is int:  # many different ones, or a loop over pairs ends early
      return draw.randint(-size if inner.negative else 0, size)
    return _change(one, inner, draw)

  return type(value)(item() for _ in range(size))
