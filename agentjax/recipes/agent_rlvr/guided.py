r"""Guided retry: where all members of a group fail, some play again with a hint.

The hint is a further message of the prompt while the episode is played. In what is recorded the
prompt is that of the other members, and everything after it is as it was drawn. The sampler's
log-probs were those with the hint, so ratios must be to the trainer's own:
``rl.old_log_probs="recomputed"``.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from agentjax.config import PositiveInt, check
from agentjax.rewards.graph import RewardGraph
from agentjax.rollout.config import SamplerConfig
from agentjax.rollout.group import Group, side_by_side
from agentjax.rollout.scoring import score
from agentjax.trajectory.record import Message, Segment, Task, Trajectory

GUIDED = "guided"  # in the metadata of an episode that was played with a hint: the hint


@dataclasses.dataclass(unsafe_hash=True)
class GuidedConfig(SamplerConfig):
  """Settings; all defaults are ours.

  Attributes:
    retries: members of a group that play again, at most.
    success: a reward of this or more is no failure; one such member is enough.
    field: of ``task.metadata``, a list of hints, which the retries take in turn. Without it the
      hint are the calls of the task's worked solution; a task without either is not played again.
    words: put before the hint.
  """

  retries: PositiveInt = 2
  success: float = 1.0
  field: str = "hints"
  words: str = "Hint:"

  def check_group(self, group_size: int, path: str) -> None:
    """Some members stay as they are, for a comparison."""
    said = f"less than {path}.group_size={group_size}"
    check(self.retries < group_size, f"{path}.sampler.retries", self.retries, said)

  def build(self, rewards: RewardGraph) -> Guided:
    """See ``SamplerConfig.build``."""
    return Guided(self, rewards)


@dataclasses.dataclass(frozen=True)
class Guided:
  """Independent episodes, of which some are replaced where all failed; see the module.

  Retries have samples of their own, from the size of the group on.
  """

  config: GuidedConfig
  rewards: RewardGraph

  async def sample(self, group: Group) -> list[Trajectory]:
    if len(group.finished()) >= group.size:
      return group.finished()
    members = await side_by_side([group.episode(sample) for sample in range(group.size)])
    hints = hints_of(group.task, self.config.field)
    if not hints or not await self._all_failed(group, members):
      return group.settle(members)
    asked = [hints[i % len(hints)] for i in range(self.config.retries)]
    retries = await side_by_side(
      [
        dataclasses.replace(group, task=self._hinted(group.task, hint)).episode(group.size + i)
        for i, hint in enumerate(asked)
      ]
    )
    found = [
      without_hint(retry, members[i], hint)
      for i, (retry, hint) in enumerate(zip(retries, asked, strict=True))
      if not (retry.status.broken or members[i].status.broken)
    ]
    return group.settle([*members[: group.size - len(found)], *found])

  async def _all_failed(self, group: Group, members: Sequence[Trajectory]) -> bool:
    """Whether no member succeeded; the members themselves are not changed."""
    judged = copy.deepcopy([one for one in members if not one.status.broken])
    timeout = group.player.config.reward_timeout
    await score(self.rewards, judged, group.task, timeout=timeout)
    values = [one.reward.value for one in judged if one.reward.value is not None]
    return bool(values) and max(values) < self.config.success

  def _hinted(self, task: Task, hint: str) -> Task:
    said = Message("user", f"{self.config.words} {hint}")
    return dataclasses.replace(task, prompt=(*task.prompt, said))


def hints_of(task: Task, field: str) -> list[str]:
  """The task's own hints, or the calls of its worked solution as one; none without either."""
  if own := task.metadata.get(field):
    return [str(hint) for hint in own]
  calls = [
    f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})"
    for message in task.demonstration
    for call in message.tool_calls
  ]
  return [" ".join(calls)] if calls else []


def without_hint(played: Trajectory, plain: Trajectory, hint: str) -> Trajectory:
  """A copy with the prompt of ``plain``, an episode of the task without a hint.

  It is marked as ``replayed``: its log-probs are those of another prompt.
  """
  prompt, begin = _prompt(plain), len(_prompt(played))
  shift = len(prompt) - begin
  moved = [
    dataclasses.replace(s, parent=None if s.parent is None else s.parent + shift)
    for s in played.segments[begin:]
  ]
  earned = {
    name: [*[None] * len(prompt), *values[begin:]] for name, values in played.turn_rewards.items()
  }
  return dataclasses.replace(
    played,
    segments=[*prompt, *moved],
    turn_rewards=earned,
    columns={**played.columns, "replayed": np.array(True)},
    metadata={**played.metadata, GUIDED: hint},
  )


def _prompt(episode: Trajectory) -> list[Segment]:
  """What stands before the first turn."""
  first = next((i for i, s in enumerate(episode.segments) if s.sampled.any()), None)
  return episode.segments[:first]
