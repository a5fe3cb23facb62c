"""Features of texts: the stream of a frozen backbone after an inner block, at the last token."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from agentjax.config import ConfigError, check
from agentjax.models import ModelConfig, Params, forward
from agentjax.training.model_pool import Policy
from agentjax.trajectory.record import Message

Array = jax.Array
Prompt = tuple[Message, ...]

_WIDTH = 64  # rows are padded to a multiple of it, so that few shapes are compiled


def tapped_layer(layer: int | None, model: ModelConfig) -> int:
  """The block after which features are read; see ``CriticConfig.layer``.

  Raises:
    ConfigError: the backbone has no such block, or its blocks run more than once.
  """
  if model.loop is not None or model.second_pass is not None:
    raise ConfigError(
      "the blocks of this backbone run more than once, so that no block has one output; allowed: "
      "a backbone without model.loop and model.second_pass."
    )
  blocks = len(model.pattern)
  found = (blocks - 1) // 2 if layer is None else layer
  check(found < blocks, "critic.layer", layer, f"0 to {blocks - 1}, a block of {model.pattern!r}")
  return found


def read_features(
  policy: Policy, prompts: Sequence[Prompt], *, layer: int, rows: int
) -> Float[np.ndarray, "prompts embed"]:
  """The features of each prompt; equal prompts are read once.

  Args:
    policy: the backbone.
    prompts: each is one row.
    layer: see ``tapped_layer``.
    rows: prompts that are read at once.
  """
  places: dict[Prompt, int] = {}
  index = [places.setdefault(prompt, len(places)) for prompt in prompts]
  ids = [[i for s in policy.chat.prompt(prompt) for i in s.ids] for prompt in places]
  found = np.zeros((len(ids), policy.model.d_model), np.float32)
  order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
  for start in range(0, len(order), rows):
    some = order[start : start + rows]
    width = -(-max(len(ids[i]) for i in some) // _WIDTH) * _WIDTH
    tokens, segments = (np.zeros((rows, width), np.int32) for _ in range(2))
    ends = np.zeros(rows, np.int32)
    for row, i in enumerate(some):
      tokens[row, : len(ids[i])], segments[row, : len(ids[i])] = ids[i], 1
      ends[row] = len(ids[i]) - 1
    read = tap(policy.params, policy.model, tokens, segments, ends, layer=layer)
    found[some] = np.asarray(read)[: len(some)]
  return found[index]


@functools.partial(jax.jit, static_argnames=("model", "layer"))
def tap(
  params: Params,
  model: ModelConfig,
  token_ids: Int[Array, "rows time"],
  segment_ids: Int[Array, "rows time"],
  ends: Int[Array, " rows"],
  *,
  layer: int,
) -> Float[Array, "rows embed"]:
  """The stream after a block at the last token of each row. No gradient reaches the backbone."""
  positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
  frozen = jax.lax.stop_gradient(params)
  out = forward(frozen, model, token_ids, segment_ids, positions, captured=ends[:, None])
  assert out.captured is not None
  return out.captured[layer, :, 0].astype(jnp.float32)
