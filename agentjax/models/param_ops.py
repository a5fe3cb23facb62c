"""Changes of parameters between updates, without a gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from agentjax.models.attention import Attention
from agentjax.models.config import ModelConfig
from agentjax.models.mla import Mla
from agentjax.models.stack import Params

Array = jax.Array


def qk_clip_obstacle(config: ModelConfig) -> str | None:
  """Why the scores of this model cannot be clipped, or None if they can."""
  if not set("*VAS") & set(config.pattern):
    return "no block of model.pattern has attention"
  if config.gemma is not None or config.qk_norm:
    return "queries and keys are normed, which bounds their products"
  if config.loop is not None or config.second_pass is not None:
    return "blocks run several times"
  return None


def qk_clip_scales(
  params: Params,
  config: ModelConfig,
  max_scores: Float[Array, "attentions heads"],
  *,
  threshold: float,
  alpha: float = 0.5,
) -> tuple[Any, Float[Array, ""]]:
  """Factors of QK-clip on the projections of queries and keys.

  A head whose largest score S on the batch is above the threshold gets ``g = threshold / S``, all
  others 1. If each head has its own key, its query is multiplied by ``g^alpha`` and its key by
  ``g^(1 - alpha)``. If heads share a key, the query is multiplied by g, so that no other head
  changes. Latent attention: the parts without rotary embedding by ``sqrt(g)`` each, the rotated
  query by g, the rotated key, which all heads share, not at all. Scores on the same inputs are then
  at most the threshold.

  Args:
    params: from ``init``; biases are scaled with their projections.
    config: of the params; ``qk_clip_obstacle`` must be None.
    max_scores: float32, in the order of the pattern, from ``forward`` with ``record_max_scores``.
    threshold: 100 in Kimi K2.
    alpha: share of g that the query takes; 1/2 in Kimi K2.

  Returns:
    A tree like ``params``: an array to multiply by, or None if nothing changes; and the number of
      clipped heads.

  References: Kimi K2, 2507.20534 (MuonClip).
  """
  factors = jnp.where(max_scores > threshold, threshold / max_scores, 1.0)
  groups, used = [], 0
  for group in params.groups:
    layers = [leaf for leaf in jax.tree.leaves(group, is_leaf=_is_attention) if _is_attention(leaf)]
    if not layers:
      groups.append(jax.tree.map(lambda _: None, group))
      continue
    repeats = jax.tree.leaves(group)[0].shape[0]
    here = factors[used : used + repeats * len(layers)].reshape(repeats, len(layers), -1)
    used += repeats * len(layers)
    steps = iter(jnp.moveaxis(here, 1, 0))

    def scales(leaf: Any, steps: Any = steps) -> Any:
      if not _is_attention(leaf):
        return None
      own = jax.tree.map(lambda _: None, leaf)
      return dataclasses.replace(own, **_head_scales(leaf, next(steps), alpha))

    groups.append(jax.tree.map(scales, group, is_leaf=_is_attention))
  nothing = jax.tree.map(lambda _: None, params)
  return dataclasses.replace(nothing, groups=tuple(groups)), jnp.sum(factors < 1.0)


def rescale(params: Any, scales: Any) -> Any:
  """``params`` times ``scales``, in the dtypes of the params; unchanged where the scale is None."""
  return jax.tree.map(lambda w, s: w if s is None else (w * s).astype(w.dtype), params, scales)


def _is_attention(node: Any) -> bool:
  return isinstance(node, Attention | Mla)


def _head_scales(layer: Attention | Mla, factors: Array, alpha: float) -> dict[str, Array]:
  """Scales of the arrays of stacked layers, by name; ``factors`` are [layers, heads]."""
  heads = factors[:, None, :, None]  # beside [layers, in, heads, width]
  if isinstance(layer, Mla):
    return {"query_nope": heads**0.5, "query_rope": heads, "key_up": heads**0.5}
  own_keys = layer.query.shape[2] == layer.key.shape[2]
  scales = {"query": heads**alpha if own_keys else heads}
  if own_keys:
    scales["key"] = heads ** (1.0 - alpha)
  for name in list(scales):
    if getattr(layer, f"{name}_bias") is not None:
      scales[f"{name}_bias"] = scales[name][:, 0]
  return scales
