r"""Agentic GRPO of staged rollouts: an update as each stage is scored, and a correction at the end.

A rollout i is a row of stages s_1 ... s_N with rewards r_1 ... r_N that are known one after the
other. Stage t learns twice,

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
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from agentjax.config import Config, check
from agentjax.objectives.advantages import AdvantageConfig, sequence_advantages
from agentjax.objectives.objective import ObjectiveConfig, Prepared, prepare
from agentjax.objectives.policy_loss import PolicyLossConfig
from agentjax.trajectory.batch import Batch


@dataclasses.dataclass(unsafe_hash=True)
class StagedConfig(Config):
  """Attributes:
  advantage: centre, scale, ddof and epsilon of both updates; credit "broadcast".
  policy_loss: of the first update.
  correction_clip_low, correction_clip_high: bounds of the second, at most those of the first; not
    published, and by default half of PPO's usual ones (ours).
  """

  advantage: AdvantageConfig = dataclasses.field(default_factory=AdvantageConfig)
  policy_loss: PolicyLossConfig = dataclasses.field(default_factory=PolicyLossConfig)
  correction_clip_low: float = 0.1
  correction_clip_high: float = 0.1

  def validate(self, path: str = "staged") -> None:
    super().validate(path)
    centres = ("group_mean", "group_median", "group_unique_mean", "leave_one_out")
    for part, name, allowed_values in (
      ("advantage", "centre", centres),
      ("advantage", "credit", ("broadcast",)),
      ("advantage", "branches", ("soft",)),
      ("advantage", "whiten", (False,)),
      ("advantage", "clip", (None,)),
      ("advantage", "learn_from", ("all",)),
      ("policy_loss", "covariance", ("none",)),
    ):
      value = getattr(getattr(self, part), name)
      allowed = " or ".join(repr(v) for v in allowed_values)
      check(value in allowed_values, f"{path}.{part}.{name}", value, allowed)
    check(
      not self.policy_loss.mismatch.active,
      f"{path}.policy_loss.mismatch",
      self.policy_loss.mismatch,
      "none: ratios are to the policy that sampled",
    )
    for name in ("clip_low", "clip_high"):
      first, second = getattr(self.policy_loss, name), getattr(self, f"correction_{name}")
      allowed = f"0 to {path}.policy_loss.{name}={first}"
      check(0 <= second <= first, f"{path}.correction_{name}", second, allowed)

  def objective(self, update: Literal["immediate", "correction"]) -> ObjectiveConfig:
    """What ``prepare`` and ``policy_objective`` take for one of the two updates."""
    loss = self.policy_loss
    if update == "correction":
      loss = dataclasses.replace(
        loss, clip_low=self.correction_clip_low, clip_high=self.correction_clip_high
      )
    return ObjectiveConfig(self.advantage, loss)


def staged_advantages(
  rewards: Float[Array, "sequences stages"],
  known: Bool[Array, "sequences stages"],
  groups: Int[Array, "sequences"],
  config: AdvantageConfig,
) -> Float[Array, "sequences stages"]:
  """A_t of every stage, each normalised over its own stage of its group.

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


def prepare_staged(
  batch: Batch,
  rewards: Float[Array, "sequences stages"],
  known: Bool[Array, "sequences stages"],
  stages: Int[Array, "batch time"],
  config: StagedConfig,
  update: Literal["immediate", "correction"],
) -> tuple[Prepared, dict[str, Float[Array, ""]]]:
  """``prepare`` for one of the two updates of staged rollouts.

  The loss is ``policy_objective(config.objective(update))``. Ratios are to ``batch.log_probs``, the
  policy that sampled, in both. Give the first update only the stages that were scored since the
  last, by ``known``, so that none has it twice.

  Args:
    batch: whole rollouts; ``batch.rewards`` are not looked at.
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
  prepared, metrics = prepare(batch, config.objective(update), selected=inside)
  advantages = jnp.where(prepared.weights > 0, own[sequence, column], 0)
  metrics["advantage/mean_abs"] = jnp.sum(prepared.shares * jnp.abs(advantages))
  learning = jnp.where(usable, own != 0, False)
  metrics["advantage/learning_share"] = jnp.sum(learning) / jnp.maximum(jnp.sum(usable), 1)
  prepared = dataclasses.replace(prepared, advantages=advantages * config.advantage.multiplier)
  return jax.lax.stop_gradient((prepared, metrics))
