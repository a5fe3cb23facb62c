"""Columns from which ``objectives.prepare`` computes advantages; signals add them to a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from agentjax.trajectory.batch import Batch
from agentjax.trajectory.columns import Column, register_column

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
CONSISTENCY = register_column(
  Column(
    "consistency",
    "float32",
    "Share of the answers of the sequence's group that are its most frequent one.",
    level="sequence",
    in_loss=False,
  )
)
PART_REWARDS = register_column(
  Column(
    "part_rewards",
    "float32",
    "Values of the parts that advantage.parts names.",
    shape=("parts",),
    level="sequence",
    in_loss=False,
  )
)

_CREDIT = (
  OLD_LOG_PROBS,
  REFERENCE_LOG_PROBS,
  VALUES,
  TOKEN_REWARDS,
  TURN_REWARDS,
  SELECTED,
  BASELINES,
  CONSISTENCY,
  PART_REWARDS,
)


def credit_inputs(batch: Batch, config: ObjectiveConfig) -> dict[str, jax.Array]:
  """What ``prepare`` is given beside the batch: those of its columns that the config reads.

  Args:
    batch: with the columns of all signals.
    config: of the objective.
  """
  taught = config.distillation
  unread = set()
  if not config.needs_reference:
    unread.add(REFERENCE_LOG_PROBS.name)
  names = [column.name for column in _CREDIT if column.name not in unread]
  if taught is not None and taught.form == "sampled":
    names.append("teacher_log_probs")
  return {name: batch.columns[name] for name in names if name in batch.columns}
