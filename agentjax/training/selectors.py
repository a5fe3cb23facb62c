"""Selectors: which of the sampled groups a step is trained on. Functions of their rewards. No jax.

A group's score (``group_scores``) says how much can be learned from it; a rule (``keep_groups``)
decides which scores are kept. The rule "band" looks at one group at a time, so it can refill: a
refused group is dropped as soon as it has ended, and another begins in its place
(``rollout.stream.GroupStream``), under every schedule. The other rules compare the groups of a
step.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from agentjax.config import Config, NonNegativeInt, PositiveInt, PositiveShare, check
from agentjax.names import check_callable, check_name, entry_names, load
from agentjax.rollout.statistics import num_sampled_tokens
from agentjax.schedules import Scheduled
from agentjax.trajectory.record import Trajectory
from agentjax.trajectory.seats import learning_views

_SCORES = ("reward_std", "reward_mean", "reward_sum", "entropy", "entropy_std", "length")
_RULES = ("all", "band", "top_p", "top_p_softmax", "top_k", "min_p")
_GROUP = "agentjax.selectors"  # of entry points
GroupKey = tuple[int, int]  # (round, task id)

_SLACK = 0.01  # of RAGEN's code: a sum that misses its share by this much reaches it


@dataclasses.dataclass(unsafe_hash=True)
class SelectionConfig(Config):
  """Which groups of a step are trained on.

  Attributes:
    rule: "all"; "band": scores strictly between ``above`` and ``below`` (DAPO's dynamic sampling is
      above=0 on "reward_std"); "top_p": the fewest groups that hold ``share`` of all scores;
      "top_p_softmax": likewise of the softmax of the scores; "top_k": ``share`` of the groups, one
      at least; "min_p": scores of at least ``share`` times the best; or "module:function" of your
      own, of the scores float64 [G], which returns bool [G].
    score: of a group, over its valid members. "reward_std" (sample deviation, 0 for fewer than
      two), "reward_mean", "reward_sum"; "entropy" and "entropy_std" (of the members' mean entropy a
      drawn token, nats); "length" (mean drawn tokens); or "module:function" of your own, of the
      group's trajectories, which returns a number.
    above, below: open ends of the band; None leaves it open there.
    share: 0 to 1, see ``rule``. RAGEN-2 has .9 for both forms of "top_p"; StarPO-S keeps .25 by
      "top_k".
    prefer: whether rules other than "band" keep the "largest" scores or the "smallest".
    keep_zeros: whether rules other than "band" may keep groups with score 0. RAGEN-2's linear
      "top_p" drops them, its main table ("top_p_softmax") keeps them.
    refill: per step at most ``refill * rl.tasks_per_step`` groups replace those that the band
      refuses; then the step uses fewer. 0 replaces none. DAPO's scripts allow 10 batches. "band"
      only.
    rescale: the loss of a step with fewer groups than ``rl.tasks_per_step`` is multiplied by their
      share ("linear"), by its root ("sqrt"), or left alone ("none").
    patience: steps in a row without any group to train on, each of which is skipped, before the
      run stops.

  References: DAPO, 2503.14476; StarPO-S, 2504.20073; RAGEN-2, 2604.06268.
  """

  rule: str = "all"
  score: str = "reward_std"
  above: Scheduled[float] | None = None
  below: Scheduled[float] | None = None
  share: Scheduled[PositiveShare] = 0.9
  prefer: Literal["largest", "smallest"] = "largest"
  keep_zeros: bool = False
  refill: NonNegativeInt = 0
  rescale: Literal["none", "linear", "sqrt"] = "none"
  patience: PositiveInt = 5

  def validate(self, path: str = "config.rl.selection") -> None:
    super().validate(path)
    require = self.requirements(path)
    for name, built_in in (("rule", _RULES), ("score", _SCORES)):
      word = getattr(self, name)
      check_name(word, f"{path}.{name}", (*built_in, *entry_names({}, _GROUP)))
      if word not in built_in:
        _own(word, f"{path}.{name}")
    band = self.rule == "band"
    for name in ("above", "below"):
      value = getattr(self, name)
      check(band or value is None, f"{path}.{name}", value, f"None with {path}.rule={self.rule!r}")
    require(
      not band or self.above is not None or self.below is not None,
      "above",
      f"a number, or {path}.below, with {path}.rule='band'; 0 drops groups without spread",
    )
    if self.above is not None and self.below is not None:
      require(self.above < self.below, "above", f"less than below={self.below}")
    require(
      band or not self.refill,
      "refill",
      f"0 with {path}.rule={self.rule!r}, which compares the groups of a step; rule='band' looks "
      "at one group at a time",
    )

  def loss_factor(self, kept: int, size: int) -> float:
    """What the loss of a step with ``kept`` of ``size`` groups is multiplied by."""
    share = min(kept / size, 1.0)
    return {"none": 1.0, "linear": share, "sqrt": math.sqrt(share)}[self.rescale]


def keep_groups(scores: np.ndarray, config: SelectionConfig) -> np.ndarray:
  """bool [G]: which of the groups with ``scores`` float [G] are trained on; maybe none.

  "top_p" sorts, then keeps the fewest first groups whose sum is at least ``share`` of the sum of
  all scores, with a tolerance of .01. Equal scores keep their order.
  """
  scores = np.asarray(scores, np.float64)
  if config.rule not in _RULES:
    return np.asarray(_own(config.rule)(scores), bool).reshape(scores.shape)
  if config.rule == "all":
    return np.ones(scores.shape, bool)
  if config.rule == "band":
    kept = np.ones(scores.shape, bool)
    if config.above is not None:
      kept &= scores > config.above
    if config.below is not None:
      kept &= scores < config.below
    return kept
  kept = np.zeros(scores.shape, bool)
  allowed = np.flatnonzero(scores != 0) if not config.keep_zeros else np.arange(len(scores))
  if not allowed.size:
    return kept
  signed = scores[allowed] if config.prefer == "largest" else -scores[allowed]
  order = allowed[np.argsort(-signed, kind="stable")]
  kept[order[: _how_many(scores[order], config)]] = True
  return kept


def _how_many(ordered: np.ndarray, config: SelectionConfig) -> int:
  """How many groups are kept; ``ordered`` has their scores, the preferred first."""
  if config.rule == "top_k":
    return max(1, int(config.share * len(ordered) + 1e-9))
  if config.rule == "min_p":
    if config.prefer == "largest":
      return int(np.sum(ordered >= config.share * ordered[0]))
    return int(np.sum(ordered * config.share <= ordered[0]))
  worth = ordered
  if config.rule == "top_p_softmax":
    signed = ordered if config.prefer == "largest" else -ordered
    worth = np.exp(signed - signed.max())
    worth = worth / worth.sum()
  reached = np.cumsum(worth) >= config.share * worth.sum() - _SLACK
  return int(np.argmax(reached)) + 1 if reached.any() else 0


def _own(name: str, path: str = "config.rl.selection") -> Callable[[Any], Any]:
  """A rule or a score of the user's own."""
  allowed = "'module:attribute' of a function of scores (rule) or of trajectories (score)"
  function = load(entry_names({}, _GROUP).get(name, name), path, allowed)
  check_callable(function, f"{path}={name!r}", allowed)
  return function


def group_scores(
  trajectories: Sequence[Trajectory], score: str
) -> tuple[list[GroupKey], np.ndarray]:
  """(round, task) of every group in the order of addresses, and its score, float64 [G].

  Where it has several agents, that is the mean of the scores of those that learn.
  """
  groups: dict[GroupKey, list[Trajectory]] = collections.defaultdict(list)
  for trajectory in sorted(trajectories, key=lambda t: t.address):
    groups[trajectory.address[:2]].append(trajectory)
  return list(groups), np.array([_score(g, score) for g in groups.values()])


def select_groups(
  trajectories: Sequence[Trajectory], config: SelectionConfig
) -> tuple[list[Trajectory], dict[str, float]]:
  """The episodes of the groups that are kept, in their order, and metrics under ``selection/``."""
  keys, scores = group_scores(trajectories, config.score)
  mask = keep_groups(scores, config)
  kept = {key for key, keep in zip(keys, mask, strict=True) if keep}
  metrics = {
    "selection/score": float(scores.mean()) if len(scores) else 0.0,
    "selection/score_kept": float(scores[mask].mean()) if mask.any() else 0.0,
    # Chance in the environment causes spread too. Pure noise gives similar scores for all groups.
    "selection/score_variation": _variation(scores),
    "selection/groups": float(mask.sum()),
  }
  return [t for t in trajectories if t.address[:2] in kept], metrics


def _variation(scores: np.ndarray) -> float:
  mean = float(scores.mean()) if len(scores) else 0.0
  return float(scores.std()) / mean if mean else 0.0


def _score(group: Sequence[Trajectory], score: str) -> float:
  roles: dict[str, list[Trajectory]] = collections.defaultdict(list)
  for own in learning_views(group):
    roles[own.group].append(own)
  return float(np.mean([_score_role(members, score) for members in roles.values()]))


def _score_role(group: Sequence[Trajectory], score: str) -> float:
  members = [t for t in group if t.usable]
  if not members:
    return 0.0
  if score not in _SCORES:
    return float(_own(score)(members))
  if score.startswith("reward"):
    values = [t.reward.value for t in members if t.reward.value is not None]
  elif score.startswith("entropy"):
    values = [drawn_entropy(t) for t in members]
  else:
    values = [float(num_sampled_tokens(t)) for t in members]
  if score.endswith("_std"):
    # Compared exactly: the rounded mean of equal values need not equal them.
    return float(np.std(values, ddof=1)) if max(values) > min(values) else 0.0
  return float(np.sum(values)) if score == "reward_sum" else float(np.mean(values))


def drawn_entropy(trajectory: Trajectory) -> float:
  drawn = [s.entropies[s.sampled] for s in trajectory.segments if s.sampled.any()]
  return float(np.concatenate(drawn).mean()) if drawn else 0.0
