"""Differentiable log-probs of tokens, and log-probs of any response after any prefix."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from agentjax.models.cache import prepare_decode_params
from agentjax.models.config import ModelConfig
from agentjax.models.exact import score_rows
from agentjax.models.heads import Scores, TokenScores, score_targets
from agentjax.models.stack import ForwardOutput, Params, anchored, forward
from agentjax.models.vocabulary import (
  TokenSets,
  over_vocabulary,
  put_tokens,
  readout,
  restricted_scores,
  take_tokens,
)
from agentjax.trajectory.packing import plan_rows

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
  drawn: Any = None,
  kept: Int[Array, "batch kept"] | None = None,
  sets: TokenSets | None = None,
) -> TokenScores:
  """Log-prob and entropy of every token given its past, at ``temperature``.

  The logits of ``config.logits_chunk`` time steps are held at once, and are recomputed in the
  backward pass: [B, T, vocab] never exists.

  With ``config.exact_chunk = C`` the log-probs are, bit for bit, those with which ``decode_step``
  draws: the hidden states, the choices of routers and the scores are those of ``exact.score_rows``.
  The gradient runs the inside of each block again, from the exact stream before it.

  Args:
    params, config, token_ids, segment_ids, positions, experts, drawn: see ``forward``. With
      ``exact_chunk`` C divides T, and every sequence starts at a multiple of C in its row, as
      ``trajectory.packing.pack`` does with ``align=C``.
    temperature: divides the logits; above 0. No gradient reaches it.
    kept: places in their rows of the tokens that are scored, 0 where a row has fewer; None scores
      all. No logits are made for the others, whose scores are 0.
    sets: of the kept tokens, [B, K, places]: scores are those of a softmax over only these tokens,
      and log-normalisers are 0.

  Raises:
    ValueError: ``exact_chunk`` with experts to be replayed, with ``kept``, a T that it does not
      divide, or a mesh of more than one device; sets without kept.
  """
  if sets is not None and kept is None:
    raise ValueError("sets are those of kept tokens; give kept as well.")
  targets = jnp.roll(token_ids, -1, axis=1)
  rows = (token_ids, segment_ids, positions)
  if config.exact_chunk:
    _check_exact(config, experts, kept)
    out, scores = _exact(params, config, *rows, targets, temperature)
  else:
    out = forward(params, config, *rows, experts=experts, drawn=drawn)
    # Token t is predicted from the hidden state before it.
    if kept is None:
      scores = score_targets(params, config, out.hidden, targets, temperature)
    else:
      scores = _kept_scores(params, config, out.hidden, targets, temperature, kept, sets)
  follows = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
  log_probs, entropies, log_normalizers = (
    jnp.pad(jnp.where(follows, v[:, :-1], 0.0), ((0, 0), (1, 0))) for v in scores
  )
  return TokenScores.of(out, (log_probs, entropies, log_normalizers))


def _check_exact(config: ModelConfig, experts: Array | None, kept: Array | None) -> None:
  """Refuses arguments that an exact computation does not support."""
  if experts is not None:
    raise ValueError(
      f"experts were given with exact_chunk={config.exact_chunk}, where training chooses what "
      "sampling chose; leave them out."
    )
  if kept is not None:
    raise ValueError(
      f"kept was given with exact_chunk={config.exact_chunk}, where all tokens are scored as in "
      "sampling; leave it out."
    )


def _kept_scores(
  params: Params,
  config: ModelConfig,
  hidden: Array,
  targets: Array,
  temperature: float | Array,
  kept: Array,
  sets: TokenSets | None,
) -> Scores:
  """Scores [B, T] of the targets before the kept places, 0 for the others."""
  before = jnp.maximum(kept - 1, 0)
  few_hidden, own = take_tokens(hidden, before), take_tokens(targets, before)
  if sets is None:
    few = score_targets(params, config, few_hidden, own, temperature)
  else:
    read = readout(params, config, few_hidden, temperature)
    within = restricted_scores(read, sets, size=config.logits_chunk)
    few = (*within, jnp.zeros_like(within[0]))
  apart = (put_tokens(v, kept, targets.shape[1]) for v in few)
  first, second, third = (jnp.roll(v, -1, axis=1) for v in apart)
  return first, second, third


@dataclasses.dataclass(frozen=True)
class ResponseScores:
  """A model's scores of the n tokens of a response.

  Attributes:
    log_probs, entropies: float32 [n], nats.
    top_ids, top_log_probs: int32 and float32 [n, k], the most likely tokens; None for k = 0.
    distributions: float32 [n, vocab], log-probs of all tokens; None unless asked for.
  """

  log_probs: np.ndarray
  entropies: np.ndarray
  top_ids: np.ndarray | None = None
  top_log_probs: np.ndarray | None = None
  distributions: np.ndarray | None = None


def score_responses(
  params: Params,
  config: ModelConfig,
  prefixes: Sequence[Sequence[int] | np.ndarray],
  responses: Sequence[Sequence[int] | np.ndarray],
  *,
  temperature: float = 1.0,
  top_k: int = 0,
  full: bool = False,
  row_length: int | None = None,
  rows: int = 8,
) -> list[ResponseScores]:
  """``log p(response | prefix)`` token by token, for any pairs of the two.

  The i-th response follows the i-th prefix, which need not be the one it was sampled after: its own
  question, another question (mutual information, ``cross_log_probs``), or only the start token (the
  marginal of 2604.14142). Pairs are packed into rows; states of recurrent blocks start at zero in
  each.

  Args:
    params, config: of the model.
    prefixes: token ids, at least one each, because the first token of a row cannot be predicted.
    responses: token ids, as many as prefixes.
    temperature: divides the logits.
    top_k: most likely tokens to return with each.
    full: also returns whole distributions; of ``rows * row_length`` tokens they are held at once.
    row_length: tokens a row; None takes the longest pair, rounded up to a multiple of 64.
    rows: rows a forward pass.

  Raises:
    ValueError: unequal numbers, or an empty prefix.
    PackingError: a pair is longer than ``row_length``.
  """
  if len(prefixes) != len(responses):
    raise ValueError(f"{len(prefixes)} prefixes for {len(responses)} responses; give one each.")
  empty = next((i for i, prefix in enumerate(prefixes) if not len(prefix)), None)
  if empty is not None:
    raise ValueError(
      f"prefix {empty} is empty; allowed: at least one token, such as the one that starts every "
      "conversation."
    )
  joined = zip(prefixes, responses, strict=True)
  pairs = [np.concatenate(pair).astype(np.int32) for pair in joined]
  lengths = [len(pair) for pair in pairs]
  if not lengths:
    return []
  width = row_length or -(-max(lengths) // 64) * 64
  if config.exact_chunk:
    config = dataclasses.replace(config, exact_chunk=0).freeze()
  plan = plan_rows(lengths, width)
  count = -(-plan.num_rows // rows) * rows
  ids, segments, positions = (np.zeros((count, width), np.int32) for _ in range(3))
  for i, pair in enumerate(pairs):
    span = slice(int(plan.starts[i]), int(plan.starts[i]) + len(pair))
    ids[plan.rows[i], span], segments[plan.rows[i], span] = pair, i + 1
    positions[plan.rows[i], span] = np.arange(len(pair))
  parts = []
  for at in range(0, count, rows):
    given = (v[at : at + rows] for v in (ids, segments, positions))
    parts.append(jax.device_get(_describe(params, config, *given, temperature, top_k, full)))
  every = [None if v[0] is None else np.concatenate(v) for v in zip(*parts, strict=True)]

  def own(i: int) -> ResponseScores:
    end = int(plan.starts[i]) + lengths[i]
    span = slice(end - len(responses[i]), end)
    found = [None if v is None else v[plan.rows[i], span] for v in every]
    return ResponseScores(*found)  # type: ignore[arg-type]

  return [own(i) for i in range(len(pairs))]


def cross_log_probs(
  params: Params,
  config: ModelConfig,
  prefixes: Sequence[Sequence[int] | np.ndarray],
  responses: Sequence[Sequence[int] | np.ndarray],
  **options: int | float | None,
) -> Float[np.ndarray, "responses prefixes"]:
  """``sum_t log p(response_i | prefix_j)``, nats, of every response after every prefix.

  Input of the mutual-information estimates of RAGEN-2 (2604.06268). ``options`` are those of
  ``score_responses``.
  """
  every = score_responses(
    params,
    config,
    [prefix for _ in responses for prefix in prefixes],
    [response for response in responses for _ in prefixes],
    **options,  # type: ignore[arg-type]
  )
  sums = [float(scores.log_probs.sum(dtype=np.float64)) for scores in every]
  return np.array(sums).reshape(len(responses), len(prefixes))


@functools.partial(jax.jit, static_argnames=("config", "top_k", "full"))
def _describe(
  params: Params,
  config: ModelConfig,
  token_ids: Array,
  segment_ids: Array,
  positions: Array,
  temperature: float,
  top_k: int,
  full: bool,
) -> tuple[Array | None, ...]:
  """Fields of ResponseScores [B, T, ...], aligned with the token."""
  scores = score_tokens(params, config, token_ids, segment_ids, positions, temperature=temperature)
  top: tuple[Array | None, Array | None] = (None, None)
  whole = None
  read = readout(params, config, scores.hidden, temperature)
  if top_k:
    values, ids = over_vocabulary(
      lambda log_p: jax.lax.top_k(log_p, top_k), [read], size=config.logits_chunk
    )
    top = (jnp.roll(ids, 1, axis=1), jnp.roll(values, 1, axis=1))
  if full:
    whole = over_vocabulary(lambda log_p: log_p, [read], size=config.logits_chunk)
    whole = jnp.roll(whole, 1, axis=1)
  return scores.log_probs, scores.entropies, *top, whole


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
  return dataclasses.replace(out, hidden=hidden), scores
