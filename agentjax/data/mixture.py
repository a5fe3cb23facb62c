"""One sequence of tasks from several, in fixed proportions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from agentjax.trajectory.record import Task


def mix(
  sources: Sequence[Sequence[Task]], weights: Sequence[float], *, size: int, first_id: int
) -> list[Task]:
  """``size`` tasks drawn from the sources in proportion to the weights, evenly spread.

  Position n goes to the source that is furthest behind its share (largest ``weight * (n + 1) -
  taken``, first wins), so every prefix keeps the proportions to within one task a source. A source
  that is used up starts again. Tasks get new ids, because two sources may use the same ones;
  ``metadata["source_id"]`` keeps the old id.

  Raises:
    ValueError: no source, an empty source, or weights that are not one positive number a source.
  """
  if not sources or len(sources) != len(weights):
    raise ValueError(f"{len(sources)} sources with {len(weights)} weights; give each source one")
  if any(len(source) == 0 for source in sources):
    raise ValueError("a source of the mixture holds no tasks")
  if not all(w > 0 for w in weights):
    raise ValueError(f"weights={tuple(weights)}; allowed: positive numbers")
  shares = [w / sum(weights) for w in weights]
  taken = [0] * len(sources)
  tasks = []
  for position in range(size):
    behind = [share * (position + 1) - count for share, count in zip(shares, taken, strict=True)]
    chosen = behind.index(max(behind))
    task = sources[chosen][taken[chosen] % len(sources[chosen])]
    taken[chosen] += 1
    tasks.append(
      dataclasses.replace(
        task, id=first_id + position, metadata={**task.metadata, "source_id": task.id}
      )
    )
  return tasks
