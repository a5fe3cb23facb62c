"""Final answers; numbers are compared by value."""

from __future__ import annotations

import re
from fractions import Fraction

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_WRAPPED = re.compile(
  rf"(?P<sign>[-−+]?)\s*[$€£]?\s*(?P<number>{_UNSIGNED})(?P<percent>\s*%)?"
  rf"(?:\s*/\s*(?P<denominator>\d+))?",
  re.ASCII,
)
# Python refuses to read integers of more than 4300 digits; no task's answer comes near.
_MAX_CHARACTERS = 1000


def normalise_number(text: str) -> Fraction | None:
  """The exact value of a text that is one number and nothing else; None for any other text.

  Accepted: signs, thousands commas, decimals, a currency sign, a closing full stop, ``%`` (kept as
  the number of percent) and simple fractions ``3/4``. Units are not accepted: "5 apples" is None.
  Neither is a text of more than 1000 characters.
  """
  if len(text) > _MAX_CHARACTERS:
    return None
  match = _WRAPPED.fullmatch(text.strip().removesuffix(".").strip())
  if match is None:
    return None
  value = Fraction(match["number"].replace(",", ""))
  if match["denominator"] is not None:
    if int(match["denominator"]) == 0 or match["percent"]:
      return None
    value /= int(match["denominator"])
  return -value if match["sign"] in ("-", "−") else value


def answers_equal(answer: str, reference: str) -> bool:
  """Equal as numbers where both are numbers, otherwise equal as text without outer blanks."""
  numbers = normalise_number(answer), normalise_number(reference)
  if None not in numbers:
    return numbers_equal(*numbers)
  return numbers == (None, None) and answer.strip() == reference.strip()


def numbers_equal(
  left: Fraction | None, right: Fraction | None, *, relative_tolerance: float = 1e-9
) -> bool:
  """Whether two numbers agree to a relative tolerance; None (no number) equals nothing.

  The tolerance allows decimals cut after ten digits, the calculator's precision: 0.33 is not 1/3.
  """
  if left is None or right is None:
    return False
  return abs(left - right) <= Fraction(relative_tolerance) * max(abs(left), abs(right))
