"""Whose fault a failure is: one decision for all code that handles what the policy does.

An episode is masked only for a fault of ours. A failure that its files, time, calls or bytes cause
counts: it is an error that the policy reads, or a reward of 0. If it masked the episode, a losing
policy would learn to cause it.

``fault_of`` decides by the kind of error and where it occurred:

  where      the policy's                                         ours
  files      what a program left in its box cannot be read,       input or output errors, memory and
             packed or replaced as it stands                      descriptors of this machine
  tool,      errors of data, such as of decoding, numbers,        all else: files, connections,
  step,      types, keys, depth, syntax, asserted values: code    time-outs of services, states
  verdict    that is the same for all failed on what this         that must not be
             episode wrote
  reset                                                           everything: nobody has acted yet

An error may carry its own ``fault``, which then decides. An error of data may also be a mistake in
a tool or a scorer, so there are two control runs: for a failing tool over a sandbox, an idle
program in a fresh box (``tools.registry``); for a failing scorer, its verdict on an empty answer
(``rewards.graph``). If these fail too, the fault is ours.
"""

from __future__ import annotations

import csv
import dataclasses
import enum
import errno
import re
import struct
import zlib
from collections.abc import Mapping
from typing import Any

FAULT = "fault"  # in the metadata of an episode: its fault as plain data


class Owner(enum.StrEnum):
  """Whose fault it is."""

  POLICY = "policy"
  INFRASTRUCTURE = "infrastructure"  # sandboxes, tools, environments and their machines
  VERIFIER = "verifier"
  ENGINE = "engine"


class Boundary(enum.StrEnum):
  """Where an error occurred."""

  FILES = "files"  # the host handles what programs left in a box
  TOOL = "tool"  # a tool is called
  RESET = "reset"  # an environment starts or goes back to a snapshot
  STEP = "step"  # an environment takes an action
  VERDICT = "verdict"  # an episode is scored


@dataclasses.dataclass(frozen=True)
class Fault:
  """Whose fault a failure is, and of what kind.

  Attributes:
    owner: whose fault it is; the episode is masked unless it is the policy's.
    cause: a short name, one of few, for counts: "files", "data", "time", "sandbox", "queue",
      "tool", "environment", "verifier", "judge", "numbers".
    detail: one line for people.
  """

  owner: Owner
  cause: str
  detail: str = ""

  @property
  def masks(self) -> bool:
    """Whether the episode must not be trained on."""
    return self.owner is not Owner.POLICY

  def to_dict(self) -> dict[str, str]:
    """Plain data, for ``metadata[FAULT]``."""
    return {"owner": self.owner.value, "cause": self.cause, "detail": self.detail}

  @classmethod
  def from_dict(cls, values: Mapping[str, Any]) -> Fault:
    """Inverse of ``to_dict``."""
    return cls(Owner(values["owner"]), str(values["cause"]), str(values["detail"]))


# Errors that only contents can cause. All others are states of the machine, or mistakes in our
# code.
_DATA = (
  ArithmeticError,
  AssertionError,
  AttributeError,
  LookupError,
  MemoryError,
  RecursionError,
  SyntaxError,
  TypeError,
  ValueError,
  csv.Error,
  re.error,
  struct.error,
  zlib.error,
)
# States of this machine that no file in a box can cause.
_MACHINE = frozenset(
  (errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENODEV, errno.ESTALE, errno.EBADF)
)
_OURS = {
  Boundary.FILES: Fault(Owner.INFRASTRUCTURE, "sandbox"),
  Boundary.TOOL: Fault(Owner.INFRASTRUCTURE, "tool"),
  Boundary.RESET: Fault(Owner.INFRASTRUCTURE, "environment"),
  Boundary.STEP: Fault(Owner.INFRASTRUCTURE, "environment"),
  Boundary.VERDICT: Fault(Owner.VERIFIER, "verifier"),
}


def fault_of(error: BaseException, at: Boundary) -> Fault:
  """Whose fault ``error`` is that occurred ``at`` a boundary; see the module.

  Of several errors at once, one of ours decides.
  """
  if isinstance(error, BaseExceptionGroup):
    faults = [fault_of(inner, at) for inner in error.exceptions]
    return next((fault for fault in faults if fault.masks), faults[0])
  detail = describe(error)
  ours = dataclasses.replace(_OURS[at], detail=detail)
  own = getattr(error, "fault", None)
  if isinstance(own, Fault):
    known = dataclasses.replace(own, detail=own.detail or detail)
  elif at is Boundary.FILES and isinstance(error, OSError):
    known = ours if error.errno in _MACHINE else Fault(Owner.POLICY, "files", detail)
  else:
    known = Fault(Owner.POLICY, "data", detail) if isinstance(error, _DATA) else ours
  return ours if at is Boundary.RESET and not known.masks else known


def describe(error: BaseException) -> str:
  """Type and text of an error in one line that any encoding can write, cut to 500 characters."""
  try:
    text = f"{type(error).__name__}: {error}"
  except Exception:  # its text is made of what broke
    text = type(error).__name__
  return text.encode("ascii", "backslashreplace").decode()[:500]
