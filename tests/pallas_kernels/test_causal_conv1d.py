"""The causal convolution: values, sequence borders, padding, and the tail it hands on."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from jax.test_util import check_grads

from pallas_kernels.causal_conv1d import api, xla

causal_conv1d = jax.jit(api.causal_conv1d, static_argnames=("activation", "implementation"))
every_implementation = pytest.mark.parametrize("implementation", ["reference", "xla"])
NAMES = ("x", "w", "bias", "initial_tail")
every_activation = pytest.mark.parametrize("activation", [None, "silu"])


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


def packed(time: int, rows: int = 2) -> jax.Array:
  """Sequences of 1, 2, 3, ... tokens; padding at the begin of the first row and at every end."""
  ids = np.repeat(np.arange(1, time + 1), np.arange(1, time + 1))[:time]
  ids = np.stack([ids + 10 * row for row in range(rows)])
  ids[0, :2] = 0
  ids[:, time - 2 :] = 0
  return jnp.asarray(ids, jnp.int32)


def gradients(arguments, loss_seed: int = 1, **settings) -> dict[str, jax.Array]:
  """Gradients of a weighted sum of the output and of a smooth sum of the tail."""

  @jax.jit
  @jax.grad
  def gradient(arguments):
    y, tail = api.causal_conv1d(**arguments, **settings)
    weights = np.random.default_rng(loss_seed).normal(size=y.shape)
    return jnp.sum(y * weights) + jnp.sum(jnp.cos(tail))

  return gradient(arguments)


@pytest.mark.parametrize(
  ("time", "taps", "is_packed", "activation"),
  [
    (1, 4, False, "silu"),
    (12, 4, True, None),
    (12, 2, False, "silu"),
    (32, 3, False, None),
    (37, 4, True, "silu"),
    (49, 4, False, "silu"),
    (49, 2, True, None),
  ],
)
def test_gradients_are_those_of_the_token_loop_whatever_the_tiles(
  time, taps, is_packed, activation, monkeypatch
):
  monkeypatch.setattr(xla, "_TILE", 1)  # tiles of 16 tokens
  arguments = inputs(2, time, taps=taps)
  ids = packed(time) if is_packed else None
  settings = {"activation": activation, "segment_ids": ids}
  expected = gradients(arguments, **settings, implementation="reference")
  for key, value in gradients(arguments, **settings, implementation="xla").items():
    np.testing.assert_allclose(value, expected[key], atol=1e-5, err_msg=key)


@every_implementation
def test_gradients_are_those_of_finite_differences(implementation):
  with jax.enable_x64():
    arguments = {k: v.astype(jnp.float64) for k, v in inputs(1, 6, channels=2).items()}
    ids = jnp.asarray([[1, 1, 2, 2, 2, 0]])

    def run(arguments):
      return api.causal_conv1d(
        **arguments, segment_ids=ids, activation="silu", implementation=implementation
      )

    check_grads(jax.jit(run), (arguments,), order=1, modes=["rev"], atol=1e-7, rtol=1e-7)


@every_implementation
def test_silu_is_that_of_the_sums(implementation):
  arguments = inputs(2, 20)
  ids = packed(20)
  y, tail = causal_conv1d(
    **arguments, segment_ids=ids, activation="silu", implementation=implementation
  )
  z, expected_tail = causal_conv1d(**arguments, segment_ids=ids, implementation=implementation)
  np.testing.assert_allclose(y, jax.nn.silu(z), atol=1e-6)
  np.testing.assert_array_equal(tail, expected_tail)


@every_implementation
@every_activation
def test_what_stands_at_padding_reaches_no_output_and_no_gradient(activation, implementation):
  ids = packed(20)
  clean = inputs(2, 20)
  weights = jnp.where(ids[..., None] != 0, inputs(2, 20)["x"], jnp.nan)

  @jax.jit
  def run(arguments):
    def outputs(arguments):
      return api.causal_conv1d(
        **arguments, segment_ids=ids, activation=activation, implementation=implementation
      )

    (y, tail), pull = jax.vjp(outputs, arguments)
    return y, tail, pull((weights, jnp.ones_like(tail)))

  expected = run(clean)
  poisoned = {**clean, "x": jnp.where(ids[..., None] != 0, clean["x"], jnp.nan)}
  for value, wanted in zip(jax.tree.leaves(run(poisoned)), jax.tree.leaves(expected), strict=True):
    np.testing.assert_array_equal(value, wanted)
  assert all(np.isfinite(v).all() for v in jax.tree.leaves(expected))


@every_implementation
def test_a_row_that_begins_with_padding_has_no_use_for_the_tail(implementation):
  arguments = inputs(1, 6)
  ids = jnp.asarray([[0, 0, 7, 7, 7, 7]], jnp.int32)
  y, tail = causal_conv1d(**arguments, segment_ids=ids, implementation=implementation)
  fresh = {**arguments, "x": arguments["x"][:, 2:], "initial_tail": None}
  expected, expected_tail = causal_conv1d(**fresh, implementation=implementation)
  np.testing.assert_array_equal(y[:, 2:], expected)
  np.testing.assert_array_equal(tail, expected_tail)
  _, kept = causal_conv1d(**arguments, segment_ids=0 * ids, implementation=implementation)
  np.testing.assert_array_equal(kept, arguments["initial_tail"])


def compare_shards() -> None:
  """Rows whole and cut over four devices, with and without segment ids."""
  mesh = jax.make_mesh((4,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
  arguments = inputs(2, 24)
  weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, 24, 5)), jnp.float32)

  def loss(arguments, ids, run):
    y = run(*(arguments[name] for name in NAMES), ids)
    return jnp.sum(y * weights), y

  def whole(x, w, bias, initial_tail, ids):
    return api.causal_conv1d(
      x, w, bias, initial_tail=initial_tail, segment_ids=ids, activation="silu"
    )[0]

  def shard(x, w, bias, initial_tail, ids):
    return api.causal_conv1d(
      x,
      w,
      bias,
      initial_tail=initial_tail,
      segment_ids=ids,
      activation="silu",
      time_axis="context",
    )[0]

  rows, everything = PartitionSpec(None, "context"), PartitionSpec()
  for ids in (packed(24), None):
    cut = jax.shard_map(
      shard,
      mesh=mesh,
      in_specs=(rows, *[everything] * 3, rows),
      out_specs=rows,
    )
    gradient = jax.jit(jax.grad(loss, has_aux=True), static_argnums=2)
    expected, values = (gradient(arguments, ids, run) for run in (whole, cut))
    for name in arguments:
      np.testing.assert_allclose(values[0][name], expected[0][name], atol=1e-5, err_msg=name)
    np.testing.assert_allclose(values[1], expected[1], atol=1e-6)


def test_time_cut_over_a_mesh_axis_changes_neither_values_nor_gradients():
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(pathlib.Path(__file__).resolve().parents[2]),
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
  }
  done = subprocess.run(
    [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr[-4000:]


def test_it_works_under_checkpoint_vmap_and_shard_map(monkeypatch):
  monkeypatch.setattr(xla, "_TILE", 1)
  arguments = inputs(2, 40)
  ids = packed(40)

  def loss(x, w, bias, initial_tail, ids):
    y, tail = api.causal_conv1d(
      x, w, bias, initial_tail=initial_tail, segment_ids=ids, activation="silu"
    )
    return jnp.sum(jnp.sin(y), axis=(1, 2)) + jnp.sum(tail, axis=(1, 2))

  def gradient(run):
    by_order = [arguments[name] for name in NAMES]
    return jax.jit(jax.grad(lambda *a: jnp.sum(run(*a, ids)), argnums=(0, 1, 2, 3)))(*by_order)

  def mapped(x, w, bias, initial_tail, ids):
    row = jax.vmap(
      lambda x, tail, ids: loss(x[None], w, bias, tail[None], ids[None])[0], in_axes=(0, 0, 0)
    )
    return row(x, initial_tail, ids)

  rows, all_of_it = PartitionSpec("data"), PartitionSpec()
  sharded = jax.shard_map(
    loss,
    mesh=jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)),
    in_specs=(rows, all_of_it, all_of_it, rows, rows),
    out_specs=rows,
  )
  expected = gradient(loss)
  for run in (jax.checkpoint(loss), mapped, sharded):
    for value, wanted in zip(gradient(run), expected, strict=True):
      np.testing.assert_allclose(value, wanted, atol=1e-5)


def test_the_backward_pass_holds_no_further_array_as_large_as_its_input():
  x = jax.ShapeDtypeStruct((1, 8192, 256), jnp.float32)
  w = jax.ShapeDtypeStruct((4, 256), jnp.float32)
  ids = jax.ShapeDtypeStruct((1, 8192), jnp.int32)

  def pull(x, w, ids, to_y):
    run = functools.partial(api.causal_conv1d, segment_ids=ids, activation="silu")
    return jax.vjp(lambda x, w: run(x, w)[0], x, w)[1](to_y)

  held = jax.jit(pull).lower(x, w, ids, x).compile().memory_analysis()
  assert held.temp_size_in_bytes < 0.75 * x.size * x.dtype.itemsize


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
    ({"lengths": (3,)}, r"lengths must have shape \(2,\)"),
  ],
)
def test_shapes_that_do_not_fit_are_named(change, message):
  arguments = inputs(2, 6)
  for name, sizes in change.items():
    arguments[name] = jnp.zeros(sizes)
  with pytest.raises(ValueError, match=message):
    causal_conv1d(**arguments)


def test_an_implementation_that_is_not_there_fails_and_lists_the_others():
  with pytest.raises(ValueError, match="'cuda' .*available: 'reference', 'xla'"):
    causal_conv1d(**inputs(1, 2), implementation="cuda")


def test_settings_that_are_not_there_or_exclude_each_other_are_named():
  with pytest.raises(ValueError, match="activation='relu'; allowed: None, 'silu'"):
    api.causal_conv1d(**inputs(1, 2), activation="relu")
  with pytest.raises(ValueError, match="time_axis='context' cuts; mark padding by segment_ids"):
    api.causal_conv1d(**inputs(1, 2), lengths=jnp.ones((1,), jnp.int32), time_axis="context")


if __name__ == "__main__":
  compare_shards()
