"""The convolution's Pallas kernels: interpreted values and gradients, and what they compile for."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.causal_conv1d import api, pallas_gpu, pallas_tpu
from tests.pallas_kernels.topologies import CHIPS, compile_for, needs_libtpu

both_kernels = pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])


@pytest.fixture
def small_tiles(monkeypatch):
  """Rows of several tiles in time and channels at sizes that are quick to interpret."""
  monkeypatch.setattr(pallas_tpu, "_TIME", 8)
  monkeypatch.setattr(pallas_tpu, "_CHANNELS", 16)
  monkeypatch.setattr(pallas_gpu, "_TIME", 4)
  monkeypatch.setattr(pallas_gpu, "_CHANNELS", 16)
  monkeypatch.setattr(pallas_gpu, "_WALK", 2)


def inputs(batch: int, time: int, channels: int, taps: int, dtype=jnp.float32):
  rng = np.random.default_rng(0)

  def normal(*sizes: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=sizes), dtype)

  return {
    "x": normal(batch, time, channels),
    "w": normal(taps, channels),
    "bias": normal(channels),
    "initial_tail": normal(batch, taps - 1, channels),
  }


def packed(batch: int, time: int) -> jax.Array:
  """Sequences of 1, 2, 3, ... tokens, padding at the begin of the first row and at every end."""
  ids = np.repeat(np.arange(1, time + 1), np.arange(1, time + 1))[:time]
  ids = np.stack([ids + 10 * row for row in range(batch)])
  ids[0, :2] = 0
  ids[:, time - 2 :] = 0
  return jnp.asarray(ids, jnp.int32)


def results(arguments, to_y, ids, activation, implementation) -> dict[str, jax.Array]:
  """Output, tail, and the gradients of <to_y, y> + sum(tail)."""

  def run(arguments):
    return api.causal_conv1d(
      **arguments, segment_ids=ids, activation=activation, implementation=implementation
    )

  @jax.jit
  def outputs_and_gradients(arguments):
    (y, tail), pull = jax.vjp(run, arguments)
    return {"y": y, "tail": tail, **pull((to_y, jnp.ones_like(tail)))[0]}

  return outputs_and_gradients(arguments)


@pytest.mark.usefixtures("small_tiles")
@both_kernels
@pytest.mark.parametrize(
  ("time", "channels", "taps", "is_packed", "activation"),
  [
    (1, 5, 4, False, "silu"),
    (12, 16, 2, False, None),
    (19, 24, 4, True, "silu"),
    (21, 5, 3, True, None),
  ],
)
def test_values_and_gradients_are_those_of_the_token_loop(
  time, channels, taps, is_packed, activation, implementation
):
  arguments = inputs(2, time, channels, taps)
  to_y = jnp.cos(arguments["x"])
  ids = packed(2, time) if is_packed else None
  expected = results(arguments, to_y, ids, activation, "reference")
  for name, value in results(arguments, to_y, ids, activation, implementation).items():
    np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)


@pytest.mark.usefixtures("small_tiles")
@both_kernels
def test_what_stands_at_padding_reaches_no_output_and_no_gradient(implementation):
  arguments, ids = inputs(2, 19, 5, 4), packed(2, 19)
  real = ids[..., None] != 0
  poisoned = {**arguments, "x": jnp.where(real, arguments["x"], jnp.nan)}
  to_y = jnp.where(real, jnp.cos(arguments["x"]), jnp.nan)
  expected = results(arguments, jnp.nan_to_num(to_y), ids, "silu", "reference")
  for name, value in results(poisoned, to_y, ids, "silu", implementation).items():
    np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)


@pytest.mark.usefixtures("small_tiles")
@both_kernels
def test_bfloat16_is_summed_in_float32(implementation):
  arguments = inputs(1, 19, 16, 4, jnp.bfloat16)
  to_y, ids = jnp.cos(arguments["x"]), packed(1, 19)
  wide = {k: v.astype(jnp.float32) for k, v in arguments.items()}
  expected = results(wide, to_y.astype(jnp.float32), ids, "silu", "reference")
  for name, value in results(arguments, to_y, ids, "silu", implementation).items():
    assert value.dtype == jnp.bfloat16
    np.testing.assert_allclose(
      value.astype(jnp.float32), expected[name], atol=1e-6, rtol=2**-7, err_msg=name
    )


@pytest.mark.usefixtures("small_tiles")
@both_kernels
def test_it_works_under_checkpoint_and_vmap(implementation):
  arguments = inputs(2, 9, 5, 4)
  to_y = jnp.cos(arguments["x"])
  expected = results(arguments, to_y, None, "silu", "reference")
  run = functools.partial(api.causal_conv1d, activation="silu", implementation=implementation)

  @functools.partial(jax.vmap, in_axes=(0, 0, None, None))
  @jax.checkpoint
  def loss(x, initial_tail, w, bias):
    y, tail = run(x[None], w, bias, initial_tail=initial_tail[None])
    return y[0], tail[0]

  order = ("x", "initial_tail", "w", "bias")
  (y, tail), pull = jax.vjp(jax.jit(loss), *(arguments[name] for name in order))
  values = dict(zip(order, pull((to_y, jnp.ones_like(tail))), strict=True))
  for name, value in {"y": y, "tail": tail, **values}.items():
    np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)


@both_kernels
def test_what_a_kernel_cannot_do_is_named(implementation):
  with jax.enable_x64():
    x = jnp.zeros((1, 4, 3), jnp.float64)
    with pytest.raises(ValueError, match=f"{implementation}.*float64.*implementation='xla'"):
      api.causal_conv1d(x, jnp.ones((4, 3)), implementation=implementation)
  with pytest.raises(ValueError, match=rf"{implementation}.*K <= .*\(12, 3\).*'xla'"):
    api.causal_conv1d(
      jnp.zeros((1, 4, 3)), jnp.ones((12, 3), jnp.float32), implementation=implementation
    )


def specs(
  batch: int, time: int, channels: int, dtype: jnp.dtype
) -> tuple[jax.ShapeDtypeStruct, ...]:
  """x, w, bias, gradient of y, segment ids."""
  x = jax.ShapeDtypeStruct((batch, time, channels), dtype)
  taps, bias = ((4, channels), (channels,))
  ids = jax.ShapeDtypeStruct((batch, time), jnp.int32)
  return (x, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in (taps, bias)), x, ids)


def forward_and_backward(x, w, bias, to_y, ids, *, implementation: str):
  run = functools.partial(
    api.causal_conv1d, segment_ids=ids, activation="silu", implementation=implementation
  )
  (y, tail), pull = jax.vjp(run, x, w, bias)
  return y, tail, pull((to_y, jnp.zeros_like(tail)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("time", "channels"), [(4096, 6144), (300, 160)])
def test_both_passes_lower_for_a_gpu(time, channels, dtype):
  kernels = jax.jit(functools.partial(forward_and_backward, implementation="pallas_gpu"))
  device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
  with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
    traced = kernels.trace(*specs(2, time, channels, dtype))
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert lowered.count("__gpu$xla.gpu.triton") == 2


@needs_libtpu
@pytest.mark.tpu
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
  ("time", "channels", "dtype"), [(4096, 6144, jnp.bfloat16), (300, 160, jnp.float32)]
)
def test_both_passes_compile_for_every_tpu(time, channels, dtype, chip):
  kernels = functools.partial(forward_and_backward, implementation="pallas_tpu")
  compiled = compile_for(chip, kernels, *specs(2, time, channels, dtype))
  assert compiled.as_text().count("tpu_custom_call") == 2
