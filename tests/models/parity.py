"""Ours beside what `transformers` computed: what the two parity tests share."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agentjax import models

# Two ways to extend an empty slot to 13 tokens: [chunks, rows].
COUNTS = np.array([[5, 8], [8, 5]], np.int32)
PREFILL = int(COUNTS[:, 0].sum())
# Largest difference over the largest expected magnitude. Either side sums in float32 in its own
# order; the library's cached decoding differs from its own full pass by 4e-7 to 1.3e-6.
TOLERANCE = 5e-6


class Computed(NamedTuple):
  """Float32: logits [B, T, vocab], log-probs [B, T], cached logits from token PREFILL - 1 on."""

  logits: jax.Array
  log_probs: jax.Array
  decode_logits: jax.Array


@functools.partial(jax.jit, static_argnums=1)
def compute(params: models.Params, config: models.ModelConfig, token_ids: jax.Array) -> Computed:
  """A full pass, and a cached one: two chunks of uneven lengths, then one token at a time."""
  rows, length = token_ids.shape
  segment_ids = jnp.ones_like(token_ids)
  positions = jnp.broadcast_to(jnp.arange(length), token_ids.shape)
  scores = models.score_tokens(params, config, token_ids, segment_ids, positions)

  decode_params = models.prepare_decode_params(params, config)
  slots = jnp.arange(rows)
  counts = jnp.asarray(COUNTS)
  starts = jnp.cumsum(counts, axis=0) - counts
  chunks = jnp.take_along_axis(
    token_ids[None], starts[..., None] + jnp.arange(COUNTS.max()), axis=2, mode="clip"
  )

  def append(cache: models.Cache, chunk: tuple[jax.Array, jax.Array]):
    out = models.extend(decode_params, config, cache, slots, *chunk)
    return out.cache, out.logits

  def step(cache: models.Cache, tokens: jax.Array):
    active = jnp.ones(tokens.shape, bool)
    out = models.decode_step(decode_params, config, cache, tokens, active)
    return out.cache, out.logits

  cache = models.init_cache(config, rows, length)
  cache, prefilled = jax.lax.scan(append, cache, (chunks, counts))
  _, decoded = jax.lax.scan(step, cache, token_ids[:, PREFILL:].T)
  return Computed(
    logits=models.compute_logits(params, config, scores.hidden),
    log_probs=scores.log_probs,
    decode_logits=jnp.concatenate([prefilled[-1:], decoded]).swapaxes(0, 1),
  )


def distances(computed: Computed, expected: Mapping[str, np.ndarray]) -> dict[str, float]:
  """Largest difference of each quantity over the largest expected magnitude."""
  wanted = Computed(
    logits=expected["logits"],
    log_probs=expected["log_probs"],
    decode_logits=expected["decode_logits"][:, PREFILL - 1 :],
  )
  return {
    name: float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())
    for name, ours, theirs in zip(Computed._fields, computed, wanted, strict=True)
  }


def stored_numbers(directory: pathlib.Path) -> dict[str, np.ndarray]:
  """Numbers of each tensor of a checkpoint that the forward pass reads, flat, float32.

  LongCat-Flash's identity experts are left out: they have gate and up rows, which nothing reads,
  and no down projection.
  """
  data = (directory / "model.safetensors").read_bytes()
  start = 8 + int.from_bytes(data[:8], "little")
  header = json.loads(data[8:start])
  dtypes = {"F32": jnp.float32, "BF16": jnp.bfloat16}
  numbers: dict[str, np.ndarray] = {}
  for name, entry in header.items():
    expert = name.removesuffix(".gate_proj.weight").removesuffix(".up_proj.weight")
    identity = expert[-1].isdigit() and f"{expert}.down_proj.weight" not in header
    if name == "__metadata__" or identity:
      continue
    first, last = entry["data_offsets"]
    stored = np.frombuffer(data[start + first : start + last], dtypes[entry["dtype"]])
    numbers[name] = stored.astype(np.float32)
  return numbers
