"""Several tokens into slots at once, of which the first few may turn out to be the right ones.

``verify`` runs a window of tokens through the model, as decoding one by one would see them, and
``accept`` keeps as many of them as were right. Keys and values of the others stay where they are,
beyond the length of the slot, and the next tokens overwrite them. A recurrent state cannot step
back: ``verify`` leaves it as it was and hands on what goes into it, which is small, and ``accept``
runs the recurrence again over what was right. The projections, by far the most work, run once.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agentjax.models.attention import attention_extend
from agentjax.models.blocks import KINDS, Appended, Block, BlockKind
from agentjax.models.cache import Cache, run_section
from agentjax.models.config import BUILT_IN, ModelConfig
from agentjax.models.heads import compute_logits
from agentjax.models.mamba2 import MambaCache, advance_state, mix_out, project_in
from agentjax.models.norm import rms_norm
from agentjax.models.passes import DecodeSection
from agentjax.models.stack import DecodeParams, close_stream, given_to_blocks, open_stream

Array = jax.Array


class Verified(NamedTuple):
  """Result of ``verify``.

  Attributes:
    logits: float32 [slots, window, vocab], of the token behind each of the window.
    pending: blocks of the cache, with what ``accept`` needs in the place of recurrent ones.
    experts: int32 [routers, slots, window, choices]; None without a router.
    hidden: [slots, window, embed], after the last norm.
  """

  logits: Array
  pending: tuple[Any, ...]
  experts: Array | None
  hidden: Array


class _Recurrent(NamedTuple):
  """A state before the window, and what the window puts into it."""

  cache: MambaCache
  projected: Any  # of ``project_in``, [slots, window, ...]


def unverifiable(config: ModelConfig) -> str | None:
  """Why ``verify`` cannot run a model; None where it can."""
  if config.loop is not None or config.second_pass is not None:
    return "blocks that run more than once (model.loop, model.second_pass)"
  if config.exact_chunk:
    return "exact log-probs (model.exact_chunk)"
  if own := sorted(set(config.pattern) - BUILT_IN):
    return f"blocks of your own, which it cannot roll back (model.pattern has {', '.join(own)})"
  return None


def verify(
  params: DecodeParams,
  config: ModelConfig,
  cache: Cache,
  token_ids: Int[Array, "slots window"],
  active: Bool[Array, " slots"],
) -> Verified:
  """Logits behind each token of a window that follows what the slots hold.

  Inactive slots keep what they hold, and their logits mean nothing. Tokens past the end of a slot
  are lost, and so mean nothing either.

  Args:
    params: from ``prepare_decode_params``.
    config: of the params; see ``unverifiable``.
    cache: use ``accept``'s in its place from here on.
    token_ids: [S, W].
    active: bool [S].
  """
  slots, window = token_ids.shape
  rows = jnp.where(active, jnp.arange(slots), slots)
  positions = cache.lengths[:, None] + jnp.arange(window)
  appended = Appended(rows, positions, jnp.where(active, window, 0))
  x, per_layer = open_stream(params, config, token_ids)
  given = given_to_blocks(config, None, per_layer, token_ids)
  section = DecodeSection(config.pattern, params.blocks, cache.blocks, given)
  x, pending, routed = run_section(x, section, config=config, where=appended, kinds=EVERY_SLOT)
  hidden = rms_norm(close_stream(x, config), params.final_norm, config.norm_eps)
  return Verified(
    logits=compute_logits(params, config, hidden),
    pending=pending,
    experts=jnp.stack(routed) if routed else None,
    hidden=hidden,
  )


def accept(
  params: DecodeParams,
  config: ModelConfig,
  lengths: Int[Array, " slots"],
  pending: tuple[Any, ...],
  counts: Int[Array, " slots"],
) -> Cache:
  """The cache after the first ``counts[s]`` tokens of the window.

  Args:
    params, config: of ``verify``.
    lengths: of the cache before the window.
    pending: from ``verify``.
    counts: 0 leaves a slot as it was.
  """

  def replayed(block: Any, entry: Any) -> Any:
    if not isinstance(entry, _Recurrent):
      return entry
    cache = entry.cache
    for j in range(entry.projected.x.shape[1]):
      column = jax.tree.map(lambda v, j=j: v[:, j], entry.projected)
      _, cache = advance_state(block.mixer, column, cache, config, active=j < counts)
    return cache

  blocks = tuple(map(replayed, params.blocks, pending))
  return Cache(blocks=blocks, lengths=lengths + counts)


def _mamba(
  params: Block,
  x: Float[Array, "slots window embed"],
  entry: MambaCache,
  config: ModelConfig,
  where: Appended,
  given: Any,
) -> tuple[Array, _Recurrent, None]:
  """The recurrence token by token, as decoding runs it, between projections of all at once."""
  del given
  projected = project_in(params.mixer, rms_norm(x, params.norm, config.norm_eps))
  cache, outputs = entry, []
  for j in range(x.shape[1]):
    column = jax.tree.map(lambda v, j=j: v[:, j], projected)
    y, cache = advance_state(params.mixer, column, cache, config, active=where.counts > 0)
    outputs.append(y)
  out = mix_out(params.mixer, jnp.stack(outputs, axis=1), projected.gate, config)
  return x + out, _Recurrent(entry, projected), None


def _attention(
  params: Block,
  x: Float[Array, "slots window embed"],
  entry: Any,
  config: ModelConfig,
  where: Appended,
  given: Any,
) -> tuple[Array, Any, None]:
  """As ``attention_extend``, with a row for every slot: nothing has to be gathered."""
  del given
  inputs = rms_norm(x, params.norm, config.norm_eps)
  every = where._asdict() | {"rows": None}
  out, entry = attention_extend(params.mixer, inputs, entry, config, **every)
  return x + out, entry, None


# ``extend`` of these takes a row for every slot, in order.
EVERY_SLOT: Mapping[str, BlockKind] = collections.ChainMap(
  {
    "M": dataclasses.replace(KINDS["M"], extend=_mamba),
    "*": dataclasses.replace(KINDS["*"], extend=_attention),
  },
  KINDS,
)
