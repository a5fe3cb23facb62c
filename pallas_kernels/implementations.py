"""The choice among a kernel's implementations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def choose(kernel: str, name: str | None, available: Mapping[str, T], *, default: str) -> T:
  """``available[name]``, or the default for None; anything else raises ValueError."""
  chosen = default if name is None else name
  if chosen not in available:
    raise ValueError(
      f"{kernel} has no implementation={name!r} in this version; available: "
      f"{', '.join(repr(n) for n in available)}, or None for the fastest measured."
    )
  return available[chosen]
