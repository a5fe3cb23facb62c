"""Branching at entropy: episodes that continue another from a turn with a high entropy (ARPO,
AEPO)."""

from __future__ import annotations

import dataclasses
import heapq
import math
from typing import Literal

import numpy as np
from jaxtyping import Float

from agentjax.config import NonNegativeFloat, PositiveInt, check
from agentjax.engine.request import Sample
from agentjax.rewards.graph import RewardGraph
from agentjax.rollout import keys
from agentjax.rollout.config import SamplerConfig
from agentjax.rollout.group import Crew, Group
from agentjax.rollout.program import BranchPoint, Episode
from agentjax.trajectory.record import Trajectory


@dataclasses.dataclass(unsafe_hash=True)
class BranchConfig(SamplerConfig):
  r"""When an episode is branched after a tool result, and how a group shares its places.

  Of the ``group_size`` = M episodes of a task, N start at the prompt. The others branch at turns
  where the entropy rose. With H the mean entropy (nats) of the first ``probe_tokens`` tokens of a
  turn, and ``dH = probe_tokens (H_turn - H_first turn) / log(vocabulary)``, a turn after a tool
  result is drawn again by up to ``copies`` further episodes with

      P = (base + weight * dH) * max(0, 1 - penalty * n)

  where n is the number of branched turns directly before this one on the same path. If places are
  left when all have ended, fresh episodes take them; these are not branched.

  The defaults are those of ARPO's code (2507.19849), with two differences: it sums the entropies of
  up to 20 tokens, of the 10 likeliest ids each, so that a short turn has a low sum; we take the
  mean of exact entropies, times 20. ``penalty`` is of AEPO (2510.14545), whose form and numbers
  here are those of a third-party port, as the paper's own are not published.

  Attributes:
    roots: N with the budget "fixed"; ARPO has 8 for M = 16.
    budget: "fixed", or AEPO's "entropy":
      ``N = int(M sigmoid(sensitivity (H_first - H_tool))) + 1``, at most M, where H_tool is the
      mean of H over the turns after tool results of the first episode, which runs alone to find
      out; without tool results N = M.
    sensitivity: of the budget "entropy".
    rule: "draw" branches with probability P (ARPO), "threshold" where P > ``threshold`` (AEPO).
    base, weight, penalty, threshold: of the formula; AEPO has penalty 0.05 and threshold 0.5.
    copies: further episodes a branched turn gives.
    probe_tokens: tokens that H looks at.
  """

  roots: PositiveInt = 8
  budget: Literal["fixed", "entropy"] = "fixed"
  sensitivity: NonNegativeFloat = 0.5
  rule: Literal["draw", "threshold"] = "draw"
  base: float = 0.5
  weight: float = 0.2
  penalty: NonNegativeFloat = 0.0
  threshold: float = 0.5
  copies: PositiveInt = 1
  probe_tokens: PositiveInt = 20

  def check_group(self, group_size: int, path: str) -> None:
    """See ``SamplerConfig.check_group``."""
    check(
      self.budget != "fixed" or self.roots <= group_size,
      f"{path}.sampler.roots",
      self.roots,
      f"at most {path}.group_size ({group_size}); the rest of the group are branches",
    )

  def build(self, rewards: RewardGraph) -> BranchSampler:
    """See ``SamplerConfig.build``."""
    return BranchSampler(self)


def probe_entropy(entropies: Float[np.ndarray, " tokens"], probe_tokens: int) -> float:
  """Mean of the first ``probe_tokens`` entropies of a turn, nats; 0 where it has no token."""
  return float(np.mean(entropies[:probe_tokens])) if len(entropies) else 0.0


def entropy_delta(turn: float, root: float, *, vocab_size: int, probe_tokens: int = 20) -> float:
  """``dH = probe_tokens (H_turn - H_root) / log(vocab_size)`` (see ``BranchConfig``)."""
  return probe_tokens * (turn - root) / math.log(vocab_size)


def branch_probability(delta: float, consecutive: int, config: BranchConfig) -> float:
  """P of ``BranchConfig``, clipped to 0..1. ``consecutive``: branched turns right before."""
  wanted = (config.base + config.weight * delta) * max(0.0, 1.0 - config.penalty * consecutive)
  return min(max(wanted, 0.0), 1.0)


def entropy_budget(total: int, root: float, tool: float, *, sensitivity: float = 0.5) -> float:
  """AEPO's number of episodes from the start, ``total * sigmoid(sensitivity (root - tool))``.

  A high entropy at the prompt gives more of them, a high entropy after tool results more branches.
  2510.14545.

  Args:
    total: episodes of the group, branches included.
    root: entropy of the first turn, nats.
    tool: mean entropy of the turns after tool results, nats.
    sensitivity: beta.
  """
  return total / (1.0 + math.exp(-sensitivity * (root - tool)))


@dataclasses.dataclass(frozen=True)
class BranchSampler:
  """Entropy-triggered branching. ``BranchConfig`` has the rule.

  A branch begins before the turn with the high entropy, with a fork of the context and a fresh
  environment in the snapshot's state. It draws that turn again with keys of its own address: branch
  number s of a task is its sample s. Branches are granted in the order (turn, sample) of these
  turns, so time does not matter. No episode waits for the decision: its branches begin later.
  """

  config: BranchConfig

  async def sample(self, group: Group) -> list[Trajectory]:
    if len(group.finished()) >= group.size:
      return group.finished()
    return group.settle(await _Tree(group, self.config).grow())


class _Tree:
  """All paths of one group, and the places that are left."""

  def __init__(self, group: Group, config: BranchConfig):
    self.group, self.config = group, config
    self.vocab_size = group.player.chat.tokenizer.vocab_size
    self.members: list[Trajectory] = []
    self._crew = Crew()
    self._started = 0  # samples given out
    self._next_turn: dict[int, int] = {}  # of every path at work: the next turn it may offer
    self._offers: list[_Offer] = []  # all there ever were
    self._queue: list[tuple[int, int, _Offer]] = []  # those not taken up yet: turn, sample, offer
    self._all_roots = False  # no further path begins at the prompt

  @property
  def full(self) -> bool:
    """Whether no branch can be taken any more."""
    return self._started >= self.group.size

  async def grow(self) -> list[Trajectory]:
    try:
      for _ in range(await self._roots() - self._started):
        self._start(_Path(self, self._started))
      self._all_roots = True
      self._settle()
      await self._crew.join()
      while not self.full:
        sample, self._started = self._started, self._started + 1
        self._crew.start(self._play(sample, None, None))
      await self._crew.join()
    finally:
      # Also of branches that were cancelled before they began.
      for offer in self._offers:
        offer.point.release()
    return self.members

  async def _roots(self) -> int:
    """How many episodes begin at the prompt."""
    size, config = self.group.size, self.config
    if config.budget == "fixed":
      return min(config.roots, size)
    probe = _Path(self, 0)
    self._start(probe)
    await self._crew.join()
    if not probe.after_tools:
      return size
    tool = sum(probe.after_tools) / len(probe.after_tools)
    share = entropy_budget(size, probe.root, tool, sensitivity=config.sensitivity)
    return min(max(int(share) + 1, 1), size)

  def _start(self, path: _Path, offer: _Offer | None = None, turn: int = 1) -> None:
    """``turn`` is the first that the path may offer."""
    self._started = max(self._started, path.sample + 1)
    self._next_turn[path.sample] = turn
    self._crew.start(self._play(path.sample, path, offer))

  async def _play(self, sample: int, path: _Path | None, offer: _Offer | None) -> None:
    start = None if offer is None else offer.point
    try:
      self.members.append(
        await self.group.episode(sample, start=start, watcher=path, branch=sample)
      )
    finally:
      if path is not None:
        path.drop()
      if offer is not None:
        offer.branches -= 1
        if not offer.branches:
          offer.point.release()
    if path is not None:
      del self._next_turn[sample]
      self._settle()

  def decided(self, sample: int, turn: int, offer: _Offer | None) -> None:
    """Path ``sample`` has drawn ``turn``; it may offer the turn for branching."""
    self._next_turn[sample] = turn + 1
    if offer is not None:
      self._offers.append(offer)
      heapq.heappush(self._queue, (turn, sample, offer))
    self._settle()

  def _settle(self) -> None:
    """Accepts the offers that no other offer can precede."""
    while self._queue and self._all_roots and not self.full:
      turn, sample, offer = self._queue[0]
      earliest = min(((t, s) for s, t in self._next_turn.items()), default=(math.inf, 0))
      if earliest < (turn, sample):
        return
      heapq.heappop(self._queue)
      offer.branches = min(self.config.copies, self.group.size - self._started)
      for _ in range(offer.branches):
        branch = _Path(self, self._started, offer.root, offer.consecutive)
        self._start(branch, offer, turn + 1)
    if self.full:
      for _, _, offer in self._queue:
        offer.point.release()
      self._queue.clear()


@dataclasses.dataclass
class _Offer:
  """A turn that may be drawn again.

  Attributes:
    point: where its branches begin.
    root: entropy of the path's first turn.
    consecutive: branched turns on the path up to this one.
    branches: those that may still need ``point``.
  """

  point: BranchPoint
  root: float
  consecutive: int
  branches: int = 0


class _Path:
  """Watches one episode and offers its turns with a high entropy."""

  def __init__(
    self, tree: _Tree, sample: int, root: float | None = None, consecutive: int = 0
  ) -> None:
    self.sample = sample
    self.root = 0.0 if root is None else root  # entropy of the path's first turn, nats
    self.after_tools: list[float] = []  # of the turns after tool results
    self._tree, self._consecutive = tree, consecutive
    self._point: BranchPoint | None = None
    self._settled_turn = root is None  # False until a branch has drawn the turn it is there for

  async def before(self, episode: Episode) -> None:
    """Keeps the state before a turn that may be branched."""
    if episode.turn == 0 or not self._settled_turn or self._tree.full:
      return
    self._point = await episode.mark()

  def after(self, episode: Episode, sample: Sample) -> None:
    """Looks at the turn, and offers it."""
    tree, config = self._tree, self._tree.config
    turn, entropy = episode.turn - 1, probe_entropy(sample.entropies, config.probe_tokens)
    if turn == 0:
      self.root = entropy
      return
    if not self._settled_turn:
      self._settled_turn = True
      return
    self.after_tools.append(entropy)
    delta = entropy_delta(
      entropy, self.root, vocab_size=tree.vocab_size, probe_tokens=config.probe_tokens
    )
    probability = branch_probability(delta, self._consecutive, config)
    if config.rule == "draw":
      unsure = keys.branch_draw(episode.player.run_seed, episode.address, turn) < probability
    else:
      unsure = probability > config.threshold
    self._consecutive = self._consecutive + 1 if unsure else 0
    offer = None
    if unsure and self._point is not None and not tree.full:
      offer = _Offer(self._point, self.root, self._consecutive)
      self._point = None
    self.drop()
    tree.decided(self.sample, turn, offer)

  def drop(self) -> None:
    """Frees kept states that are not offered."""
    if self._point is not None:
      self._point.release()
      self._point = None
