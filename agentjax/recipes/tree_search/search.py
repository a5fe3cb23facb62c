"""Tree search over turns, with snapshots of environments and forks of the engine's contexts."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
import logging
import math
from collections.abc import Sequence
from typing import Literal

from agentjax.config import NonNegativeFloat, PositiveInt
from agentjax.names import check_callable, check_name, load
from agentjax.rewards.graph import RewardGraph, Scorer, as_reward
from agentjax.rollout.config import SamplerConfig
from agentjax.rollout.group import Crew, Group
from agentjax.rollout.program import BranchPoint, Episode
from agentjax.trajectory.record import Trajectory

_log = logging.getLogger(__name__)


@dataclasses.dataclass(unsafe_hash=True)
class TreeConfig(SamplerConfig):
  """How a tree of turns grows. All defaults are ours.

  Attributes:
    score: "module:attribute" of what values an episode so far, as ``TreeSearch.score`` has it.
    rule: "beam" expands the ``beam`` most valuable nodes of every depth until all have ended.
      "uct" expands ``expansions`` times the node that it reaches from the root by always taking the
      child with the largest ``mean value + exploration sqrt(log(visits) / visits of the child)``
      (UCT, Kocsis and Szepesvari 2006).
    width: turns drawn from a node when it is expanded.
    beam: of the rule "beam". expansions, exploration: of the rule "uct"; sqrt(2) suits values in
      0..1.
  """

  score: str = ""
  rule: Literal["beam", "uct"] = "beam"
  width: PositiveInt = 4
  beam: PositiveInt = 2
  expansions: PositiveInt = 8
  exploration: NonNegativeFloat = 2.0**0.5

  def build(self, rewards: RewardGraph) -> TreeSearch:
    """See ``SamplerConfig.build``."""
    path, allowed = "config.rollout.sampler.score", "a function of an episode and its task"
    check_name(self.score, path)
    score = load(self.score, path, allowed)
    check_callable(score, f"{path}={self.score!r}", allowed, arguments=2)
    return TreeSearch(self, score)


@dataclasses.dataclass(eq=False)
class Node:
  """An episode up to the end of a turn.

  Attributes:
    number: in the order of expansion; also the sample number of its address and its branch.
    parent: the node before; None at the prompt.
    trajectory: the episode so far.
    value: of the scorer; None where the environment or the scorer failed, and at the prompt.
    point: branch point of its end; None if the episode has ended.
    children: expanded from here.
    visits, total: how often the search came through, and the sum of the values it found.
  """

  number: int
  parent: Node | None
  trajectory: Trajectory
  value: float | None = None
  point: BranchPoint | None = None
  children: list[Node] = dataclasses.field(default_factory=list)
  visits: int = 0
  total: float = 0.0


@dataclasses.dataclass(frozen=True)
class TreeSearch:
  """A sampler whose members are the most valuable leaves of a search (see ``TreeConfig``).

  The group's program plays unfinished nodes to their end; fresh episodes take places that are left.
  Nodes are numbered in the order of expansion and draw with the keys of their number, so that the
  tree depends on the weights, the task and the seed, and on ``score``.

  Attributes:
    config: how the tree grows.
    score: (episode so far, task) to its value, larger is better; called in the event loop, so it
      must not block. An unfinished episode has status OK and no answer yet. If it raises, or takes
      longer than ``rollout.reward_timeout``, the node has no value and is not expanded.
  """

  config: TreeConfig
  score: Scorer

  async def sample(self, group: Group) -> list[Trajectory]:
    if len(group.finished()) >= group.size:
      return group.finished()
    self.config.validate("tree")
    return group.settle(await _Search(group, self).run())


class _Search:
  """One tree."""

  def __init__(self, group: Group, search: TreeSearch):
    self._group, self._config, self._score = group, search.config, search.score
    self._numbers = itertools.count()
    self._nodes: list[Node] = []

  async def run(self) -> list[Trajectory]:
    try:
      root = await self._grow(next(self._numbers), None)
      if root.point is not None:
        await (self._beam(root) if self._config.rule == "beam" else self._uct(root))
      leaves = [n for n in self._nodes if n.value is not None and not n.children]
      return await self._finish(_best(leaves, self._group.size))
    finally:
      for node in self._nodes:
        if node.point is not None:
          node.point.release()

  async def _beam(self, root: Node) -> None:
    frontier = [root]
    while frontier:
      grown = [child for children in await self._expand(frontier) for child in children]
      alive = [n for n in grown if n.point is not None and n.value is not None]
      frontier = _best(alive, self._config.beam)
      for node in set(alive) - set(frontier):
        node.value = None  # out of the race

  async def _uct(self, root: Node) -> None:
    for _ in range(self._config.expansions):
      node = root
      while node.children:
        node = max(node.children, key=self._upper_bound)  # the first of several
      if node.point is None:
        self._learn(node, node.value)
        continue
      for child in (await self._expand([node]))[0]:
        self._learn(child, child.value)

  def _upper_bound(self, node: Node) -> float:
    if node.value is None:
      return -math.inf
    assert node.parent is not None
    spread = math.sqrt(math.log(max(node.parent.visits, 1)) / node.visits)
    return node.total / node.visits + self._config.exploration * spread

  def _learn(self, node: Node, value: float | None) -> None:
    current: Node | None = node
    while value is not None and current is not None:
      current.visits += 1
      current.total += value
      current = current.parent

  async def _expand(self, nodes: Sequence[Node]) -> list[list[Node]]:
    """New children of every node, all drawn at the same time."""
    crew = Crew()

    async def add(number: int, parent: Node) -> None:
      parent.children.append(await self._grow(number, parent))

    for node in nodes:
      for _ in range(self._config.width):
        crew.start(add(next(self._numbers), node))
    await crew.join()
    for node in nodes:
      node.children.sort(key=lambda child: child.number)
      assert node.point is not None
      node.point.release()  # nobody else begins here
    return [node.children for node in nodes]

  async def _grow(self, number: int, parent: Node | None) -> Node:
    """One turn from ``parent``, or the prompt."""
    points: list[BranchPoint] = []

    async def turn(episode: Episode) -> None:
      if parent is None:
        await episode.open(await episode.reset())
      else:
        step = await episode.step(await episode.act())
        await episode.observe(step.observation)
      point = await episode.mark()
      if point is None:
        await self._group.program(episode)  # it cannot wait here, so it goes on to its end
      else:
        points.append(point)

    trajectory = await self._group.episode(
      number, program=turn, start=None if parent is None else parent.point, branch=number
    )
    node = Node(number, parent, trajectory, point=points[0] if points else None)
    self._nodes.append(node)
    if not trajectory.status.broken and parent is not None:
      node.value = await self._value(trajectory)
    return node

  async def _value(self, trajectory: Trajectory) -> float | None:
    timeout = self._group.player.config.reward_timeout
    try:
      score = self._score(trajectory, self._group.task)
      if inspect.isawaitable(score):
        score = await asyncio.wait_for(score, timeout)
      return as_reward(score).value
    except Exception as error:
      _log.warning("the search has no value of %s", trajectory.address, exc_info=error)
      return None

  async def _finish(self, leaves: Sequence[Node]) -> list[Trajectory]:
    """The episodes of these leaves, unfinished ones played on, and as many fresh ones as lack."""
    members = [node.trajectory for node in leaves if node.point is None]
    starts = [node.point for node in leaves if node.point is not None]
    crew = Crew()

    async def play(start: BranchPoint | None, number: int) -> None:
      members.append(await self._group.episode(number, start=start, branch=number))

    for start in [*starts, *[None] * (self._group.size - len(leaves))]:
      crew.start(play(start, next(self._numbers)))
    await crew.join()
    return members


def _best(nodes: Sequence[Node], count: int) -> list[Node]:
  """The most valuable, the older of equals."""
  return sorted(nodes, key=lambda n: (-(n.value or 0.0), n.number))[:count]
