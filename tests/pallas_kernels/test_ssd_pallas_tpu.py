"""The Mosaic kernel of SSD: interpreted values and gradients, and compilation for every TPU."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels.ssd import pallas_tpu, reference, ssd
from pallas_kernels.ssd.shapes import CHECKED, Shape
from tests.pallas_kernels.topologies import CHIPS, compile_for, needs_libtpu

PACKED = Shape(2, 37, 8, 64, 2, 16, 16)  # two heads of 64 fill the lanes
SMALL = Shape(4, 19, 4, 8, 2, 16, 8)
NAMES = ("x", "dt", "a", "b", "c", "d", "initial_state")


def inputs(shape: Shape, seed: int = 0) -> dict[str, jax.Array]:
  """Random arguments; the step sizes reach from almost none to strong decay."""
  rng = np.random.default_rng(seed)
  batch, time, heads, width, groups, size, _ = shape

  def normal(*sizes: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=sizes), jnp.float32)

  return {
    "x": normal(batch, time, heads, width),
    "dt": jax.nn.softplus(2.0 * normal(batch, time, heads) - 1.0),
    "a": -jnp.exp(normal(heads)),
    "b": normal(batch, time, groups, size),
    "c": normal(batch, time, groups, size),
    "d": normal(heads),
    "initial_state": normal(batch, heads, width, size),
  }


def resets(shape: Shape) -> jax.Array:
  """Inside chunks, on both sides of their edges, twice in a row; none in the last row."""
  marks = np.zeros((shape.batch, shape.time), bool)
  for t in (1, 3, shape.chunk - 1, shape.chunk, 2 * shape.chunk, 2 * shape.chunk + 1):
    marks[:, t : t + 1] = True
  if shape.batch > 1:
    marks[-1] = False
  return jnp.asarray(marks)


def scan(implementation, arguments, marks, chunk: int) -> tuple[jax.Array, jax.Array]:
  """An implementation of named arguments; a traced dict has its keys in another order."""
  return implementation(*(arguments.get(k) for k in NAMES), marks, chunk)


tpu_scan = jax.jit(functools.partial(scan, pallas_tpu.ssd), static_argnums=2)


def results(implementation, shape: Shape, arguments, marks) -> dict[str, jax.Array]:
  """y, the last state and the gradients of all that has one, for random cotangents."""
  rng = np.random.default_rng(1)
  to_y = jnp.asarray(rng.normal(size=arguments["x"].shape), jnp.float32)
  to_state = jnp.asarray(rng.normal(size=arguments["initial_state"].shape), jnp.float32)

  def loss(arguments):
    y, state = scan(implementation, arguments, marks, shape.chunk)
    return jnp.sum(y * to_y) + jnp.sum(state * to_state), {"y": y, "state": state}

  gradients, values = jax.jit(jax.grad(loss, has_aux=True))(arguments)
  return values | gradients


def assert_close(actual, expected, tolerance: float) -> None:
  assert actual.keys() == expected.keys()
  for key, value in expected.items():
    value = np.asarray(value, np.float32)
    scale = 1.0 + np.max(np.abs(value))
    actual_value = np.asarray(actual[key], np.float32)
    np.testing.assert_allclose(actual_value / scale, value / scale, atol=tolerance, err_msg=key)


@pytest.mark.parametrize("shape", [*CHECKED.values(), PACKED], ids=[*CHECKED, "packed"])
def test_values_and_gradients_are_those_of_the_token_loop(shape):
  arguments, marks = inputs(shape), resets(shape)
  expected = results(reference.ssd, shape, arguments, marks)
  assert_close(results(pallas_tpu.ssd, shape, arguments, marks), expected, 2e-5)


def test_without_resets_and_skip():
  shape = CHECKED["a rest"]
  arguments = inputs(shape)
  del arguments["d"]
  expected = results(reference.ssd, shape, arguments, None)
  assert_close(results(pallas_tpu.ssd, shape, arguments, None), expected, 2e-5)


def test_blocks_that_share_a_group_add_up(monkeypatch):
  shape = Shape(1, 20, 8, 64, 1, 16, 16)
  arguments, marks = inputs(shape), resets(shape)
  monkeypatch.setattr(pallas_tpu, "_VMEM_BYTES", 0)  # so that the smallest blocks are taken
  expected = results(reference.ssd, shape, arguments, marks)
  assert_close(results(pallas_tpu.ssd, shape, arguments, marks), expected, 2e-5)


# bfloat16: operands of the products are rounded to 8 bits of significand.
@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)])
def test_relative_error_against_float64(dtype, bound):
  arguments, marks = inputs(PACKED), resets(PACKED)
  arguments |= {k: arguments[k].astype(dtype) for k in ("x", "b", "c")}
  actual = results(pallas_tpu.ssd, PACKED, arguments, marks)
  expected_dtypes = {k: dtype if k in ("y", "x", "b", "c") else jnp.float32 for k in actual}
  assert {k: v.dtype for k, v in actual.items()} == expected_dtypes
  with jax.enable_x64(True):
    exact = {k: v.astype(jnp.float64) for k, v in arguments.items()}
    expected = results(reference.ssd, PACKED, exact, marks)
  for key, value in expected.items():
    error = np.asarray(actual[key], np.float64) - np.asarray(value)
    assert np.linalg.norm(error) < bound * np.linalg.norm(value), key


def test_nothing_crosses_a_reset():
  shape = Shape(1, 24, 2, 4, 1, 8, 8)
  arguments = inputs(shape)
  marks = jnp.zeros((1, 24), bool).at[0, 6].set(True)

  def loss(arguments):
    y, _ = tpu_scan(arguments, marks, 8)
    return jnp.sum(jnp.square(y[:, 6:]))

  gradients = jax.grad(loss)(arguments)
  assert float(jnp.max(jnp.abs(gradients["initial_state"]))) == 0.0
  for key in ("x", "dt", "b", "c"):
    assert float(jnp.max(jnp.abs(gradients[key][:, :6]))) == 0.0, key
    assert float(jnp.max(jnp.abs(gradients[key][:, 6:]))) > 0.0, key
  other = arguments | {"x": arguments["x"].at[:, :6].add(100.0)}
  y, state = tpu_scan(arguments, marks, 8)
  other_y, other_state = tpu_scan(other, marks, 8)
  np.testing.assert_array_equal(other_y[:, 6:], y[:, 6:])
  np.testing.assert_array_equal(other_state, state)


def test_tokens_without_a_step_leave_the_state_bit_for_bit():
  arguments = inputs(SMALL)
  arguments["dt"] = jnp.zeros_like(arguments["dt"])
  _, state = tpu_scan(arguments, None, SMALL.chunk)
  np.testing.assert_array_equal(state, arguments["initial_state"])


def test_a_row_has_the_same_bits_in_any_place():
  arguments = inputs(SMALL)
  order = np.array([2, 0, 3, 1])
  y, state = tpu_scan(arguments, None, SMALL.chunk)
  moved = {k: v if k in ("a", "d") else v[order] for k, v in arguments.items()}
  moved_y, moved_state = tpu_scan(moved, None, SMALL.chunk)
  np.testing.assert_array_equal(moved_y, y[order])
  np.testing.assert_array_equal(moved_state, state[order])


def test_the_gradient_of_a_rate_that_forgets_everything_is_no_rounding_noise():
  shape = Shape(1, 24, 2, 4, 1, 8, 8)
  arguments = inputs(shape)
  arguments["dt"] = jnp.full_like(arguments["dt"], 4.0)
  arguments["a"] = jnp.asarray([-12.5, -1e-6])
  arguments["x"] = 100.0 * arguments["x"]
  gradients = results(pallas_tpu.ssd, shape, arguments, None)
  expected = results(reference.ssd, shape, arguments, None)
  # exp(-50) times sums of about 1e6; a difference of sums over y and x would leave about 1.
  assert abs(gradients["a"][0]) < 1e-12
  assert_close(gradients, expected, 2e-5)


def _by_vmap(arguments):
  axes = {k: None if k in ("a", "d") else 0 for k in arguments}

  def one(arguments):
    rows = {k: v if k in ("a", "d") else v[None] for k, v in arguments.items()}
    y, state = tpu_scan(rows, None, SMALL.chunk)
    return y[0], state[0]

  return jax.vmap(one, in_axes=(axes,))(arguments)


def _by_checkpoint(arguments):
  return jax.checkpoint(lambda arguments: tpu_scan(arguments, None, SMALL.chunk))(arguments)


def _by_shard_map(arguments):
  mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  rows, alike = PartitionSpec("data"), PartitionSpec()
  return jax.shard_map(
    lambda arguments: tpu_scan(arguments, None, SMALL.chunk),
    mesh=mesh,
    in_specs=({k: alike if k in ("a", "d") else rows for k in arguments},),
    out_specs=(rows, rows),
    check_vma=False,
  )(arguments)


@pytest.mark.parametrize("transformed", [_by_vmap, _by_checkpoint, _by_shard_map])
def test_transformations_change_no_gradient(transformed):
  arguments = inputs(SMALL)

  def loss(arguments, run):
    y, state = run(arguments)
    return jnp.sum(jnp.square(y)) + jnp.sum(jnp.square(state))

  def token_loop(arguments):
    return scan(reference.ssd, arguments, None, SMALL.chunk)

  gradient = jax.jit(jax.grad(loss), static_argnums=1)
  assert_close(gradient(arguments, transformed), gradient(arguments, token_loop), 2e-5)


def test_the_interface_hands_it_rows_with_padding():
  shape = CHECKED["a rest"]
  arguments = inputs(shape)
  ids = jnp.asarray([[1] * 9 + [0] * 2 + [2] * 20 + [0] * 6, [3] * 37], jnp.int32)
  poisoned = arguments | {"x": arguments["x"].at[0, 9:11].set(jnp.nan)}
  options = {"segment_ids": ids, "chunk_size": shape.chunk}
  y, state = ssd(**poisoned, **options, implementation="pallas_tpu")
  expected_y, expected_state = ssd(**arguments, **options, implementation="reference")
  np.testing.assert_allclose(y, expected_y, atol=2e-5)
  np.testing.assert_allclose(state, expected_state, atol=2e-5)


@pytest.mark.parametrize(("name", "dtype"), [("x", jnp.float16), ("dt", jnp.bfloat16)])
def test_a_dtype_that_it_does_not_take_is_named(name, dtype):
  arguments = inputs(SMALL)
  arguments[name] = arguments[name].astype(dtype)
  with pytest.raises(ValueError, match=rf"takes {name} in float32.*implementation='xla'"):
    tpu_scan(arguments, None, SMALL.chunk)


# Compilation. Nemotron Nano's and Super's layers, four rows of 2,048 tokens.
LAYERS = {
  "nano": Shape(4, 2048, 64, 64, 8, 128, 128),
  "super": Shape(4, 2048, 128, 64, 8, 128, 128),
}


def abstract(shape: Shape, dtype) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Arguments as a layer has them, heads and groups beside each other, and resets."""
  batch, time, heads, width, groups, size, _ = shape
  of = jax.ShapeDtypeStruct
  return (
    of((batch, time, heads * width), dtype),
    of((batch, time, heads), jnp.float32),
    of((heads,), jnp.float32),
    of((batch, time, groups * size), dtype),
    of((batch, time, groups * size), dtype),
    of((heads,), jnp.float32),
    of((batch, heads, width, size), jnp.float32),
    of((batch, time), jnp.bool_),
  )


def forward(shape: Shape, x, dt, a, b, c, d, state, marks):
  batch, time, heads, width, groups, size, chunk = shape
  x = x.reshape(batch, time, heads, width)
  b, c = (v.reshape(batch, time, groups, size) for v in (b, c))
  y, state = pallas_tpu.ssd(x, dt, a, b, c, d, state, marks, chunk)
  return y.reshape(batch, time, -1), state


def gradient(shape: Shape, *arguments):
  def loss(*differentiated):
    y, state = forward(shape, *differentiated, arguments[-1])
    return jnp.sum(jnp.square(y.astype(jnp.float32))) + jnp.sum(jnp.square(state))

  return jax.grad(loss, argnums=range(7))(*arguments[:-1])


def bytes_needed(shape: Shape, dtype) -> dict[str, int]:
  batch, time, heads, width, _, size, chunk = shape
  state = 4 * batch * heads * width * size
  return {
    "states": time // chunk * state,
    "y and its gradient": 2 * batch * time * heads * width * jnp.dtype(dtype).itemsize,
    # First and last states and their gradients; dt, its sums and the parts of its gradient.
    "rest": 4 * state + 8 * 4 * batch * time * heads,
  }


@pytest.mark.tpu
@needs_libtpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("chip", CHIPS)
def test_gradient_compiles_and_keeps_one_state_a_chunk(chip, layer, dtype, record_property):
  shape = LAYERS[layer]
  start = time.perf_counter()
  compiled = compile_for(chip, functools.partial(gradient, shape), *abstract(shape, dtype))
  seconds = time.perf_counter() - start
  text = compiled.as_text()
  assert "ssd_forward" in text and "ssd_backward" in text
  temporary = compiled.memory_analysis().temp_size_in_bytes
  cost = compiled.cost_analysis()
  seen = {"MiB": temporary / 2**20, "compile seconds": seconds} | {
    k: cost.get(k) for k in ("flops", "bytes accessed", "optimal_seconds")
  }
  for key, value in seen.items():
    record_property(key, value)
  print(chip, layer, dtype.__name__, seen)
  assert temporary <= sum(bytes_needed(shape, dtype).values())


@pytest.mark.tpu
@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_forward_alone_keeps_one_state_a_row(chip):
  shape = LAYERS["nano"]
  compiled = compile_for(chip, functools.partial(forward, shape), *abstract(shape, jnp.bfloat16))
  needed = bytes_needed(shape, jnp.bfloat16)
  assert compiled.memory_analysis().temp_size_in_bytes <= needed["rest"]


@pytest.mark.tpu
@needs_libtpu
@pytest.mark.parametrize(
  ("shape", "dtype"),
  [
    (Shape(2, 2048, 64, 64, 8, 128, 256), jnp.bfloat16),
    (Shape(2, 2048, 64, 64, 8, 128, 256), jnp.float32),  # asks for more VMEM
    (Shape(2, 2048, 64, 64, 8, 128, 64), jnp.bfloat16),
    (Shape(1, 512, 80, 64, 1, 128, 128), jnp.bfloat16),  # blocks share the group
    (Shape(1, 200, 8, 80, 2, 64, 100), jnp.bfloat16),  # nothing fills lanes or sublanes
    (CHECKED["chunks of one"], jnp.float32),
  ],
  ids=["long chunks", "long chunks float32", "short chunks", "one group", "odd", "tiny"],
)
def test_other_sizes_compile(shape, dtype):
  compile_for("v5p", functools.partial(gradient, shape), *abstract(shape, dtype))
