"""Objectives: advantages, policy losses, value and supervised losses. Pure functions of arrays.

Read in this order: ``objective`` (what a loss is), ``preparation`` (what comes before it),
``advantages`` and ``returns`` (credit), ``policy_loss`` and ``mismatch`` (the surrogate),
``aggregation`` (one number), ``presets``.
"""

from agentjax.objectives.advantages import (
  AdvantageConfig,
  AmbiguityConfig,
  ambiguity_terms,
  check_group_size,
  check_outcomes,
  check_rewards,
  multi_reward_advantages,
  sequence_advantages,
)
from agentjax.objectives.aggregation import token_coefficients
from agentjax.objectives.custom_loss import LossFunction, load_function
from agentjax.objectives.distillation import (
  DistillationConfig,
  candidate_divergence,
  compare,
  divergence,
  keep_best,
  select_tokens,
  soft_or,
  teacher_advantages,
)
from agentjax.objectives.kl import kl_estimate
from agentjax.objectives.mismatch import MismatchConfig, mismatch_correction, mismatch_metrics
from agentjax.objectives.objective import (
  LossInputs,
  Objective,
  ObjectiveConfig,
  Prepared,
  policy_objective,
)
from agentjax.objectives.policy_loss import PolicyLoss, PolicyLossConfig
from agentjax.objectives.preference import (
  PreferenceConfig,
  dpo_loss,
  implicit_prm_loss,
  preference_advantages,
)
from agentjax.objectives.preparation import prepare, prepare_supervised
from agentjax.objectives.presets import PRESETS, preset
from agentjax.objectives.returns import (
  bilevel_gae,
  gae,
  optimal_token_baseline,
  reward_to_go,
  whiten,
)
from agentjax.objectives.segments import broadcast_to_tokens
from agentjax.objectives.supervised import negative_log_likelihood, supervised_objective
from agentjax.objectives.value_loss import (
  ValueLossConfig,
  bernoulli_value_loss,
  squared_value_loss,
)

__all__ = [
  "PRESETS",
  "AdvantageConfig",
  "AmbiguityConfig",
  "DistillationConfig",
  "LossFunction",
  "LossInputs",
  "MismatchConfig",
  "Objective",
  "ObjectiveConfig",
  "PolicyLoss",
  "PolicyLossConfig",
  "PreferenceConfig",
  "Prepared",
  "ValueLossConfig",
  "ambiguity_terms",
  "bernoulli_value_loss",
  "bilevel_gae",
  "broadcast_to_tokens",
  "candidate_divergence",
  "check_group_size",
  "check_outcomes",
  "check_rewards",
  "compare",
  "divergence",
  "dpo_loss",
  "gae",
  "implicit_prm_loss",
  "keep_best",
  "kl_estimate",
  "load_function",
  "mismatch_correction",
  "mismatch_metrics",
  "multi_reward_advantages",
  "negative_log_likelihood",
  "optimal_token_baseline",
  "policy_objective",
  "preference_advantages",
  "prepare",
  "prepare_supervised",
  "preset",
  "reward_to_go",
  "select_tokens",
  "sequence_advantages",
  "soft_or",
  "squared_value_loss",
  "supervised_objective",
  "teacher_advantages",
  "token_coefficients",
  "whiten",
]
