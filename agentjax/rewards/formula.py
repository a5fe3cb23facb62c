"""A reward as one expression of its parts, in text.

``f1 + 0.1 * (f1 > 0) * tool_used if format >= 1 else -1`` pays -1 for a bad format, otherwise F1
and a bonus that only a right answer gets. An expression has numbers, names of parts (in quotes
where they are no identifiers), ``+ - * /``, ``min(a, b)``, ``max(a, b)``, comparisons of two,
``and``, ``or``, ``not`` and ``A if C else B``. A comparison counts 1 where it holds, else 0; a
number other than 0 holds. Only the side of a choice that is taken is read. A quotient is 0 where
the divisor is not above 0: if it were an error, a policy could bring it about.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping

from agentjax.config import ConfigError
from agentjax.trajectory.record import Reward

TERMS = "reward_terms"  # in the metadata: the terms of the formula, each with its value

_OPERATORS: Mapping[type, Callable[..., float]] = {
  ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
  ast.Div: lambda a, b: a / b if b > 0 else 0.0,
  ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
  ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.USub: operator.neg, ast.Not: operator.not_,
}  # fmt: skip


class _InvalidPartError(Exception):
  """A part that is read has no value."""


@dataclasses.dataclass(frozen=True)
class Formula:
  """An expression; see the module.

  Attributes:
    text: of the expression.
    numbers: what further names in it stand for.
    recorded: whether its terms are kept with every episode.

  Raises:
    ConfigError: a text that is no such expression.
  """

  text: str
  numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)
  recorded: bool = False

  def __post_init__(self) -> None:
    anything: Mapping[str, Reward] = collections.defaultdict(lambda: Reward(1.0))
    for node in ast.walk(self._tree):
      if isinstance(node, ast.expr):  # of what is not read in one case too
        self._value(node, anything)

  @functools.cached_property
  def _tree(self) -> ast.expr:
    try:
      return ast.parse(self.text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
      raise ConfigError(f"formula={self.text!r} is no expression: {error}.") from error

  def names(self) -> frozenset[str]:
    """The parts that it reads."""
    nodes = list(ast.walk(self._tree))
    functions = [node.func for node in nodes if isinstance(node, ast.Call)]
    names = {_name(node) for node in nodes if node not in functions}
    return frozenset(names - {"", *self.numbers})

  def evaluate(self, parts: Mapping[str, Reward]) -> Reward:
    """The sum of the terms; invalid where a part that is read is invalid."""
    try:
      return Reward(sum(value for _, value in self.terms(parts)))
    except _InvalidPartError as error:
      return Reward.invalid(str(error))

  def terms(self, parts: Mapping[str, Reward]) -> list[tuple[str, float]]:
    """(text, value) of what is added up to the reward; of a choice the side that is taken."""
    return list(self._terms(self._tree, parts))

  def _terms(
    self, node: ast.expr, parts: Mapping[str, Reward], sign: float = 1.0
  ) -> Iterator[tuple[str, float]]:
    match node:
      case ast.IfExp(test, body, other):
        yield from self._terms(body if self._value(test, parts) else other, parts, sign)
      case ast.BinOp(left, ast.Add() | ast.Sub() as kind, right):
        yield from self._terms(left, parts, sign)
        yield from self._terms(right, parts, sign if isinstance(kind, ast.Add) else -sign)
      case _:
        shown = node if sign > 0 else ast.UnaryOp(ast.USub(), node)
        yield ast.unparse(shown), sign * self._value(node, parts)

  def _value(self, node: ast.expr, parts: Mapping[str, Reward]) -> float:
    value = functools.partial(self._value, parts=parts)
    match node:
      case ast.Constant(bool() | None):
        pass
      case ast.Constant(int() | float() as number):
        return float(number)
      case ast.BinOp(left, kind, right) | ast.Compare(left, [kind], [right]):
        if type(kind) in _OPERATORS:
          return float(_OPERATORS[type(kind)](value(left), value(right)))
      case ast.UnaryOp(kind, inner) if type(kind) in _OPERATORS:
        return float(_OPERATORS[type(kind)](value(inner)))
      case ast.BoolOp(kind, values):
        return float((all if isinstance(kind, ast.And) else any)(map(value, values)))
      case ast.IfExp(test, body, other):
        return value(body if value(test) else other)
      case ast.Call(ast.Name("min" | "max" as function), [_, _, *_] as values, []):
        return (min if function == "min" else max)(map(value, values))
    if name := _name(node):
      return self.numbers[name] if name in self.numbers else _value_of(parts, name)
    raise ConfigError(
      f"formula={self.text!r} has {ast.unparse(node)!r}; allowed: numbers, names of parts, + - * "
      "/, min(a, b), max(a, b), comparisons of two, and, or, not, A if C else B."
    )


def _name(node: ast.AST) -> str:
  """The name that a node of an expression is; "" where it is none."""
  match node:
    case ast.Name(name) | ast.Constant(str() as name):
      return name
  return ""


def _value_of(parts: Mapping[str, Reward], name: str) -> float:
  value, reason = parts[name].value, parts[name].reason
  if value is None:
    raise _InvalidPartError(f"{name}: {reason}")
  return value
