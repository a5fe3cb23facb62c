"""Reads JSON that hostile code may have written, with bounds that are checked first."""

from __future__ import annotations

import json
import re
from typing import Any


def bounded_json(text: str, *, max_characters: int, max_values: int, max_depth: int) -> Any:
  """``json.loads(text)``, refused if it would need too much memory.

  A parsed value takes up to 25 times the memory of its text (``{},`` becomes a dict), so the
  characters outside of strings are counted first.

  Args:
    text: what to parse.
    max_characters: of the text.
    max_values: keys, numbers, strings, lists and objects together.
    max_depth: lists and objects within each other.

  Raises:
    ValueError: no JSON, or one of the bounds is passed.
  """
  if len(text) > max_characters:
    raise ValueError(f"has {len(text)} characters, at most {max_characters} are read")
  bare = text.replace("\\\\", "").replace('\\"', "")
  if bare.count('"') > 2 * max_values:
    raise ValueError(f"holds more than {max_values} strings")
  bare = "".join(bare.split('"')[::2])
  # A value follows an opening, a comma or a colon, but the first; closings are as many as openings.
  if sum(map(bare.count, ",:[{")) >= max_values or sum(map(bare.count, "]}")) > max_values:
    raise ValueError(f"holds more than {max_values} values")
  depth = 0
  for mark in re.findall(r"[\[\]{}]", bare):
    depth += 1 if mark in "[{" else -1
    if depth > max_depth:
      raise ValueError(f"is nested more than {max_depth} deep")
  return json.loads(text)
