from textkit import (
  acronym,
  edit_distance,
  from_roman,
  justify,
  longest_common,
  slug,
  title,
  to_roman,
  wrap,
)


def test_edit_distance():
  assert edit_distance("kitten", "sitting") == 3
  assert edit_distance("", "abc") == 3
  assert edit_distance("abc", "") == 3
  assert edit_distance("flaw", "lawn") == 2
  assert edit_distance("ab", "ba") == 2


def test_longest_common():
  assert longest_common("the cathedral", "a cathode") == " cath"
  assert longest_common("abc", "xyz") == ""
  assert longest_common("abab", "ab") == "ab"
  assert longest_common("xbanana", "banana") == "banana"


def test_wrap():
  assert wrap("the quick brown fox", 9) == ["the quick", "brown fox"]
  assert wrap("the quick brown fox", 8) == ["the", "quick", "brown", "fox"]
  assert wrap("incomprehensible it is", 5) == ["incomprehensible", "it is"]
  assert wrap("  ", 5) == []


def test_justify():
  assert justify("a bb c", 8) == "a  bb  c"
  assert justify("a bb c", 9) == "a   bb  c"
  assert justify("one", 9) == "one"
  assert justify("aa bb cc", 8) == "aa bb cc"
  assert justify("aaa bbb", 3) == "aaa bbb"


def test_to_roman():
  assert to_roman(1994) == "MCMXCIV"
  assert to_roman(3999) == "MMMCMXCIX"
  assert to_roman(1) == "I"
  assert to_roman(44) == "XLIV"
  assert to_roman(560) == "DLX"


def test_roman_range():
  refused = 0
  for number in (0, 4000, -3):
    try:
      to_roman(number)
    except ValueError:
      refused += 1
  assert refused == 3


def test_from_roman():
  assert from_roman("MCMXCIV") == 1994
  assert from_roman("XLIX") == 49
  assert from_roman("DCCC") == 800


def test_from_roman_refuses():
  refused = 0
  for text in ("", "IIII", "IC", "abc", "VX"):
    try:
      from_roman(text)
    except ValueError:
      refused += 1
  assert refused == 5


def test_slug():
  assert slug("  Twice -- as   good! ") == "twice-as-good"
  assert slug("one two three", 8) == "one-two"
  assert slug("one two three", 7) == "one-two"
  assert slug("abcdefgh", 4) == "abcd"
  assert slug("one two three", 6) == "one"


def test_title():
  assert title("THE lord of the rings") == "The Lord of the Rings"
  assert title("what to aim to") == "What to Aim To"


def test_acronym():
  assert acronym("National Institute of Health") == "NIH"
  assert acronym("the end") == "E"
