"""What is read off the hidden states: logits, token log-probs and entropies, values."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.models.config import ModelConfig
from agentjax.models.products import precision
from agentjax.models.spec import ParamSpec, Weight
from agentjax.models.stack import DecodeParams, ForwardOutput, Params, forward

Array = jax.Array


@flax.struct.dataclass
class TokenScores(ForwardOutput):
  """Result of ``score_tokens``: the pass, and of every token, aligned with the token itself,

  Attributes:
    log_probs: float32 [B, T], log p(token t | its past), nats; 0 on the first token of a sequence
      and on padding.
    entropies: float32 [B, T], entropy of the distribution token t was drawn from, nats; 0 likewise.
  """

  log_probs: Array
  entropies: Array


@flax.struct.dataclass
class ValueHead:
  """Linear read-out of an expected return."""

  weight: Weight  # [embed] float32
  bias: Weight  # [] float32


def compute_logits(
  params: Params | DecodeParams, hidden: Float[Array, "*lead embed"]
) -> Float[Array, "*lead vocab"]:
  """Float32 logits of the next token."""
  return _logits(hidden, _output_weight(params).astype(hidden.dtype))


def score_tokens(
  params: Params,
  config: ModelConfig,
  token_ids: Int[Array, "batch time"],
  segment_ids: Int[Array, "batch time"],
  positions: Int[Array, "batch time"],
  *,
  temperature: float | Array = 1.0,
  experts: Int[Array, "routers batch time choices"] | None = None,
) -> TokenScores:
  """Log-prob and entropy of every token given its past, at ``temperature``.

  The logits of ``config.logits_chunk`` time steps are held at once, and are recomputed in the
  backward pass: [B, T, vocab] never exists.

  Args:
    params, config, token_ids, segment_ids, positions, experts: see ``forward``.
    temperature: divides the logits; above 0. No gradient reaches it.
  """
  out = forward(params, config, token_ids, segment_ids, positions, experts=experts)
  # Token t is read off the hidden state before it.
  hidden, targets = out.hidden[:, :-1], token_ids[:, 1:]
  weight = _output_weight(params).astype(hidden.dtype)
  divisor = jnp.asarray(temperature, jnp.float32)
  size = config.logits_chunk
  parts = [
    _score(hidden[:, start : start + size], weight, targets[:, start : start + size], divisor)
    for start in range(0, targets.shape[1], size)
  ]
  follows = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)

  def join(index: int) -> Array:
    values = [part[index] for part in parts]
    joined = jnp.concatenate(values, axis=1) if values else jnp.zeros(targets.shape, jnp.float32)
    return jnp.pad(jnp.where(follows, joined, 0.0), ((0, 0), (1, 0)))

  return TokenScores(
    log_probs=join(0),
    entropies=join(1),
    hidden=out.hidden,
    routing=out.routing,
  )


def value_specs(config: ModelConfig) -> ValueHead:
  """Abstract parameters of the value head; it starts at zero."""
  return ValueHead(
    weight=ParamSpec((config.d_model,), (None,), init="zeros"),
    bias=ParamSpec((), (), init="zeros", decayed=False),
  )


def values(params: ValueHead, hidden: Float[Array, "*lead embed"]) -> Float[Array, "*lead"]:
  """``weight · hidden + bias`` in float32."""
  return jnp.sum(hidden.astype(jnp.float32) * params.weight, axis=-1) + params.bias


@jax.custom_vjp
def _score(hidden: Array, weight: Array, targets: Array, temperature: Array) -> tuple[Array, Array]:
  """Log-prob of the targets and entropy, keeping no logits for the gradient.

  Args:
    hidden: [B, T, embed].
    weight: [embed, vocab].
    targets: int [B, T].
    temperature: scalar; no gradient reaches it.

  Returns:
    Log-probs and entropies, float32 [B, T].
  """
  return _score_forward(hidden, weight, targets, temperature)[0]


def _score_forward(
  hidden: Array, weight: Array, targets: Array, temperature: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
  logits = _logits(hidden, weight) / temperature
  top = jnp.max(logits, axis=-1)
  shifted = logits - top[..., None]
  exps = jnp.exp(shifted)
  total = jnp.sum(exps, axis=-1)
  log_total = jnp.log(total)
  chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  # -sum p log p = log Z - sum p logit.
  entropies = log_total - jnp.sum(exps * shifted, axis=-1) / total
  kept = (hidden, weight, targets, temperature, top + log_total, entropies)
  return (chosen - top - log_total, entropies), kept


def _score_backward(
  kept: tuple[Array, ...], gradients: tuple[Array, Array]
) -> tuple[Array, Array, None, Array]:
  """``d log p(y) / d logit_j = [j = y] - p_j`` and ``d H / d logit_j = -p_j (log p_j + H)``."""
  hidden, weight, targets, temperature, log_total, entropies = kept
  to_log_prob, to_entropy = (g[..., None] for g in gradients)
  log_probs = _logits(hidden, weight) / temperature - log_total[..., None]
  pull = to_log_prob + to_entropy * (log_probs + entropies[..., None])
  hit = jnp.arange(weight.shape[1]) == targets[..., None]
  slope = jnp.where(hit, to_log_prob, 0.0) - jnp.exp(log_probs) * pull
  slope = (slope / temperature).astype(hidden.dtype).reshape(-1, weight.shape[1])
  exact = precision(hidden.dtype)
  return (
    jnp.matmul(slope, weight.T, precision=exact).reshape(hidden.shape),
    jnp.matmul(hidden.reshape(-1, hidden.shape[-1]).T, slope, precision=exact),
    None,
    jnp.zeros_like(temperature),
  )


_score.defvjp(_score_forward, _score_backward)


def _output_weight(params: Params | DecodeParams) -> Array:
  return params.embedding.T if params.lm_head is None else params.lm_head


def _logits(hidden: Array, weight: Array) -> Array:
  return jnp.matmul(
    hidden, weight, precision=precision(hidden.dtype), preferred_element_type=jnp.float32
  )
