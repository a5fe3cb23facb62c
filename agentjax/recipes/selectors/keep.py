r"""Of every group ``keep`` episodes stay: by strata, and within each by an order.

Strata and order are formulas (``rewards.formula``) of the parts of the reward and of "reward",
"tokens", "turns" and "calls". Every stratum keeps its share of the group, so that what they
distinguish, such as success, stays as frequent as it was. Examples:

    strata="reward > 0", order="tool_errors"     the successes, and failures, with fewer errors
    strata="", order="max(reward, -reward)"      ranks: the rewards nearest to 0
    strata="reward > 0",
    order="tokens if reward > 0 else -tokens"    short successes and long failures

The first is GRPO-RoC's idea in general (2508.20722; ``recipes.grpo_roc`` has its exact penalties),
the last RoRecomp's (2509.25958).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from agentjax.config import NonNegativeInt, PositiveFloat, PositiveInt
from agentjax.rewards.formula import Formula
from agentjax.rewards.scorers import sampled_tokens, turns
from agentjax.signals.signal import Metrics, Signal, SignalConfig, SignalTools, StepContext
from agentjax.training.experiment import Experiment
from agentjax.trajectory.episode_groups import generator, usable_groups
from agentjax.trajectory.record import Reward, Task, Trajectory

_FIGURES = ("reward", "tokens", "turns", "calls")
_NO_TASK = Task(0, (), "", "")


@dataclasses.dataclass(unsafe_hash=True)
class KeepConfig(SignalConfig):
  """Settings; ``config.rollout.group_size`` is how many episodes are sampled.

  Attributes:
    keep: episodes of a group that are trained on. All defaults are ours.
    strata: a formula; episodes with one value are one stratum. "" makes one of all.
    order: a formula; the lowest values stay. "" draws with equal chances.
    choose: "first": the lowest; "drawn": with chances ``1 / (offset + order)``, for orders >= 0.
    floor: episodes that a stratum keeps at least, as far as it has them.
    offset: keeps the chance of order 0 finite.
    seed: of the draws.
  """

  keep: PositiveInt = 8
  strata: str = "reward > 0"
  order: str = ""
  choose: Literal["first", "drawn"] = "first"
  floor: NonNegativeInt = 1
  offset: PositiveFloat = 0.1
  seed: int = 0

  def check_run(self, experiment: Experiment, path: str) -> None:
    """Formulas must name what there is."""
    require = self.requirements(path)
    size, known = experiment.rollout.group_size, {*experiment.reward.parts, *_FIGURES}
    require(self.keep < size, "keep", f"less than config.rollout.group_size={size}")
    for name in ("strata", "order"):
      text = getattr(self, name)
      right = not text or Formula(text).names() <= known
      require(right, name, f"a formula of {', '.join(sorted(known))}")

  def build(self, tools: SignalTools) -> Keep:
    """See ``SignalConfig.build``."""
    del tools
    return Keep(self)


class Keep(Signal):
  """See the module. Metrics: ``keep/share`` of the episodes, and of "order" the means before and
  after, ``keep/order`` and ``keep/order_kept``.

  Args:
    config: see KeepConfig.
  """

  name = "keep"

  def __init__(self, config: KeepConfig):
    self._config = config
    self._strata, self._order = (Formula(t) if t else None for t in (config.strata, config.order))

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    del context
    kept: set[int] = set()
    before: list[float] = []
    after: list[float] = []
    for key, members in usable_groups(episodes).items():
      strata = np.array([_value(self._strata, one) for one in members])
      order = np.array([_value(self._order, one) for one in members])
      chosen = self._choose(strata, order, generator(self._config.seed, key))
      kept |= {id(members[i]) for i in chosen}
      before += order.tolist()
      after += order[chosen].tolist()
    result = [one for one in episodes if id(one) in kept]
    return result or list(episodes), {
      "keep/share": len(result) / max(len(episodes), 1),
      "keep/order": float(np.mean(before)) if before else 0.0,
      "keep/order_kept": float(np.mean(after)) if after else 0.0,
    }

  def _choose(
    self, strata: np.ndarray, order: np.ndarray, random: np.random.Generator
  ) -> list[int]:
    """Indices of the members that stay, in their order."""
    settings = self._config
    if len(order) <= settings.keep:
      return list(range(len(order)))
    values, owners = np.unique(strata, return_inverse=True)
    sizes = np.bincount(owners, minlength=len(values))
    chosen: list[int] = []
    for i, count in enumerate(shares(sizes, settings.keep, settings.floor)):
      own = np.flatnonzero(owners == i)
      if self._order is None:
        chosen += random.choice(own, count, replace=False).tolist()
      elif settings.choose == "first":
        chosen += own[np.argsort(order[own], kind="stable")][:count].tolist()
      else:
        chances = 1 / (settings.offset + np.maximum(order[own], 0))
        chosen += random.choice(own, count, replace=False, p=chances / chances.sum()).tolist()
    return sorted(chosen)


def shares(sizes: np.ndarray, keep: int, floor: int) -> list[int]:
  """How many of each stratum stay, ``keep`` in all of more: in proportion, by largest remainders.

  A stratum keeps ``floor`` of its members at least, or all if it has fewer, as far as that fits.
  """
  exact = sizes * keep / sizes.sum()
  found = np.floor(exact).astype(int)
  least = np.minimum(sizes, floor)
  if least.sum() <= keep:
    found = np.maximum(found, least)
  while found.sum() != keep:
    step = 1 if found.sum() < keep else -1
    room = found < sizes if step > 0 else found > (least if least.sum() <= keep else 0)
    behind = np.where(room, step * (exact - found), -np.inf)
    found[int(np.argmax(behind))] += step
  return found.tolist()


def _value(formula: Formula | None, episode: Trajectory) -> float:
  """The value of a formula for an episode; parts without a value count 0."""
  if formula is None:
    return 0.0
  figures = {
    "reward": episode.reward.value or 0.0,
    "tokens": sampled_tokens(episode, _NO_TASK),
    "turns": turns(episode, _NO_TASK),
    "calls": float(len(episode.tools)),
  }
  parts: Mapping[str, Reward] = {
    name: part if part.valid else Reward(0.0) for name, part in episode.reward_parts.items()
  } | {name: Reward(value) for name, value in figures.items()}
  missing = {name: Reward(0.0) for name in formula.names() - set(parts)}
  return formula.evaluate({**parts, **missing}).value or 0.0
