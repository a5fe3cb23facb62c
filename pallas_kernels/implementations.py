"""What every kernel's ``api.py`` needs: checks, the choice of an implementation, where it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import jax

T = TypeVar("T")

# Kind of a Pallas kernel to the platforms it is compiled for.
NATIVE: Mapping[str, tuple[str, ...]] = {"tpu": ("tpu",), "gpu": ("cuda", "rocm")}


def choose(kernel: str, name: str | None, available: Mapping[str, T], *, default: str) -> T:
  """``available[name]``, or the default for None; anything else raises ValueError."""
  chosen = default if name is None else name
  if chosen not in available:
    raise ValueError(
      f"{kernel} has no implementation={name!r} in this version; available: "
      f"{', '.join(repr(n) for n in available)}, or None for the fastest measured."
    )
  return available[chosen]


def check_shape(kernel: str, name: str, value: jax.Array | None, expected: tuple[int, ...]) -> None:
  """Raises ValueError unless the argument ``name`` is None or has the expected shape."""
  if value is not None and value.shape != expected:
    raise ValueError(f"{kernel}: {name} must have shape {expected}, got {value.shape}.")


def on_platform(kind: str, call: Callable[[bool], Callable[..., T]], *args: jax.Array) -> T:
  """``call(interpret)(*args)``: compiled on the platforms of ``NATIVE``, interpreted on CPU.

  The platform is the one the program is lowered for, not the one it is traced on, so a program
  compiled ahead of time for a TPU on a CPU has the kernel. Any other platform is an error of
  ``jax.lax.platform_dependent``.
  """
  branches = {name: call(False) for name in NATIVE[kind]}
  return jax.lax.platform_dependent(*args, cpu=call(True), **branches)
