"""Final answers in text, marked by a line ``#### ANSWER``, as in GSM8K (2110.14168)."""

from __future__ import annotations

import re

ANSWER_MARK = "####"
_MARKED = re.compile(rf"{ANSWER_MARK}[ \t]*([^\n]*)")


def mark_answer(answer: str) -> str:
  """``#### answer``."""
  return f"{ANSWER_MARK} {answer}"


def read_marked_answer(text: str) -> str | None:
  """The rest of the line after the last ``####``, stripped; None where there is no mark or no rest.

  The last mark counts, so that listing many answers gains nothing over giving one.
  """
  marked = _MARKED.findall(text)
  return (marked[-1].strip() or None) if marked else None


def read_tagged_answer(text: str) -> str | None:
  """The content of the last closed ``<answer>...</answer>``; None without one."""
  opening, closing = "<answer>", "</answer>"
  start = text.rfind(opening, 0, max(text.rfind(closing), 0))
  if start < 0:
    return None
  return text[start + len(opening) : text.index(closing, start)]
