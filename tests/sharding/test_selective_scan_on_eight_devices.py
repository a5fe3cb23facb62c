"""The selective scan with time cut over four of eight devices; runs itself in a process of its own.

Two rows are cut over two devices, and each row's time over four.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_kernels.selective_scan import api
from pallas_kernels.selective_scan.shapes import Shape

SHAPE = Shape(2, 48, 6, 2, 4, 4)
# Sequences that go on over a cut, over two cuts, that begin at one, and padding.
IDS = {
  "one sequence a row": None,
  "packed": [[1] * 24 + [2] * 24, [3] * 5 + [4] * 30 + [5] * 4 + [0] * 2 + [6] * 7],
}


def arguments() -> dict[str, jax.Array]:
  rng = np.random.default_rng(0)
  batch, time, channels, groups, size, _ = SHAPE

  def normal(*sizes: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=sizes), jnp.float32)

  return {
    "x": normal(batch, time, channels),
    "dt": normal(batch, time, channels),
    "a": -jnp.exp(normal(channels, size)),
    "b": normal(batch, time, groups, size),
    "c": normal(batch, time, groups, size),
    "d": normal(channels),
    "dt_bias": normal(channels),
  }


def values_and_gradients(run):
  def loss(arguments):
    y, state = run(arguments)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(state)), (y, state)

  return jax.jit(jax.grad(loss, has_aux=True))(arguments())


def check(name: str, implementation: str, atol: float) -> None:
  ids = None if IDS[name] is None else jnp.asarray(IDS[name], jnp.int32)
  scan = functools.partial(api.selective_scan, dt_softplus=True, chunk_size=SHAPE.chunk)
  mesh = jax.make_mesh((2, 4), ("data", "time"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  cut = P("data", "time")
  specs = {k: cut if k in ("x", "dt", "b", "c") else P() for k in arguments()}

  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(specs, cut),
    out_specs=(cut, P("data", "time")),
    check_vma=implementation == "xla",
  )
  def on_shards(arguments, ids):
    y, state = scan(**arguments, segment_ids=ids, time_axis="time", implementation=implementation)
    return y, state[:, None]

  def cut_run(arguments):
    y, states = on_shards(arguments, ids)
    return y, states[:, -1]

  found = values_and_gradients(cut_run)
  expected = values_and_gradients(
    lambda arguments: scan(**arguments, segment_ids=ids, implementation="reference")
  )
  for value, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    scale = 1.0 + float(jnp.max(jnp.abs(other)))
    np.testing.assert_allclose(value / scale, other / scale, atol=atol)


def test_time_cut_over_devices_gives_what_one_device_does(on_eight_devices):
  assert "all agree" in on_eight_devices(__file__)


if __name__ == "__main__":
  for case in IDS:
    check(case, "xla", 3e-6)
  check("packed", "pallas_tpu", 3e-6)
  print("all agree")
