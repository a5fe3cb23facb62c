"""Self-improve prompts: some members of a group begin from a solution that another member wrote.

A group has two stages. Its first members play the task as it is. The last program that each of them
ran, its output and its score then stand in the prompt of one of the others, who is asked for a
better one. The environment of that one starts anew: what it hands in is its own, and is paid like
any other answer. All are trained on, with the prompts that they had.

Reference: RL for machine-learning-engineering agents, 2509.01684, second-hand: half of the prompts
ask for a better version of an earlier solution. Where that solution comes from and the words are
not known to us; those here are ours: it is of the policy of the same step, so that nothing is
stored.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Literal

from agentjax.config import AtLeastTwo, ConfigError, Share, check
from agentjax.rewards.graph import RewardGraph
from agentjax.rollout.config import SamplerConfig
from agentjax.rollout.group import Group, side_by_side
from agentjax.rollout.scoring import score
from agentjax.trajectory.record import Message, Task, Trajectory

IMPROVED = "improved"  # in the metadata of such an episode: the sample it began from, and its score


@dataclasses.dataclass(frozen=True)
class Solution:
  """What an episode arrived at.

  Attributes:
    sample: of the episode.
    program: its last program that ran without an error, else its last program.
    output: what the program printed.
    score: of what the episode handed in.
  """

  sample: int
  program: str
  output: str
  score: float


@dataclasses.dataclass(unsafe_hash=True)
class ImproveConfig(SamplerConfig):
  """Settings; all but ``share`` are ours.

  Attributes:
    share: of the members of a group that begin from a solution, rounded down; half in the paper. 0
      is plain sampling.
    part: of the reward that is shown as the score; "" is the whole reward.
    begin_from: "own", one of the first members each, in turn; "best", all from the one that scored
      most.
    argument: of a tool call that holds a program.
    most_characters: of program and of output, each; the end is cut off.
  """

  share: Share = 0.5
  part: str = ""
  begin_from: Literal["own", "best"] = "own"
  argument: str = "code"
  most_characters: AtLeastTwo = 2000

  def check_group(self, group_size: int, path: str) -> None:
    """Somebody has to begin with nothing."""
    said = f"a share that leaves one of {path}.group_size={group_size} members"
    check(self.count(group_size) < group_size, f"{path}.sampler.share", self.share, said)

  def count(self, group_size: int) -> int:
    """Members that begin from a solution."""
    return int(self.share * group_size + 1e-9)

  def build(self, rewards: RewardGraph) -> Improve:
    """See ``SamplerConfig.build``."""
    if self.part and self.part not in rewards.part_names:
      raise ConfigError(
        f"config.rollout.sampler.part={self.part!r}; allowed: '' or one of config.reward.parts, "
        f"{', '.join(rewards.part_names)}."
      )
    return Improve(self, rewards)


@dataclasses.dataclass(frozen=True)
class Improve:
  """See the module. A member without a solution to begin from plays the task as it is.

  The improved episodes are a group of their own for advantages that compare: their prompts are
  easier.
  """

  config: ImproveConfig
  rewards: RewardGraph

  async def sample(self, group: Group) -> list[Trajectory]:
    if len(group.finished()) >= group.size:
      return group.finished()
    first = group.size - self.config.count(group.size)
    members = await side_by_side([group.episode(sample) for sample in range(first)])
    found = await self._solutions(group, members)
    if self.config.begin_from == "best" and found:
      found = [max(found, key=lambda one: (one.score, -one.sample))]
    begun = {
      sample: found[i % len(found)] for i, sample in enumerate(range(first, group.size)) if found
    }
    others = await side_by_side(
      [
        (
          dataclasses.replace(group, task=improve(group.task, begun[s])) if begun else group
        ).episode(s)
        for s in range(first, group.size)
      ]
    )
    for one in others:
      if base := begun.get(one.sample):
        one.group = f"task {group.task.id}, {IMPROVED}"
        one.metadata = {**one.metadata, IMPROVED: {"sample": base.sample, "score": base.score}}
    return group.settle([*members, *others])

  async def _solutions(self, group: Group, members: Sequence[Trajectory]) -> list[Solution]:
    """Of the members that have a program and a score; the members themselves are not changed."""
    judged = copy.deepcopy([one for one in members if not one.status.broken])
    await score(self.rewards, judged, group.task, timeout=group.player.config.reward_timeout)
    found = [self._solution(one) for one in judged]
    return [one for one in found if one is not None]

  def _solution(self, episode: Trajectory) -> Solution | None:
    part = self.config.part
    value = (episode.reward_parts[part] if part in episode.reward_parts else episode.reward).value
    calls = [
      call for call in episode.tools if isinstance(call.arguments.get(self.config.argument), str)
    ]
    if value is None or not calls:
      return None
    call = next((call for call in reversed(calls) if call.status == "ok"), calls[-1])
    most = self.config.most_characters
    program = call.arguments[self.config.argument]
    return Solution(episode.sample, program[:most], call.output[:most], value)


def improve(task: Task, solution: Solution) -> Task:
  """The task with a solution at the end of its prompt, and the wish for a better one."""
  asked = (
    f"Here is an earlier program of yours for this task.\n{solution.program.strip()}\n"
    f"It printed:\n{solution.output.strip() or '(nothing)'}\n"
    f"Its answer scored {solution.score:.3g}. Write a better one. Files that it wrote are gone."
  )
  last = task.prompt[-1]
  parts = last.parts or (last.content,)
  prompt = (*task.prompt[:-1], Message.of(last.role, *parts, f"\n\n{asked}"))
  return dataclasses.replace(task, prompt=prompt)
