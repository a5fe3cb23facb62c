"""Rows of GSM8K with other numbers: a small policy learns what to do with numbers, not the numbers.

The calculator annotations of a solution say where each number comes from, so a row can be told
again with others (as templates made by hand do in GSM-Symbolic, 2410.05229; the rules are ours):

* most whole numbers that a question states once, and a calculation uses, are drawn anew, from half
  to twice as much; 0, 1, 2 and numbers that are usually constants (7 days, 60 minutes) stay, and
  those that stand in words, in 20% or in 1/4;
* every calculation is done again. All results are positive, whole ones stay whole, others have at
  most two decimals;
* the words of the solution state the new numbers.

A row has no variant if one number would have to become two different ones, or if a calculation uses
a number of unknown origin: none of the question, in digits or in words, no earlier result, and no
usual constant.

What a number means is not looked at: somebody may work 40 hours a day in a variant.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from fractions import Fraction

from agentjax.tools.calculator import CalculatorError, evaluate, format_value

_NUMBER = re.compile(r"(?<![\w.,/])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w%/]|[.,]\d)")
# In a solution also the parts of 48/2= are numbers by themselves.
_BESIDE_OPERATORS = re.compile(r"(?<![\w.,])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w|[.,]\d)")
_LITERAL = re.compile(r"\d+(?:\.\d+)?|\.\d+")
_ANNOTATION = re.compile(r"<<([^<>]*)=([^<>=]*)>>")
_CONSTANTS = frozenset(map(Fraction, (0, 1, 2, 7, 10, 12, 24, 30, 52, 60, 100, 365, 1000)))  # ours
_WORDS: Mapping[str, tuple[float, ...]] = {
  "half": (2, 0.5), "twice": (2,), "double": (2,), "thrice": (3,), "triple": (3,), "dozen": (12,),
  "third": (3,), "thirds": (3,), "fourth": (4,), "quarter": (4, 0.25), "quarters": (4, 0.25),
  "fifth": (5,), "three": (3,), "four": (4,), "five": (5,), "six": (6,), "eight": (8,),
  "nine": (9,), "eleven": (11,), "fifteen": (15,), "twenty": (20,), "fifty": (50,),
}  # fmt: skip
_TRIES = 20

Renamed = Mapping[Fraction, Fraction]


def vary(question: str, solution: str, source: random.Random) -> tuple[str, str] | None:
  """The row with other numbers.

  Args:
    question: its text.
    solution: its text, with annotations and the line ``#### N``.
    source: of the draws.

  Returns:
    Question and solution, or None if none was found, or if the row allows none.
  """
  if not _explained(question, solution):
    return None
  used = set(_numbers(" ".join(expression for expression, _ in _ANNOTATION.findall(solution))))
  stated = [*_numbers(question), *_in_words(question)]  # with those of 20% and 1/4
  alone = [_value(found.group()) for found in _NUMBER.finditer(question)]
  free = [
    n
    for n in alone
    if n.denominator == 1 and n not in _CONSTANTS and stated.count(n) == 1 and n in used
  ]
  for _ in range(_TRIES if free else 0):
    drawn = {n: _draw(n, source) if source.random() < 0.7 else n for n in free}
    renamed = _solve(solution, {n: n for n in stated} | drawn)
    if renamed is not None and any(old != new for old, new in drawn.items()):
      return _replace(_NUMBER, question, drawn), _rewrite(solution, renamed)
  return None


def _explained(question: str, solution: str) -> bool:
  """Whether all numbers of calculations come from the question, a result, or custom."""
  known = {*_numbers(question), *_in_words(question), *_CONSTANTS}
  for percent in re.findall(r"(\d*\.?\d+)%", question):
    share = Fraction(percent) / 100
    known |= {share, 1 - share, 1 + share}
  for expression, result in _ANNOTATION.findall(solution):
    if not known.issuperset(_numbers(expression)):
      return False
    known.update(_numbers(result))
  return True


def _numbers(text: str) -> list[Fraction]:
  """All that stand in digits, wherever they stand."""
  return [_value(found) for found in _LITERAL.findall(text.replace(",", ""))]


def _in_words(text: str) -> list[Fraction]:
  words = re.findall(r"[a-z]+", text.lower())
  return [Fraction(number) for word in words for number in _WORDS.get(word, ())]


def _draw(number: Fraction, source: random.Random) -> Fraction:
  """Half to twice ``number``; a round number stays round."""
  step = next(s for s in (10, 5, 1) if number % s == 0 and (number >= 20 or s == 1))
  return Fraction(step * source.randint(max(int(number) // (2 * step), 1), 2 * int(number) // step))


def _solve(solution: str, renamed: Mapping[Fraction, Fraction]) -> dict[Fraction, Fraction] | None:
  """New numbers by old ones after all calculations, or None where they do not go on."""
  known = dict(renamed)
  for expression, result in _ANNOTATION.findall(solution):
    for number in _numbers(expression):
      known.setdefault(number, number)  # a constant, which no later result may be
    try:
      old, new = evaluate(result), evaluate(_in_expression(expression, known))
      exact = evaluate(expression)
    except CalculatorError:
      return None
    if old != exact:  # rounded by whoever wrote it
      return None
    whole = 1 if old.denominator == 1 else 100
    positive = min(old, new) > 0
    if not (positive and (new * whole).denominator == 1 and known.setdefault(old, new) == new):
      return None
  return known if evaluate(solution.rpartition("####")[2]) in known else None


def _in_expression(expression: str, known: Renamed) -> str:
  return _replace(_LITERAL, expression.replace(",", ""), known)


def _rewrite(solution: str, known: Renamed) -> str:
  """All annotations, and the words between them."""
  written, start = [], 0
  for found in _ANNOTATION.finditer(solution):
    expression = _in_expression(found.group(1), known)
    written += [
      _replace(_BESIDE_OPERATORS, solution[start : found.start()], known),
      f"<<{expression}={format_value(evaluate(expression))}>>",
    ]
    start = found.end()
  return "".join([*written, _replace(_BESIDE_OPERATORS, solution[start:], known)])


def _replace(numbers: re.Pattern[str], text: str, known: Renamed) -> str:
  """The text, with the numbers that have become others."""

  def replaced(found: re.Match[str]) -> str:
    old = _value(found.group())
    new = known.get(old, old)
    return found.group() if new == old else format_value(new)

  return numbers.sub(replaced, text)


def _value(number: str) -> Fraction:
  return Fraction(number.replace(",", ""))
