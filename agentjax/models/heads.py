"""Outputs computed from the hidden states: logits, token log-probs and entropies, values."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from agentjax.models.chunks import map_time
from agentjax.models.config import ModelConfig
from agentjax.models.linear import linear_gradients, precision
from agentjax.models.spec import ParamSpec, Weight
from agentjax.models.stack import DecodeParams, ForwardOutput, Params
from agentjax.sharding import LOGICAL_AXES, partition_spec

Array = jax.Array

Scores = tuple[Array, Array, Array]  # log-probs, entropies, log-normalisers

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

  @classmethod
  def of(cls, out: ForwardOutput, scores: Scores) -> TokenScores:
    """A pass with the scores of its tokens."""
    own = {field.name: getattr(out, field.name) for field in dataclasses.fields(ForwardOutput)}
    log_probs, entropies, log_normalizers = scores
    return cls(log_probs=log_probs, entropies=entropies, log_normalizers=log_normalizers, **own)


@flax.struct.dataclass
class ValueHead:
  """Linear read-out of an expected return."""

  weight: Weight  # [embed] float32
  bias: Weight  # [] float32


def compute_logits(
  params: Params | DecodeParams, config: ModelConfig, hidden: Float[Array, "*lead embed"]
) -> Float[Array, "*lead vocab"]:
  """Float32 logits of the next token."""
  return output_logits(hidden, output_weight(params).astype(hidden.dtype), config.logit_softcap)


def distribution(
  logits: Float[Array, "rows vocab"], temperatures: Float[Array, " rows"]
) -> tuple[Float[Array, "rows vocab"], Float[Array, " rows"], Float[Array, " rows"]]:
  """``z = logits / temperature``, its logsumexp and the entropy of its softmax in nats, float32."""
  scaled = logits.astype(jnp.float32) / temperatures[:, None]
  peak = jnp.max(scaled, axis=-1)
  weights = jnp.exp(scaled - peak[:, None])
  total = jnp.sum(weights, axis=-1)
  normalizer = peak + jnp.log(total)
  return scaled, normalizer, normalizer - jnp.sum(weights * scaled, axis=-1) / total


def score_targets(
  params: Params,
  config: ModelConfig,
  hidden: Float[Array, "batch time embed"],
  targets: Int[Array, "batch time"],
  temperature: float | Array = 1.0,
  known: Scores | None = None,
) -> Scores:
  """Log-prob of the token that each hidden state predicts, entropy and log-normaliser, float32.

  In chunks of ``config.logits_chunk`` time steps, see ``score_tokens``. Over a mesh every device
  scores its own tokens with its part of the vocabulary, so that the weight is gathered, and its
  gradient summed, only once.

  Args:
    params, config, hidden, targets: of the model.
    temperature: divides the logits.
    known: the result, if it is known already; then only the gradient is computed. On one device.
  """
  weight, axes = output_weight(params), ("embed", "vocab")
  score = functools.partial(_score_chunks, softcap=config.logit_softcap, size=config.logits_chunk)
  divisor = jnp.asarray(temperature, jnp.float32)
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return score(hidden, weight.astype(hidden.dtype), targets, divisor, known=known)
  assert known is None

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
  known: Scores | None = None,
) -> Scores:
  """``_score`` of ``size`` time steps at once."""
  time = targets.shape[1]
  given = (hidden, targets) if known is None else (hidden, targets, *known)

  def one(hidden: Array, targets: Array, *known: Array) -> Scores:
    scores = known if known else None
    return _score(hidden, weight, targets, temperature, scores, softcap, parts)

  if time <= _UNROLLED_CHUNKS * size:
    pieces = [one(*(v[:, at : at + size] for v in given)) for at in range(0, time, size)]
    first, second, third = (jnp.concatenate(v, axis=1) for v in zip(*pieces, strict=True))
    return first, second, third
  # A loop holds one gradient of the weight; unrolled, there may be as many as chunks.
  return map_time(lambda given: one(*given), given, size)


def value_specs(config: ModelConfig) -> ValueHead:
  """Abstract parameters of the value head; it starts at zero."""
  return ValueHead(
    weight=ParamSpec((config.d_model,), (None,), init="zeros"),
    bias=ParamSpec((), (), init="zeros", decayed=False),
  )


def values(params: ValueHead, hidden: Float[Array, "*lead embed"]) -> Float[Array, "*lead"]:
  """``weight · hidden + bias`` in float32."""
  return jnp.sum(hidden.astype(jnp.float32) * params.weight, axis=-1) + params.bias


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _score(
  hidden: Array,
  weight: Array,
  targets: Array,
  temperature: Array,
  known: Scores | None,
  softcap: float | None,
  parts: tuple[str, ...] | None,
) -> tuple[Array, Array, Array]:
  """Log-prob of the targets, entropy and log-normaliser, keeping no logits for the gradient.

  Args:
    hidden: [B, T, embed].
    weight: [embed, vocab].
    targets: int [B, T].
    temperature: scalar; no gradient reaches it.
    known: the results, where they are known.
    softcap: see ``Gemma4Config.logit_softcap``.
    parts: mesh axes that the vocabulary is split over, inside ``jax.shard_map``; ``weight`` is then
      the device's part. None is a whole one.

  Returns:
    Log-probs, entropies and log-normalisers, float32 [B, T].
  """
  return _score_forward(hidden, weight, targets, temperature, known, softcap, parts)[0]


def _score_forward(
  hidden: Array,
  weight: Array,
  targets: Array,
  temperature: Array,
  known: Scores | None,
  softcap: float | None,
  parts: tuple[str, ...] | None,
) -> tuple[Scores, tuple[Any, ...]]:
  if known is not None:
    _, entropies, log_total = known
    return known, (hidden, weight, targets, temperature, log_total, entropies, known)
  logits = output_logits(hidden, weight, softcap) / temperature
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
  kept = (hidden, weight, targets, temperature, top + log_total, entropies, None)
  return (chosen - top - log_total, entropies, top + log_total), kept


def _score_backward(
  softcap: float | None,
  parts: tuple[str, ...] | None,
  kept: tuple[Any, ...],
  gradients: Scores,
) -> tuple[Any, ...]:
  """``d log p(y) = [j = y] - p_j``, ``d H = -p_j (log p_j + H)``, ``d log Z = p_j``, by logit j."""
  hidden, weight, targets, temperature, log_total, entropies, known = kept
  # Each of the devices that hold one result gets its share of the gradient.
  to_log_prob, to_entropy, to_log_total = (_over_parts(g, parts)[..., None] for g in gradients)
  logits = output_logits(hidden, weight, softcap)
  log_probs = logits / temperature - log_total[..., None]
  pull = to_log_prob + to_entropy * (log_probs + entropies[..., None]) - to_log_total
  hit = jnp.arange(weight.shape[1]) + _first_id(weight, parts) == targets[..., None]
  slope = jnp.where(hit, to_log_prob, 0.0) - jnp.exp(log_probs) * pull
  if softcap is not None:
    slope = slope * (1.0 - jnp.square(logits / softcap))
  slope = (slope / temperature).astype(hidden.dtype)
  nothing = jax.tree.map(jnp.zeros_like, (temperature, known))
  return *linear_gradients(hidden, weight, slope), None, *nothing


_score.defvjp(_score_forward, _score_backward)


def _over_parts(x: Array, parts: tuple[str, ...] | None) -> Array:
  return x if parts is None else jax.lax.psum(x, parts)


def _first_id(weight: Array, parts: tuple[str, ...] | None) -> Array | int:
  """Id of the first token of a device's part of the vocabulary."""
  return 0 if parts is None else jax.lax.axis_index(parts) * weight.shape[1]


def output_weight(params: Params | DecodeParams) -> Array:
  return params.embedding.T if params.lm_head is None else params.lm_head


def output_logits(hidden: Array, weight: Array, softcap: float | None) -> Array:
  logits = jnp.matmul(
    hidden, weight, precision=precision(hidden.dtype), preferred_element_type=jnp.float32
  )
  return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
