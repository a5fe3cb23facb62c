"""Scores one answer by reasoning-gym's verifier, in a box: see ``scoring``.

Some of the library's verifiers hand the answer to ``eval`` or to ``sympy.parse_expr``, which runs
it. Then the answer would run in the process of the score and could change it. So these two are
replaced before an answer is read: ``evaluate`` and ``parse_expression`` only know numbers, texts,
lists and arithmetic.

Some verifiers also pay wrong answers; ``_MENDED`` replaces them.

Imports the standard library and, once it runs, reasoning-gym, which the box has.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import operator
import os
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

Entry = Mapping[str, Any]
Score = Callable[[str, Entry], float]

READY = "ready"  # printed before the answer is looked at: whatever fails from here on is its doing
_MOST_BITS = 4096  # of an integer that arithmetic makes
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod,
  ast.Pow: operator.pow,
  ast.LShift: operator.lshift,
  ast.RShift: operator.rshift,
  ast.BitAnd: operator.and_,
  ast.BitOr: operator.or_,
  ast.BitXor: operator.xor,
}
_SIGNS: Mapping[type, Callable[[Any], Any]] = {
  ast.UAdd: operator.pos,
  ast.USub: operator.neg,
  ast.Invert: operator.invert,
}
_FUNCTIONS = frozenset(
  "sin cos tan cot sec csc asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt Abs "
  "Rational Integer".split()
)
_CONSTANTS = frozenset(("pi", "E", "I"))


def evaluate(text: str, *scope: object) -> Any:
  """What ``eval`` gives for numbers, texts, lists, tuples and arithmetic on numbers.

  Raises:
    ValueError: anything else, or a number that is too large.
  """
  del scope
  return _value(ast.parse(text.strip(), mode="eval").body)


def _value(node: ast.AST) -> Any:
  if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str)):
    return node.value
  if isinstance(node, (ast.List, ast.Tuple)):
    values = [_value(item) for item in node.elts]
    return values if isinstance(node, ast.List) else tuple(values)
  if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
    return _SIGNS[type(node.op)](_number(node.operand))
  if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
    left, right = _number(node.left), _number(node.right)
    if isinstance(node.op, (ast.Pow, ast.LShift)) and abs(right) > _MOST_BITS:
      raise ValueError(f"an exponent of more than {_MOST_BITS}")
    if isinstance(node.op, ast.Pow) and _bits(left) * abs(right) > _MOST_BITS:
      raise ValueError(f"a power of more than {_MOST_BITS} bits")
    return _OPERATORS[type(node.op)](left, right)
  raise ValueError(f"{type(node).__name__} is neither a plain value nor arithmetic")


def _number(node: ast.AST) -> Any:
  value = _value(node)
  if not isinstance(value, (int, float)):
    raise ValueError("arithmetic is for numbers")
  return value


def _bits(value: Any) -> int:
  return value.bit_length() if isinstance(value, int) else 1


def exact_value(text: str) -> tuple[Fraction, list[int]]:
  """The value of a text of whole numbers, ``+ - * /`` and brackets, and the numbers in their order.

  Raises:
    ValueError, ZeroDivisionError, SyntaxError: no such text, or one without a value.
  """
  used: list[int] = []

  def value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
      used.append(node.value)
      return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
      return Fraction(_SIGNS[type(node.op)](value(node.operand)))
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
      return Fraction(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
    raise ValueError(f"{type(node).__name__} is not allowed; allowed: whole numbers, + - * / ( )")

  return value(ast.parse(text.strip(), mode="eval").body), used


def parse_expression(original: Callable[..., Any]) -> Callable[..., Any]:
  """``sympy.parse_expr`` for arithmetic over single letters and known functions, and only that."""

  def parse(text: str, local_dict: dict[str, Any] | None = None, **settings: Any) -> Any:
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
      if isinstance(node, ast.Name):
        known = (node.id.isalpha() and len(node.id) == 1) or node.id in _CONSTANTS | _FUNCTIONS
        allowed = known or node.id in (local_dict or {})
      elif isinstance(node, ast.Call):
        called = node.func.id if isinstance(node.func, ast.Name) else None
        allowed = called in _FUNCTIONS and not node.keywords
      elif isinstance(node, ast.Constant):
        allowed = type(node.value) in (int, float)
      else:
        allowed = isinstance(node, _ALGEBRA)
      if not allowed:
        raise ValueError(f"{ast.unparse(node)[:80]!r} is no part of an algebraic expression")
    # The checked text is exactly the parsed text, without comments and odd spellings.
    return original(ast.unparse(tree), local_dict=local_dict, **settings)

  return parse


_ALGEBRA = (
  ast.Expression,
  ast.BinOp,
  ast.UnaryOp,
  ast.Load,
  ast.Add,
  ast.Sub,
  ast.Mult,
  ast.Div,
  ast.Pow,
  ast.UAdd,
  ast.USub,
)


def disarm() -> None:
  """Takes ``eval``, ``exec`` and ``sympy.parse_expr`` from every module of reasoning-gym."""
  import sympy
  from sympy.parsing import sympy_parser

  original = sympy_parser.parse_expr
  parse = parse_expression(original)
  setattr(sympy, "parse_expr", parse)  # noqa: B010 (the modules ask the package for it)
  for name, module in list(sys.modules.items()):
    if name.partition(".")[0] != "reasoning_gym":
      continue
    setattr(module, "eval", evaluate)  # noqa: B010 (found before the builtin of that name)
    setattr(module, "exec", _refuse)  # noqa: B010
    for key, value in list(vars(module).items()):
      if value is original:
        setattr(module, key, parse)


def _refuse(*arguments: object) -> None:
  raise ValueError("nothing is executed where answers are scored")


def verifier(name: str) -> Score:
  """The scorer of one data set: 1 for a right answer, else at most a half.

  An answer is right if the library's verifier pays it in full and its words and numbers are those
  of the reference. For data sets with many right answers the verifier alone decides
  (``_MANY_ANSWERS``) if it reads the whole answer (``_MADE_OF``); with many forms of an answer the
  number of numbers must match, and there may be no words but those of notation (``_MANY_FORMS``).
  Other answers get half of the library's figure.
  """
  from reasoning_gym import get_score_answer_fn

  disarm()
  library = get_score_answer_fn(name)

  def score(answer: str, entry: Entry) -> float:
    if name in _MENDED:
      return float(_MENDED[name](answer, entry))
    if name == "boxnet" and not _moves_boxes(answer):
      return 0.0
    paid = float(library(answer, entry))
    if math.isnan(paid):
      return 0.0
    if paid >= 1 and _states(answer, str(entry["answer"]), name):
      return 1.0
    return min(max(paid, 0.0), 1.0) / 2

  return score


def _states(answer: str, reference: str, name: str) -> bool:
  """Whether an answer that the library pays says no more than that."""
  if name in _MADE_OF:
    return _MADE_OF[name].fullmatch(answer) is not None
  if name in _MANY_ANSWERS:
    return True
  if name in _MANY_FORMS:
    known = {*_LETTERS.findall(reference.casefold()), *_NOTATION}
    said = _LETTERS.findall(answer.casefold())
    numbers = (len(_NUMBER.findall(text)) for text in (answer, reference))
    return known.issuperset(said) and len(set(numbers)) == 1
  if name == "knights_knaves":  # whom first is free; which role is whose, the library looks at
    return sorted(map(str, _words(answer))) == sorted(map(str, _words(reference)))
  return _words(answer) == _words(reference)


def _words(text: str) -> list[str | Decimal]:
  """Words, without case, and numbers, without their form; punctuation and blanks are left out."""
  with contextlib.suppress(InvalidOperation):
    return [Decimal(text.strip().replace(",", ""))]
  found = _WORD.findall(text)
  return [Decimal(word) if _NUMBER.fullmatch(word) else word.casefold() for word in found]


_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_LETTERS = re.compile(r"[^\W\d_]+")
_NOTATION = "frac dfrac tfrac day days degree degrees e".split()
_WORD = re.compile(rf"{_NUMBER.pattern}|\w+|±")


def _uses_each_number(target: int | None) -> Score:
  """Whether an expression reaches the target with every number of the puzzle, each once."""

  def score(answer: str, entry: Entry) -> float:
    puzzle = entry["metadata"]
    try:
      value, used = exact_value(answer)
    except (ValueError, ZeroDivisionError, SyntaxError):
      return 0.0
    right = value == (puzzle["target"] if target is None else target)
    return float(right and sorted(used) == sorted(puzzle["numbers"]))

  return score


def _same_text(answer: str, entry: Entry) -> float:
  return float(answer.strip().casefold() == str(entry["answer"]).casefold())


def _probability(answer: str, entry: Entry) -> float:
  """Right to four digits after the point, and to a hundredth of the probability itself."""
  try:
    stated, right = Fraction(answer.strip()), Fraction(str(entry["answer"]))
  except (ValueError, ZeroDivisionError):
    return 0.0
  return float(abs(stated - right) <= min(Fraction(1, 10**4), right / 100))


def _complex(answer: str, entry: Entry) -> float:
  from reasoning_gym.algebra.complex_arithmetic import ComplexArithmeticDataset

  stated = ComplexArithmeticDataset.parse_string_to_complex(answer)
  if stated is None:
    return 0.0
  return float(abs(stated - complex(*entry["metadata"]["result"])) <= 1e-6)  # false for nan


def _moves_boxes(answer: str) -> bool:
  """Whether a plan moves boxes alone: the library's verifier also lets their targets come to them.

  Raises:
    ValueError, AttributeError: it is no list of mappings.
  """
  moves = [move for step in json.loads(answer) for move in step.values()]
  return not any(re.match(r"move\((?!box_)", str(move)) for move in moves)


# In place of the library's verifiers that pay wrong answers. countdown, puzzle24: any numbers, and
# numbers in a comment. game_of_life_halting: any text. coin_flip: "0". complex_arithmetic: "nan".
_MENDED: Mapping[str, Score] = {
  "complex_arithmetic": _complex,
  "coin_flip": _probability,
  "countdown": _uses_each_number(None),
  "game_of_life_halting": _same_text,
  "puzzle24": _uses_each_number(24),
}
_MANY_ANSWERS = frozenset(
  "boxnet codeio cryptarithm graph_color group_anagrams "
  "intermediate_integration jugs knight_swap n_queens "
  "palindrome_generation palindrome_partitioning polynomial_multiplication "
  "rubiks_cube rush_hour shortest_path simple_integration tower_of_hanoi "
  "word_ladder".split()
)
# Of further sets with many right answers: the library skips all other characters, "not" included.
_MADE_OF = {
  "kakurasu": re.compile(r"[01\s,\[\]]*"),
  "polynomial_equations": re.compile(r"[-+\d.,\sijeE\[\]]*"),
  "quantum_lock": re.compile(r"[ABCabc\s,→>-]*"),
  "sokoban": re.compile(r"[LRUD\s]*"),
}
_MANY_FORMS = frozenset(
  "advanced_geometry fraction_simplification number_format pool_matrix power_function "
  "time_intervals".split()
)


def main() -> None:
  """Reads (name, entry, answer) from stdin; prints ``READY``, then the score as JSON."""
  out = sys.stdout
  name, entry, answer = pickle.loads(sys.stdin.buffer.read())  # written by the trainer
  score = verifier(name)
  print(READY, file=out, flush=True)
  try:
    value = score(answer, entry)
  except Exception:
    value = 0.0  # the library's verifiers raise at some answers that they cannot read
  print(json.dumps(value), file=out, flush=True)
  os._exit(0)  # what the library's packages would do at the end is of no use here
