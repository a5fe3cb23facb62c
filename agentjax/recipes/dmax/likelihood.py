r"""What a block-diffusion policy learns from, and the bound on the likelihood of its text.

The supervised loss is the mean over two passes of ``-log p(y_t | input)`` at **all** tokens y that
the policy writes, noised or not. In the first pass each of them is a mask with probability .75. In
the second, the masks are replaced by what the first pass finds most likely: the policy's own,
partly wrong tokens (on-policy uniform training). So it learns to fill in masks, and to correct
itself.

The bound on ``log p(y)`` of a block of n tokens is that of all orders in which they can be decided,

  log p(y) >= sum_{k=1}^n E_{|M| = k} [ 1/k sum_{t in M} log p(y_t | y without M) ],

of which one draw of k and of the set M gives an unbiased estimate, ``n/k`` on every token of M. The
blocks before are clean in it. It holds for a policy that decides one token after the other in a
random order within each block; decoding that decides several at once draws from another
distribution.

References: DMax, 2604.08302 (training); block diffusion, 2503.09573, and 2406.03736 (bounds).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from agentjax.models import (
  ModelConfig,
  Params,
  Sight,
  TokenScores,
  forward,
  over_vocabulary,
  readout,
)
from agentjax.models.heads import score_targets
from agentjax.models.stack import ForwardOutput
from agentjax.recipes.dmax.blocks import (
  Text,
  block_sight,
  fill_blocks,
  in_blocks,
  share_mask,
  subset_mask,
)
from agentjax.recipes.dmax.settings import NoiseSettings
from agentjax.training.likelihood import ScoreTokens

Array = jax.Array


def run_noisy(
  params: Params, config: ModelConfig, noisy_ids: Array, text: Text, sight: Sight
) -> ForwardOutput:
  """The pass over [noisy, clean]; hidden states [B, T, embed] are those of the noisy copy."""

  def twice(first: Array, second: Array) -> Array:
    return jnp.concatenate([first, second], axis=1)

  out = forward(
    params,
    config,
    twice(noisy_ids, text.token_ids),
    twice(text.segment_ids, text.segment_ids),
    twice(text.positions, text.positions),
    sight=sight,
  )
  return dataclasses.replace(out, hidden=out.hidden[:, : noisy_ids.shape[1]])


def most_likely(
  params: Params, config: ModelConfig, hidden: Array, settings: NoiseSettings
) -> Array:
  """int32 [B, T], the most likely token at every place; never the mask. No gradient."""
  ids = jnp.arange(config.vocab_size)
  allowed = (ids < settings.vocab_limit) & (ids != settings.mask_id)

  def choose(log_p: Array) -> Array:
    return jnp.argmax(jnp.where(allowed, log_p, -jnp.inf), axis=-1).astype(jnp.int32)

  read = readout(jax.lax.stop_gradient(params), config, jax.lax.stop_gradient(hidden))
  return over_vocabulary(choose, [read], size=config.logits_chunk)


def on_policy_scores(settings: NoiseSettings, *, second_pass: bool) -> ScoreTokens:
  """Log-probs whose mean is the supervised loss.

  Both passes have one mask, so that the first also makes the input of the second.

  Args:
    settings: of the noise.
    second_pass: whether the mean is over two passes, or only the first is made.
  """

  def score(
    params: Params,
    config: ModelConfig,
    token_ids: Array,
    segment_ids: Array,
    positions: Array,
    *,
    marks: Array,
    temperature: float | Array = 1.0,
  ) -> TokenScores:
    size = settings.block
    text, sight = _blocks(settings, token_ids, segment_ids, positions, marks)
    masked = share_mask(text, size, settings.seed, 0, settings.mask_ratio) | text.unknown
    noisy = jnp.where(masked, settings.mask_id, text.token_ids)
    out = run_noisy(params, config, noisy, text, sight)
    found = [score_targets(params, config, out.hidden, text.token_ids, temperature)]
    if second_pass:
      own = most_likely(params, config, out.hidden, settings)
      again = run_noisy(params, config, jnp.where(masked, own, noisy), text, sight)
      found.append(score_targets(params, config, again.hidden, text.token_ids, temperature))
    scale = (text.noise > 0) / len(found)
    scores = tuple(scale * sum(parts[1:], parts[0]) for parts in zip(*found, strict=True))
    return _token_scores(out, scores, text, size)

  return score


def bound_scores(settings: NoiseSettings) -> ScoreTokens:
  """An estimate of the bound, shared out among the tokens; the mean of ``settings.draws`` draws.

  One number of noise and one text give one set of masks: under two sets of parameters the
  estimates differ by the parameters alone.
  """

  def score(
    params: Params,
    config: ModelConfig,
    token_ids: Array,
    segment_ids: Array,
    positions: Array,
    *,
    marks: Array,
    temperature: float | Array = 1.0,
  ) -> TokenScores:
    size = settings.block
    text, sight = _blocks(settings, token_ids, segment_ids, positions, marks)
    total: list[Array] = [jnp.zeros(token_ids.shape)] * 3
    for draw in range(settings.draws):
      masked, scale = subset_mask(text, size, settings.seed, draw)
      noisy = jnp.where(masked | text.unknown, settings.mask_id, text.token_ids)
      out = run_noisy(params, config, noisy, text, sight)
      found = score_targets(params, config, out.hidden, text.token_ids, temperature)
      scale = scale / settings.draws
      total = [so_far + scale * part for so_far, part in zip(total, found, strict=True)]
    return _token_scores(out, tuple(total), text, size)

  return score


def _blocks(
  settings: NoiseSettings, token_ids: Array, segment_ids: Array, positions: Array, marks: Array
) -> tuple[Text, Sight]:
  """Rows whose sequences fill whole blocks, and what [noisy, clean] copies of them see."""
  text = fill_blocks(
    token_ids,
    segment_ids,
    positions,
    marks,
    block=settings.block,
    stop_ids=settings.stop_ids,
  )
  batch, time = token_ids.shape
  return text, block_sight(batch, time, settings.block)


def _token_scores(
  out: ForwardOutput, scores: tuple[Array, ...], text: Text, block: int
) -> TokenScores:
  """With the scores of a fill on the token that it repeats."""
  places = jnp.arange(text.ends.shape[1])

  def fold(x: Array) -> Array:
    filled = in_blocks(jnp.where(places > text.ends, x, 0.0), block)
    more = jnp.repeat(jnp.sum(filled, axis=-1), block, axis=1)
    return jnp.where(places > text.ends, 0.0, x) + jnp.where(places == text.ends, more, 0.0)

  log_probs, entropies, log_normalizers = (fold(x) for x in scores)
  return TokenScores.of(out, (log_probs, entropies, log_normalizers))
