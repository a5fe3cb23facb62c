"""The causal convolution: values, sequence borders, padding, and the tail it hands on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.causal_conv1d import IMPLEMENTATIONS, api

causal_conv1d = jax.jit(api.causal_conv1d, static_argnames="implementation")
every_implementation = pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))


def inputs(batch: int, time: int, channels: int = 5, taps: int = 4) -> dict[str, jax.Array]:
  rng = np.random.default_rng(0)

  def normal(*sizes: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=sizes), jnp.float32)

  return {
    "x": normal(batch, time, channels),
    "w": normal(taps, channels),
    "bias": normal(channels),
    "initial_tail": normal(batch, taps - 1, channels),
  }


def numpy_filter(x, w, bias, initial_tail, segment_ids):
  """Walks each row with a window; returns outputs (0 at padding) and the last window."""
  x, w, bias = (np.asarray(v, np.float64) for v in (x, w, bias))
  tails = np.array(initial_tail, np.float64)
  y = np.zeros_like(x)
  for row in range(x.shape[0]):
    previous = None
    for t in range(x.shape[1]):
      segment = int(segment_ids[row, t])
      if segment == 0:
        continue
      if previous is not None and segment != previous:
        tails[row] = 0.0
      previous = segment
      window = np.concatenate([tails[row], x[row, t][None]])
      y[row, t] = (window * w).sum(axis=0) + bias
      tails[row] = window[1:]
  return y, tails


@every_implementation
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize(
  "ids",
  [
    [[1], [1]],
    [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]],
    [[7, 7, 3, 9, 9, 9, 9], [1, 1, 1, 1, 1, 2, 2]],
    [[7, 7, 3, 9, 9, 0, 0], [0, 0, 0, 0, 0, 0, 0]],
    [[5, 0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7]],
  ],
)
def test_values_and_tail_are_those_of_a_sliding_window(ids, taps, implementation):
  segment_ids = np.asarray(ids, np.int32)
  arguments = inputs(*segment_ids.shape, taps=taps)
  y, tail = causal_conv1d(**arguments, segment_ids=segment_ids, implementation=implementation)
  expected, expected_tail = numpy_filter(**arguments, segment_ids=segment_ids)
  np.testing.assert_allclose(y, expected, atol=1e-5)
  np.testing.assert_array_equal(tail, expected_tail.astype(np.float32))


@every_implementation
def test_lengths_mean_right_padding(implementation):
  arguments = inputs(4, 6)
  lengths = jnp.asarray([0, 1, 4, 6])
  ids = (np.arange(6) < np.asarray(lengths)[:, None]).astype(np.int32)
  y, tail = causal_conv1d(**arguments, lengths=lengths, implementation=implementation)
  expected, expected_tail = numpy_filter(**arguments, segment_ids=ids)
  np.testing.assert_allclose(y, expected, atol=1e-5)
  np.testing.assert_array_equal(tail, expected_tail.astype(np.float32))
  np.testing.assert_array_equal(tail[0], arguments["initial_tail"][0])
  # Lengths cut a row that has segment ids, too.
  packed = np.asarray([[1, 1, 2, 2, 2, 2]] * 4, np.int32)
  y, tail = causal_conv1d(
    **arguments, segment_ids=packed, lengths=lengths, implementation=implementation
  )
  expected, expected_tail = numpy_filter(**arguments, segment_ids=packed * ids)
  np.testing.assert_allclose(y, expected, atol=1e-5)
  np.testing.assert_array_equal(tail, expected_tail.astype(np.float32))


@every_implementation
@pytest.mark.parametrize("cuts", [(1,), (5,), (1, 2, 3, 4)])
def test_calls_that_hand_on_the_tail_equal_one_call_bit_for_bit(cuts, implementation):
  arguments = inputs(2, 9)
  tail = arguments.pop("initial_tail")
  expected, expected_tail = causal_conv1d(
    **arguments, initial_tail=tail, implementation=implementation
  )
  x = arguments.pop("x")
  pieces = []
  for begin, end in zip((0, *cuts), (*cuts, 9), strict=True):
    y, tail = causal_conv1d(
      x[:, begin:end], **arguments, initial_tail=tail, implementation=implementation
    )
    pieces.append(y)
  np.testing.assert_array_equal(jnp.concatenate(pieces, axis=1), expected)
  np.testing.assert_array_equal(tail, expected_tail)


@every_implementation
def test_no_gradient_crosses_a_sequence_border_or_reaches_padding(implementation):
  arguments = inputs(1, 10)
  ids = jnp.asarray([[4] * 3 + [2] * 4 + [0] * 3], jnp.int32)

  @jax.jit
  @jax.grad
  def gradient(x):
    y, tail = causal_conv1d(**{**arguments, "x": x}, segment_ids=ids, implementation=implementation)
    return jnp.sum(jnp.square(y[:, 3:])) + jnp.sum(jnp.square(tail))

  changed = np.asarray(jnp.any(gradient(arguments["x"]) != 0, axis=(0, 2)))
  np.testing.assert_array_equal(changed, [False] * 3 + [True] * 4 + [False] * 3)


def test_gradients_are_those_of_the_token_loop():
  arguments = inputs(2, 12)
  ids = jnp.asarray([[1] * 5 + [2] * 7, [3] * 2 + [4] * 8 + [0] * 2], jnp.int32)

  @jax.grad
  def gradient(arguments, implementation):
    y, tail = causal_conv1d(**arguments, segment_ids=ids, implementation=implementation)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(tail))

  expected = gradient(arguments, "reference")
  for key, value in gradient(arguments, "xla").items():
    np.testing.assert_allclose(value, expected[key], atol=1e-5, err_msg=key)


@every_implementation
def test_a_row_has_the_same_bits_in_any_place(implementation):
  arguments = inputs(5, 7)
  order = np.array([3, 0, 4, 2, 1])
  moved = {k: v[order] if k in ("x", "initial_tail") else v for k, v in arguments.items()}
  y, tail = causal_conv1d(**arguments, implementation=implementation)
  moved_y, moved_tail = causal_conv1d(**moved, implementation=implementation)
  np.testing.assert_array_equal(moved_y, y[order])
  np.testing.assert_array_equal(moved_tail, tail[order])


def test_bfloat16_inputs_are_summed_in_float32():
  arguments = inputs(2, 8)
  half = {k: v.astype(jnp.bfloat16) for k, v in arguments.items()}
  y, tail = causal_conv1d(**half)
  assert (y.dtype, tail.dtype) == (jnp.bfloat16, jnp.bfloat16)
  expected, _ = causal_conv1d(**{k: v.astype(jnp.float32) for k, v in half.items()})
  np.testing.assert_array_equal(y, expected.astype(jnp.bfloat16))


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"w": (4, 6)}, r"w must be \[K >= 2, C=5\], got \(4, 6\)"),
    ({"w": (1, 5)}, "K >= 2"),
    ({"initial_tail": (2, 2, 5)}, r"initial_tail must have shape \(2, 3, 5\)"),
    ({"x": (2, 0, 5)}, "without an empty axis"),
  ],
)
def test_shapes_that_do_not_fit_are_named(change, message):
  arguments = inputs(2, 6)
  for name, sizes in change.items():
    arguments[name] = jnp.zeros(sizes)
  with pytest.raises(ValueError, match=message):
    causal_conv1d(**arguments)


def test_an_implementation_that_is_not_there_fails_and_lists_the_others():
  with pytest.raises(ValueError, match="available: 'reference', 'xla'"):
    causal_conv1d(**inputs(1, 2), implementation="pallas_gpu")
