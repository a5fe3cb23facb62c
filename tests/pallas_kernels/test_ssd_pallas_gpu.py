"""The Triton kernels of SSD: interpreted values and gradients, and lowering for CUDA."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.ssd import api, pallas_gpu, reference
from pallas_kernels.ssd.shapes import CHECKED, Shape
from tests.pallas_kernels.test_ssd import inputs, packed_ids

NAMES = ("x", "dt", "a", "b", "c", "d", "initial_state")
NANO = Shape(1, 2048, 64, 64, 8, 128, 128)
SUPER = NANO._replace(heads=128)
# Interpreted programs are large and run once.
QUICKLY = {"compiler_options": {"xla_backend_optimization_level": 0}}


def resets(shape: Shape) -> jax.Array:
  """Inside chunks, on both sides of their edges, twice in a row; none in the last row."""
  marks = np.zeros((shape.batch, shape.time), bool)
  marks[:, [t for t in (1, 3, 15, 16, 32, 33) if t < shape.time]] = True
  if shape.batch > 1:
    marks[-1] = False
  return jnp.asarray(marks)


def run(ssd, arguments, marks, chunk: int):
  """Outputs, last state and gradients of a sum of both with weights, in float32."""

  rng = np.random.default_rng(1)
  # Whole numbers, which bfloat16 holds: the gradient reaching y is the same in every dtype.
  to_y = rng.integers(-4, 5, arguments["x"].shape).astype(np.float32)
  to_state = rng.integers(-4, 5, arguments["initial_state"].shape).astype(np.float32)

  def loss(arguments):
    y, state = ssd(*(arguments.get(k) for k in NAMES), marks, chunk)
    return jnp.sum(y.astype(jnp.float32) * to_y) + jnp.sum(state * to_state), (y, state)

  gradients, (y, state) = jax.jit(jax.grad(loss, has_aux=True), **QUICKLY)(arguments)
  found = {"y": y, "state": state, **{f"d{k}": v for k, v in gradients.items()}}
  return jax.tree.map(lambda v: np.asarray(v, np.float32), found)


def check(arguments, marks, chunk: int, atol: float) -> None:
  found = run(pallas_gpu.ssd, arguments, marks, chunk)
  # The reference multiplies in float32 what it is given, also bfloat16.
  wide = {k: v.astype(jnp.float32) for k, v in arguments.items()}
  for key, expected in run(reference.ssd, wide, marks, chunk).items():
    scale = 1.0 + np.max(np.abs(expected))
    np.testing.assert_allclose(found[key] / scale, expected / scale, atol=atol, err_msg=key)


@pytest.mark.parametrize(
  ("name", "packed"),
  [
    ("a rest", True),
    ("whole chunks", False),
    pytest.param("one token", False, marks=pytest.mark.slow),
    pytest.param("shorter than a chunk", True, marks=pytest.mark.slow),
    pytest.param("a group a head", True, marks=pytest.mark.slow),
  ],
)
def test_values_and_gradients_are_those_of_the_token_loop(name, packed):
  shape = CHECKED[name]
  check(inputs(shape), resets(shape) if packed else None, shape.chunk, 1e-5)


def test_bfloat16_inputs_in_chunks_of_32_tokens():
  shape = Shape(2, 70, 4, 8, 2, 16, 32)
  arguments = inputs(shape)
  half = {k: v.astype(jnp.bfloat16) if k in ("x", "b", "c") else v for k, v in arguments.items()}
  y, state = jax.eval_shape(lambda v: pallas_gpu.ssd(*(v[k] for k in NAMES), None, 32), half)
  assert (y.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
  # Operands of products are rounded to 8 bits.
  check(half, resets(shape), shape.chunk, 2**-7)


def test_without_skip_and_with_more_heads_than_a_program_takes():
  shape = Shape(1, 17, 12, 4, 1, 4, 16)
  arguments = inputs(shape)
  del arguments["d"]
  check(arguments, None, shape.chunk, 1e-5)


def test_strong_decay_keeps_its_digits_between_tokens_without_any():
  arguments = inputs(Shape(1, 32, 2, 4, 1, 4, 16))
  arguments["dt"] = jnp.full_like(arguments["dt"], 20.0).at[:, ::3].set(1e-4)
  arguments["a"] = jnp.asarray([-16.0, -0.01])
  # The running sum reaches 16 tokens x 320, rounded to 24 bits.
  check(arguments, None, 16, 16 * 320 * 2**-24)


def test_nothing_crosses_a_sequence_border_or_reaches_padding():
  arguments = inputs(Shape(1, 24, 2, 4, 1, 4, 16))
  ids = jnp.asarray([[1] * 6 + [2] * 14 + [0] * 4], jnp.int32)

  def loss(arguments):
    y, _ = api.ssd(**arguments, segment_ids=ids, chunk_size=16, implementation="pallas_gpu")
    return jnp.sum(jnp.square(y[:, 6:]))

  gradients = jax.jit(jax.grad(loss), **QUICKLY)(arguments)
  assert float(jnp.max(jnp.abs(gradients["initial_state"]))) == 0.0
  for key in ("x", "dt", "b", "c"):
    assert float(jnp.max(jnp.abs(gradients[key][:, :6]))) == 0.0, key
    assert float(jnp.max(jnp.abs(gradients[key][:, 20:]))) == 0.0, key
    assert float(jnp.max(jnp.abs(gradients[key][:, 6:20]))) > 0.0, key


def test_tokens_without_a_step_leave_the_state_bit_for_bit():
  arguments = inputs(Shape(2, 20, 2, 4, 1, 4, 16))
  resting = {**arguments, "dt": jnp.zeros_like(arguments["dt"])}
  _, state = jax.jit(
    functools.partial(api.ssd, chunk_size=16, implementation="pallas_gpu"), **QUICKLY
  )(**resting)
  np.testing.assert_array_equal(state, arguments["initial_state"])


def test_checkpointed_and_mapped_gradients_are_the_same():
  shape = Shape(2, 18, 2, 4, 1, 4, 16)
  arguments, ids = inputs(shape), packed_ids(shape)
  rows = {k: None if v.ndim == 1 else 0 for k, v in arguments.items()}

  def loss_of_row(arguments, ids, implementation):
    one = {k: v if rows[k] is None else v[None] for k, v in arguments.items()}
    y, state = api.ssd(**one, segment_ids=ids[None], chunk_size=16, implementation=implementation)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(state))

  def gradient(implementation):
    one = jax.checkpoint(functools.partial(loss_of_row, implementation=implementation))
    mapped = jax.vmap(one, in_axes=(rows, 0))
    return jax.jit(jax.grad(lambda v: jnp.sum(mapped(v, ids))), **QUICKLY)(arguments)

  expected = gradient("reference")
  for key, value in gradient("pallas_gpu").items():
    scale = 1.0 + np.max(np.abs(expected[key]))
    np.testing.assert_allclose(value / scale, expected[key] / scale, atol=1e-5, err_msg=key)


@pytest.mark.parametrize(
  ("change", "message"),
  [({"size": 256}, 'P=4, N=256; use implementation="xla"'), ({"width": 200}, "P=200, N=8")],
)
def test_sizes_that_the_kernels_cannot_hold_are_named(change, message):
  arguments = inputs(Shape(1, 4, 2, 4, 1, 8, 16)._replace(**change))
  with pytest.raises(ValueError, match=f"P and N up to 128, got float32 with {message}"):
    api.ssd(**arguments, implementation="pallas_gpu")


def test_float64_is_refused():
  with jax.enable_x64(True):
    arguments = inputs(CHECKED["one token"])
    wide = {k: v.astype(jnp.float64) for k, v in arguments.items()}
    with pytest.raises(ValueError, match="got float64 with"):
      api.ssd(**wide, implementation="pallas_gpu")


def h100():
  """What newer jax wants to know of a GPU that is not there."""
  if jax.__version_info__ < (0, 11):
    return contextlib.nullcontext()
  device = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
  return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [NANO, SUPER, NANO._replace(batch=3, time=1000)])
def test_the_kernels_are_lowered_for_cuda(shape, dtype):
  batch, time, heads, width, groups, size, chunk = shape

  def of(*sizes: int, dtype: object = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)

  maps = of(batch, time, groups, size, dtype=dtype)
  arguments = (
    of(batch, time, heads, width, dtype=dtype),
    of(batch, time, heads),
    of(heads),
    maps,
    maps,
    of(heads),
    of(batch, heads, width, size),
  )
  marks = of(batch, time, dtype=jnp.bool_)

  def forward(*arguments):
    return pallas_gpu.ssd(*arguments, chunk)

  def backward(*arguments):
    results, pull = jax.vjp(lambda *v: pallas_gpu.ssd(*v, arguments[-1], chunk), *arguments[:-1])
    return pull(results)

  for function, kernels in ((forward, 2), (backward, 5)):
    with h100():
      lowered = jax.jit(function).trace(*arguments, marks).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("__gpu$xla.gpu.triton") == kernels
