"""Groups of one stage: every episode knows which chain it continues."""

from __future__ import annotations

import dataclasses

from agentjax.recipes.grandcode.world import SAMPLE
from agentjax.rewards.graph import RewardGraph
from agentjax.rollout.config import SamplerConfig
from agentjax.rollout.group import Crew, Group
from agentjax.trajectory.record import Trajectory


@dataclasses.dataclass(unsafe_hash=True)
class ChainConfig(SamplerConfig):
  """Independent episodes; sample i plays the next stage of chain i of its task.

  Without it (evaluations) an episode plays all stages.
  """

  def build(self, rewards: RewardGraph) -> ChainSampler:
    """See ``SamplerConfig.build``."""
    del rewards
    return ChainSampler()


class ChainSampler:
  """See ChainConfig."""

  async def sample(self, group: Group) -> list[Trajectory]:
    if len(group.finished()) >= group.size:
      return group.finished()
    members: dict[int, Trajectory] = {}
    crew = Crew()

    async def play(sample: int) -> None:
      metadata = {**group.task.metadata, SAMPLE: sample}
      own = dataclasses.replace(group, task=dataclasses.replace(group.task, metadata=metadata))
      members[sample] = await own.episode(sample)

    for sample in range(group.size):
      crew.start(play(sample))
    await crew.join()
    return group.settle(list(members.values()))
