"""Functions of whole next-token distributions, of which only a few tokens' are held at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.models.config import ModelConfig
from agentjax.models.heads import output_logits, output_weight
from agentjax.models.stack import DecodeParams, Params

Array = jax.Array


class Readout(NamedTuple):
  """Hidden states and what makes log-probs of them.

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
  softcap = None if config.gemma is None else config.gemma.logit_softcap
  return Readout(hidden, output_weight(params), temperature, softcap)


def over_vocabulary(
  function: Callable[..., Any],
  readouts: Sequence[Readout],
  *per_token: Array,
  size: int,
) -> Any:
  """``function(log_p, log_q, ..., *per_token)`` of all tokens, ``size`` time steps at once.

  The logits of one chunk are held at a time, in the backward pass as well, which makes them again:
  memory is ``batch * size * vocab`` floats a model, whatever the number of tokens.

  Args:
    function: gets float32 log-probs [B, size, vocab], one array a readout, and ``per_token`` cut
      alike; returns a pytree of arrays [B, size, ...].
    readouts: of one model or of several.
    per_token: arrays [B, T, ...].
    size: time steps a chunk; T or more holds all logits.

  Returns:
    The pytree with arrays [B, T, ...].
  """
  batch, time = readouts[0].hidden.shape[:2]
  hiddens = tuple(r.hidden for r in readouts)

  @jax.checkpoint
  def chunk(given: tuple[Array, ...]) -> Any:
    states, rest = given[: len(readouts)], given[len(readouts) :]
    log_probs = [_log_probs(r, h) for r, h in zip(readouts, states, strict=True)]
    return function(*log_probs, *rest)

  given = (*hiddens, *per_token)
  if time <= size:
    return chunk(given)
  count = -(-time // size)

  def cut(x: Array) -> Array:
    padded = jnp.pad(x, [(0, 0), (0, count * size - time)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(padded.reshape(batch, count, size, *x.shape[2:]), 1, 0)

  def join(x: Array) -> Array:
    return jnp.moveaxis(x, 0, 1).reshape(batch, count * size, *x.shape[3:])[:, :time]

  return jax.tree.map(join, jax.lax.map(chunk, tuple(cut(x) for x in given)))


def take_tokens(
  values: Float[Array, "batch time *rest"], places: Int[Array, "batch kept"]
) -> Array:
  """[B, K, ...] of [B, T, ...]: in every row the entries at ``places``."""
  index = places.reshape(*places.shape, *(1,) * (values.ndim - 2))
  return jnp.take_along_axis(values, index, axis=1)


def put_tokens(
  values: Float[Array, "batch kept"], places: Int[Array, "batch kept"], time: int
) -> Float[Array, "batch time"]:
  """Inverse of ``take_tokens``, 0 elsewhere; what stands at place 0 is dropped."""
  rows = jnp.arange(values.shape[0])[:, None]
  # Place 0 has nothing before it to be predicted from, and fills up short rows.
  return (
    jnp.zeros((values.shape[0], time), values.dtype)
    .at[rows, places]
    .set(jnp.where(places > 0, values, 0))
  )


def _log_probs(read: Readout, hidden: Array) -> Array:
  # Cast here, so that the weight's gradient adds up over chunks in the weight's own dtype.
  logits = output_logits(hidden, read.weight.astype(hidden.dtype), read.softcap)
  return jax.nn.log_softmax(logits / read.temperature)
