"""Log-probs of tokens, of which a gradient may flow back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Int

from agentjax.models.cache import prepare_decode_params
from agentjax.models.config import ModelConfig
from agentjax.models.exact import score_rows
from agentjax.models.heads import Scores, TokenScores, score_targets
from agentjax.models.stack import ForwardOutput, Params, anchored, forward

Array = jax.Array


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

  With ``config.exact_chunk = C`` the log-probs are, bit for bit, those with which ``decode_step``
  draws: the hidden states, the choices of routers and the scores are those of ``exact.score_rows``.
  The gradient runs the inside of each block again, from the exact stream before it.

  Args:
    params, config, token_ids, segment_ids, positions, experts, depths: see ``forward``. With
      ``exact_chunk`` C divides T, and every sequence starts at a multiple of C in its row, as
      ``trajectory.packing.pack`` does with ``align=C``.
    temperature: divides the logits; above 0. No gradient reaches it.

  Raises:
    ValueError: ``exact_chunk`` with experts to be replayed, a T that it does not divide, or a mesh
      of more than one device.
  """
  targets = jnp.roll(token_ids, -1, axis=1)
  rows = (token_ids, segment_ids, positions)
  if config.exact_chunk:
    if experts is not None:
      raise ValueError(
        f"experts were given with exact_chunk={config.exact_chunk}, where training chooses what "
        "sampling chose; leave them out."
      )
    out, scores = _exact(params, config, *rows, targets, temperature)
  else:
    out = forward(params, config, *rows, experts=experts, depths=depths)
    # Token t is read off the hidden state before it.
    scores = score_targets(params, config, out.hidden, targets, temperature)
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


def _exact(
  params: Params,
  config: ModelConfig,
  token_ids: Array,
  segment_ids: Array,
  positions: Array,
  targets: Array,
  temperature: float | Array,
) -> tuple[ForwardOutput, Scores]:
  """The pass and the scores of all targets, by ``exact.score_rows``; their gradient by blocks."""
  if token_ids.shape[1] % config.exact_chunk:
    raise ValueError(
      f"rows of {token_ids.shape[1]} tokens; allowed: a multiple of "
      f"model.exact_chunk={config.exact_chunk}."
    )
  devices = jax.sharding.get_abstract_mesh().size
  if devices > 1:
    raise ValueError(
      f"model.exact_chunk={config.exact_chunk} on a mesh of {devices} devices; allowed: one "
      "device, as sampling runs on one, or model.exact_chunk=0."
    )
  rows = (token_ids, segment_ids, positions)
  fixed = prepare_decode_params(jax.lax.stop_gradient(params), config)
  divisor = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
  known = score_rows(fixed, config, *rows, targets, divisor)
  out = forward(params, config, *rows, experts=known.experts, anchors=known.streams)
  hidden = anchored(out.hidden, known.hidden)
  scores = score_targets(
    params,
    config,
    hidden,
    targets,
    temperature,
    known=(known.log_probs, known.entropies, known.log_normalizers),
  )
  return ForwardOutput(hidden, out.routing, out.max_scores), scores
