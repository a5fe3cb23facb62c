"""Policies as pure functions over pytrees: one code for training, scoring and decoding."""

from agentjax.models.cache import (
  Cache,
  copy_slot,
  decode_step,
  extend,
  init_cache,
  prepare_decode_params,
  read_slots,
  reset_slots,
  write_slots,
)
from agentjax.models.config import ModelConfig
from agentjax.models.heads import (
  TokenScores,
  ValueHead,
  compute_logits,
  score_tokens,
  value_specs,
  values,
)
from agentjax.models.spec import (
  ParamSpec,
  abstract,
  count,
  decay_mask,
  init_params,
  trained_mask,
)
from agentjax.models.stack import (
  DecodeParams,
  ForwardOutput,
  Params,
  factor_pattern,
  forward,
  init,
  param_specs,
  update_router_bias,
)

__all__ = [
  "Cache",
  "DecodeParams",
  "ForwardOutput",
  "ModelConfig",
  "ParamSpec",
  "Params",
  "TokenScores",
  "ValueHead",
  "abstract",
  "compute_logits",
  "copy_slot",
  "count",
  "decay_mask",
  "decode_step",
  "extend",
  "factor_pattern",
  "forward",
  "init",
  "init_cache",
  "init_params",
  "param_specs",
  "prepare_decode_params",
  "read_slots",
  "reset_slots",
  "score_tokens",
  "trained_mask",
  "update_router_bias",
  "value_specs",
  "values",
  "write_slots",
]
