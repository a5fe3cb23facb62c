"""Logits of one token in the middle of the stack."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.models.norm import rms_norm
from agentjax.recipes.meds.logit_lens import layer_ends, layer_logits
from tests.models.rows import TINY, draw, forward, pack

_STACK = dataclasses.replace(TINY, pattern="*-*-M")
_run = jax.jit(layer_logits, static_argnums=(1, 6))


@pytest.fixture(scope="module")
def sequences() -> list[np.ndarray]:
  """Token ids of five sequences, 1 to 21 tokens."""
  rng = np.random.default_rng(3)
  return [rng.integers(0, TINY.vocab_size, size) for size in (13, 21, 5, 1, 9)]


def test_a_transformer_layer_is_two_blocks_and_any_other_block_one():
  assert layer_ends("*-*-") == (1, 3)
  assert layer_ends("MM*E-M") == (0, 1, 3, 4, 5)
  assert layer_ends("*") == (0,)


def test_each_logit_is_that_of_the_stack_cut_off_there(sequences):
  params = draw(_STACK, seed=0)
  rows = pack(sequences, [[0, 2, None], [1, 4]], 30)
  places = jnp.array([[2, 5, 9], [1, 3, 0]])
  got = _run(params, _STACK, *rows, places, (1, 3, 4))
  assert got.shape == (2, 3, 3) and got.dtype == jnp.float32
  every = jnp.broadcast_to(jnp.arange(30), (2, 30))
  streams = forward(params, _STACK, *rows, captured=every).captured
  # The first layer as a model of its own, whose hidden states are behind the last norm.
  first = dataclasses.replace(_STACK, pattern="*-")
  one = tuple(jax.tree.map(lambda w: w[:1], block) for block in params.groups[0])
  hidden = forward(dataclasses.replace(params, groups=(one,)), first, *rows).hidden
  normed = rms_norm(streams[1], params.final_norm, _STACK.norm_eps)
  np.testing.assert_allclose(normed, hidden, rtol=1e-4, atol=1e-5)
  head = np.asarray(params.embedding.T if params.lm_head is None else params.lm_head)
  for row, column, place in ((0, 0, 2), (0, 1, 5), (0, 2, 9), (1, 0, 1), (1, 1, 3)):
    token = int(rows.token_ids[row, place])
    expected = [np.asarray(streams[b, row, place - 1]) @ head[:, token] for b in (1, 3, 4)]
    np.testing.assert_allclose(got[row, column], expected, rtol=1e-4, atol=1e-5)


def test_a_packed_neighbour_and_padding_do_not_matter(sequences):
  params = draw(_STACK, seed=0)
  alone = pack(sequences, [[2]], 30)
  behind = pack(sequences, [[0, None, 2]], 30)
  start = len(sequences[0]) + 2
  one = _run(params, _STACK, *alone, jnp.array([[3]]), (1, 4))
  other = _run(params, _STACK, *behind, jnp.array([[start + 3]]), (1, 4))
  np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_blocks_that_are_not_there_are_refused(sequences):
  rows = pack(sequences, [[0]], 30)
  with pytest.raises(ValueError, match="0 to 4"):
    layer_logits(draw(_STACK, seed=0), _STACK, *rows, jnp.array([[1]]), (5,))
