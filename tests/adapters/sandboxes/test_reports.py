"""What hostile code reports costs little more than its text, however it is made."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from agentjax.adapters.sandboxes.reports import bounded_json

_BOUNDS = {"max_characters": 2**22, "max_values": 1000, "max_depth": 5}


@pytest.mark.parametrize(
  "value",
  [
    {},
    [],
    "",
    3,
    None,
    {"a": [1, 2, {"b": "}],[{"}]},
    {'"\\': '\\",{[', "b": ["\\\\", "\\", '\\"' * 9]},
    "," * 10_000,
    list(range(900)),
    {str(i): i for i in range(300)},
    [[[[["deep"]]]]],
  ],
)
def test_ordinary_reports_are_read_whole(value: Any) -> None:
  assert bounded_json(json.dumps(value), **_BOUNDS) == value
  assert bounded_json(json.dumps(value, indent=1, ensure_ascii=False), **_BOUNDS) == value


@pytest.mark.parametrize(
  ("text", "why"),
  [
    ("[" + "{}," * 10**6 + "{}]", "values"),
    ("[" + '"",' * 10**6 + '""]', "strings"),
    ("[" + "1," * 10**6 + "1]", "values"),
    ('{"a":' * 10**5 + "1" + "}" * 10**5, "strings"),
    ("[" * 10**6, "values"),
    ("]" * 10**6, "values"),
    ("[" * 6 + "]" * 6, "deep"),
    ("\\" * 10**6, "Expecting"),
    ('"' + '\\"' * 10**6, "Unterminated"),
    ("9" * 10**6, "digits"),
    ("[" + " " * 2**22 + "]", "characters"),
    ("", "Expecting"),
  ],
)
def test_what_would_cost_more_than_its_text_is_refused_before_it_is_parsed(
  text: str, why: str
) -> None:
  tracemalloc.start()
  try:
    with pytest.raises(ValueError, match=why):
      bounded_json(text, **_BOUNDS)
    assert tracemalloc.get_traced_memory()[1] < 5 * len(text) + 2**20
  finally:
    tracemalloc.stop()
