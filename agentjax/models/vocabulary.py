"""Functions of whole next-token distributions, computed for a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from agentjax.models.chunks import map_time
from agentjax.models.config import ModelConfig
from agentjax.models.heads import output_logits, output_weight
from agentjax.models.linear import precision
from agentjax.models.stack import DecodeParams, Params

Array = jax.Array


class Readout(NamedTuple):
  """Hidden states and their output projection.

  Attributes:
    hidden: [B, T, embed].
    weight: [embed, vocab].
    temperature: divides the logits.
    softcap: see ``Gemma4Config.logit_softcap``.
  """

  hidden: Float[Array, "batch time embed"]
  weight: Float[Array, "embed vocab"]
  temperature: float | Array = 1.0
  softcap: float | None = None


def readout(
  params: Params | DecodeParams,
  config: ModelConfig,
  hidden: Float[Array, "batch time embed"],
  temperature: float | Array = 1.0,
) -> Readout:
  """The output projection of a model on its hidden states."""
  return Readout(hidden, output_weight(params), temperature, config.logit_softcap)


def over_vocabulary(
  function: Callable[..., Any],
  readouts: Sequence[Readout],
  *per_token: Array,
  size: int,
) -> Any:
  """``function(log_p, log_q, ..., *per_token)`` of all tokens, ``size`` time steps at once.

  Only the logits of one chunk are held at a time, also in the backward pass, which computes them
  again: memory is ``batch * size * vocab`` floats per model, for any number of tokens.

  Args:
    function: gets float32 log-probs [B, size, vocab], one array a readout, and ``per_token`` cut
      alike; returns a pytree of arrays [B, size, ...].
    readouts: of one model or of several.
    per_token: arrays [B, T, ...].
    size: time steps a chunk; T or more holds all logits.

  Returns:
    The pytree with arrays [B, T, ...].
  """

  def chunk(*given: Array) -> Any:
    states, rest = given[: len(readouts)], given[len(readouts) :]
    log_probs = [_log_probs(r, h) for r, h in zip(readouts, states, strict=True)]
    return function(*log_probs, *rest)

  return in_chunks(chunk, *(r.hidden for r in readouts), *per_token, size=size)


def in_chunks(function: Callable[..., Any], *per_token: Array, size: int) -> Any:
  """``function(*per_token)``, ``size`` time steps at once, in the backward pass as well.

  Args:
    function: of arrays [B, size, ...] to a pytree of such arrays.
    per_token: arrays [B, T, ...], one at least.
    size: time steps a chunk; T or more is one chunk.
  """

  @jax.checkpoint
  def chunk(given: tuple[Array, ...]) -> Any:
    return function(*given)

  whole = per_token[0].shape[1] <= size
  return chunk(per_token) if whole else map_time(chunk, per_token, size)


class TokenSets(NamedTuple):
  """Tokens that a restricted softmax runs over, one set for each token of a text.

  Attributes:
    ids: int32 [B, T, 1 + K], the token of the text first.
    inside: bool [B, T, 1 + K], which of the places are used; the first always is.
  """

  ids: Int[Array, "batch time places"]
  inside: Bool[Array, "batch time places"]


def restricted_scores(
  read: Readout, sets: TokenSets, *, size: int
) -> tuple[Float[Array, "batch time"], Float[Array, "batch time"]]:
  """``log p(y | S) = z_y - logsumexp_{v in S} z_v`` and the entropy of p(. | S), nats, float32.

  Logits are computed only for the tokens in the sets: for ``size`` time steps ``size * (1 + K)``
  columns of the output projection are gathered at once. Over a mesh that splits the vocabulary, the
  compiler gathers the projection first.

  Args:
    read: of the states before the tokens.
    sets: of the tokens, [B, T, 1 + K].
    size: time steps at once.
  """
  rows = jnp.asarray(read.weight).T

  def score(hidden: Array, ids: Array, inside: Array) -> tuple[Array, Array]:
    columns = rows[ids].astype(hidden.dtype)
    logits = jnp.einsum(
      "btd,btkd->btk",
      hidden,
      columns,
      precision=precision(hidden.dtype),
      preferred_element_type=jnp.float32,
    )
    if read.softcap is not None:
      logits = read.softcap * jnp.tanh(logits / read.softcap)
    log_p = jax.nn.log_softmax(jnp.where(inside, logits / read.temperature, -1e30), axis=-1)
    kept = jnp.where(inside, log_p, 0)
    entropy = -jnp.sum(jnp.where(inside, jnp.exp(kept) * kept, 0), axis=-1)
    return kept[..., 0], entropy

  return in_chunks(score, read.hidden, sets.ids, sets.inside, size=size)


def take_tokens(
  values: Float[Array, "batch time *rest"], places: Int[Array, "batch kept"]
) -> Array:
  """[B, K, ...] of [B, T, ...]: in every row the entries at ``places``."""
  index = places.reshape(*places.shape, *(1,) * (values.ndim - 2))
  return jnp.take_along_axis(values, index, axis=1)


def put_tokens(
  values: Float[Array, "batch kept"], places: Int[Array, "batch kept"], time: int
) -> Float[Array, "batch time"]:
  """Inverse of ``take_tokens``, 0 elsewhere; the entry at place 0 is dropped."""
  rows = jnp.arange(values.shape[0])[:, None]
  # The token at place 0 cannot be predicted; 0 fills up short rows.
  return (
    jnp.zeros((values.shape[0], time), values.dtype)
    .at[rows, places]
    .set(jnp.where(places > 0, values, 0))
  )


def _log_probs(read: Readout, hidden: Array) -> Array:
  # Cast here, so that the weight's gradient adds up over chunks in the weight's own dtype.
  logits = output_logits(hidden, read.weight.astype(hidden.dtype), read.softcap)
  return jax.nn.log_softmax(logits / read.temperature)
