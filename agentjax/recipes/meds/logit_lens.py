"""The logit lens: the stream after blocks in the middle of the stack, through the output head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.models.config import ModelConfig
from agentjax.models.heads import output_weight
from agentjax.models.stack import Params, forward

Array = jax.Array

_TOKEN_MIXERS, _CHANNEL_MIXERS = "M*A", "-E"


def layer_ends(pattern: str) -> tuple[int, ...]:
  """Indices of the blocks that end a layer.

  A block that mixes tokens and one right after it that mixes channels are one layer, as in a
  transformer; every other block is a layer of its own.
  """
  return tuple(
    i
    for i, kind in enumerate(pattern)
    if not (kind in _TOKEN_MIXERS and pattern[i + 1 : i + 2] in tuple(_CHANNEL_MIXERS))
  )


def layer_logits(
  params: Params,
  config: ModelConfig,
  token_ids: Int[Array, "batch time"],
  segment_ids: Int[Array, "batch time"],
  positions: Int[Array, "batch time"],
  places: Int[Array, "batch places"],
  blocks: tuple[int, ...],
) -> Float[Array, "batch places blocks"]:
  """Logits, after each of some blocks, of the tokens at ``places``: the "logit lens" of one token.

  ``z_l = W_out[:, y_t] . h_l`` with h_l the stream after block l at the token before y_t. There is
  no norm between (as in the code of MEDS, 2604.11297), and no soft cap.

  Args:
    params, config, token_ids, segment_ids, positions: see ``forward``.
    places: of y_t in their rows, 1 or more; the result for 0 has no meaning.
    blocks: indices in ``config.pattern``.

  Returns:
    Float32.

  Raises:
    ValueError: blocks that the pattern does not have, or see ``forward``.
  """
  if not blocks or min(blocks) < 0 or max(blocks) >= len(config.pattern):
    raise ValueError(
      f"blocks={blocks}; allowed: one or more of 0 to {len(config.pattern) - 1}, the blocks of the "
      f"pattern {config.pattern!r}."
    )
  rows = (token_ids, segment_ids, positions)
  out = forward(params, config, *rows, captured=jnp.maximum(places - 1, 0))
  assert out.captured is not None
  streams = out.captured[jnp.array(blocks)].astype(jnp.float32)
  columns = output_weight(params).T[jnp.take_along_axis(token_ids, places, axis=1)]
  return jnp.einsum(
    "lbkd,bkd->bkl", streams, columns.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
  )
