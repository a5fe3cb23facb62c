"""The Pallas kernels of the selective scan: interpreted on CPU, lowered for what they are made for.

Interpreted programs are optimised little: they are large and run once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.selective_scan import api, pallas_gpu, pallas_tpu
from pallas_kernels.selective_scan.shapes import CHECKED, Shape
from tests.pallas_kernels.test_selective_scan import (
  TOKENS,
  check_published_values_and_gradients,
  inputs,
  needs_data,
  packed_ids,
)
from tests.pallas_kernels.topologies import CHIPS, compile_for, needs_libtpu

QUICKLY = {"compiler_options": {"xla_backend_optimization_level": 0}}
on_accelerators = pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])


def values_and_gradients(arguments, implementation, **options):
  def loss(arguments):
    y, state = api.selective_scan(**arguments, **options, implementation=implementation)
    wide = y.astype(jnp.float32)
    return jnp.sum(jnp.sin(wide)) + jnp.sum(jnp.cos(state)), (y, state)

  return jax.jit(jax.grad(loss, has_aux=True), **QUICKLY)(arguments)


def check_against_the_token_loop(arguments, implementation, atol, **options):
  found = values_and_gradients(arguments, implementation, **options)
  expected = values_and_gradients(arguments, "reference", **options)
  places = jax.tree_util.tree_leaves_with_path(expected)
  for (place, value), other in zip(places, jax.tree.leaves(found), strict=True):
    assert value.dtype == other.dtype
    value, other = (np.asarray(v, np.float32) for v in (value, other))
    scale = 1.0 + np.max(np.abs(value))
    np.testing.assert_allclose(other / scale, value / scale, atol=atol, err_msg=str(place))


@on_accelerators
@pytest.mark.parametrize(
  ("name", "packed"),
  [
    ("one token", False),
    ("a chunk and one", True),
    pytest.param("a rest, odd sizes", True, marks=pytest.mark.slow),
    pytest.param("shorter than a chunk", False, marks=pytest.mark.slow),
    pytest.param("whole chunks", False, marks=pytest.mark.slow),
    pytest.param("chunks of one", True, marks=pytest.mark.slow),
  ],
)
def test_values_and_gradients_are_those_of_the_token_loop(name, packed, implementation):
  shape = CHECKED[name]
  ids = packed_ids(shape) if packed else None
  check_against_the_token_loop(
    inputs(shape), implementation, 3e-6, segment_ids=ids, chunk_size=shape.chunk
  )


@on_accelerators
def test_groups_wider_than_a_block_and_bfloat16(implementation):
  shape = Shape(1, 20, 264, 2, 4, 16)
  arguments = inputs(shape)
  half = {k: v.astype(jnp.bfloat16) if k in ("x", "b", "c") else v for k, v in arguments.items()}
  # Gradients of bfloat16 arrays are rounded to 8 bits.
  check_against_the_token_loop(half, implementation, 2**-8, chunk_size=16)


@needs_data
@on_accelerators
@pytest.mark.parametrize(
  "case",
  ["c1", *(pytest.param(case, marks=pytest.mark.slow) for case in ("c0", "c2", "c3", "c4"))],
)
def test_published_kernel_values_and_gradients(case, implementation):
  check_published_values_and_gradients(case, implementation, **QUICKLY)


@on_accelerators
def test_weak_and_strong_decay_and_nan_at_padding(implementation):
  arguments = inputs(Shape(2, 12, 4, 1, 2, 8))
  rates = jnp.asarray([[1e-6, 50.0], [1e-3, 10.0], [0.1, 50.0], [1.0, 1e-6]])
  arguments = {**arguments, "a": -rates, "dt": jnp.ones_like(arguments["dt"])}
  poisoned = {k: v.at[:, 10:].set(jnp.nan) if k in TOKENS else v for k, v in arguments.items()}
  check_against_the_token_loop(
    poisoned, implementation, 3e-6, lengths=jnp.asarray([10, 10]), chunk_size=8
  )


@on_accelerators
def test_checkpointed_and_mapped_gradients_are_the_same(implementation):
  arguments = inputs(Shape(2, 9, 4, 2, 4, 8))
  rows = {k: 0 if k in (*TOKENS, "initial_state") else None for k in arguments}

  def loss_of_row(arguments):
    one = {k: v if rows[k] is None else v[None] for k, v in arguments.items()}
    y, state = api.selective_scan(**one, chunk_size=8, implementation=implementation)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(state))

  def loss(arguments):
    return jnp.sum(jax.vmap(jax.checkpoint(loss_of_row), in_axes=(rows,))(arguments))

  found = jax.jit(jax.grad(loss), **QUICKLY)(arguments)
  expected, _ = values_and_gradients(arguments, "reference")
  for key, value in found.items():
    np.testing.assert_allclose(value, expected[key], atol=2e-5, rtol=2e-5, err_msg=key)


@pytest.mark.parametrize(
  ("implementation", "change", "message"),
  [
    ("pallas_tpu", {"size": 4096}, "N=4096 .*smaller chunk_size or implementation='xla'"),
    ("pallas_gpu", {"size": 65}, "at most 64 state entries .*N=65.*implementation='xla'"),
  ],
)
def test_sizes_that_a_kernel_cannot_hold_are_named(implementation, change, message):
  arguments = inputs(Shape(1, 64, 2, 1, 4, 64)._replace(**change))
  with pytest.raises(ValueError, match=message):
    api.selective_scan(**arguments, implementation=implementation)


@on_accelerators
def test_float64_is_refused(implementation):
  with jax.enable_x64(True):
    arguments = inputs(CHECKED["one token"], dtype=jnp.float64)
    with pytest.raises(ValueError, match="float32, got float64; use implementation='xla'"):
      api.selective_scan(**arguments, implementation=implementation)


def abstract(shape: Shape, dtype: jnp.dtype, packed: bool) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Arguments of an implementation, without the chunk."""
  batch, time, channels, groups, size, _ = shape

  def of(sizes: tuple[int, ...], dtype: object = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)

  maps = of((batch, time, groups, size), dtype)
  return (
    of((batch, time, channels), dtype),
    of((batch, time, channels)),
    of((channels, size)),
    maps,
    maps,
    of((channels,)),
    of((batch, channels, size)),
    *((of((batch, time), bool),) if packed else ()),
  )


def forward_and_backward(module, chunk):
  def run(x, dt, a, b, c, d, state, resets=None):
    def scan(*arguments):
      return module.selective_scan(*arguments, resets, chunk)

    out, pull = jax.vjp(scan, x, dt, a, b, c, d, state)
    return out, pull(out)

  return run


LARGE = Shape(1, 2048, 4096, 1, 16, 64)
either_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])


@either_dtype
def test_lowers_for_cuda_on_a_machine_without_a_gpu(dtype):
  arguments = abstract(LARGE, jnp.dtype(dtype), packed=dtype == jnp.bfloat16)
  gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
  with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("gpu",), abstract_device=gpu)):
    traced = jax.jit(forward_and_backward(pallas_gpu, LARGE.chunk)).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("custom_call @__gpu$xla.gpu.triton") == 2


@either_dtype
@needs_libtpu
@pytest.mark.tpu
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
  "shape", [LARGE, Shape(2, 1000, 5120, 1, 16, 128), Shape(1, 256, 768, 2, 8, 256)], ids=str
)
def test_compiles_for_every_tpu(shape, chip, dtype):
  for packed in (False, True):
    arguments = abstract(shape, jnp.dtype(dtype), packed)
    compiled = compile_for(chip, forward_and_backward(pallas_tpu, shape.chunk), *arguments)
    assert compiled.as_text().count("tpu_custom_call") >= 2
    # Boundary states and padded arrays, where a state a token would be 4 N bytes a channel.
    kept = compiled.memory_analysis().temp_size_in_bytes
    assert kept < 4 * shape.batch * shape.time * shape.channels * shape.size / 2
