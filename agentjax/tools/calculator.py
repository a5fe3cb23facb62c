"""A calculator: its own tokenizer and recursive-descent parser over exact rationals, no ``eval``.

Grammar, loosest first (all binary operators but ``**`` associate to the left)::

    sum     := product (("+" | "-") product)*
    product := unary (("*" | "/" | "//" | "%") unary)*
    unary   := ("+" | "-") unary | power
    power   := percent (("**" | "^") unary)?
    percent := atom "%"*
    atom    := "$"? (number | "(" sum ")")
    number  := digits with optional thousands commas, decimals (".5", "3.", "1,250.75")

``×``, ``÷`` and ``−`` read as ``*``, ``/`` and ``-``. A ``%`` is the remainder where a number, a
``$`` or a ``(`` follows, and otherwise divides by 100: ``17 % 5`` is 2, ``50% * 30`` is 15.
"""

from __future__ import annotations

import dataclasses
import decimal
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Any

from agentjax.config import PositiveInt, Range
from agentjax.tools.config import ToolConfig, Workbench
from agentjax.tools.protocol import Tool, ToolContext, ToolResult, ToolStatus


class CalculatorError(ValueError):
  """An expression that has no value; the message is written for the policy that wrote it."""


@dataclasses.dataclass(unsafe_hash=True)
class CalculatorConfig(ToolConfig):
  """Limits of one expression and the form of its result; the figures are ours.

  Attributes:
    max_characters: length of an expression.
    max_depth: nested parentheses, signs and powers.
    max_bits: bits of any intermediate numerator or denominator; bounds time and memory.
    significant_digits: digits of a result that is not an integer; rounded half to even.
  """

  max_characters: PositiveInt = 500
  max_depth: Annotated[int, Range(1, 100)] = 50
  max_bits: Annotated[int, Range(64, 14000)] = 4096
  significant_digits: Annotated[int, Range(1, 50)] = 10

  def build(self, bench: Workbench) -> Tool:
    return CalculatorTool(self)


_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+"
_TOKEN = re.compile(rf"\s*(?:(?P<number>{_NUMBER})|(?P<symbol>\*\*|//|[-+*/%^()$×÷−]))")
_SPELLING = {"×": "*", "÷": "/", "−": "-", "^": "**"}


def evaluate(expression: str, config: CalculatorConfig | None = None) -> Fraction:
  """Exact value of an arithmetic expression (see the module's grammar).

  Powers with an integer exponent are exact; others go through float64.

  Raises:
    CalculatorError: syntax, division by zero, a power without a real value, or a limit of
      ``config`` was passed.
  """
  return _Parser(expression, config or CalculatorConfig()).parse()


def format_value(value: Fraction, significant_digits: int = 10) -> str:
  """``value`` as a plain decimal: integers without a point, no trailing zeros.

  A value that is not an integer is rounded to ``significant_digits`` (half to even); magnitudes
  outside 1e-9 .. 1e16 that are not integers are written with an exponent.
  """
  if value.denominator == 1:
    return str(value.numerator)
  context = decimal.Context(prec=significant_digits, Emin=-(10**6), Emax=10**6)
  rounded = context.divide(decimal.Decimal(value.numerator), decimal.Decimal(value.denominator))
  rounded = rounded.normalize(context)
  return str(rounded) if not -9 <= rounded.adjusted() < 16 else f"{rounded:f}"


class CalculatorTool:
  """The calculator as a tool; a wrong call gets status ERROR."""

  name = "calculator"
  description = (
    "Evaluates one arithmetic expression exactly. Operators: + - * / // % ** and parentheses."
  )
  parameters: Mapping[str, Any] = {
    "type": "object",
    "properties": {"expression": {"type": "string", "description": "for example (12 + 3) * 4 / 5"}},
    "required": ["expression"],
    "additionalProperties": False,
  }

  def __init__(self, config: CalculatorConfig | None = None):
    self._config = config or CalculatorConfig()
    self._config.validate("calculator")

  async def __call__(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    try:
      value = evaluate(arguments["expression"], self._config)
    except CalculatorError as error:
      return ToolResult(ToolStatus.ERROR, f"error: {error}")
    return ToolResult(ToolStatus.OK, format_value(value, self._config.significant_digits))


class _Parser:
  """Recursive descent over the token list; ``_at`` is the next token."""

  def __init__(self, expression: str, config: CalculatorConfig):
    self._config = config
    if len(expression) > config.max_characters:
      raise CalculatorError(
        f"the expression has {len(expression)} characters; at most {config.max_characters} are "
        "allowed"
      )
    self._tokens = _tokenize(expression)
    self._at = 0
    self._depth = 0

  def parse(self) -> Fraction:
    if not self._tokens:
      raise CalculatorError("the expression is empty")
    value = self._sum()
    if self._peek() is not None:
      raise CalculatorError(f"unexpected {self._peek()!r} after a complete expression")
    return value

  def _peek(self) -> str | None:
    return self._tokens[self._at] if self._at < len(self._tokens) else None

  def _take(self, *symbols: str) -> str | None:
    token = self._peek()
    if token is None or token not in symbols:
      return None
    self._at += 1
    return token

  def _sum(self) -> Fraction:
    value = self._product()
    while operator := self._take("+", "-"):
      right = self._product()
      value = self._bounded(value + right if operator == "+" else value - right)
    return value

  def _product(self) -> Fraction:
    value = self._unary()
    while operator := self._take("*", "/", "//", "%"):
      right = self._unary()
      if operator == "*":
        value = self._bounded(value * right)
        continue
      if right == 0:
        raise CalculatorError("division by zero")
      if operator == "/":
        value = self._bounded(value / right)
      elif operator == "//":
        value = Fraction(value // right)
      else:
        value = value % right
    return value

  def _unary(self) -> Fraction:
    self._depth += 1
    if self._depth > self._config.max_depth:
      raise CalculatorError(f"nested deeper than {self._config.max_depth} levels")
    if operator := self._take("+", "-"):
      value = self._unary()
      value = -value if operator == "-" else value
    else:
      value = self._power()
    self._depth -= 1
    return value

  def _power(self) -> Fraction:
    base = self._percent()
    if self._take("**"):
      return self._raised(base, self._unary())
    return base

  def _percent(self) -> Fraction:
    value = self._atom()
    while self._peek() == "%" and not self._operand_follows():
      self._at += 1
      value = self._bounded(value / 100)
    return value

  def _operand_follows(self) -> bool:
    following = self._tokens[self._at + 1 : self._at + 2]
    return bool(following) and (following[0] in ("(", "$") or following[0][0] in "0123456789.")

  def _atom(self) -> Fraction:
    self._take("$")
    token = self._peek()
    if token is None:
      raise CalculatorError("the expression ends where a number or '(' was expected")
    self._at += 1
    if token == "(":
      value = self._sum()
      if not self._take(")"):
        raise CalculatorError("a '(' is never closed")
      return value
    if token[0] in "0123456789.":
      return self._bounded(Fraction(token.rstrip(".")))
    raise CalculatorError(f"unexpected {token!r} where a number or '(' was expected")

  def _raised(self, base: Fraction, exponent: Fraction) -> Fraction:
    if base == 0 and exponent < 0:
      raise CalculatorError("division by zero")
    if exponent.denominator != 1:
      return self._bounded(_real_power(base, exponent))
    n = exponent.numerator
    if abs(base) not in (0, 1) and (_bits(base) - 1) * abs(n) > self._config.max_bits:
      raise CalculatorError("the result is too large")
    if abs(base) in (0, 1):  # a huge exponent is harmless here, and only its parity matters
      n = n % 2 if base == -1 else min(n, 1) if base == 0 else 0
    return self._bounded(base**n)

  def _bounded(self, value: Fraction) -> Fraction:
    if _bits(value) > self._config.max_bits:
      raise CalculatorError("the result is too large")
    return value


def _tokenize(expression: str) -> list[str]:
  tokens, position = [], 0
  text = expression.rstrip()
  while position < len(text):
    match = _TOKEN.match(text, position)
    if match is None:
      bad = text[position:].lstrip()[:1]
      raise CalculatorError(
        f"{bad!r} is not part of an expression; allowed: numbers and + - * / // % ** ( )"
      )
    if number := match.group("number"):
      tokens.append(number.replace(",", ""))
    else:
      symbol = match.group("symbol")
      tokens.append(_SPELLING.get(symbol, symbol))
    position = match.end()
  return tokens


def _bits(value: Fraction) -> int:
  return max(value.numerator.bit_length(), value.denominator.bit_length())


def _real_power(base: Fraction, exponent: Fraction) -> Fraction:
  if base < 0:
    raise CalculatorError("a negative number has no real power with a fractional exponent")
  try:
    result = math.pow(base, exponent)
  except OverflowError:
    raise CalculatorError("the result is too large") from None
  return Fraction(result)
