r"""Which episodes of an oversampled group are trained on: resample on correct.

Of 2 G episodes of a task G stay, in the shares of success and failure that the whole group has:

    n+ = round(G #successes / (#successes + #failures)),  n- = G - n+,  at least ``floor`` of each
    failures   are drawn uniformly
    successes  are drawn with chances 1 / (offset + p),  p = p_error + p_format
    p_error    calls that failed over all calls; 1/2 without any
    p_format   1 without an answer, else min((answers - 1) / turns, 1)

The mean reward of a group stays what it was, but for rounding, and its successes made fewer errors.
Reference: 2508.20722 and its code (microsoft/rStar), which sorts successes by p and takes the first
failures (``choose="first"``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np

from agentjax.config import NonNegativeInt, Range
from agentjax.signals.signal import Metrics, Signal, SignalConfig, SignalTools, StepContext
from agentjax.training.experiment import Experiment
from agentjax.trajectory.episode_groups import generator, usable_groups
from agentjax.trajectory.record import Trajectory


@dataclasses.dataclass(unsafe_hash=True)
class RocConfig(SignalConfig):
  """Settings of the draw; ``config.rollout.group_size`` is how many episodes are sampled.

  Attributes:
    keep: G, episodes of a group that are trained on. The paper samples 32 and keeps 16.
    above: an episode with more reward than this is a success.
    choose: "drawn" as in the paper, or "first" as in its code.
    floor: so many successes and failures stay at least, where there are any; 2 in the code.
    offset: keeps the chance of an episode without errors finite; ours.
    mark: what begins an answer in a turn; each further one is an error of format.
    seed: of the draw.
  """

  keep: Annotated[int, Range(2)] = 16
  above: float = 0.0
  choose: Literal["drawn", "first"] = "drawn"
  floor: NonNegativeInt = 2
  offset: Annotated[float, Range(0, above=True)] = 0.1
  mark: str = "####"
  seed: int = 0

  def check_run(self, experiment: Experiment, path: str) -> None:
    """See ``SignalConfig.check_run``."""
    require = self.requirements(path)
    size = experiment.rollout.group_size
    require(self.keep < size, "keep", f"less than config.rollout.group_size={size}")
    require(2 * self.floor <= self.keep, "floor", f"at most keep/2={self.keep / 2}")

  def build(self, tools: SignalTools) -> ResampleOnCorrect:
    """See ``SignalConfig.build``."""
    return ResampleOnCorrect(self, tools.token_bytes)


class ResampleOnCorrect(Signal):
  """Keeps ``keep`` episodes of every group. Those without a verdict are never kept.

  Metrics: ``roc/kept`` (share of the episodes), ``roc/penalty`` and ``roc/penalty_kept`` (mean of
  the successes, before and after).

  Args:
    config: see RocConfig.
    token_bytes: of every token, None for those that are no text.
  """

  name = "grpo_roc"

  def __init__(self, config: RocConfig, token_bytes: Sequence[bytes | None]):
    self._config, self._bytes = config, token_bytes

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    del context
    kept: set[int] = set()
    before: list[float] = []
    after: list[float] = []
    for key, members in usable_groups(episodes).items():
      penalties = np.array([self.penalty(one) for one in members])
      good = np.array([self._succeeded(one) for one in members])
      chosen = self._choose(good, penalties, generator(self._config.seed, key))
      kept |= {id(members[i]) for i in chosen}
      before += penalties[good].tolist()
      after += [float(penalties[i]) for i in chosen if good[i]]
    result = [one for one in episodes if id(one) in kept]
    return result or list(episodes), {
      "roc/kept": len(result) / max(len(episodes), 1),
      "roc/penalty": float(np.mean(before)) if before else 0.0,
      "roc/penalty_kept": float(np.mean(after)) if after else 0.0,
    }

  def penalty(self, episode: Trajectory) -> float:
    """``p_error + p_format`` of an episode."""
    calls = episode.tools
    failed = sum(record.status != "ok" for record in calls)
    turns = {segment.turn for segment in episode.segments if segment.sampled.any()}
    answers = self._written(episode).count(self._config.mark.encode())
    form = 1.0 if not answers or not turns else min((answers - 1) / len(turns), 1.0)
    return (failed / len(calls) if calls else 0.5) + form

  def _written(self, episode: Trajectory) -> bytes:
    drawn = (t for s in episode.segments for t in s.token_ids[s.sampled].tolist())
    return b"".join(self._bytes[token] or b"" for token in drawn)

  def _succeeded(self, episode: Trajectory) -> bool:
    assert episode.reward.value is not None
    return episode.reward.value > self._config.above

  def _choose(
    self, good: np.ndarray, penalties: np.ndarray, random: np.random.Generator
  ) -> list[int]:
    """Indices of those that stay, in their order."""
    settings = self._config
    wins, losses = np.flatnonzero(good), np.flatnonzero(~good)
    if len(good) <= settings.keep:
      return list(range(len(good)))
    count = balance(len(wins), len(losses), settings.keep, settings.floor)
    if settings.choose == "first":
      best = wins[np.argsort(penalties[wins], kind="stable")][:count]
      rest = losses[: settings.keep - count]
    else:
      chances = 1 / (settings.offset + penalties[wins])
      shares = chances / chances.sum() if count else None
      best = random.choice(wins, count, replace=False, p=shares)
      rest = random.choice(losses, settings.keep - count, replace=False)
    return sorted(int(i) for i in (*best, *rest))


def balance(wins: int, losses: int, keep: int, floor: int) -> int:
  """How many successes stay of ``wins``, so that ``keep`` of all stay."""
  count = round(wins * keep / (wins + losses))
  least, most = min(floor, wins), min(wins, keep - min(floor, losses))
  # There must be failures enough for the rest.
  return int(np.clip(count, max(least, keep - losses), most))
