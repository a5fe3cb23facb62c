"""A tiny configuration and packed rows that the model tests share."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agentjax import models
from agentjax.models.lora import LoraConfig, lora_specs
from agentjax.models.spec import is_spec

TINY = models.ModelConfig(
  vocab_size=41,
  d_model=24,
  pattern="ME*-",
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  rope_theta=1e4,
  qk_norm=True,
  attention_block=8,
  d_mlp=40,
  mamba_heads=4,
  mamba_head_dim=8,
  mamba_state=8,
  mamba_groups=2,
  chunk_size=8,
  num_experts=4,
  experts_per_token=2,
  d_expert=16,
  d_shared_expert=16,
  expert_block=8,
  logits_chunk=7,
)


class Rows(NamedTuple):
  """Token rows as ``forward`` takes them, int32 [B, T]."""

  token_ids: jax.Array
  segment_ids: jax.Array
  positions: jax.Array


def pack(sequences: list[np.ndarray], layout: list[list[int | None]], length: int) -> Rows:
  """Rows of ``length``: each lists sequences by index; None leaves two tokens of padding.

  Padding holds random tokens: whatever stands there must not matter.
  """
  rng = np.random.default_rng(7)
  tokens = rng.integers(0, TINY.vocab_size, (len(layout), length))
  segments = np.zeros((len(layout), length), np.int32)
  positions = np.zeros((len(layout), length), np.int32)
  for row, members in enumerate(layout):
    at = 0
    for index in members:
      if index is None:
        at += 2
        continue
      size = len(sequences[index])
      tokens[row, at : at + size] = sequences[index]
      segments[row, at : at + size] = index + 1
      positions[row, at : at + size] = np.arange(size)
      at += size
    assert at <= length
  return Rows(*(jnp.asarray(v, jnp.int32) for v in (tokens, segments, positions)))


def by_sequence(values: jax.Array, rows: Rows) -> dict[int, np.ndarray]:
  """Per-token values of each sequence, by its segment id."""
  ids = np.asarray(rows.segment_ids)
  values = np.asarray(values)
  return {int(i): values[ids == i] for i in np.unique(ids) if i}


def filled_adapters(config: models.ModelConfig, lora: LoraConfig, seed: int = 0) -> models.Params:
  """Adapters whose product is not zero."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda s: jnp.asarray(0.1 * rng.standard_normal(s.shape), s.dtype),
    lora_specs(models.param_specs(config), lora),
    is_leaf=is_spec,
  )


def draw(config: models.ModelConfig, seed: int) -> models.Params:
  """Parameters off their symmetric start: norms, biases and the router bias are not constant.

  Drawn by numpy, which spares every test module the compilation of ``init``.
  """
  rng = np.random.default_rng(seed)
  middle = {"ones": 1.0, "decay_rate": 0.5, "step_bias": -3.0}

  def leaf(spec: models.ParamSpec) -> jax.Array:
    width = spec.scale if spec.init == "normal" else 0.1
    values = middle.get(spec.init, 0.0) + width * rng.standard_normal(spec.shape)
    return jnp.asarray(values, spec.dtype)

  specs = models.param_specs(config)
  return jax.tree.map(leaf, specs, is_leaf=lambda s: isinstance(s, models.ParamSpec))


forward = jax.jit(models.forward, static_argnums=1)
score_tokens = jax.jit(models.score_tokens, static_argnums=1)
