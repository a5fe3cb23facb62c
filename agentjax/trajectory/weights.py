"""Loss weights as a product of named rules on the record. No jax."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import numpy as np

from agentjax.config import Config, NonNegativeFloat, PositiveInt, Range
from agentjax.trajectory.builder import leaves, path
from agentjax.trajectory.record import Flag, Segment, Status, Trajectory

_BASES = ("none", "role", "observations")
WeightRule = Literal[
  "none",
  "role",
  "observations",
  "error_masked",
  "partial",
  "incomplete",
  "incomplete_unless_repetitive",
  "repetitive",
  "special_tokens",
  "leaves",
]


@dataclasses.dataclass(unsafe_hash=True)
class WeightConfig(Config):
  """Which rules multiply to a token's weight.

  Attributes:
    rules: "none": 1 on every token, also prompts and tool results (agentic mid-training as in
      daVinci-Dev). "role": the weight the episode recorded, by default 1 on what the policy drew
      and on a demonstration's turns, 0 elsewhere. "observations": that, and 1 on tool results, so
      that what tools answer is learnt; for demonstrations. "error_masked": ``error_factor`` on a
      turn whose tool call failed; it stays in the context (KAT-Coder). "partial": the same, but a
      turn flagged as reflection keeps its weight (STeP). "incomplete": 0 on a trajectory that was
      truncated or that an infrastructure or verifier fault ended. "incomplete_unless_repetitive":
      the same, but one that was truncated while it repeated itself keeps its weight, as a failure
      (LongCat-Flash-Thinking). "repetitive": 0 on a trajectory that repeats itself (SPEAR).
      "special_tokens": ``special_token_factor`` on ``special_token_ids`` (Unify-Agent). "leaves":
      the number of branches of the episode that share the token, so that sums over the tree are
      sums over its branches as if each were an episode (KAT-Coder); without it a shared token
      counts once.
    error_factor: >= 0, used by "error_masked" and "partial"; the papers have 0.
    repeated_tokens, repetitions: a trajectory repeats itself where one run of ``repeated_tokens``
      tokens stands ``repetitions`` times or more in the turns of its policy together. 20 and 10 in
      SPEAR's code, which also looks at what tools answered; LongCat-Flash-Thinking has no numbers.
    special_token_ids: ids, for "special_tokens".
    special_token_factor: >= 0; Unify-Agent has 3.
  """

  rules: tuple[WeightRule, ...] = ("role",)
  error_factor: NonNegativeFloat = 0.0
  repeated_tokens: PositiveInt = 20
  repetitions: Annotated[int, Range(2)] = 10
  special_token_ids: tuple[int, ...] = ()
  special_token_factor: NonNegativeFloat = 3.0

  def validate(self, path: str = "config") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(
      len(set(self.rules)) == len(self.rules) and bool(self.rules),
      "rules",
      "at least one rule, each once",
    )
    require(
      sum(rule in _BASES for rule in self.rules) == 1,
      "rules",
      f"exactly one of {', '.join(map(repr, _BASES))}, which the others multiply",
    )
    require(
      ("special_tokens" in self.rules) == bool(self.special_token_ids),
      "special_token_ids",
      'some ids with the rule "special_tokens", none without it',
    )


def token_weights(trajectory: Trajectory, config: WeightConfig) -> list[np.ndarray]:
  """float32 [n] for each segment: the product of ``config.rules``."""
  weights = [np.ones(len(s), np.float32) for s in trajectory.segments]
  for rule in config.rules:
    for weight, factor in zip(weights, _RULES[rule](trajectory, config), strict=True):
      weight *= np.asarray(factor, np.float32)
  return weights


def apply_weight_rules(trajectory: Trajectory, config: WeightConfig) -> Trajectory:
  """A copy of ``trajectory`` that carries ``token_weights``; the record itself stays as it was."""
  segments = [
    dataclasses.replace(segment, weights=weights)
    for segment, weights in zip(trajectory.segments, token_weights(trajectory, config), strict=True)
  ]
  return dataclasses.replace(trajectory, segments=segments)


def failed_turns(trajectory: Trajectory) -> frozenset[int]:
  """Indices of the policy's segments whose tool call failed.

  Segments with the flag ``TOOL_ERROR``; for a tool result with that flag, the model call that it
  answers.
  """
  failed = set()
  for i, segment in enumerate(trajectory.segments):
    if Flag.TOOL_ERROR not in segment.flags:
      continue
    current: int | None = i
    while current is not None and not _is_turn(trajectory.segments[current]):
      current = trajectory.segments[current].parent
    if current is not None:
      failed.add(current)
  return frozenset(failed)


def repeats_itself(trajectory: Trajectory, length: int, times: int) -> bool:
  """Whether one run of ``length`` tokens stands ``times`` times in the policy's turns; runs do not
  cross turns, and may overlap."""
  counts: collections.Counter[bytes] = collections.Counter()
  for segment in filter(_is_turn, trajectory.segments):
    ids = np.ascontiguousarray(segment.token_ids, np.int32)
    counts.update(ids[i : i + length].tobytes() for i in range(len(ids) - length + 1))
  return max(counts.values(), default=0) >= times


def _is_turn(segment: Segment) -> bool:
  """Whether the policy or a teacher wrote the segment; the markup before a turn does not count."""
  return segment.owner == "assistant" and bool(segment.sampled.any() or segment.weights.any())


_Factors = Sequence[np.ndarray | float]  # one a segment


def _none(trajectory: Trajectory, config: WeightConfig) -> _Factors:
  return [1.0] * len(trajectory.segments)


def _role(trajectory: Trajectory, config: WeightConfig) -> _Factors:
  return [segment.weights for segment in trajectory.segments]


def _observations(trajectory: Trajectory, config: WeightConfig) -> _Factors:
  return [1.0 if s.owner == "tool" else s.weights for s in trajectory.segments]


def _error_masked(trajectory: Trajectory, config: WeightConfig) -> _Factors:
  failed = failed_turns(trajectory)
  return [config.error_factor if i in failed else 1.0 for i in range(len(trajectory.segments))]


def _partial(trajectory: Trajectory, config: WeightConfig) -> _Factors:
  failed = failed_turns(trajectory)
  return [
    config.error_factor if i in failed and Flag.REFLECTION not in segment.flags else 1.0
    for i, segment in enumerate(trajectory.segments)
  ]


def _incomplete(trajectory: Trajectory, config: WeightConfig) -> _Factors:
  unfinished = trajectory.status is Status.TRUNCATED or trajectory.status.masked
  factor = 0.0 if unfinished else 1.0
  return [factor] * len(trajectory.segments)


def _incomplete_unless_repetitive(trajectory: Trajectory, config: WeightConfig) -> _Factors:
  cut = trajectory.status is Status.TRUNCATED
  kept = cut and repeats_itself(trajectory, config.repeated_tokens, config.repetitions)
  return [1.0] * len(trajectory.segments) if kept else _incomplete(trajectory, config)


def _repetitive(trajectory: Trajectory, config: WeightConfig) -> _Factors:
  repeats = repeats_itself(trajectory, config.repeated_tokens, config.repetitions)
  return [0.0 if repeats else 1.0] * len(trajectory.segments)


def _special_tokens(trajectory: Trajectory, config: WeightConfig) -> _Factors:
  ids = np.array(config.special_token_ids, np.int32)
  factor = np.float32(config.special_token_factor)
  return [np.where(np.isin(s.token_ids, ids), factor, np.float32(1.0)) for s in trajectory.segments]


def _leaves(trajectory: Trajectory, config: WeightConfig) -> _Factors:
  counts = [0.0] * len(trajectory.segments)
  for leaf in leaves(trajectory):
    for index in path(trajectory, leaf):
      counts[index] += 1.0
  return counts


_RULES: dict[str, Callable[[Trajectory, WeightConfig], _Factors]] = {
  "none": _none,
  "role": _role,
  "observations": _observations,
  "error_masked": _error_masked,
  "partial": _partial,
  "incomplete": _incomplete,
  "incomplete_unless_repetitive": _incomplete_unless_repetitive,
  "repetitive": _repetitive,
  "special_tokens": _special_tokens,
  "leaves": _leaves,
}
