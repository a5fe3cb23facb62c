"""Text of a model or a page, so that a terminal shows it and does not obey it."""

from __future__ import annotations

import re

# C0 and C1 controls but tab and newline, what turns the direction of writing, lone surrogates.
_OBEYED = re.compile(
  r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
  r"""The text with its control characters as escapes, such as ``\x1b``; tab and newline stay."""
  return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
