"""A world whose episodes begin inside an expert's trajectory.

The expert is the worked solution of the task. Its first turns are played in the environment before
the policy acts. The policy reads them as its prompt, so that they are not trained on. "rollback"
leaves the policy the last ``depth`` turns of the expert: one at first, and one more after every
step in which enough of the anchored episodes succeeded. "parallel" begins anywhere, at one place
for all episodes of a task.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Literal, Self

import numpy as np

from agentjax.config import PositiveInt, Share
from agentjax.data import DataConfig
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.tools.build import ToolsConfig
from agentjax.trajectory.record import Message, Task, Trajectory
from agentjax.world.cheats import Setting, Turns
from agentjax.world.environment import Action, Environment, Observation, Step
from agentjax.world.world import PlainWorld, Site, World, WorldConfig, default_world


@dataclasses.dataclass(unsafe_hash=True)
class AnchoredConfig(WorldConfig):
  """Settings; all defaults are ours.

  Attributes:
    inner: the world. Held-out tasks, and those without a worked solution, begin at its beginning.
    mode: see the module.
    threshold: share of anchored episodes of a step that succeed, from which on ``depth`` grows.
    success: reward of a success.
    depth: turns that the policy has at the start.
    seed: of "parallel".
  """

  inner: WorldConfig = dataclasses.field(default_factory=default_world)
  mode: Literal["rollback", "parallel"] = "rollback"
  threshold: Share = 0.5
  success: float = 1.0
  depth: PositiveInt = 1
  seed: int = 0

  def check_run(self, tools: ToolsConfig, data: DataConfig, path: str) -> None:
    self.inner.check_run(tools, data, path)

  def without_chance(self) -> Self:
    return dataclasses.replace(self, inner=self.inner.without_chance())

  def build(self, site: Site) -> AnchoredWorld:
    return AnchoredWorld(self, self.inner.build(site))


class AnchoredWorld(PlainWorld):
  """See the module; ``depth`` is its state.

  Args:
    config: see AnchoredConfig.
    base: the inner world.
  """

  def __init__(self, config: AnchoredConfig, base: World):
    super().__init__(self._begin, base.tools, base)
    self._config, self._of, self.depth = config, base, config.depth

  def _begin(self, task: Task) -> Environment:
    inner, played = self._of.environment(task), self.anchor(task)
    return Anchored(inner, experts_turns(task)[:played]) if played else inner

  def anchor(self, task: Task) -> int:
    """How many of the expert's turns are played before the policy acts."""
    turns = len(experts_turns(task))
    if task.id >= FIRST_TEST_ID or turns < 2:
      return 0
    if self._config.mode == "parallel":
      draw = np.random.default_rng([self._config.seed, task.id])
      return int(draw.integers(turns))
    return max(turns - self.depth, 0)

  async def learn(self, finished: Sequence[Trajectory]) -> None:
    await self._of.learn(finished)
    rewards = [one.reward.value for one in finished if is_anchored(one)]
    known = [value >= self._config.success for value in rewards if value is not None]
    if known and float(np.mean(known)) >= self._config.threshold:
      self.depth += 1

  def get_state(self) -> bytes:
    return json.dumps([self.depth, self._of.get_state().hex()]).encode()

  def set_state(self, state: bytes) -> None:
    self.depth, inner = json.loads(state)
    self._of.set_state(bytes.fromhex(inner))

  def cheats(self, task: Task, setting: Setting) -> Mapping[str, Turns]:
    return self._of.cheats(task, setting)

  def solution(self, task: Task, setting: Setting) -> Turns:
    """What is left of the expert's turns; all of the inner world's for tasks without an anchor."""
    turns = tuple(self._of.solution(task, setting))
    said = [i for i, message in enumerate(turns) if message.role == "assistant"]
    played = self.anchor(task)
    return turns[said[played] :] if played else turns


class Anchored(Environment):
  """An environment in which an expert has acted before the policy.

  Args:
    inner: the environment.
    expert: turns of the assistant, the first of an episode that goes on after them.
  """

  def __init__(self, inner: Environment, expert: Sequence[Message]):
    self.tools, self.agents = inner.tools, inner.agents
    self._inner, self._expert = inner, tuple(expert)

  @property
  def least_return(self) -> float:
    return self._inner.least_return

  async def reset(self, task: Task, key: int) -> Observation:
    observation = await self._inner.reset(task, key)
    shown = list(observation.messages)
    for turn in self._expert:
      step = await self._inner.step(Action(turn.content, turn.tool_calls))
      if step.terminated or step.truncated:
        raise RuntimeError(f"the expert's turns of task {task.id} end the episode before the last")
      shown += [turn, *step.observation.messages]
    self.tools = self._inner.tools
    return dataclasses.replace(observation, messages=tuple(shown))

  async def step(self, action: Action) -> Step:
    return await self._inner.step(action)

  async def close(self) -> None:
    await self._inner.close()


def is_anchored(episode: Trajectory) -> bool:
  """Whether somebody else's turn, and what answered it, stand before the policy's first.

  The markup that opens a turn belongs to the assistant as well, and nothing answers it.
  """
  acted = False
  for segment in episode.segments:
    if segment.sampled.any():
      return False
    if acted and segment.owner != "assistant":
      return True
    acted = acted or segment.owner == "assistant"
  return False


def experts_turns(task: Task) -> list[Message]:
  """The assistant's turns of the worked solution."""
  return [message for message in task.demonstration if message.role == "assistant"]
