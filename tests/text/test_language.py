import random
import re

import numpy as np
import pytest

from agentjax.text.language import (
  LanguageError,
  both,
  compile_language,
  control,
  either,
  lifted,
  literal,
  regex,
  repeat,
  searched,
  separated,
  seq,
  without,
)

_RANDOM = random.Random(0)
TEXTS = ["".join(_RANDOM.choices('ab01"\\ \né€😀-{}x', k=n % 8)) for n in range(2000)]


@pytest.mark.parametrize(
  "pattern",
  [
    "a*b", "(a|b)*0", "[^a]+", r"\d{2,3}", ".*", "a|b|", "(?:ab)+?x?", "[a-b0]{0,4}", r"\S+",
    r"[^\s]*\s", "é+|€", "[]a]+", r"[a\-]+", r"-?(0|[1-9]\d*)", "(a*)*b", "(a|b|)*", "a{2}",
    "a{1,}b", "(?P<x>a)+", r"[\s\S]*", r"\D*", r"\x61\u00e9?", "^a.*$", "a{0}", "",
    r'"([^"\\\x00-\x1f]|\\["\\/bfnrt]){0,9}"', r"[€-😀]+", r"a\.b|\\", "(b|(a|b)*)*1",
  ],
)  # fmt: skip
def test_an_automaton_accepts_what_python_matches(pattern):
  automaton = compile_language(regex(pattern))
  some = [*TEXTS, "é", "ab", "b1", "aba1", '"a\\n"', "€€", ""]
  assert [automaton.accepts(t) for t in some] == [bool(re.fullmatch(pattern, t)) for t in some]


@pytest.mark.parametrize("pattern", ["^a.*", "b", "0$", "^a.*|b.*$", "^(a|b)", "a[^0]"])
def test_what_is_searched_and_intersected_is_in_both(pattern):
  automaton = compile_language(both(searched(pattern), regex(".{2,4}")))
  for text in TEXTS:
    if automaton.accepts(text):
      assert re.search(pattern, text) and re.fullmatch(".{2,4}", text)
    elif pattern != "^a.*|b.*$":  # taken as ^(a.*|b.*)$
      assert not (re.search(pattern, text) and re.fullmatch(".{2,4}", text))


def test_bytes_that_are_no_text_are_no_characters():
  automaton = compile_language(regex(".*"))
  assert automaton.accepts("é€😀")
  for data in (b"\xc3", b"\xa9", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\n"):
    assert not automaton.accepts(data)


def test_a_language_without_texts_holds_all_others():
  automaton = compile_language(without("</p>", "ab"))
  for text in [*TEXTS, "</p>", "x</p", "<</p>", "a</pb"]:
    assert automaton.accepts(text) == ("</p>" not in text and "ab" not in text)


def test_separators_stand_between_parts_only():
  automaton = compile_language(separated(literal("a"), literal(","), 1, 3))
  assert [automaton.accepts(t) for t in ("a", "a,a,a", "", "a,", ",a", "a,a,a,a")] == [
    True, True, False, False, False, False,
  ]  # fmt: skip


def test_automata_are_the_smallest():
  assert len(compile_language(either(literal("abc"), literal("xbc"))).next_state) == 4
  assert len(compile_language(regex("(a|aa|aaa)*")).next_state) == 1
  assert len(compile_language(regex(r"[ab]{0,50}c")).next_state) == 52


@pytest.mark.parametrize(
  "pattern", ["(?=a)", r"\bfoo", r"(a)\1", "a^b", "(?i)a", "a++", "[", "a$b", r"\Aa"]
)
def test_what_is_no_regular_expression_here_is_refused(pattern):
  with pytest.raises(LanguageError, match=re.escape(repr(pattern))):
    compile_language(regex(pattern))


def test_languages_of_nothing_and_of_too_much_are_refused():
  with pytest.raises(LanguageError, match="no text at all"):
    compile_language(both(literal("a"), literal("b")))
  with pytest.raises(LanguageError, match="states are needed"):
    compile_language(regex("(a|b)*a(a|b){18}"))


def test_tokens_lead_where_their_bytes_lead():
  pieces = [b"a", b"b", b"ab", b"abab", b"\xc3", b"\xa9", "é".encode(), None, None, b"", b"ba\xc3"]
  language = seq(regex("(ab|é)*"), repeat(seq(control(8), regex("[ab]+"))))
  automaton = compile_language(language)
  next_state, classes = lifted(automaton, pieces)
  assert next_state.shape[1] < len(pieces)
  for state in range(len(automaton.next_state)):
    for token, piece in enumerate(pieces):
      target = state
      letters = [256 + automaton.controls.index(8)] if token == 8 else list(piece or [])
      for letter in letters:
        target = int(automaton.next_state[target, letter]) if target >= 0 else -1
      expected = target if letters else -1
      assert next_state[state, classes[token]] == expected, (state, token)
  assert (next_state[:, 0] == -1).all()
  assert np.flatnonzero(classes == 0).tolist() == [7, 9, 10]
