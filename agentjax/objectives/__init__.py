"""Objectives: advantages, policy losses, value and supervised losses. Pure functions of arrays.

Read in this order: ``objective`` (what a loss is), ``preparation`` (what comes before it),
``advantages`` and ``returns`` (credit), ``policy_loss`` and ``mismatch`` (the surrogate),
``aggregation`` (one number).
"""

from agentjax.objectives.advantages import AdvantageConfig, sequence_advantages
from agentjax.objectives.aggregation import token_coefficients
from agentjax.objectives.distillation import DistillationConfig, divergence
from agentjax.objectives.mismatch import MismatchConfig
from agentjax.objectives.objective import (
  LossInputs,
  Objective,
  ObjectiveConfig,
  Prepared,
  policy_objective,
  preset,
)
from agentjax.objectives.policy_loss import PolicyLossConfig
from agentjax.objectives.preference import PreferenceConfig, dpo_loss, implicit_prm_loss
from agentjax.objectives.preparation import prepare
from agentjax.objectives.segments import broadcast_to_tokens
from agentjax.objectives.value_loss import ValueLossConfig

__all__ = [
  "AdvantageConfig",
  "DistillationConfig",
  "LossInputs",
  "MismatchConfig",
  "Objective",
  "ObjectiveConfig",
  "PolicyLossConfig",
  "PreferenceConfig",
  "Prepared",
  "ValueLossConfig",
  "broadcast_to_tokens",
  "divergence",
  "dpo_loss",
  "implicit_prm_loss",
  "policy_objective",
  "prepare",
  "preset",
  "sequence_advantages",
  "token_coefficients",
]
