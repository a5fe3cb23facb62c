"""Wrong candidates to measure tests with: mutants of a right program, and slow twins."""

from __future__ import annotations

import dataclasses
import random

from agentjax.worlds.repair.mutations import mutations

_SLOW = """
_scope = {{}}
exec({source!r}, _scope)

def {function}(*arguments):
  size = 0
  for one in arguments:
    if hasattr(one, "__len__"):
      size += len(one)
    elif type(one) is int:
      size += min(abs(one), 100_000)
  for _ in range(size * size // 4):
    pass
  return _scope[{function!r}](*arguments)
"""


@dataclasses.dataclass(frozen=True)
class Wrong:
  """A candidate: its name, its source, and whether it is slow instead of changed."""

  name: str
  code: str
  slow: bool = False


def wrong_candidates(source: str, function: str, *, most: int, seed: int) -> list[Wrong]:
  """Up to ``most`` programs with one fault each, drawn by the seed, and one that is right but slow.

  The slow one makes n * n / 4 empty steps for arguments of n items, or around n. A mutant may be
  equal to the source: only a test tells.
  """
  made = mutations(source)
  random.Random(f"{seed} {source}").shuffle(made)
  mutants = [
    Wrong(f"{m.operator}, line {m.line}, {i}", m.source) for i, m in enumerate(made[:most])
  ]
  return [*mutants, Wrong("slow", _SLOW.format(source=source, function=function), slow=True)]
