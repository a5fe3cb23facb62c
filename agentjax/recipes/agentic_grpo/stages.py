r"""Two updates of every stage: one when the stage is scored, a correction when the episode ends.

A rollout i is a row of stages s_1 ... s_N with rewards r_1 ... r_N, which become known one after
the other. Stage t learns twice,

    at once:          A_t^i  = (r_t^i - mean_i r_t) / std_i r_t
    when r_N is in:   d_t^i  = r_N^i - r_t^i,   A'_t^i = (d_t^i - mean_i d_t) / std_i d_t

each time by PPO's clipped surrogate with the ratio to the policy that sampled the stage; the bound
of the second update is at most that of the first. Statistics are those of one stage of one group.
The last stage has d = 0, so nothing is corrected there.

Reference: 2604.02721 (GrandCode), known to us from second-hand descriptions: the two bounds, group
sizes and rates are not public. Ours: a rollout that never reached its last reward has no
correction, and std is the sample's unless ``advantage.ddof`` says otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentjax.config import check
from agentjax.objectives.advantages import AdvantageConfig, sequence_advantages
from agentjax.objectives.columns import without_unread
from agentjax.objectives.objective import ObjectiveConfig, Prepared
from agentjax.objectives.preparation import prepare
from agentjax.recipes.agentic_grpo.rewards import StageRewards
from agentjax.schedules import at_most
from agentjax.signals.signal import Signal
from agentjax.training.pass_config import PassesConfig, PlannedPass
from agentjax.trajectory.batch import Batch

if TYPE_CHECKING:
  from agentjax.training.experiment import Experiment, PhaseConfig

Which = Literal["immediate", "correction"]

_CENTRES = ("group_mean", "group_median", "group_unique_mean", "leave_one_out")
# Settings that the objective may have; the two updates do not use others.
_ALLOWED: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
  ("advantage", "function", (None,)),
  ("advantage", "centre", _CENTRES),
  ("advantage", "credit", ("broadcast",)),
  ("advantage", "whiten", (False,)),
  ("advantage", "clip", (None,)),
  ("advantage", "terms", ((),)),
  ("advantage", "learn_from", ("all",)),
  ("policy_loss", "clip", ("ppo", "mask")),
  ("policy_loss", "covariance", ("none",)),
)


@dataclasses.dataclass(unsafe_hash=True)
class StagedConfig(PassesConfig):
  """Two updates of every stage, instead of one of every sequence.

  In a run a stage is a turn. All turns of a step are scored when it is trained on, so the first
  update is of all stages and the second follows it.

  Attributes:
    part: part of the reward that is earned turn by turn (``Trajectory.turn_rewards``): r_t of every
      turn but the last, whose reward r_N is that of the episode. A turn that was not judged is not
      trained on.
    correction_clip_low, correction_clip_high: bounds of the second update, at most
      ``policy_loss.clip_low`` and ``clip_high``, those of the first; not published, and by default
      half of PPO's usual ones (ours).
  """

  part: str = "environment"
  correction_clip_low: float = 0.1
  correction_clip_high: float = 0.1
  number: ClassVar[int] = 2

  def validate(self, path: str = "config.rl.passes") -> None:
    super().validate(path)
    check(bool(self.part), f"{path}.part", self.part, "name of a part of the reward")

  def check_phase(self, experiment: Experiment, phase: PhaseConfig, path: str, name: str) -> None:
    """See ``PassesConfig.check_phase``."""
    self.check_objective(phase.objective, name)
    turns, parts = experiment.rollout.max_turns, experiment.reward.parts
    check(turns > 1, f"{path}.rollout.max_turns", turns, f">= 2 with {name}.passes")
    allowed = f"one of {path}.reward.parts = {parts}"
    check(self.part in parts, f"{name}.passes.part", self.part, allowed)
    check(
      phase.context == "episode",
      f"{name}.context",
      phase.context,
      f"'episode' with {name}.passes",
    )

  def check_objective(self, objective: ObjectiveConfig, name: str) -> None:
    """Raises ConfigError for an objective that two updates of stages cannot use.

    Args:
      objective: of the phase.
      name: dotted name of the phase.
    """
    path, taken = f"{name}.objective", f"{name}.passes"
    for room, field, values in _ALLOWED:
      value = getattr(getattr(objective, room), field)
      allowed = " or ".join(repr(v) for v in values) + f" with {taken}"
      check(value in values, f"{path}.{room}.{field}", value, allowed)
    for field in ("distillation", "preference", "function"):
      value = getattr(objective, field)
      check(value is None, f"{path}.{field}", value, f"None with {taken}")
    mismatch = objective.policy_loss.mismatch
    check(
      not mismatch.active,
      f"{path}.policy_loss.mismatch",
      mismatch,
      f"none with {taken}: ratios are to the policy that sampled",
    )
    for bound in ("clip_low", "clip_high"):
      first, second = getattr(objective.policy_loss, bound), getattr(self, f"correction_{bound}")
      said = f"0 to {path}.policy_loss.{bound}={first}"
      check(0 <= second <= first, f"{taken}.correction_{bound}", second, said)

  def signals(self, experiment: Experiment) -> tuple[Signal, ...]:
    """The rewards of stages."""
    return (StageRewards(self.part, at_most(experiment.rollout).max_turns),)

  def plan(self, objective: ObjectiveConfig) -> tuple[PlannedPass, ...]:
    """The update of all stages, and the correction in narrower bounds."""
    first, second = (
      functools.partial(_prepare, config=objective, update=which)
      for which in ("immediate", "correction")
    )
    return (
      PlannedPass("", first, objective),
      PlannedPass("correction/", second, self.correction(objective)),
    )

  def correction(self, objective: ObjectiveConfig) -> ObjectiveConfig:
    """The second update's objective, from that of the first."""
    loss = dataclasses.replace(
      objective.policy_loss,
      clip_low=self.correction_clip_low,
      clip_high=self.correction_clip_high,
    )
    return dataclasses.replace(objective, policy_loss=loss)


def _prepare(
  batch: Batch, config: ObjectiveConfig, update: Which
) -> tuple[Prepared, dict[str, Array]]:
  names = ("stage_rewards", "stages_known", "stages")
  rewards, known, stages = (batch.columns[name] for name in names)
  given = without_unread(batch, config)
  return prepare_stages(given, rewards, known, stages, config, update)


def prepare_stages(
  batch: Batch,
  rewards: Float[Array, "sequences stages"],
  known: Bool[Array, "sequences stages"],
  stages: Int[Array, "batch time"],
  config: ObjectiveConfig,
  update: Which,
) -> tuple[Prepared, dict[str, Float[Array, ""]]]:
  """``objectives.prepare`` for one of the two updates.

  The loss is ``policy_objective(config)`` for the first and that of ``StagedConfig.correction`` for
  the second. Ratios are to the policy that sampled in both. Give the first update only the stages
  that were scored since the last, by ``known``, so that none has it twice.

  Args:
    batch: whole rollouts, with ``old_log_probs`` and ``reference_log_probs`` as in ``prepare``;
      ``batch.rewards`` are not used.
    rewards, known: of the stages of each sequence, in the order of ``batch.groups``.
    stages: the stage of every token, from 0; ``batch.turns`` where each stage is one turn. Tokens
      outside 0 ... stages - 1, and of stages that are not known, lose their weight.
    config: static.
    update: which of the two.
  """
  compute = staged_advantages if update == "immediate" else stage_corrections
  usable = known & batch.valid[:, None]
  own = compute(rewards, usable, batch.groups, config.advantage)
  if update == "correction":
    usable &= usable[:, -1:]
  sequence = jnp.maximum(batch.segment_ids - 1, 0)
  column = jnp.clip(stages, 0, rewards.shape[1] - 1)
  inside = (batch.segment_ids > 0) & (stages == column) & usable[sequence, column]
  prepared, metrics = prepare(batch, config, selected=inside)
  advantages = jnp.where(prepared.weights > 0, own[sequence, column], 0)
  metrics["advantage/mean_abs"] = jnp.sum(prepared.shares * jnp.abs(advantages))
  learning = jnp.where(usable, own != 0, False)
  metrics["advantage/learning_share"] = jnp.sum(learning) / jnp.maximum(jnp.sum(usable), 1)
  prepared = dataclasses.replace(prepared, advantages=advantages * config.advantage.multiplier)
  return jax.lax.stop_gradient((prepared, metrics))


def staged_advantages(
  rewards: Float[Array, "sequences stages"],
  known: Bool[Array, "sequences stages"],
  groups: Int[Array, "sequences"],
  config: AdvantageConfig,
) -> Float[Array, "sequences stages"]:
  """A_t of every stage, normalised over the same stage of its group.

  Args:
    rewards: r_t; read only where known.
    known: False for stages that are not scored yet, or never will be.
    groups: as in ``sequence_advantages``.
    config: centre, scale, ddof, epsilon.
  """
  return jax.vmap(
    lambda own, valid: sequence_advantages(own, valid, groups, config), in_axes=1, out_axes=1
  )(rewards, known)


def stage_corrections(
  rewards: Float[Array, "sequences stages"],
  known: Bool[Array, "sequences stages"],
  groups: Int[Array, "sequences"],
  config: AdvantageConfig,
) -> Float[Array, "sequences stages"]:
  """A'_t of every stage of the rollouts whose last reward is known; arguments as before.

  The last reward is that of the last column; a rollout without it is out of all statistics.
  """
  last, finished = rewards[:, -1:], known[:, -1:]
  return staged_advantages(last - rewards, known & finished, groups, config)
