r"""Stages that are trained on as soon as they are scored, before later stages begin.

A world plays one stage of a task in each episode (``Trajectory.sample`` says which chain i it
continues), so a training step sees the group of one stage with its rewards r_t:

    the step of stage t:   A_t^i = (r_t^i - mean_i r_t) / std_i r_t
    the step of stage N:   the same for stage N, and for every earlier stage
                           d_t^i = r_N^i - r_t^i,  A'_t^i = (d_t^i - mean_i d_t) / std_i d_t

Both are GRPO of a group whose rewards are r_t, or d_t. So the correction is the earlier group once
more, with other rewards and under narrower bounds; its log-probs are those under which it was
sampled.

Reference: 2604.02721 (GrandCode). Ours: a stage is an agent; one policy plays all of them, as the
correction needs the rewards of both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np

from agentjax.config import check
from agentjax.objectives.objective import ObjectiveConfig, Prepared
from agentjax.objectives.preparation import prepare
from agentjax.objectives.segments import broadcast_to_tokens
from agentjax.recipes.agentic_grpo.stages import StagedConfig
from agentjax.rollout.seat_config import trained_seats
from agentjax.signals.signal import Metrics, Signal, StepContext
from agentjax.training.pass_config import PassesConfig, PlannedPass
from agentjax.trajectory.batch import Batch
from agentjax.trajectory.columns import Column
from agentjax.trajectory.episode_groups import replayed
from agentjax.trajectory.record import Reward, Trajectory
from agentjax.trajectory.store import from_texts, to_texts

if TYPE_CHECKING:
  from agentjax.training.experiment import Experiment, PhaseConfig

CORRECTED = Column(
  "corrected",
  "bool",
  "Whether the sequence is an earlier stage that its last reward corrects.",
  fill=False,
  level="sequence",
  in_loss=False,
)


@dataclasses.dataclass(unsafe_hash=True)
class LiveStagesConfig(PassesConfig):
  """Two updates of every stage, the first before later stages begin.

  Attributes:
    stages: agents in the order of a rollout; the reward of the last is r_N. Agents that are not
      named have one update, by their own reward.
    correction_clip_low, correction_clip_high: as in ``StagedConfig``.
  """

  stages: tuple[str, ...] = ("hypothesis", "solver")
  correction_clip_low: float = 0.1
  correction_clip_high: float = 0.1
  number: ClassVar[int] = 2

  def validate(self, path: str = "config.rl.passes") -> None:
    super().validate(path)
    distinct = len(set(self.stages)) == len(self.stages) > 1
    check(distinct, f"{path}.stages", self.stages, "two or more agents, each once")

  def check_phase(self, experiment: Experiment, phase: PhaseConfig, path: str, name: str) -> None:
    """See ``PassesConfig.check_phase``."""
    self._staged.check_objective(phase.objective, name)
    require = experiment.requirements(path)
    require(
      experiment.rl.old_log_probs == "behaviour",
      "rl.old_log_probs",
      f"'behaviour' with {name}.passes: ratios are to the policy that sampled",
    )
    require(experiment.rl.selection.rule == "all", "rl.selection.rule", f"'all' with {name}.passes")
    require(
      not experiment.rl.schedule.bound,
      "rl.schedule.mode",
      f"'sync' with {name}.passes: a stage begins after the update of the one before",
    )
    seats = trained_seats(experiment.seats)
    check(
      not seats,
      f"{path}.seats",
      ", ".join(seats),
      f"no 'trained' seat with {name}.passes: one policy plays all stages",
    )

  @property
  def _staged(self) -> StagedConfig:
    """The two updates' bounds, which both kinds of stages have."""
    return StagedConfig(
      correction_clip_low=self.correction_clip_low, correction_clip_high=self.correction_clip_high
    )

  def signals(self, experiment: Experiment) -> tuple[Signal, ...]:
    """The memory of earlier stages."""
    del experiment
    return (LiveStages(self.stages),)

  def plan(self, objective: ObjectiveConfig) -> tuple[PlannedPass, ...]:
    """The update of the step's own episodes, and the correction of earlier stages."""
    later = self._staged.correction(objective)
    first, second = (
      functools.partial(_prepare, config=objective, corrected=c) for c in (False, True)
    )
    return PlannedPass("", first, objective), PlannedPass("correction/", second, later)


def _prepare(
  batch: Batch, config: ObjectiveConfig, corrected: bool
) -> tuple[Prepared, dict[str, jax.Array]]:
  column = broadcast_to_tokens(batch.columns[CORRECTED.name], batch.segment_ids)
  inside = (column > 0) if corrected else (column == 0)
  return prepare(batch, config, selected=inside & (batch.segment_ids > 0))


class LiveStages(Signal):
  """Keeps the groups of earlier stages until their last reward is known. They are state of the run.

  Metrics: ``stages/kept`` and ``stages/corrected`` (episodes).

  Args:
    stages: agents in their order.
  """

  name = "live_stages"
  keeps_episodes = True
  adds = (CORRECTED,)

  def __init__(self, stages: Sequence[str]):
    self._stages = tuple(stages)
    # By source and task; of each stage the latest group.
    self._kept: dict[tuple[str, int], dict[str, list[Trajectory]]] = {}

  def get_state(self) -> list[list[Any]]:
    return [
      [agent, to_texts(members)] for own in self._kept.values() for agent, members in own.items()
    ]

  def set_state(self, state: Any) -> None:
    self._kept = {}
    for agent, texts in state:
      members = from_texts(texts)
      key = (members[0].source, members[0].task_id)
      self._kept.setdefault(key, {})[agent] = members

  def observe(
    self, context: StepContext, episodes: Sequence[Trajectory]
  ) -> tuple[list[Trajectory], Metrics]:
    """The step's episodes, followed by earlier stages of those that have ended."""
    del context
    groups: dict[tuple[str, int], dict[str, list[Trajectory]]] = {}
    for one in episodes:
      agent = one.segments[0].agent
      if agent in self._stages:
        groups.setdefault((one.source, one.task_id), {}).setdefault(agent, []).append(one)
    added: list[Trajectory] = []
    for key, own in groups.items():
      kept = self._kept.setdefault(key, {})
      for agent, members in own.items():
        if agent != self._stages[-1]:
          usable = [one for one in members if one.usable]
          if usable:
            kept[agent] = usable
      if self._stages[-1] in own:
        last = {o.sample: o.reward.value for o in own[self._stages[-1]] if not o.status.masked}
        for members in self._kept.pop(key).values():
          added += corrections(members, last)
    count = sum(len(m) for own in self._kept.values() for m in own.values())
    # Marks on all, so that steps with and without corrections have the same columns.
    return [*(_marked(one, False) for one in episodes), *added], {
      "stages/kept": float(count),
      "stages/corrected": float(len(added)),
    }


def corrections(
  members: Sequence[Trajectory], last: Mapping[int, float | None]
) -> list[Trajectory]:
  """The group of an earlier stage with the rewards r_N - r_t; chains without r_N are left out.

  Args:
    members: with their own rewards r_t.
    last: r_N by sample.
  """
  made = []
  for one in members:
    final, own = last.get(one.sample), one.reward.value
    if final is None or own is None:
      continue
    later = dataclasses.replace(replayed(one), reward=Reward(final - own))
    made.append(_marked(later, True))
  return made


def _marked(episode: Trajectory, corrected: bool) -> Trajectory:
  """A copy that says whether it is an earlier stage."""
  marks = {"replayed": np.array(corrected), CORRECTED.name: np.array(corrected)}
  return dataclasses.replace(episode, columns={**episode.columns, **marks})
