"""Rewards from settings: named parts, their weights, and one gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from agentjax.config import Config, check
from agentjax.rewards.graph import Gate, Node, Part, RewardGraph, Scorer, WeightedSum
from agentjax.rewards.judged import JUDGED_PARTS, JudgedConfig, build_judged
from agentjax.rewards.scorers import SCORERS


@dataclasses.dataclass(unsafe_hash=True)
class RewardConfig(Config):
  """``reward = sum_i weight_i * part_i``, where gated parts count only if the gate is open.

  Attributes:
    parts: names of scorers; all are logged.
    weights: one weight a part; 0 logs the part without rewarding it.
    gate: part that opens the gate, or None for no gate.
    gate_threshold: the gate is open where its part is at least this.
    gated: parts behind the gate, e.g. ("turns",): being short pays only when the answer is right.
    judged: how the parts "rubric" and "genrm" judge, and who does.
  """

  parts: tuple[str, ...] = ("exact_match",)
  weights: tuple[float, ...] = (1.0,)
  gate: str | None = None
  gate_threshold: float = 1.0
  gated: tuple[str, ...] = ()
  judged: JudgedConfig = dataclasses.field(default_factory=JudgedConfig)

  def validate(self, path: str = "config.reward") -> None:
    super().validate(path)
    check(len(self.parts) > 0, f"{path}.parts", self.parts, "at least one scorer")
    check(len(set(self.parts)) == len(self.parts), f"{path}.parts", self.parts, "distinct names")
    check(
      len(self.weights) == len(self.parts),
      f"{path}.weights",
      self.weights,
      f"one weight for each of the {len(self.parts)} parts",
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


def build_rewards(config: RewardConfig, scorers: Mapping[str, Scorer] = SCORERS) -> RewardGraph:
  """The graph of a config. ``scorers``: name -> scorer; extend SCORERS by your own.

  Raises:
    ConfigError: a part that no scorer makes, or a setting that ``validate`` refuses.
  """
  config.validate("config.reward")
  known = sorted({*scorers, *JUDGED_PARTS})
  for name in config.parts:
    check(name in known, "config.reward.parts", name, ", ".join(known))
  judged = [name for name in config.parts if name not in scorers]
  alone, compared = build_judged(config.judged, judged)
  terms: list[tuple[float, Node]] = []
  for name, weight in zip(config.parts, config.weights, strict=True):
    node: Node = Part(name)
    if config.gate is not None and name in config.gated:
      node = Gate(Part(config.gate), node, config.gate_threshold)
    terms.append((weight, node))
  chosen = {name: scorers[name] for name in config.parts if name in scorers}
  return RewardGraph({**chosen, **alone}, WeightedSum(tuple(terms)), compared)
