"""Paged attention with heads over four of eight devices; runs itself in a process of its own.

XLA partitions its own implementation; the kernels stand inside ``jax.shard_map``, as do engines'
slots, whose pages are split as well.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from agentjax.models.attend import attend_cache
from agentjax.models.paged import attend_paged, fits
from agentjax.models.pages import Paged
from agentjax.sharding import MeshConfig, make_mesh
from pallas_kernels.paged_attention import paged_attention, quantize_tokens

ROWS, TIME, HEADS, WIDTH, PAGE, PAGES = 4, 3, 8, 16, 32, 20
CALL = functools.partial(paged_attention, scale=0.3, window=300)
# Heads over `tensor`, rows over `data`; pages and what they hold are on every row of devices.
SPECS = {
  "query": P("data", None, "tensor"),
  "keys": P(None, "tensor"),
  "values": P(None, "tensor"),
  "key_scales": P(None, "tensor"),
  "value_scales": P(None, "tensor"),
  "page_table": P("data"),
  "starts": P("data"),
  "counts": P("data"),
}


def arguments(kv_heads: int, quantised: bool) -> dict[str, jax.Array]:
  rng = np.random.default_rng(0)

  def normal(*sizes: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=sizes), jnp.float32)

  number = ROWS * PAGES
  made = {
    "query": normal(ROWS, TIME, HEADS, WIDTH),
    "keys": normal(number, kv_heads, PAGE, WIDTH),
    "values": normal(number, kv_heads, PAGE, WIDTH),
    "page_table": jnp.asarray(rng.permutation(number).reshape(ROWS, PAGES), jnp.int32),
    "starts": jnp.asarray([PAGE * PAGES - TIME, 0, 100, 401], jnp.int32),
    "counts": jnp.asarray([TIME, TIME, 0, 2], jnp.int32),
  }
  if quantised:
    made["keys"], made["key_scales"] = quantize_tokens(made["keys"])
    made["values"], made["value_scales"] = quantize_tokens(made["values"])
  return made


def check(mesh: jax.sharding.Mesh, kv_heads: int, quantised: bool, implementation: str) -> None:
  given = arguments(kv_heads, quantised)
  # One key head is read by the heads of all devices.
  specs = {k: P() if kv_heads == 1 and k.startswith(("key", "value")) else SPECS[k] for k in given}
  placed = {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in given.items()}
  call = functools.partial(CALL, implementation=implementation)
  if implementation == "xla":
    run = jax.jit(call)
    text = run.lower(**placed).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text, text
  else:
    body = functools.partial(_named, call)
    run = jax.jit(
      functools.partial(
        _call_named,
        jax.shard_map(
          body, mesh=mesh, in_specs=(specs,), out_specs=SPECS["query"], check_vma=False
        ),
      )
    )
  found = run(**placed)
  assert found.sharding.is_equivalent_to(NamedSharding(mesh, SPECS["query"]), found.ndim)
  expected = CALL(**given, implementation="reference")
  np.testing.assert_allclose(found, expected, atol=2e-6)


def held(kv_heads: int, ways: int) -> Paged:
  """Slots whose pages lie in random order in their own part of the pool."""
  rng = np.random.default_rng(kv_heads)
  part = 1 + ROWS // ways * PAGES
  own = [rng.permutation(part - 1).reshape(-1, PAGES) + 1 + way * part for way in range(ways)]
  pool = rng.normal(size=(ways * part, kv_heads, PAGE, WIDTH))
  table = jnp.asarray(np.concatenate(own), jnp.int32)
  return Paged(jnp.asarray(pool, jnp.float32), table, PAGE * PAGES, ways)


def check_slots(mesh: jax.sharding.Mesh, kv_heads: int, window: int | None) -> None:
  """``attend_paged`` of slots over `data` and heads over `tensor` is ``attend_cache`` of one."""
  latent = kv_heads == 1
  query = arguments(4, False)["query"]
  keys = held(kv_heads, mesh.shape["data"])
  values = None if latent else dataclasses.replace(keys, pool=keys.pool[::-1])
  positions = jnp.asarray([[500], [0], [37], [612]]) + jnp.arange(TIME)
  given = {"positions": positions, "scale": 0.3, "window": window}
  given["value_width"] = 10 if latent else None
  expected = attend_cache(query, keys, values, **given)

  def placed(tree, *axes):
    return jax.device_put(tree, NamedSharding(mesh, P(*axes)))

  def pooled(paged):
    pool = placed(paged.pool, "data", None if latent else "tensor")
    return dataclasses.replace(paged, pool=pool, table=placed(paged.table, "data"))

  query, keys = placed(query, "data", None, "tensor"), pooled(keys)
  values = None if latent else pooled(values)
  rows = jnp.arange(ROWS)
  with jax.set_mesh(mesh):
    for kernels, takes in (("pallas_gpu", True), ("pallas_tpu", False)):  # 16 channels are too few
      assert fits(kernels, query, keys, values, None, given["value_width"]) == takes
    assert not fits("pallas_gpu", query, keys, values, rows, given["value_width"])
    assert not fits("pallas_gpu", query[:, :, :6], keys, values, None, given["value_width"])
    for implementation in ("xla", "pallas_gpu"):
      call = functools.partial(attend_paged, implementation=implementation)
      run = jax.jit(functools.partial(call, **given)).lower(query, keys, values).compile()
      text = run.as_text()
      assert "all-gather" not in text and "all-to-all" not in text, text
      np.testing.assert_allclose(run(query, keys, values), expected, atol=1e-5)


def _named(call, given):
  return call(**given)


def _call_named(call, **given):
  return call(given)


@pytest.mark.slow
def test_heads_over_devices_give_what_one_device_does(on_eight_devices):
  assert "all agree" in on_eight_devices(__file__)


if __name__ == "__main__":
  auto = (jax.sharding.AxisType.Auto,) * 2
  the_mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=auto)
  with jax.set_mesh(the_mesh):
    for case in ((4, False), (1, False), (4, True)):
      check(the_mesh, *case, "xla")
    check(the_mesh, 4, False, "pallas_tpu")
  lane = make_mesh(MeshConfig(data=2, fsdp=1, tensor=4))
  for slots in ((4, None), (8, 100), (1, None)):
    check_slots(lane, *slots)
  print("all agree")
