"""What every kind of block owes to its tokens, whatever it computes: one function a property."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from agentjax import models
from tests.models import parity
from tests.models.rows import by_sequence, draw, pack, score_tokens
from tests.models.slots import read_slots

LENGTH = 21  # longer than a block of queries and than any window here


def tokens(config: models.ModelConfig, *sizes: int) -> list[np.ndarray]:
  """Sequences of these lengths."""
  rng = np.random.default_rng(11)
  return [rng.integers(0, config.vocab_size, size) for size in sizes]


def assert_close(got: models.Params, wanted: models.Params) -> None:
  """Gradients that were summed in another order: off by some roundings of their scale."""
  for (path, one), other in zip(
    jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(got), strict=True
  ):
    scale = 1.0 + float(jnp.max(jnp.abs(one)))
    np.testing.assert_allclose(
      other / scale, one / scale, atol=5e-5, err_msg=jax.tree_util.keystr(path)
    )


def check_packing(config: models.ModelConfig) -> None:
  """Log-probs and their gradient do not depend on how sequences and padding fill rows."""
  params = draw(config, seed=4)
  sequences = tokens(config, 13, 6, 9)

  @jax.jit
  def run(params, rows):
    scores = models.score_tokens(params, config, *rows)
    return jnp.sum(jnp.sin(scores.log_probs)), scores.log_probs

  alone = pack(sequences, [[0], [1], [2]], LENGTH)
  packed = pack(sequences, [[None, 1, 0], [2, None], []], LENGTH)
  (_, wanted), gradients = jax.value_and_grad(run, has_aux=True)(params, alone)
  (_, got), packed_gradients = jax.value_and_grad(run, has_aux=True)(params, packed)
  for name, values in by_sequence(wanted, alone).items():
    np.testing.assert_allclose(by_sequence(got, packed)[name], values, atol=1e-5)
  assert_close(packed_gradients, gradients)


def check_decoding(config: models.ModelConfig) -> None:
  """Two uneven extends and single steps give the logits of one pass over the sequence."""
  params = draw(config, seed=5)
  token_ids = jnp.asarray(np.stack(tokens(config, LENGTH, LENGTH)), jnp.int32)
  computed = parity.compute(params, config, token_ids)
  np.testing.assert_allclose(
    computed.decode_logits, computed.logits[:, parity.PREFILL - 1 :], atol=2e-5
  )


def check_slots(config: models.ModelConfig) -> None:
  """What is done to some slots leaves every bit of the others."""
  params = models.prepare_decode_params(draw(config, seed=6), config)
  extend = jax.jit(functools.partial(models.extend, config=config))
  step = jax.jit(functools.partial(models.decode_step, config=config))
  pieces = np.stack(tokens(config, 6, 6, 6, 6))
  cache = models.init_cache(config, 4, 16)
  counts = np.full(4, 6)
  cache = extend(params, cache=cache, rows=np.arange(4), token_ids=pieces, counts=counts).cache
  untouched = np.array([0, 3])
  before = read_slots(cache, untouched)
  rows = np.array([2, 4, 1, 4])  # 4 is no slot
  cache = extend(params, cache=cache, rows=rows, token_ids=pieces, counts=counts // 2).cache
  active = np.array([False, True, True, False])
  cache = step(params, cache=cache, token_ids=pieces[0, :4], active=active).cache
  np.testing.assert_array_equal(cache.lengths, [6, 10, 10, 6])
  jax.tree.map(np.testing.assert_array_equal, read_slots(cache, untouched), before)


def check_remat(config: models.ModelConfig) -> None:
  """Recomputing blocks in the backward pass does not change the gradient."""
  params = draw(config, seed=7)
  rows = pack(tokens(config, 13, 6), [[0], [None, 1]], LENGTH)

  def total(params, config):
    return jnp.sum(jnp.sin(score_tokens(params, config, *rows).log_probs))

  kept = jax.grad(total)(params, config)
  recomputed = jax.grad(total)(params, dataclasses.replace(config, remat="block"))
  assert_close(recomputed, kept)


def check_gradient(config: models.ModelConfig) -> None:
  """Along one direction the gradient is the difference quotient of the loss."""
  params = draw(config, seed=8)
  sequences = tokens(config, 13, 6)
  rows = pack(sequences, [[0], [None, 1]], LENGTH)
  routing = jax.jit(models.forward, static_argnums=1)(params, config, *rows).routing
  # A router's choice has no slope: it stays what it is at the middle.
  experts = None if routing is None else routing.experts
  rng = np.random.default_rng(0)
  direction = jax.tree.map(
    lambda p: jnp.asarray(rng.standard_normal(p.shape) * np.std(p), p.dtype), params
  )

  @jax.jit
  def total(params):
    scores = models.score_tokens(params, config, *rows, experts=experts)
    return jnp.sum(scores.log_probs - 0.3 * scores.entropies)

  def along(step: float) -> float:
    return float(total(jax.tree.map(lambda p, d: p + step * d, params, direction)))

  gradients = jax.grad(total)(params)
  slope = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradients, direction)))
  # Small against the curvature, large against the rounding of a sum of some hundred nats.
  step = 4e-4
  quotient = (8 * (along(step) - along(-step)) - (along(2 * step) - along(-2 * step))) / (12 * step)
  np.testing.assert_allclose(quotient, slope, rtol=1e-2, atol=0.05)
  assert abs(slope) > 1
