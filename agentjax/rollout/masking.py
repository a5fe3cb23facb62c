r"""Tests whether masking depends on the policy's behaviour, which it must not for faults of ours.

A fault of ours hits the members of a group (siblings) independently of what they do. So siblings
are compared at the same moment: at turn k those that took turn k, at the end those that were
scored. With x the number of calls, or of tokens drawn, in that turn (at the end: in the episode), r
its ranks among the n siblings, and m of them masked at that moment,

    T = sum over moments, masked siblings of (r - mean r)
    V = sum over moments of m (n - m) / (n - 1) * population variance of r
    z = T / sqrt(V)

is about standard normal where masking does not depend on x: the mean and the variance are those of
drawing m of n without replacement (a stratified rank test, as the log-rank test is of survival).
The same moment matters: a broken episode ends early and so always has fewer calls than its
siblings. A large |z| is no proof, because a tool that fails by itself also hits those who call it;
but look into it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from agentjax.rollout.statistics import masking_cause
from agentjax.trajectory.record import Trajectory

FEATURES = ("calls", "tokens")
_MOST_Z = 4.0  # seen by chance once in 16,000 tests; ours
_FEWEST = 8  # masked episodes with siblings who were not; the normal law needs some


@dataclasses.dataclass
class _Sum:
  total: float = 0.0
  variance: float = 0.0


class MaskingWatch:
  """Adds up the test over the steps of a run, and warns once."""

  def __init__(self) -> None:
    self._sums = {name: _Sum() for name in FEATURES}
    self._causes: collections.Counter[str] = collections.Counter()
    self._warned = False

  @property
  def z(self) -> dict[str, float]:
    """z by feature; 0 where nothing can be compared."""
    return {
      name: s.total / math.sqrt(s.variance) if s.variance else 0.0 for name, s in self._sums.items()
    }

  def metrics(self) -> dict[str, float]:
    """``rollout/masking_z_<feature>``."""
    return {f"rollout/masking_z_{name}": value for name, value in self.z.items()}

  def add(self, trajectories: Sequence[Trajectory]) -> str | None:
    """Adds the episodes of a step; returns a warning, at most once per run."""
    moments: dict[Hashable, list[tuple[tuple[float, ...], str]]] = collections.defaultdict(list)
    for trajectory in trajectories:
      for moment, features, cause in _moments(trajectory):
        moments[(trajectory.address[:2], moment)].append((features, cause))
    for siblings in moments.values():
      masked = np.array([bool(cause) for _, cause in siblings])
      if masked.all() or not masked.any():
        continue
      self._causes.update(cause for _, cause in siblings if cause)
      for name, values in zip(FEATURES, zip(*(f for f, _ in siblings), strict=True), strict=True):
        _count(self._sums[name], np.array(values), masked)
    return self._warning()

  def _warning(self) -> str | None:
    found = {name: z for name, z in self.z.items() if abs(z) > _MOST_Z}
    if self._warned or not found or sum(self._causes.values()) < _FEWEST:
      return None
    self._warned = True
    said = ", ".join(
      f"{'more' if z > 0 else 'fewer'} {name} (z={z:.1f})" for name, z in found.items()
    )
    causes = ", ".join(f"{cause} {count}" for cause, count in self._causes.most_common())
    return (
      f"masked episodes have {said} than their siblings at the same turn: the policy may be "
      f"bringing about what masks it. Causes: {causes}. Look at metadata['fault'] of the masked "
      "episodes; this is said once (docs/rewards.md, 'Whose fault')"
    )


def _moments(trajectory: Trajectory) -> Iterator[tuple[Hashable, tuple[float, ...], str]]:
  """(moment, features, why it was masked there or "") of each turn, and of the end."""
  tokens: collections.Counter[int] = collections.Counter()
  for segment in trajectory.segments:
    if drawn := int(segment.sampled.sum()):
      tokens[segment.turn] += drawn
  calls = collections.Counter(record.turn for record in trajectory.tools)
  cause = masking_cause(trajectory)
  last = max(tokens, default=None)
  for turn, drawn in tokens.items():
    broke = trajectory.status.broken and turn == last
    yield turn, (float(calls[turn]), float(drawn)), cause if broke else ""
  if not trajectory.status.broken and cause != "screened":
    yield "end", (float(len(trajectory.tools)), float(tokens.total())), cause


def _count(into: _Sum, values: np.ndarray, masked: np.ndarray) -> None:
  ranks = np.array(
    [((values < v).sum() + (values <= v).sum()) / 2 for v in values]
  )  # of ties: mean
  n, m = len(values), int(masked.sum())
  into.total += float((ranks[masked] - ranks.mean()).sum())
  into.variance += m * (n - m) / (n - 1) * float(ranks.var())
