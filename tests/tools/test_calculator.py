"""The calculator: every annotation of GSM8K, the grammar, and its limits."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import re
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjax.config import ConfigError
from agentjax.tools import CalculatorTool, ToolContext, ToolStatus
from agentjax.tools.calculator import CalculatorConfig, CalculatorError, evaluate, format_value

CONTEXT = ToolContext(episode="e", seed=0, timeout=5.0)


def _annotations() -> list[tuple[str, str]]:
  folder = pathlib.Path(os.environ["AGENTJAX_DATA"]) / "gsm8k"
  found = []
  for split in ("train", "test"):
    for line in (folder / f"{split}.jsonl").read_text().splitlines():
      for annotation in re.findall(r"<<([^<>]*)>>", json.loads(line)["answer"]):
        expression, _, value = annotation.rpartition("=")
        found.append((expression, value))
  return found


@pytest.mark.skipif("AGENTJAX_DATA" not in os.environ, reason="needs GSM8K under AGENTJAX_DATA")
def test_every_gsm8k_annotation_has_its_stated_value() -> None:
  annotations = _annotations()
  assert len(annotations) == 27_998
  values = [(evaluate(expression), stated) for expression, stated in annotations]
  assert [stated for value, stated in values if value != evaluate(stated)] == []
  otherwise = [stated for value, stated in values if format_value(value) != stated]
  assert len(otherwise) == 823  # 97.06 % are written alike
  # The rest pad with zeros ("4.80"), omit the leading one (".5") or state a fraction ("3/4").
  assert all(re.fullmatch(r"-?\d*\.\d*0|-?\.\d+|3/4", stated) for stated in otherwise)


@pytest.mark.parametrize(
  ("expression", "result"),
  [
    ("1 + 2 * 3", "7"),
    ("(1 + 2) * 3", "9"),
    ("10 - 4 - 3", "3"),
    ("100 / 10 / 2", "5"),
    ("2 ** 3 ** 2", "512"),
    ("-2 ** 2", "-4"),
    ("2 ** -2", "0.25"),
    ("--3", "3"),
    ("+-+5", "-5"),
    ("7 // 2", "3"),
    ("-7 // 2", "-4"),
    ("17 % 5", "2"),
    ("-7 % 3", "2"),
    ("50%", "0.5"),
    ("50% * 30", "15"),
    ("20 - 5%", "19.95"),
    ("10 % (3)", "1"),
    ("$12.50 + $.50", "13"),
    ("1,250,000 / 2", "625000"),
    ("1,250.5 * 2", "2501"),
    ("3. + .5", "3.5"),
    ("6 × 7 ÷ 2 − 1", "20"),
    ("2^10", "1024"),
    ("0.1 + 0.2", "0.3"),
    ("1 / 3", "0.3333333333"),
    ("2 / 3", "0.6666666667"),
    ("10 ** 20", "100000000000000000000"),
    ("1 / 10 ** 12", "1E-12"),
    ("2 ** 0.5", "1.414213562"),
    ("0 ** 0", "1"),
    ("(-1) ** 1000000000001", "-1"),
    ("0 * -5", "0"),
    (" 1 \n+\t1 ", "2"),
  ],
)
def test_grammar(expression: str, result: str) -> None:
  assert format_value(evaluate(expression)) == result


@pytest.mark.parametrize(
  ("expression", "message"),
  [
    ("", "empty"),
    ("   ", "empty"),
    ("1 +", "ends where a number"),
    ("(1 + 2", "never closed"),
    ("1 + 2)", "unexpected '\\)'"),
    ("1 2", "unexpected '2'"),
    ("* 3", "unexpected '\\*'"),
    ("1 / 0", "division by zero"),
    ("5 // (3 - 3)", "division by zero"),
    ("5 % (0)", "division by zero"),
    ("0 ** -1", "division by zero"),
    ("(-8) ** (1 / 3)", "negative number"),
    ("__import__('os')", "'_' is not part"),
    ("x + 1", "'x' is not part"),
    ("1,00 + 2", "',' is not part"),
    ("1e5", "'e' is not part"),
    ("1" * 501, "501 characters"),
    ("(" * 200 + "1" + ")" * 200, "deeper"),
    ("-" * 200 + "1", "deeper"),
    ("9 ** 9 ** 9 ** 9", "too large"),
    ("2 ** 5000", "too large"),
    ("10 ** 400.5", "too large"),
    ("(((9**99)**9)**9)", "too large"),
  ],
)
def test_what_has_no_value_says_why(expression: str, message: str) -> None:
  with pytest.raises(CalculatorError, match=message):
    evaluate(expression)


def test_worst_expressions_take_no_time() -> None:
  start = time.perf_counter()
  for expression in ("9**" * 100 + "9", "*".join(["9" * 40] * 12), "1/7+" * 120 + "1", "(" * 499):
    try:
      format_value(evaluate(expression))
    except CalculatorError:
      pass
  assert time.perf_counter() - start < 0.5


_numbers = st.one_of(
  st.integers(0, 10**6).map(str), st.decimals(0, 1000, places=3).map(lambda d: f"{d:f}")
)


def _combined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
  return st.one_of(
    st.tuples(parts, st.sampled_from(["+", "-", "*", "/", "//"]), parts).map(" ".join),
    parts.map(lambda p: f"({p})"),
    parts.map(lambda p: f"-{p}"),
  )


@given(st.recursive(_numbers, _combined, max_leaves=8))
def test_agrees_with_exact_python_arithmetic(expression: str) -> None:
  exact = re.sub(r"\d+(\.\d+)?", lambda m: f"Fraction('{m.group()}')", expression)
  try:
    expected = eval(exact, {"Fraction": Fraction})
  except ZeroDivisionError:
    with pytest.raises(CalculatorError, match="zero"):
      evaluate(expression)
    return
  assert evaluate(expression) == expected


@given(st.text(max_size=40))
def test_any_text_gives_a_value_or_a_calculator_error(text: str) -> None:
  try:
    format_value(evaluate(text))
  except CalculatorError:
    pass


@given(st.fractions(), st.integers(1, 20))
def test_written_value_is_the_value_to_that_many_digits(value: Fraction, digits: int) -> None:
  written = Fraction(format_value(value, digits))
  assert abs(written - value) <= abs(value) * Fraction(1, 10 ** (digits - 1))


def test_tool_answers_and_reports_errors_as_observations() -> None:
  tool = CalculatorTool()
  good = asyncio.run(tool({"expression": "48/2"}, CONTEXT))
  bad = asyncio.run(tool({"expression": "48/0"}, CONTEXT))
  assert (good.status, good.output) == (ToolStatus.OK, "24")
  assert (bad.status, bad.output) == (ToolStatus.ERROR, "error: division by zero")


def test_impossible_settings_are_refused_by_name() -> None:
  with pytest.raises(ConfigError, match="max_bits"):
    CalculatorTool(CalculatorConfig(max_bits=10**6))
