"""Rewards from settings: named parts, their weights, and one gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from agentjax.config import Config, Share, Table, check
from agentjax.names import check_name, is_own, known_names
from agentjax.rewards.graph import (
  Gate,
  GroupScorer,
  Node,
  Part,
  RewardGraph,
  Scorer,
  WeightedSum,
)
from agentjax.rewards.monitor import (
  MONITOR_PART,
  MONITORS,
  Monitor,
  MonitorConfig,
  count_findings,
  watched,
)
from agentjax.rewards.samples import SampleConfig
from agentjax.rewards.scorer_config import GroupScorerConfig, ScorerConfig
from agentjax.rewards.scorers import SCORERS
from agentjax.sandbox.config import Sandboxes


@dataclasses.dataclass(unsafe_hash=True)
class RewardConfig(Config):
  """``reward = sum_i weight_i * part_i``, where gated parts count only if the gate is open.

  Attributes:
    parts: names of scorers; all are logged: one of ``scorers.SCORERS`` or of the world's, a part
      with settings ("genrm", "overlong", "reasoning_gym", "reasoning_gym_graded", "rubric",
      "unit_tests"), a name of ``settings``, that of an entry point, or "module:attribute" of your
      own, a function of an episode and its task (``graph.Scorer``).
    weights: one weight a part; 0 logs the part without rewarding it.
    gate: part that opens the gate, or None for no gate.
    gate_threshold: the gate is open where its part is at least this.
    gated: parts that count only if the gate is open, e.g. ("turns",): a short episode is rewarded
      only if the answer is right.
    settings: of parts that do not have the defaults, by name.
    monitor: monitors that look for signs of cheating, and the effect of a finding on the reward.
    samples: when the episodes that earned most are written down for people to read.
    fault_alarm: a step warns where more than this share of its episodes got no verdict; ours.
  """

  parts: tuple[str, ...] = ("exact_match",)
  weights: tuple[float, ...] = (1.0,)
  gate: str | None = None
  gate_threshold: float = 1.0
  gated: tuple[str, ...] = ()
  settings: Table[ScorerConfig] = dataclasses.field(default_factory=Table)
  monitor: MonitorConfig = dataclasses.field(default_factory=MonitorConfig)
  samples: SampleConfig = dataclasses.field(default_factory=SampleConfig)
  fault_alarm: Share = 0.05

  @property
  def shares(self) -> dict[str, float]:
    """The weight of each part."""
    return dict(zip(self.parts, self.weights, strict=True))

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
    require(
      len(self.weights) == len(self.parts),
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
    require(any(self.weights), "weights", "at least one weight other than 0")
    if self.gate is not None:
      require(self.gate in self.parts, "gate", f"one of parts {self.parts}")
    if self.gated:
      require(self.gate is not None, "gated", "() where gate is None")
    for name in self.gated:
      require(
        name in self.parts and name != self.gate,
        "gated",
        f"names of parts {self.parts} other than the gate",
      )


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
  for name in config.parts:
    if name in chosen or name in compared:
      continue
    settings = config.part(name)
    if isinstance(settings, GroupScorerConfig):
      compared[name] = settings.build_group(sandboxes or Sandboxes())
    else:
      chosen[name] = settings.build(sandboxes or Sandboxes())
  terms: list[tuple[float, Node]] = []
  for name, weight in zip(config.parts, config.weights, strict=True):
    node: Node = Part(name)
    if config.gate is not None and name in config.gated:
      node = Gate(Part(config.gate), node, config.gate_threshold)
    terms.append((weight, node))
  formula: Node = WeightedSum(tuple(terms))
  if config.monitor.names:
    chosen[MONITOR_PART] = count_findings({name: monitors[name] for name in config.monitor.names})
    formula = watched(formula, Part(MONITOR_PART), config.monitor)
  return RewardGraph(chosen, formula, compared)
