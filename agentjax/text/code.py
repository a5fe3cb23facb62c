"""How code stands in an answer: a fenced block of Markdown."""

from __future__ import annotations

import re

_BLOCK = re.compile(
  r"^[ \t]*```[ \t]*(?:python3?|py)?[ \t]*\n(?P<code>.*?)^[ \t]*```[ \t]*$",
  re.MULTILINE | re.DOTALL | re.IGNORECASE,
)


def mark_code(source: str) -> str:
  """``source`` as a block that ``read_code`` reads."""
  return f"```python\n{source.rstrip()}\n```"


def read_code(text: str) -> str | None:
  """The last block marked as Python, or not marked at all; None where there is no closed block.

  The last one counts, as what comes before it is thought or was put aside.
  """
  blocks = [match["code"] for match in _BLOCK.finditer(text)]
  return blocks[-1] if blocks and blocks[-1].strip() else None
