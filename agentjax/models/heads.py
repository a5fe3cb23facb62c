"""What is read off the hidden states: logits, token log-probs and entropies, values."""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.models.config import ModelConfig
from agentjax.models.products import linear_gradients, precision
from agentjax.models.spec import ParamSpec, Weight
from agentjax.models.stack import DecodeParams, ForwardOutput, Params, forward
from agentjax.sharding import LOGICAL_AXES, partition_spec

Array = jax.Array

_UNROLLED_CHUNKS = 4  # chunks of logits in a straight line; more are a loop


@flax.struct.dataclass
class TokenScores(ForwardOutput):
  """Result of ``score_tokens``: the pass, and of every token, aligned with the token itself,

  Attributes:
    log_probs: float32 [B, T], log p(token t | its past), nats; 0 on the first token of a sequence
      and on padding.
    entropies: float32 [B, T], entropy of the distribution token t was drawn from, nats; 0 likewise.
    log_normalizers: float32 [B, T], logsumexp of the logits token t was drawn from; 0 likewise.
  """

  log_probs: Array
  entropies: Array
  log_normalizers: Array


@flax.struct.dataclass
class ValueHead:
  """Linear read-out of an expected return."""

  weight: Weight  # [embed] float32
  bias: Weight  # [] float32


def compute_logits(
  params: Params | DecodeParams, config: ModelConfig, hidden: Float[Array, "*lead embed"]
) -> Float[Array, "*lead vocab"]:
  """Float32 logits of the next token."""
  return _logits(
    hidden,
    _output_weight(params).astype(hidden.dtype),
    None if config.gemma is None else config.gemma.logit_softcap,
  )


def score_tokens(
  params: Params,
  config: ModelConfig,
  token_ids: Int[Array, "batch time"],
  segment_ids: Int[Array, "batch time"],
  positions: Int[Array, "batch time"],
  *,
  temperature: float | Array = 1.0,
  experts: Int[Array, "routers batch time choices"] | None = None,
  depths: Int[Array, "batch time"] | None = None,
) -> TokenScores:
  """Log-prob and entropy of every token given its past, at ``temperature``.

  The logits of ``config.logits_chunk`` time steps are held at once, and are recomputed in the
  backward pass: [B, T, vocab] never exists.

  Args:
    params, config, token_ids, segment_ids, positions, experts, depths: see ``forward``.
    temperature: divides the logits; above 0. No gradient reaches it.
  """
  out = forward(params, config, token_ids, segment_ids, positions, experts=experts, depths=depths)
  # Token t is read off the hidden state before it.
  scores = score_targets(params, config, out.hidden, jnp.roll(token_ids, -1, axis=1), temperature)
  follows = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
  log_probs, entropies, log_normalizers = (
    jnp.pad(jnp.where(follows, v[:, :-1], 0.0), ((0, 0), (1, 0))) for v in scores
  )
  return TokenScores(
    log_probs=log_probs,
    entropies=entropies,
    log_normalizers=log_normalizers,
    hidden=out.hidden,
    routing=out.routing,
    max_scores=out.max_scores,
  )


def score_targets(
  params: Params,
  config: ModelConfig,
  hidden: Float[Array, "batch time embed"],
  targets: Int[Array, "batch time"],
  temperature: float | Array = 1.0,
) -> tuple[Float[Array, "batch time"], Float[Array, "batch time"], Float[Array, "batch time"]]:
  """Log-prob of what each hidden state is to predict, entropy and log-normaliser, float32.

  In chunks of ``config.logits_chunk`` time steps, see ``score_tokens``. Over a mesh every device
  scores its own tokens with its part of the vocabulary, so that the weight is gathered and its
  gradient summed once and not once a chunk.
  """
  weight, axes = _output_weight(params), ("embed", "vocab")
  softcap = None if config.gemma is None else config.gemma.logit_softcap
  score = functools.partial(_score_chunks, softcap=softcap, size=config.logits_chunk)
  divisor = jnp.asarray(temperature, jnp.float32)
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return score(hidden, weight.astype(hidden.dtype), targets, divisor)

  def part(hidden: Array, weight: Array, targets: Array, divisor: Array) -> Any:
    weight = jax.lax.all_gather(weight, LOGICAL_AXES["embed"], axis=0, tiled=True)
    return score(hidden, weight, targets, divisor, parts=LOGICAL_AXES["vocab"])

  tokens = jax.P(LOGICAL_AXES["batch"], LOGICAL_AXES["time"])
  for name, value, split in (
    ("the hidden states", hidden, ("batch", "time", None)),
    ("the output projection", weight, axes),
  ):
    partition_spec(split, value.shape, mesh, name=name)
  return jax.shard_map(
    part,
    in_specs=(tokens, jax.P(*(LOGICAL_AXES[axis] for axis in axes)), tokens, jax.P()),
    out_specs=tokens,
    check_vma=False,
  )(hidden, weight.astype(hidden.dtype), targets, divisor)


def _score_chunks(
  hidden: Array,
  weight: Array,
  targets: Array,
  temperature: Array,
  *,
  softcap: float | None,
  size: int,
  parts: tuple[str, ...] | None = None,
) -> tuple[Array, Array, Array]:
  """``_score`` of ``size`` time steps at once."""
  batch, time = targets.shape

  def one(hidden: Array, targets: Array) -> tuple[Array, Array, Array]:
    return _score(hidden, weight, targets, temperature, softcap, parts)

  if time <= _UNROLLED_CHUNKS * size:
    pieces = [
      one(hidden[:, at : at + size], targets[:, at : at + size]) for at in range(0, time, size)
    ]
    first, second, third = (jnp.concatenate(v, axis=1) for v in zip(*pieces, strict=True))
    return first, second, third
  # A loop holds one gradient of the weight; unrolled, there may be as many as chunks.
  count = -(-time // size)
  chunks = tuple(
    jnp.moveaxis(
      jnp.pad(v, [(0, 0), (0, count * size - time)] + [(0, 0)] * (v.ndim - 2)).reshape(
        batch, count, size, *v.shape[2:]
      ),
      1,
      0,
    )
    for v in (hidden, targets)
  )
  scores = jax.lax.map(lambda c: one(*c), chunks)
  first, second, third = (jnp.moveaxis(v, 0, 1).reshape(batch, -1)[:, :time] for v in scores)
  return first, second, third


def value_specs(config: ModelConfig) -> ValueHead:
  """Abstract parameters of the value head; it starts at zero."""
  return ValueHead(
    weight=ParamSpec((config.d_model,), (None,), init="zeros"),
    bias=ParamSpec((), (), init="zeros", decayed=False),
  )


def values(params: ValueHead, hidden: Float[Array, "*lead embed"]) -> Float[Array, "*lead"]:
  """``weight · hidden + bias`` in float32."""
  return jnp.sum(hidden.astype(jnp.float32) * params.weight, axis=-1) + params.bias


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _score(
  hidden: Array,
  weight: Array,
  targets: Array,
  temperature: Array,
  softcap: float | None,
  parts: tuple[str, ...] | None,
) -> tuple[Array, Array, Array]:
  """Log-prob of the targets, entropy and log-normaliser, keeping no logits for the gradient.

  Args:
    hidden: [B, T, embed].
    weight: [embed, vocab].
    targets: int [B, T].
    temperature: scalar; no gradient reaches it.
    softcap: see ``Gemma4Config.logit_softcap``.
    parts: mesh axes that the vocabulary is split over, inside ``jax.shard_map``; ``weight`` is then
      the device's part. None is a whole one.

  Returns:
    Log-probs, entropies and log-normalisers, float32 [B, T].
  """
  return _score_forward(hidden, weight, targets, temperature, softcap, parts)[0]


def _score_forward(
  hidden: Array,
  weight: Array,
  targets: Array,
  temperature: Array,
  softcap: float | None,
  parts: tuple[str, ...] | None,
) -> tuple[tuple[Array, Array, Array], tuple[Array, ...]]:
  logits = _logits(hidden, weight, softcap) / temperature
  top = jnp.max(logits, axis=-1)
  if parts is not None:
    top = jax.lax.pmax(top, parts)
  shifted = logits - top[..., None]
  exps = jnp.exp(shifted)
  total = _over_parts(jnp.sum(exps, axis=-1), parts)
  log_total = jnp.log(total)
  own = targets - _first_id(weight, parts)
  inside = (own >= 0) & (own < weight.shape[1])
  chosen = jnp.take_along_axis(logits, jnp.where(inside, own, 0)[..., None], axis=-1)[..., 0]
  chosen = _over_parts(jnp.where(inside, chosen, 0.0), parts)
  # -sum p log p = log Z - sum p logit.
  entropies = log_total - _over_parts(jnp.sum(exps * shifted, axis=-1), parts) / total
  kept = (hidden, weight, targets, temperature, top + log_total, entropies)
  return (chosen - top - log_total, entropies, top + log_total), kept


def _score_backward(
  softcap: float | None,
  parts: tuple[str, ...] | None,
  kept: tuple[Array, ...],
  gradients: tuple[Array, Array, Array],
) -> tuple[Array, Array, None, Array]:
  """``d log p(y) = [j = y] - p_j``, ``d H = -p_j (log p_j + H)``, ``d log Z = p_j``, by logit j."""
  hidden, weight, targets, temperature, log_total, entropies = kept
  # Each of the devices that hold one result is given its share of the gradient.
  to_log_prob, to_entropy, to_log_total = (_over_parts(g, parts)[..., None] for g in gradients)
  logits = _logits(hidden, weight, softcap)
  log_probs = logits / temperature - log_total[..., None]
  pull = to_log_prob + to_entropy * (log_probs + entropies[..., None]) - to_log_total
  hit = jnp.arange(weight.shape[1]) + _first_id(weight, parts) == targets[..., None]
  slope = jnp.where(hit, to_log_prob, 0.0) - jnp.exp(log_probs) * pull
  if softcap is not None:
    slope = slope * (1.0 - jnp.square(logits / softcap))
  slope = (slope / temperature).astype(hidden.dtype)
  return *linear_gradients(hidden, weight, slope), None, jnp.zeros_like(temperature)


_score.defvjp(_score_forward, _score_backward)


def _over_parts(x: Array, parts: tuple[str, ...] | None) -> Array:
  return x if parts is None else jax.lax.psum(x, parts)


def _first_id(weight: Array, parts: tuple[str, ...] | None) -> Array | int:
  """Id of the first token of a device's part of the vocabulary."""
  return 0 if parts is None else jax.lax.axis_index(parts) * weight.shape[1]


def _output_weight(params: Params | DecodeParams) -> Array:
  return params.embedding.T if params.lm_head is None else params.lm_head


def _logits(hidden: Array, weight: Array, softcap: float | None) -> Array:
  logits = jnp.matmul(
    hidden, weight, precision=precision(hidden.dtype), preferred_element_type=jnp.float32
  )
  return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
