"""Paged attention with heads over four of eight devices; runs itself in a process of its own.

XLA partitions its own implementation; the kernels stand inside ``jax.shard_map``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

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


def _named(call, given):
  return call(**given)


def _call_named(call, **given):
  return call(given)


def test_heads_over_devices_give_what_one_device_does(on_eight_devices):
  assert "all agree" in on_eight_devices(__file__)


if __name__ == "__main__":
  auto = (jax.sharding.AxisType.Auto,) * 2
  the_mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=auto)
  with jax.set_mesh(the_mesh):
    for case in ((4, False), (1, False), (4, True)):
      check(the_mesh, *case, "xla")
    check(the_mesh, 4, False, "pallas_tpu")
  print("all agree")
