"""Policies as pure functions over pytrees: one code for training, scoring and decoding."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agentjax.models.attend import Sight
from agentjax.models.blocks import (
  Appended,
  BlockKind,
  BlockReport,
  Rows,
  Stepped,
  StreamKind,
  register_block,
  residual_block,
)
from agentjax.models.cache import (
  Cache,
  Decoded,
  cache_shardings,
  cache_windows,
  decode_shardings,
  decode_specs,
  decode_step,
  extend,
  in_pages,
  init_cache,
  prepare_decode_params,
)
from agentjax.models.config import LoopConfig, ModelConfig, MtpConfig, SecondPassConfig
from agentjax.models.exact import distribution_by_row
from agentjax.models.heads import (
  TokenScores,
  ValueHead,
  compute_logits,
  distribution,
  value_specs,
  values,
)
from agentjax.models.lora import LoraConfig, merge_lora
from agentjax.models.mtp import mtp_loss, mtp_scores
from agentjax.models.mtp_cache import MtpCache, draft, follow, init_mtp_cache, undraftable
from agentjax.models.param_ops import qk_clip_scales
from agentjax.models.passes import PassKind, pass_kind
from agentjax.models.presets import model_preset, model_presets
from agentjax.models.scoring import (
  cross_log_probs,
  score_responses,
  score_tokens,
)
from agentjax.models.spec import (
  ParamSpec,
  abstract,
  count,
  decay_mask,
  init_params,
)
from agentjax.models.stack import (
  DecodeParams,
  Params,
  factor_pattern,
  forward,
  init,
  num_routers,
  param_specs,
  update_router_bias,
)
from agentjax.models.verify import Verified, accept, unverifiable, verify
from agentjax.models.vocabulary import (
  Readout,
  TokenSets,
  over_vocabulary,
  put_tokens,
  readout,
  restricted_scores,
  take_tokens,
)

if TYPE_CHECKING:
  from agentjax.models.huggingface import load_pretrained, save_pretrained

__all__ = [
  "MtpCache",
  "Appended",
  "BlockKind",
  "BlockReport",
  "Cache",
  "DecodeParams",
  "Decoded",
  "LoopConfig",
  "LoraConfig",
  "ModelConfig",
  "MtpConfig",
  "ParamSpec",
  "Params",
  "Readout",
  "Rows",
  "SecondPassConfig",
  "Sight",
  "Stepped",
  "StreamKind",
  "TokenScores",
  "TokenSets",
  "ValueHead",
  "Verified",
  "abstract",
  "accept",
  "cache_shardings",
  "cache_windows",
  "compute_logits",
  "count",
  "cross_log_probs",
  "decay_mask",
  "decode_shardings",
  "decode_specs",
  "decode_step",
  "distribution",
  "distribution_by_row",
  "draft",
  "extend",
  "factor_pattern",
  "follow",
  "forward",
  "in_pages",
  "init",
  "init_mtp_cache",
  "init_cache",
  "init_params",
  "load_pretrained",
  "merge_lora",
  "model_preset",
  "model_presets",
  "mtp_loss",
  "mtp_scores",
  "num_routers",
  "PassKind",
  "over_vocabulary",
  "param_specs",
  "pass_kind",
  "prepare_decode_params",
  "put_tokens",
  "qk_clip_scales",
  "register_block",
  "residual_block",
  "readout",
  "restricted_scores",
  "save_pretrained",
  "score_responses",
  "score_tokens",
  "take_tokens",
  "undraftable",
  "unverifiable",
  "update_router_bias",
  "value_specs",
  "values",
  "verify",
]


def __getattr__(name: str) -> Any:
  if name not in ("load_pretrained", "save_pretrained"):
    raise AttributeError(f"module 'agentjax.models' has no attribute {name!r}")
  return getattr(importlib.import_module("agentjax.models.huggingface"), name)
