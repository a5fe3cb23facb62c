"""Columns from which ``objectives.prepare`` computes advantages; signals add them to a batch.

This is the one list of them: ``prepare`` reads them by name, and what an objective asks for stands
in ``columns_read``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentjax.trajectory.batch import Batch
from agentjax.trajectory.columns import Column, get_column, register_column

if TYPE_CHECKING:
  from agentjax.objectives.objective import ObjectiveConfig


OLD_LOG_PROBS = register_column(
  Column(
    "old_log_probs",
    "float32",
    "Log-prob under the trainer's policy before the update, nats.",
    in_loss=False,
  )
)
REFERENCE_LOG_PROBS = register_column(
  Column(
    "reference_log_probs", "float32", "Log-prob under the reference policy, nats.", in_loss=False
  )
)
VALUES = register_column(
  Column(
    "values",
    "float32",
    "Output of the critic in the state in which the token was chosen.",
    in_loss=False,
  )
)
TOKEN_REWARDS = register_column(
  Column("token_rewards", "float32", "Reward of a step beside the outcome.", in_loss=False)
)
TURN_REWARDS = register_column(
  Column(
    "turn_rewards", "float32", "What a turn was paid of the outcome, on one token.", in_loss=False
  )
)
SELECTED = register_column(
  Column("selected", "bool", "The token keeps its weight.", fill=True, in_loss=False)
)
BASELINES = register_column(
  Column(
    "baselines",
    "float32",
    "Reward of the greedy episode of the sequence's group.",
    level="sequence",
    in_loss=False,
  )
)

CREDIT = (
  OLD_LOG_PROBS,
  REFERENCE_LOG_PROBS,
  VALUES,
  TOKEN_REWARDS,
  TURN_REWARDS,
  SELECTED,
  BASELINES,
)


def columns_read(
  config: ObjectiveConfig, *, recomputed: bool, token_rewards: bool
) -> tuple[Column, ...]:
  """The columns that an objective asks for, apart from those that signals of one's own add.

  Args:
    config: of the objective.
    recomputed: old log-probs are the trainer's.
    token_rewards: there are rewards on tokens besides the outcome.
  """
  taught, credit = config.distillation, config.advantage
  asked = (
    (OLD_LOG_PROBS, recomputed or config.needs_old_log_probs),
    (REFERENCE_LOG_PROBS, config.needs_reference),
    (get_column("teacher_log_probs"), taught is not None and taught.form == "sampled"),
    (VALUES, config.needs_values),
    (TOKEN_REWARDS, token_rewards),
    (TURN_REWARDS, bool(credit.turn_rewards)),
    (BASELINES, config.needs_baseline),
  )
  return tuple(column for column, wanted in asked if wanted)


def without_unread(batch: Batch, config: ObjectiveConfig) -> Batch:
  """What ``prepare`` is given: without the reference's log-probs where another signal asked."""
  return batch if config.needs_reference else batch.without(REFERENCE_LOG_PROBS.name)
