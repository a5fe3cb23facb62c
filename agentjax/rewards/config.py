"""Rewards from settings: named parts, and a formula or weights that make one reward of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from agentjax.config import Config, Share, Table, check
from agentjax.names import check_name, is_own, known_names
from agentjax.rewards.formula import Formula
from agentjax.rewards.graph import GroupScorer, Node, RewardGraph, Scorer
from agentjax.rewards.monitor import (
  MONITOR_PART,
  MONITORS,
  Monitor,
  MonitorConfig,
  Screened,
  count_findings,
)
from agentjax.rewards.samples import SampleConfig
from agentjax.rewards.scorer_config import GroupScorerConfig, ScorerConfig
from agentjax.rewards.scorers import SCORERS
from agentjax.sandbox.config import Sandboxes
from agentjax.schedules import Schedule, at_end


@dataclasses.dataclass(unsafe_hash=True)
class RewardConfig(Config):
  """``reward = sum_i weight_i * part_i``, or a formula.

  Attributes:
    parts: names of scorers; all are logged: one of ``scorers.SCORERS`` or of the world's, a part
      with settings (``ScorerConfig.built_in``, such as "unit_tests"), a name of ``settings``, that
      of an entry point, or "module:attribute" of your own, a function of an episode and its task
      (``graph.Scorer``).
    weights: one weight a part; 0 logs the part without rewarding it.
    formula: the reward as an expression of the parts (``rewards.formula``), such as "f1 if format
      >= 1 else -1", instead of ``weights``; None takes those. Its terms are kept with every
      episode.
    numbers: schedules, or numbers, by the names that stand for them in ``formula``.
    settings: of parts that do not have the defaults, by name.
    monitor: monitors that look for signs of cheating, and the effect of a finding on the reward.
    samples: when the episodes that earned most are written down for people to read.
    fault_alarm: a step warns where more than this share of its episodes got no verdict; ours.
  """

  parts: tuple[str, ...] = ("exact_match",)
  weights: tuple[float, ...] = (1.0,)
  formula: str | None = None
  numbers: Table[float | Schedule] = dataclasses.field(default_factory=Table)
  settings: Table[ScorerConfig] = dataclasses.field(default_factory=Table)
  monitor: MonitorConfig = dataclasses.field(default_factory=MonitorConfig)
  samples: SampleConfig = dataclasses.field(default_factory=SampleConfig)
  fault_alarm: Share = 0.05

  @property
  def shares(self) -> dict[str, float]:
    """The weight of each part; none with a formula."""
    return {} if self.formula else dict(zip(self.parts, self.weights, strict=True))

  def formula_at(self, numbers: Callable[[Any], Any]) -> Node:
    """The formula of the whole reward.

    Args:
      numbers: puts numbers into settings in the place of schedules.
    """
    text = self.formula or " + ".join(
      f"{float(weight)!r} * {name!r}" for name, weight in self.shares.items() if weight
    )
    monitor = numbers(self.monitor)
    if monitor.names and monitor.action == "penalise":
      text = f"({text}) - {float(monitor.penalty)!r} * ({MONITOR_PART!r} > 0)"
    node = Formula(text, numbers(self.numbers), recorded=self.formula is not None)
    if monitor.names and monitor.action == "screen":
      return Screened(Formula(repr(MONITOR_PART)), node, monitor.screen_above)
    return node

  def part(self, name: str) -> ScorerConfig:
    """Settings of one of ``parts``; a copy if the part has its defaults."""
    return self.settings.get(name) or ScorerConfig.from_name(name, "config.reward.parts")

  def validate(self, path: str = "config.reward") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(len(self.parts) > 0, "parts", "at least one scorer")
    require(len(set(self.parts)) == len(self.parts), "parts", "distinct names")
    for name in filter(is_own, self.parts):
      check_name(name, f"{path}.parts")
    self._validate_formula(path)
    require(
      len(self.weights) == len(self.parts) or self.formula is not None,
      "weights",
      f"one weight for each of the {len(self.parts)} parts",
    )
    require(
      MONITOR_PART not in self.parts,
      "parts",
      f"names other than {MONITOR_PART!r}, which the setting 'monitor' adds",
    )
    for name in self.settings:
      check(name in self.parts, f"{path}.settings", name, f"one of {path}.parts = {self.parts}")
    paid = self.formula is not None or any(self.weights)
    require(paid, "weights", "at least one weight other than 0")

  def _validate_formula(self, path: str) -> None:
    require = self.requirements(path)
    names = Formula(self.formula).names() if self.formula else frozenset()
    if self.formula:
      known = {*self.parts, *self.numbers}
      allowed = f"an expression of {path}.parts = {self.parts} and {path}.numbers"
      require(names <= known, "formula", allowed)
      require(self.weights in ((), (1.0,)), "weights", f"left out, or (), with {path}.formula")
    for name in self.numbers:
      said = f"names in {path}.formula that are no parts"
      check(name in names and name not in self.parts, f"{path}.numbers", name, said)


def build_rewards(
  config: RewardConfig,
  scorers: Mapping[str, Scorer] = SCORERS,
  monitors: Mapping[str, Monitor] = MONITORS,
  sandboxes: Sandboxes | None = None,
  group_scorers: Mapping[str, GroupScorer] | None = None,
) -> RewardGraph:
  """The graph of a config; close it at the end of the run.

  Args:
    config: see RewardConfig.
    scorers: name -> scorer; extend SCORERS by your own.
    monitors: name -> monitor; extend MONITORS by your own.
    sandboxes: those of the run.
    group_scorers: name -> scorer that compares the episodes of a task.

  Raises:
    ConfigError: a part that no scorer makes, or a setting that ``validate`` refuses.
  """
  config.validate("config.reward")
  groups = group_scorers or {}
  known = sorted({*scorers, *groups, *known_names(ScorerConfig), *config.settings})
  for name in config.parts:
    allowed = f"{', '.join(known)}, 'module:attribute'"
    check(name in known or is_own(name), "config.reward.parts", name, allowed)
  for name in config.monitor.names:
    allowed = ", ".join(sorted(monitors))
    check(name in monitors, "config.reward.monitor.names", name, allowed)
  chosen = {name: scorers[name] for name in config.parts if name in scorers}
  compared = {name: groups[name] for name in config.parts if name in groups}
  own = {n: config.part(n) for n in config.parts if n not in chosen and n not in compared}
  alone = {*chosen, *(n for n, s in own.items() if not isinstance(s, GroupScorerConfig))}
  for name, settings in own.items():
    if isinstance(settings, GroupScorerConfig):
      said = (
        f"{settings.needs} among them with the part {name!r}, before it if they compare a group"
      )
      found = {*alone, *compared}  # groups are compared in the order of the parts
      check(found.issuperset(settings.needs), "config.reward.parts", config.parts, said)
      compared[name] = settings.build_group(sandboxes or Sandboxes())
    else:
      chosen[name] = settings.build(sandboxes or Sandboxes())
  if config.monitor.names:
    chosen[MONITOR_PART] = count_findings({name: monitors[name] for name in config.monitor.names})
  return RewardGraph(chosen, config.formula_at(at_end), compared, config.formula_at)
