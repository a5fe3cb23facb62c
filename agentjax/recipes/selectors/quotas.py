"""At most so many groups of a data set are trained on at a step."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from agentjax.config import Table, check
from agentjax.schedules import Schedule
from agentjax.signals.signal import Metrics, Signal, SignalConfig, SignalTools, StepContext
from agentjax.training.selectors import group_scores
from agentjax.trajectory.record import Trajectory


@dataclasses.dataclass(unsafe_hash=True)
class QuotasConfig(SignalConfig):
  """Bounds by data set; of a set with more groups those that can teach most stay.

  An easy source whose groups are many would otherwise outweigh a hard one. ``config.data`` decides
  what is sampled; this decides what is trained on.

  Attributes:
    most: groups of a step by ``Task.source``, numbers or schedules, rounded; a source that is not
      named has no bound.
    score: of a group, as in ``config.rl.selection.score``; the largest stay.
  """

  most: Table[float | Schedule] = dataclasses.field(default_factory=Table)
  score: str = "reward_std"

  def validate(self, path: str = "config.rl.signals") -> None:
    super().validate(path)
    check(bool(self.most), f"{path}.most", dict(self.most), "a number of groups for a source")
    for source, most in self.most.items():
      right = isinstance(most, int | float) and most >= 0  # of a schedule, its bounds are checked
      check(right, f"{path}.most[{source!r}]", most, ">= 0")

  def build(self, tools: SignalTools) -> Quotas:
    """See ``SignalConfig.build``."""
    del tools
    return Quotas(self)


class Quotas(Signal):
  """See QuotasConfig. Metrics: ``quotas/SOURCE``, share of the source's groups that stay.

  Args:
    config: see QuotasConfig.
  """

  name = "quotas"

  def __init__(self, config: QuotasConfig):
    self._config = config

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    settings = context.at(self._config)
    keys, scores = group_scores(episodes, settings.score)
    sources = {one.address[:2]: one.source for one in episodes}
    groups: dict[str, list[int]] = collections.defaultdict(list)
    for place, key in enumerate(keys):
      groups[sources[key]].append(place)
    kept, metrics = set(keys), {}
    for source, most in settings.most.items():
      own = np.array(groups.get(source, ()), int)
      order = own[np.argsort(-scores[own], kind="stable")]
      dropped = order[round(float(most)) :]
      kept -= {keys[i] for i in dropped}
      metrics[f"quotas/{source}"] = 1 - len(dropped) / max(len(own), 1)
    return [one for one in episodes if one.address[:2] in kept], metrics
