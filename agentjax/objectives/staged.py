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

import jax
from jaxtyping import Array, Bool, Float, Int

from agentjax.config import Config, check
from agentjax.objectives.advantages import AdvantageConfig, sequence_advantages
from agentjax.objectives.policy_loss import PolicyLossConfig


@dataclasses.dataclass(unsafe_hash=True)
class StagedConfig(Config):
  """Two updates of every stage, in the place of one of every sequence.

  In a run a stage is a turn. All turns of a step are scored when it is trained on, so the first
  update is of all stages and the second follows it.

  Attributes:
    part: part of the reward that is earned turn by turn (``Trajectory.turn_rewards``): r_t of every
      turn but the last, whose reward r_N is that of the episode. A turn that was not judged is no
      stage.
    correction_clip_low, correction_clip_high: bounds of the second update, at most
      ``policy_loss.clip_low`` and ``clip_high``, those of the first; not published, and by default
      half of PPO's usual ones (ours).
  """

  part: str = "environment"
  correction_clip_low: float = 0.1
  correction_clip_high: float = 0.1

  def validate(self, path: str = "staged") -> None:
    super().validate(path)
    check(bool(self.part), f"{path}.part", self.part, "name of a part of the reward")

  def correction(self, loss: PolicyLossConfig) -> PolicyLossConfig:
    """The second update's loss, from that of the first."""
    return dataclasses.replace(
      loss, clip_low=self.correction_clip_low, clip_high=self.correction_clip_high
    )


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
