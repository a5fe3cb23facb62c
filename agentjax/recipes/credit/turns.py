"""Advantage terms of turns: how long they took, whether their calls worked, what they earned."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from agentjax.config import ConfigError, PositiveFloat, Share, check
from agentjax.objectives.advantage_function import AdvantageInputs, AdvantageTerm
from agentjax.objectives.objective import ObjectiveConfig
from agentjax.schedules import Scheduled
from agentjax.signals.signal import Metrics, Signal, StepContext
from agentjax.training.experiment import Experiment
from agentjax.trajectory.columns import Column, register_column
from agentjax.trajectory.record import Trajectory

DURATION = register_column(
  Column(
    "duration",
    "float32",
    "Seconds of the turn's tool calls over the mean of the step's turns.",
    fill=1,
    level="turn",
    in_loss=False,
  )
)
TOOL_SUCCESS = register_column(
  Column(
    "tool_success",
    "float32",
    "Share of the turn's tool calls that succeeded; 1 without calls.",
    fill=1,
    level="turn",
    in_loss=False,
  )
)
STEP_ADVANTAGE = register_column(
  Column(
    "step_advantage",
    "float32",
    "Reward of the turn beside the turns of its group, in standard deviations.",
    level="turn",
    in_loss=False,
  )
)


@dataclasses.dataclass(unsafe_hash=True)
class DurationTerm(AdvantageTerm):
  """``A dt / mean dt``: a turn counts by the time that its tool calls took.

  Sampling starts the next episode when one has ended, so that within an hour short actions occur
  more often, and would learn more, than long ones. RL for machine-learning engineering
  (rl4mle): the gradient is ``sum_k dt_k grad log pi(a_k) A``, times rescaled by the batch's mean.

  Attributes:
    least_seconds: of every turn, with or without calls; below the time of short programs, which
      would otherwise all count alike. Ours.
  """

  least_seconds: PositiveFloat = 0.01

  def signals(self, experiment: Experiment) -> Sequence[Signal]:
    return (Durations(self.least_seconds),)

  def __call__(self, inputs: AdvantageInputs, advantages: Array) -> Array:
    return advantages * inputs.column(DURATION.name)


@dataclasses.dataclass(unsafe_hash=True)
class ToolSuccessTerm(AdvantageTerm):
  """Turns whose tool calls failed learn less from an advantage above 0.

  A good episode then does not reward the calls in it that failed. Of a turn with several calls the
  share that succeeded counts. No paper has this form; all of it is ours.

  Attributes:
    failed: factor on advantages above 0 where every call of the turn failed.
  """

  failed: Scheduled[Share] = 0.0

  def signals(self, experiment: Experiment) -> Sequence[Signal]:
    return (ToolSuccess(),)

  def __call__(self, inputs: AdvantageInputs, advantages: Array) -> Array:
    factor = self.failed + (1 - self.failed) * inputs.column(TOOL_SUCCESS.name)
    return jnp.where(advantages > 0, advantages * factor, advantages)


@dataclasses.dataclass(unsafe_hash=True)
class StepsTerm(AdvantageTerm):
  """``A + weight A_S``: advantages of steps beside those of the outcome (iStar, OPRL).

  ``A_S = (r - mean) / std`` of the turn's reward over all judged turns of the group, so that the
  two streams have one scale whatever the size of their rewards. A turn that was not judged has 0.

  Attributes:
    part: of the reward, earned turn by turn (``Trajectory.turn_rewards``); it may have weight 0.
    weight: alpha; 1 in iStar.
  """

  part: str = "environment"
  weight: Scheduled[PositiveFloat] = 1.0

  def check_run(self, experiment: Experiment, objective: ObjectiveConfig, path: str) -> None:
    """The reward must have the part."""
    parts = experiment.reward.parts
    said = f"one of config.reward.parts = {parts}"
    check(self.part in parts, f"{path}.advantage.terms 'steps'.part", self.part, said)

  def signals(self, experiment: Experiment) -> Sequence[Signal]:
    return (StepAdvantages(self.part),)

  def __call__(self, inputs: AdvantageInputs, advantages: Array) -> Array:
    return advantages + self.weight * inputs.column(STEP_ADVANTAGE.name)


class Durations(Signal):
  """See DurationTerm. Metric: ``duration/mean``, seconds a turn."""

  name = "duration"
  adds = (DURATION,)

  def __init__(self, least_seconds: float):
    self._least = least_seconds

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    del context
    spent = [self._spent(one) for one in episodes]
    pairs = zip(episodes, spent, strict=True)
    counted = [s for one, own in pairs if one.usable for s in own.values()]
    mean = float(np.mean(counted or [1.0]))
    shares = [{turn: s / mean for turn, s in own.items()} for own in spent]
    return _of_turns(episodes, DURATION, shares), {"duration/mean": mean}

  def _spent(self, episode: Trajectory) -> dict[int, float]:
    """Seconds of every turn in which the policy wrote something."""
    seconds: collections.defaultdict[int, float] = collections.defaultdict(float)
    for record in episode.tools:
      seconds[record.turn] += record.seconds
    turns = {s.turn for s in episode.segments if s.sampled.any()}
    return {turn: max(seconds[turn], self._least) for turn in turns}


class ToolSuccess(Signal):
  """See ToolSuccessTerm."""

  name = "tool_success"
  adds = (TOOL_SUCCESS,)

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    del context
    shares = []
    for one in episodes:
      calls: collections.defaultdict[int, list[bool]] = collections.defaultdict(list)
      for record in one.tools:
        calls[record.turn].append(record.status == "ok")
      shares.append({turn: float(np.mean(right)) for turn, right in calls.items()})
    return _of_turns(episodes, TOOL_SUCCESS, shares), {}


class StepAdvantages(Signal):
  """See StepsTerm. Metric: ``steps/reward``, mean over judged turns.

  Args:
    part: name in ``Trajectory.turn_rewards``.
  """

  name = "step_advantage"
  adds = (STEP_ADVANTAGE,)

  def __init__(self, part: str):
    self._part = part

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    del context
    if episodes and not any(self._part in one.turn_rewards for one in episodes):
      parts = sorted({name for one in episodes for name in one.turn_rewards})
      raise ConfigError(
        f"advantage.terms 'steps' has part={self._part!r}, which no turn earned; allowed: a part "
        f"of the reward that is earned turn by turn, here {', '.join(parts) or 'none'}."
      )
    earned: dict[tuple[int, str, str], list[float]] = collections.defaultdict(list)
    for one in episodes:
      if one.usable:
        earned[one.advantage_group] += self._judged(one).values()
    groups = {one.advantage_group for one in episodes}
    scales = {group: _mean_and_scale(earned.get(group, ())) for group in groups}
    result = []
    for one in episodes:
      mean, scale = scales[one.advantage_group]
      standard = {i: (r - mean) / scale for i, r in self._judged(one).items()}
      segments = [
        s.with_columns({STEP_ADVANTAGE.name: np.array(standard.get(i, 0.0), np.float32)})
        for i, s in enumerate(one.segments)
      ]
      result.append(dataclasses.replace(one, segments=segments))
    every = [r for own in earned.values() for r in own]
    return result, {"steps/reward": float(np.mean(every)) if every else 0.0}

  def _judged(self, episode: Trajectory) -> dict[int, float]:
    """Rewards by index of the segment."""
    paid = episode.turn_rewards.get(self._part, [])
    return {i: value for i, value in enumerate(paid) if value is not None}


def _mean_and_scale(values: Sequence[float]) -> tuple[float, float]:
  known = np.array(values or (0.0,), np.float64)
  return float(known.mean()), float(known.std()) + 1e-6


def _of_turns(
  episodes: Sequence[Trajectory], column: Column, values: Sequence[Mapping[int, float]]
) -> list[Trajectory]:
  """Copies with a column of turns; by number of the turn, elsewhere the fill."""
  result = []
  for one, known in zip(episodes, values, strict=True):
    segments = [
      s.with_columns(
        {column.name: np.array(known.get(s.turn, column.fill_value()), column.dtypes[0])}
      )
      for s in one.segments
    ]
    result.append(dataclasses.replace(one, segments=segments))
  return result
