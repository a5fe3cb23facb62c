r"""Which episodes are compared with which: short successes with long failures, the rest later.

Of the episodes of a step

    priority batch      the shortest ``share`` of the successes, the longest ``share`` of failures
    rest                goes into a first-in-first-out buffer
    compensation batch  once the buffer is full, with chance ``probability``, its oldest episodes

and each batch has an update of its own, in which one mean and deviation of the whole batch makes
the advantages, so that groups whose members all succeed teach brevity too. Reward and loss stay as
they are. Reference: 2509.25958, second-hand; its share of episodes and its schedule of
``probability`` are not in our sources, and the defaults are ours.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.config import PositiveInt, PositiveShare, Share, check
from agentjax.objectives.columns import without_unread
from agentjax.objectives.objective import ObjectiveConfig, Prepared
from agentjax.objectives.preparation import prepare
from agentjax.signals.signal import Metrics, Signal, StepContext
from agentjax.training.experiment import Experiment, PhaseConfig
from agentjax.training.pass_config import PassesConfig, PlannedPass
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.columns import Column
from agentjax.trajectory.record import Trajectory
from agentjax.trajectory.store import from_texts, to_texts

PRIORITY, COMPENSATION = 0, 1

RECOMPOSED = Column(
  "recomposed",
  "int32",
  "Which recomposed batch the episode is of: 0 the priority batch, 1 the compensation batch.",
  level="sequence",
  in_loss=False,
)


@dataclasses.dataclass(unsafe_hash=True)
class RecompositionConfig(PassesConfig):
  """Settings of the batches. All defaults are ours.

  Attributes:
    share: of the successes, and of the failures, that make the priority batch; at least one.
    above: an episode with more reward than this is a success.
    length: what is short: few sampled "tokens", or few tool "calls" for agents.
    capacity: episodes that the buffer holds; it is full then.
    compensation: of the buffer's oldest episodes make a compensation batch.
    probability: of a compensation batch at a step at which the buffer is full. Without one the
      oldest episodes beyond ``capacity`` are forgotten.
    seed: of that draw.
  """

  share: PositiveShare = 0.5
  above: float = 0.0
  length: Literal["tokens", "calls"] = "tokens"
  capacity: PositiveInt = 64
  compensation: PositiveInt = 32
  probability: Share = 0.5
  seed: int = 0
  number: ClassVar[int] = 2

  def validate(self, path: str = "config.rl.passes") -> None:
    super().validate(path)
    require = self.requirements(path)
    require(
      self.compensation <= self.capacity, "compensation", f"at most {path}.capacity={self.capacity}"
    )

  def check_phase(self, experiment: Experiment, phase: PhaseConfig, path: str, name: str) -> None:
    """Groups are whole batches, and what is replayed is off policy."""
    stage, credit = experiment.rl, phase.objective.advantage
    taken = f"with {name}.passes"
    check(stage.minibatches == 1, f"{path}.rl.minibatches", stage.minibatches, f"1 {taken}")
    check(not experiment.seats, f"{path}.seats", experiment.seats, f"none {taken}")
    for field in ("distillation", "preference"):
      value = getattr(phase.objective, field)
      check(value is None, f"{name}.objective.{field}", value, f"None {taken}")
    check(
      credit.centre != "baseline",
      f"{name}.objective.advantage.centre",
      credit.centre,
      f"one that compares the members of a batch {taken}",
    )

  def signals(self, experiment: Experiment) -> tuple[Signal, ...]:
    """The batches of each step."""
    return (Recomposition(self),)

  def plan(self, objective: ObjectiveConfig) -> tuple[PlannedPass, ...]:
    """An update of the priority batch, and one of the compensation batch where there is one."""
    first, second = (
      functools.partial(prepare_batch, config=objective, which=which)
      for which in (PRIORITY, COMPENSATION)
    )
    return PlannedPass("", first, objective), PlannedPass("compensation/", second, objective)


def prepare_batch(
  batch: Batch, config: ObjectiveConfig, which: int
) -> tuple[Prepared, dict[str, jax.Array]]:
  """``objectives.prepare`` of one recomposed batch, whose episodes are all one group."""
  chosen = batch.valid & (batch.column(RECOMPOSED.name) == which)
  groups = jnp.where(chosen, 0, -1).astype(batch.groups.dtype)
  rewards = jnp.where(chosen, batch.rewards, 0)
  alone = batch.with_columns({"valid": chosen, "groups": groups, "rewards": rewards})
  return prepare(without_unread(alone, config), config)


class Recomposition(Signal):
  """Takes the episodes of a step apart, and keeps those that are trained on later.

  The buffer is part of the run's state, tokens and all. Each episode is trained on at most once.

  Metrics: ``rorecomp/priority``, ``rorecomp/compensation`` and ``rorecomp/kept`` (episodes), and
  ``rorecomp/length`` and ``rorecomp/length_priority`` (mean length of the successes).

  Args:
    config: see RecompositionConfig.
  """

  name = "rorecomp"
  keeps_episodes = True
  adds = (RECOMPOSED,)

  def __init__(self, config: RecompositionConfig):
    self._config = config
    self._kept: list[Trajectory] = []  # the oldest first

  def get_state(self) -> list[str]:
    return to_texts(self._kept)

  def set_state(self, state: Any) -> None:
    self._kept = from_texts(state)

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    """The priority batch, and behind it the compensation batch of this step, if any."""
    settings = self._config
    usable = [one for one in episodes if one.usable]
    first = self.choose(usable)
    known = {one.address for one in first}
    self._kept += [one for one in usable if one.address not in known]
    second: list[Trajectory] = []
    if len(self._kept) >= settings.capacity:
      draw = np.random.default_rng([settings.seed, context.step]).random()
      if draw < settings.probability:
        second = self._kept[: settings.compensation]
        self._kept = self._kept[settings.compensation :]
    self._kept = self._kept[-settings.capacity :]
    wins = [self._length(one) for one in usable if self._succeeded(one)]
    brief = [self._length(one) for one in first if self._succeeded(one)]
    metrics = {
      "rorecomp/priority": float(len(first)),
      "rorecomp/compensation": float(len(second)),
      "rorecomp/kept": float(len(self._kept)),
      "rorecomp/length": float(np.mean(wins)) if wins else 0.0,
      "rorecomp/length_priority": float(np.mean(brief)) if brief else 0.0,
    }
    marked = [_marked(one, PRIORITY) for one in first]
    again = [_marked(one, COMPENSATION, replayed=np.array(True)) for one in second]
    return (marked + again) or list(episodes), metrics

  def choose(self, episodes: Sequence[Trajectory]) -> list[Trajectory]:
    """The priority batch, in the order of the episodes."""
    wins = [one for one in episodes if self._succeeded(one)]
    losses = [one for one in episodes if not self._succeeded(one)]
    wins.sort(key=self._length)
    losses.sort(key=lambda one: -self._length(one))
    chosen = {
      one.address for side in (wins, losses) for one in side[: _part(len(side), self._config.share)]
    }
    return [one for one in episodes if one.address in chosen]

  def _length(self, episode: Trajectory) -> int:
    if self._config.length == "calls":
      return len(episode.tools)
    return sum(int(segment.sampled.sum()) for segment in episode.segments)

  def _succeeded(self, episode: Trajectory) -> bool:
    assert episode.reward.value is not None
    return episode.reward.value > self._config.above


def _part(count: int, share: float) -> int:
  return max(1, math.floor(share * count + 1e-9)) if count else 0


def _marked(episode: Trajectory, batch: int, **more: np.ndarray) -> Trajectory:
  columns: Mapping[str, np.ndarray] = {RECOMPOSED.name: np.array(batch, np.int32), **more}
  return dataclasses.replace(episode, columns={**episode.columns, **columns})
