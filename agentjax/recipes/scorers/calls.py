"""Which tools an episode called."""

from __future__ import annotations

import dataclasses

from agentjax.config import check
from agentjax.rewards.graph import Scorer
from agentjax.rewards.scorer_config import ScorerConfig
from agentjax.sandbox.config import Sandboxes
from agentjax.trajectory.record import Status, Task, Trajectory


@dataclasses.dataclass(unsafe_hash=True)
class UsedConfig(ScorerConfig):
  """1 where every one of some tools was called with success, else 0; a policy error gets 0.

  ARPO (2507.19849) pays it .1 where the answer is right: ``f1 + 0.1 * (f1 > 0) * used``.

  Attributes:
    tools: their names; ARPO's are "search" and "python".
  """

  tools: tuple[str, ...] = ("search", "python")

  def validate(self, path: str = "config.reward.settings.used") -> None:
    super().validate(path)
    check(bool(self.tools), f"{path}.tools", self.tools, "the name of a tool, at least one")

  def build(self, sandboxes: Sandboxes) -> Scorer:
    """See ``ScorerConfig.build``."""

    def score(trajectory: Trajectory, task: Task) -> float:
      met = {record.name for record in trajectory.tools if record.status == "ok"}
      return float(set(self.tools) <= met and trajectory.status is not Status.POLICY_ERROR)

    return score
