"""Code in an answer: a fenced block of Markdown."""

from __future__ import annotations

import re

_OPEN = re.compile(r"[ \t]*```[ \t]*(?:python3?|py)?[ \t]*", re.IGNORECASE)
_CLOSE = re.compile(r"[ \t]*```[ \t]*")


def mark_code(source: str) -> str:
  """``source`` as a block that ``read_code`` reads."""
  return f"```python\n{source.rstrip()}\n```"


def read_code(text: str) -> str | None:
  """The last block marked as Python, or not marked at all; None where there is no closed block.

  The last one counts, because earlier ones are drafts.
  """
  last: str | None = None
  block: list[str] | None = None  # lines of the one that is open; by the line, so in linear time
  for line in text.split("\n"):
    if block is None:
      block = [] if _OPEN.fullmatch(line) else None
    elif _CLOSE.fullmatch(line):
      last, block = "".join(f"{one}\n" for one in block), None
    else:
      block.append(line)
  return last if last is not None and last.strip() else None
