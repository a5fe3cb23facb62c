"""Paged attention: values, what may not change a bit, quantised pools, compilation for devices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from agentjax.models.attend import attend_cache
from pallas_kernels.paged_attention import (
  IMPLEMENTATIONS,
  api,
  paged_attention,
  pallas_tpu,
  quantize_tokens,
)
from pallas_kernels.paged_attention.shapes import CHECKED, Shape
from tests.pallas_kernels.test_ssd_pallas_gpu import h100
from tests.pallas_kernels.topologies import CHIPS, compile_for, needs_libtpu

# Interpreted programs are large and run once.
QUICKLY = {"compiler_options": {"xla_backend_optimization_level": 0}}
PALLAS = ("pallas_tpu", "pallas_gpu")
FAST = ("xla", *PALLAS)
SMALL = Shape(4, 3, 4, 2, 16, 16, 32, 5, window=70)


def draw(shape: Shape, dtype="float32", quantised: str | None = None, seed: int = 0):
  """Named arguments: a full row, one that begins, one without tokens and one of fewer tokens.

  The last row shares its first page with the first one. Two pages more than are used.
  """
  rng = np.random.default_rng(seed)
  rows, count, number = shape.rows, shape.time, shape.rows * shape.pages + 2
  room = shape.pages * shape.page - count

  def normal(*sizes: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=sizes), dtype)

  table = rng.permutation(number)[: rows * shape.pages].reshape(rows, shape.pages)
  table[-1, 0] = table[0, 0]
  starts = [room, 0, room // 2, min(2 * shape.page + 3, room)]
  arguments = {
    "query": normal(rows, count, shape.heads, shape.width),
    "keys": normal(number, shape.kv_heads, shape.page, shape.width),
    "values": normal(number, shape.kv_heads, shape.page, shape.value_dim),
    "page_table": jnp.asarray(table, jnp.int32),
    "starts": jnp.asarray([starts[r % 4] for r in range(rows)], jnp.int32),
    "counts": jnp.asarray([[count, count, 0, max(count - 2, 1)][r % 4] for r in range(rows)]),
  }
  if shape.latent:
    arguments["values"] = None
  if quantised is not None:
    arguments |= quantise(arguments, quantised)
  return arguments


def quantise(arguments, dtype: str):
  pools = {"key": arguments["keys"], "value": arguments["values"]}
  made = {}
  for name, pool in pools.items():
    if pool is not None:
      made[f"{name}s"], made[f"{name}_scales"] = quantize_tokens(pool, dtype)
  return made


def dequantised(arguments):
  wide = {k: v for k, v in arguments.items() if not k.endswith("_scales")}
  for name in ("key", "value"):
    if wide[f"{name}s"] is not None:
      wide[f"{name}s"] = (
        wide[f"{name}s"].astype(jnp.float32) * arguments[f"{name}_scales"][..., None]
      )
  return wide


def run(arguments, shape: Shape, implementation: str, **options) -> np.ndarray:
  call = functools.partial(
    paged_attention,
    scale=0.3,
    window=shape.window,
    value_dim=shape.value_dim if shape.latent else None,
    implementation=implementation,
  )
  return np.asarray(jax.jit(call, **options)(**arguments))


def places(arguments) -> tuple[np.ndarray, np.ndarray]:
  """First place that a row sees but for its window, and one past the last."""
  starts, counts = (np.asarray(arguments[k]) for k in ("starts", "counts"))
  return starts, np.where(counts > 0, starts + counts, 0)


def token_loop(arguments, shape: Shape) -> np.ndarray:
  """Query by query, in float64."""
  named = {k: None if v is None else np.asarray(v, np.float64) for k, v in arguments.items()}
  table, starts, counts = (np.asarray(arguments[k]) for k in ("page_table", "starts", "counts"))
  out = np.zeros((shape.rows, shape.time, shape.heads, shape.value_dim))
  for r, t, h in np.ndindex(*out.shape[:3]):
    if t >= counts[r]:
      continue
    at, head = starts[r] + t, h // (shape.heads // shape.kv_heads)
    seen = np.arange(0 if shape.window is None else max(0, at + 1 - shape.window), at + 1)
    pages, slots = table[r, seen // shape.page], seen % shape.page
    key = named["keys"][pages, head, slots]
    value = key if named["values"] is None else named["values"][pages, head, slots]
    scores = 0.3 * key @ named["query"][r, t, h]
    weights = np.exp(scores - np.max(scores))
    out[r, t, h] = (weights / np.sum(weights)) @ value[:, : shape.value_dim]
  return out


@pytest.mark.parametrize("name", CHECKED)
def test_reference_and_xla_are_the_loop_over_queries(name):
  shape = CHECKED[name]
  arguments = draw(shape)
  expected = token_loop(arguments, shape)
  for implementation in ("reference", "xla"):
    np.testing.assert_allclose(run(arguments, shape, implementation), expected, atol=3e-6)


@pytest.mark.parametrize("implementation", PALLAS)
@pytest.mark.parametrize(
  "name",
  [
    "a step",
    "a window",
    "latent",
    *(
      pytest.param(n, marks=pytest.mark.slow)
      for n in CHECKED
      if n not in ("a step", "latent", "a window")
    ),
  ],
)
def test_kernels_are_the_loop_over_queries(name, implementation):
  shape = CHECKED[name]
  arguments = draw(shape)
  found = run(arguments, shape, implementation, **QUICKLY)
  np.testing.assert_allclose(found, token_loop(arguments, shape), atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("shape", "quantised"),
  [
    (Shape(4, 3, 4, 2, 16, 16, 8, 9), None),
    (Shape(4, 20, 4, 2, 16, 16, 8, 9, window=9), None),
    (Shape(4, 2, 4, 1, 24, 16, 32, 9, latent=True), "int8"),
  ],
)
def test_the_tpu_kernel_waits_for_its_copies(monkeypatch, shape, quantised):
  """Copies run as late as they may, memory begins as NaN; small tiles and blocks, so many steps."""
  late = pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan")
  monkeypatch.setattr(pallas_tpu, "on_platform", lambda _, call, *arrays: call(late)(*arrays))
  monkeypatch.setattr(pallas_tpu, "_TILE_BYTES", 2**14)
  monkeypatch.setattr(pallas_tpu, "_QUERIES", 16)
  arguments = draw(shape, quantised=quantised)
  wide = dequantised(arguments) if quantised else arguments
  found = run(arguments, shape, "pallas_tpu")
  np.testing.assert_allclose(found, token_loop(wide, shape), atol=3e-6)


@pytest.mark.parametrize("implementation", FAST)
def test_bfloat16_rounds_weights_and_results_only(implementation):
  arguments = draw(SMALL, "bfloat16")
  found = run(arguments, SMALL, implementation)
  assert found.dtype == jnp.bfloat16
  # 8 bits of weights that add up to 1, times values up to 4, and 8 bits of the result.
  np.testing.assert_allclose(found, token_loop(arguments, SMALL), atol=2 * 4 * 2**-8)


@pytest.mark.parametrize("implementation", ["reference", *FAST])
def test_what_is_not_seen_changes_no_bit(implementation):
  """Places of pages, junk in the table, NaN in what is not seen, and what other rows hold."""
  arguments = draw(SMALL)
  expected = run(arguments, SMALL, implementation)

  begins, ends = places(arguments)
  begins = np.maximum(begins - (SMALL.window - 1), 0)
  table = np.asarray(arguments["page_table"])
  number = arguments["keys"].shape[0]
  order = np.random.default_rng(5).permutation(number)
  keys, values = (np.full(arguments[k].shape, np.nan, np.float32) for k in ("keys", "values"))
  moved = np.full_like(table, 10**6)
  for row in range(SMALL.rows):
    for place in range(begins[row], ends[row]):
      page, slot = table[row, place // SMALL.page], place % SMALL.page
      moved[row, place // SMALL.page] = order[page]
      keys[order[page], :, slot] = arguments["keys"][page, :, slot]
      values[order[page], :, slot] = arguments["values"][page, :, slot]
  query = np.asarray(arguments["query"])
  real = (np.arange(SMALL.time) < np.asarray(arguments["counts"])[:, None])[..., None, None]
  other = arguments | {
    "query": jnp.asarray(np.where(real, query, np.nan)),
    "keys": jnp.asarray(keys),
    "values": jnp.asarray(values),
    "page_table": jnp.asarray(moved),
  }
  np.testing.assert_array_equal(run(other, SMALL, implementation), expected)
  assert not np.any(expected[~np.broadcast_to(real, expected.shape)])

  alone = {**arguments, "starts": arguments["starts"].at[0].set(3)}
  np.testing.assert_array_equal(run(alone, SMALL, implementation)[1:], expected[1:])


@pytest.mark.parametrize("implementation", FAST)
def test_a_row_without_tokens_among_none_with_any_is_zero(implementation):
  arguments = draw(SMALL) | {"counts": jnp.zeros(SMALL.rows, jnp.int32)}
  assert not np.any(run(arguments, SMALL, implementation))


@pytest.mark.parametrize("implementation", ["reference", *FAST])
def test_tokens_without_a_place_are_zero_and_change_nothing_for_the_others(implementation):
  arguments = draw(SMALL) | {"starts": jnp.asarray([-2, -1, -3, -1], jnp.int32)}
  counts = np.array([3, 2, 3, 1])
  found = run(arguments | {"counts": jnp.asarray(counts)}, SMALL, implementation).copy()
  moved = np.zeros_like(arguments["query"])
  moved[0, 0], moved[1, 0] = arguments["query"][0, 2], arguments["query"][1, 1]
  plain = arguments | {
    "query": jnp.asarray(moved),
    "starts": jnp.zeros(4, jnp.int32),
    "counts": jnp.asarray([1, 1, 0, 0]),
  }
  expected = token_loop(plain, SMALL)
  np.testing.assert_allclose(found[0, 2], expected[0, 0], atol=3e-6)
  np.testing.assert_allclose(found[1, 1], expected[1, 0], atol=3e-6)
  found[0, 2], found[1, 1] = 0, 0
  assert not np.any(found)


@pytest.mark.parametrize("implementation", ["xla", "pallas_gpu"])
def test_tokens_of_one_call_are_those_of_steps(implementation):
  arguments = draw(SMALL)
  together = run(arguments, SMALL, implementation)
  call = jax.jit(
    functools.partial(
      paged_attention, scale=0.3, window=SMALL.window, implementation=implementation
    )
  )
  for t in range(SMALL.time):
    step = arguments | {
      "query": arguments["query"][:, t : t + 1],
      "starts": arguments["starts"] + t,
      "counts": (arguments["counts"] > t).astype(jnp.int32),
    }
    np.testing.assert_allclose(call(**step)[:, 0], together[:, t], atol=1e-6)


@pytest.mark.parametrize(
  ("dtype", "implementation"),
  [
    *(("int8", name) for name in ("reference", *FAST)),
    *(("float8_e4m3fn", name) for name in ("reference", "xla")),
  ],
)
def test_quantised_pools_are_those_they_stand_for(dtype, implementation):
  arguments = draw(SMALL, quantised=dtype)
  expected = token_loop(dequantised(arguments), SMALL)
  np.testing.assert_allclose(run(arguments, SMALL, implementation), expected, atol=3e-6)


@pytest.mark.parametrize("implementation", FAST)
def test_quantised_latents_serve_as_keys_and_values_and_junk_scales_do_not_matter(implementation):
  shape = Shape(4, 2, 12, 1, 24, 16, 32, 5, latent=True)
  arguments = draw(shape, quantised="float8_e4m3fn")
  expected = token_loop(dequantised(arguments), shape)
  table, ends = np.asarray(arguments["page_table"]), places(arguments)[1]
  used = np.zeros(arguments["key_scales"].shape, bool)
  for row, end in enumerate(ends):
    for place in range(end):
      used[table[row, place // shape.page], :, place % shape.page] = True
  arguments["key_scales"] = jnp.where(used, arguments["key_scales"], jnp.nan)
  arguments["keys"] = jnp.where(used[..., None], arguments["keys"], jnp.nan)
  np.testing.assert_allclose(run(arguments, shape, implementation), expected, atol=3e-6)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_error_of_quantised_vectors_is_within_its_bound(dtype):
  x = np.random.default_rng(0).normal(size=(50, 33)) * 10.0 ** np.arange(-3, 2).repeat(10)[:, None]
  x[3] = 0.0
  narrow, scales = quantize_tokens(jnp.asarray(x, jnp.float32), dtype)
  assert narrow.dtype == dtype and scales.shape == x.shape[:1]
  error = np.abs(np.asarray(narrow, np.float64) * np.asarray(scales)[:, None] - x)
  largest = np.max(np.abs(x), axis=1, keepdims=True)
  bound = largest / 254 if dtype == "int8" else np.maximum(np.abs(x) / 16, largest * 2**-10 / 448)
  assert np.all(error <= bound * (1 + 1e-5))
  assert not np.any(error[3])
  # As close as 8 bits can be, not closer: the bound is reached within a tenth.
  assert np.max(error / np.maximum(bound, 1e-30)) > 0.9


def dense(arguments, shape: Shape) -> tuple[jax.Array, jax.Array]:
  """Keys and values of the rows as a cache of slots."""
  return tuple(
    jnp.swapaxes(v[arguments["page_table"]], 1, 2).reshape(
      shape.rows, shape.kv_heads, -1, v.shape[-1]
    )
    for v in (arguments["keys"], arguments["values"])
  )


@pytest.mark.optimised
@pytest.mark.parametrize(
  ("shape", "dtype"),
  [
    (Shape(4, 1, 8, 2, 16, 16, 256, 3), "float32"),
    (Shape(4, 1, 8, 2, 16, 16, 256, 3), "bfloat16"),
    (Shape(4, 5, 4, 2, 16, 16, 64, 12, window=100), "float32"),
    (Shape(4, 7, 4, 1, 32, 16, 8, 5), "float32"),
    (Shape(4, 1, 4, 1, 32, 16, 8, 32, window=5), "bfloat16"),
  ],
)
def test_xla_has_the_bits_of_a_dense_cache_read_in_the_same_tiles(shape, dtype):
  arguments = draw(shape, dtype)
  found = run(arguments, shape, "xla")
  keys, values = dense(arguments, shape)
  positions = arguments["starts"][:, None] + jnp.arange(shape.time)
  read = jax.jit(functools.partial(attend_cache, scale=0.3, window=shape.window))
  expected = np.asarray(read(arguments["query"], keys, values, positions=positions))
  real = np.arange(shape.time) < np.asarray(arguments["counts"])[:, None]
  np.testing.assert_array_equal(found[real], expected[real])


@pytest.mark.parametrize(
  ("changed", "message"),
  [
    ({"implementation": "cuda"}, "no implementation='cuda'.*'pallas_tpu'"),
    ({"window": 0}, "window=0; allowed: at least 1"),
    ({"value_dim": 8}, "got both, value_dim=8"),
    ({"values": None}, "got neither"),
    ({"values": None, "value_dim": 17}, r"value_dim=17; allowed: 1..D=16"),
    ({"keys": jnp.zeros((4, 3, 8, 16))}, "C dividing H=4, got"),
    ({"keys": jnp.zeros((22, 2, 32, 16), jnp.int8)}, "key_scales go with keys of dtype int8 or"),
    ({"key_scales": jnp.zeros((22, 2, 32))}, "key_scales go with keys.*got float32 with scales"),
    ({"values": jnp.zeros((22, 2, 32, 16), jnp.bfloat16)}, "values must be float32, as the query"),
    ({"page_table": jnp.zeros((3, 5), jnp.int32)}, r"page_table must be int32 \[R=4"),
    ({"starts": jnp.zeros(3, jnp.int32)}, r"starts must have shape \(4,\)"),
  ],
)
def test_what_does_not_fit_is_named(changed, message):
  with pytest.raises(ValueError, match=message):
    paged_attention(**{**draw(SMALL), "scale": 1.0, **changed})


@pytest.mark.parametrize(
  ("shape", "dtype", "implementation", "message"),
  [
    (SMALL._replace(page=8), "bfloat16", "pallas_tpu", "pages of a multiple of 16 tokens; got bf"),
    (SMALL, "float16", "pallas_tpu", "float32 or bfloat16.*got float16"),
    (SMALL, "float16", "pallas_gpu", "float32 or bfloat16.*got float16"),
    (SMALL._replace(width=1040), "float32", "pallas_gpu", "widths up to 1024.*D=1040"),
  ],
)
def test_a_kernel_says_what_it_does_not_take(shape, dtype, implementation, message):
  with pytest.raises(ValueError, match=rf"{message}(.|\n)*implementation='xla'"):
    jax.eval_shape(
      functools.partial(paged_attention, scale=1.0, implementation=implementation),
      **draw(shape, dtype),
    )


def test_a_page_table_that_scalar_memory_does_not_hold_is_refused():
  arguments = abstract(LAYERS["decode"]._replace(rows=512, pages=1024), "bfloat16", None)
  with pytest.raises(ValueError, match="got 512 rows of 1024 pages; take larger pages"):
    jax.eval_shape(
      functools.partial(paged_attention, scale=1.0, implementation="pallas_tpu"), **arguments
    )


# Compilation. Attention layers of Nemotron 3 Nano, of Llama 3 8B and, 128 lanes wide, of MLA.
LAYERS = {
  "decode": Shape(64, 1, 32, 8, 128, 128, 64, 128),
  "prefill": Shape(4, 512, 32, 2, 128, 128, 64, 128, window=4096),
  "latent": Shape(16, 1, 64, 1, 640, 512, 64, 128, latent=True),
}


def abstract(shape: Shape, dtype: str, quantised: str | None):
  # Pools are larger than all else, so that a copy of one shows.
  of, number = jax.ShapeDtypeStruct, max(shape.rows * shape.pages, 8192)
  lead = (number, shape.kv_heads, shape.page)
  arguments = {
    "query": of((shape.rows, shape.time, shape.heads, shape.width), dtype),
    "keys": of((*lead, shape.width), quantised or dtype),
    "values": None if shape.latent else of((*lead, shape.value_dim), quantised or dtype),
    "page_table": of((shape.rows, shape.pages), jnp.int32),
    "starts": of((shape.rows,), jnp.int32),
    "counts": of((shape.rows,), jnp.int32),
  }
  if quantised:
    arguments["key_scales"] = of(lead, jnp.float32)
    arguments["value_scales"] = None if shape.latent else of(lead, jnp.float32)
  return arguments


def kernel(shape: Shape, implementation: str, arguments):
  return api.paged_attention(
    **arguments,
    scale=0.1,
    window=shape.window,
    value_dim=shape.value_dim if shape.latent else None,
    implementation=implementation,
  )


EVERY_POOL = pytest.mark.parametrize(
  ("dtype", "quantised"),
  [("bfloat16", None), ("float32", None), ("bfloat16", "int8"), ("bfloat16", "float8_e4m3fn")],
)


@EVERY_POOL
@pytest.mark.parametrize("layer", LAYERS)
def test_the_gpu_kernel_is_lowered_for_cuda(layer, dtype, quantised):
  shape = LAYERS[layer]
  with h100():
    traced = jax.jit(functools.partial(kernel, shape, "pallas_gpu")).trace(
      abstract(shape, dtype, quantised)
    )
    lowered = traced.lower(lowering_platforms=("cuda",))
  assert lowered.as_text().count("__gpu$xla.gpu.triton") == 1


@pytest.mark.tpu
@needs_libtpu
@EVERY_POOL
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("chip", CHIPS)
def test_the_tpu_kernel_compiles_and_copies_no_pool(chip, layer, dtype, quantised):
  shape = LAYERS[layer]
  arguments = abstract(shape, dtype, quantised)
  compiled = compile_for(chip, functools.partial(kernel, shape, "pallas_tpu"), arguments)
  assert "paged_attention" in compiled.as_text()
  pool = arguments["keys"]
  # Scales of quantised pools are gathered, 4 bytes a token and key head, padded to 128 lanes.
  allowed = pool.size * pool.dtype.itemsize // 4
  assert compiled.memory_analysis().temp_size_in_bytes < allowed


def test_implementations_are_those_of_the_contract():
  assert tuple(IMPLEMENTATIONS) == ("reference", "xla", "pallas_tpu", "pallas_gpu")
