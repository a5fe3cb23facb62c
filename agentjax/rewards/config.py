"""Rewards from settings: named parts, their weights, and one gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from agentjax.config import Config, Share, check
from agentjax.names import check_callable, check_name, is_own, load
from agentjax.rewards.graph import (
  Gate,
  GroupScorer,
  Node,
  Part,
  RewardGraph,
  Scorer,
  WeightedSum,
)
from agentjax.rewards.judged import JUDGED_PARTS, JudgedConfig, build_judged
from agentjax.rewards.monitor import (
  MONITOR_PART,
  MONITORS,
  Monitor,
  MonitorConfig,
  count_findings,
  watched,
)
from agentjax.rewards.reasoning_gym import PARTS as REASONING_GYM_PARTS
from agentjax.rewards.reasoning_gym import ReasoningGymScoring, build_reasoning_gym
from agentjax.rewards.samples import SampleConfig
from agentjax.rewards.scorers import SCORERS
from agentjax.rewards.shaping import OverlongConfig, overlong
from agentjax.rewards.unit_tests import UNIT_TESTS, UnitTestConfig, UnitTestScorer
from agentjax.sandbox.config import Sandboxes


@dataclasses.dataclass(unsafe_hash=True)
class RewardConfig(Config):
  """``reward = sum_i weight_i * part_i``, where gated parts count only if the gate is open.

  Attributes:
    parts: names of scorers; all are logged. "unit_tests" has settings of its own below. A scorer of
      your own is "module:attribute", a function of an episode and its task (``graph.Scorer``).
    weights: one weight a part; 0 logs the part without rewarding it.
    gate: part that opens the gate, or None for no gate.
    gate_threshold: the gate is open where its part is at least this.
    gated: parts behind the gate, e.g. ("turns",): being short pays only when the answer is right.
    overlong: settings of the part "overlong", DAPO's penalty on long episodes; give it weight 1.
    unit_tests: how the part "unit_tests" runs code and tests.
    reasoning_gym: where the parts "reasoning_gym" and "reasoning_gym_graded" score answers.
    monitor: who looks for signs of cheating, and what a finding does to the reward.
    samples: when the episodes that earned most are written down for people to read.
    fault_alarm: a step warns where more than this share of its episodes got no verdict; ours.
    judged: how the parts "rubric" and "genrm" judge, and who does.
  """

  parts: tuple[str, ...] = ("exact_match",)
  weights: tuple[float, ...] = (1.0,)
  gate: str | None = None
  gate_threshold: float = 1.0
  gated: tuple[str, ...] = ()
  overlong: OverlongConfig = dataclasses.field(default_factory=OverlongConfig)
  unit_tests: UnitTestConfig = dataclasses.field(default_factory=UnitTestConfig)
  reasoning_gym: ReasoningGymScoring = dataclasses.field(default_factory=ReasoningGymScoring)
  monitor: MonitorConfig = dataclasses.field(default_factory=MonitorConfig)
  samples: SampleConfig = dataclasses.field(default_factory=SampleConfig)
  fault_alarm: Share = 0.05
  judged: JudgedConfig = dataclasses.field(default_factory=JudgedConfig)

  @property
  def shares(self) -> dict[str, float]:
    """The weight of each part."""
    return dict(zip(self.parts, self.weights, strict=True))

  def validate(self, path: str = "config.reward") -> None:
    super().validate(path)
    check(len(self.parts) > 0, f"{path}.parts", self.parts, "at least one scorer")
    check(len(set(self.parts)) == len(self.parts), f"{path}.parts", self.parts, "distinct names")
    for name in filter(is_own, self.parts):
      check_name(name, f"{path}.parts")
    check(
      len(self.weights) == len(self.parts),
      f"{path}.weights",
      self.weights,
      f"one weight for each of the {len(self.parts)} parts",
    )
    check(
      MONITOR_PART not in self.parts,
      f"{path}.parts",
      self.parts,
      f"names other than {MONITOR_PART!r}, which the setting 'monitor' adds",
    )
    check(any(self.weights), f"{path}.weights", self.weights, "at least one weight other than 0")
    self.judged.check_parts(self.parts, f"{path}.judged")
    if self.gate is not None:
      check(self.gate in self.parts, f"{path}.gate", self.gate, f"one of parts {self.parts}")
    if self.gated:
      check(self.gate is not None, f"{path}.gated", self.gated, "() where gate is None")
    for name in self.gated:
      check(
        name in self.parts and name != self.gate,
        f"{path}.gated",
        self.gated,
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
    group_scorers: name -> what compares the episodes of a task.

  Raises:
    ConfigError: a part that no scorer makes, or a setting that ``validate`` refuses.
  """
  config.validate("config.reward")
  own: dict[str, Scorer] = {"overlong": overlong(config.overlong)}
  own |= {name: _named(name) for name in config.parts if is_own(name) and name not in scorers}
  scorers = {**own, **scorers}
  groups = group_scorers or {}
  known = sorted({*scorers, *groups, *JUDGED_PARTS, *REASONING_GYM_PARTS, UNIT_TESTS})
  for name in config.parts:
    check(name in known, "config.reward.parts", name, f"{', '.join(known)}, 'module:attribute'")
  for name in config.monitor.names:
    allowed = ", ".join(sorted(monitors))
    check(name in monitors, "config.reward.monitor.names", name, allowed)
  chosen = {name: scorers[name] for name in config.parts if name in scorers}
  left = [name for name in config.parts if name not in chosen and name not in groups]
  single, compared = build_judged(config.judged, left)
  chosen |= single
  compared = {**compared, **{name: groups[name] for name in config.parts if name in groups}}
  chosen |= build_reasoning_gym(
    config.reasoning_gym, [name for name in config.parts if name not in chosen], sandboxes
  )
  if UNIT_TESTS in config.parts and UNIT_TESTS not in chosen:
    chosen[UNIT_TESTS] = UnitTestScorer(config.unit_tests, sandboxes=sandboxes)
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


def _named(name: str) -> Scorer:
  """The scorer that ``module:attribute`` names."""
  path, allowed = "config.reward.parts", "a function of an episode and its task"
  found = load(name, path, allowed)
  check_callable(found, f"{path}={name!r}", allowed, arguments=2)
  return found
