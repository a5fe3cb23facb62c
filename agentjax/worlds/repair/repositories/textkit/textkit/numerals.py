"""Roman numerals from 1 to 3999."""

_VALUES = (
  (1000, "M"),
  (900, "CM"),
  (500, "D"),
  (400, "CD"),
  (100, "C"),
  (90, "XC"),
  (50, "L"),
  (40, "XL"),
  (10, "X"),
  (9, "IX"),
  (5, "V"),
  (4, "IV"),
  (1, "I"),
)
_DIGITS = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}


def to_roman(number):
  """``1994`` -> ``"MCMXCIV"``; raises ValueError out of range."""
  if number < 1 or number > 3999:
    raise ValueError(f"{number} has no Roman numeral")
  text = ""
  for value, digits in _VALUES:
    while number >= value:
      text += digits
      number -= value
  return text


def from_roman(text):
  """Inverse of ``to_roman``; raises ValueError for anything that it does not write."""
  total = 0
  for index, digit in enumerate(text):
    value = _DIGITS.get(digit, 0)
    following = _DIGITS.get(text[index + 1], 0) if index + 1 < len(text) else 0
    if value < following:
      total -= value
    else:
      total += value
  if total < 1 or to_roman(total) != text:
    raise ValueError(f"{text!r} is not a Roman numeral")
  return total
