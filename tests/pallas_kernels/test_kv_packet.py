"""Attention over packets in pages: values, what may not change, groups; states after packets."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from benchmarks.packet_attention import draw, pages_of, rotary_of
from pallas_kernels.kv_packet import (
  IMPLEMENTATIONS,
  STATE_IMPLEMENTATIONS,
  PageTable,
  Rotary,
  compose_states,
  packet_attention,
  pallas_tpu,
  turn,
)
from pallas_kernels.kv_packet.shapes import CHECKED, Shape
from pallas_kernels.paged_attention import paged_attention, quantize_tokens
from tests.pallas_kernels.test_ssd_pallas_gpu import h100
from tests.pallas_kernels.topologies import CHIPS, compile_for, needs_libtpu

SCALE = 0.3
PALLAS = ("pallas_tpu", "pallas_gpu")
# Interpreted programs are large and run once.
QUICKLY = {"compiler_options": {"xla_backend_optimization_level": 0}}
SMALL = CHECKED["a window"]


def run(arguments, shape: Shape, implementation: str) -> np.ndarray:
  call = functools.partial(
    packet_attention,
    scale=SCALE,
    rotary=rotary_of(shape),
    window=shape.window,
    value_dim=shape.value_dim if shape.latent else None,
    implementation=implementation,
  )
  options = QUICKLY if implementation in PALLAS else {}
  return np.asarray(jax.jit(call, **options)(**arguments))


def held(arguments, shape: Shape, row: int) -> list[tuple[int, int, int, int]]:
  """(position, page, slot, turn) of every token that a row may see."""
  tables = [(arguments["table"], row)]
  if shape.groups:
    tables.append((arguments["shared"], row // (shape.rows // shape.groups)))
  found = []
  for table, r in tables:
    pages, firsts, valid, turns = (np.asarray(v)[r] for v in table)
    for e, count in enumerate(valid):
      found += [(firsts[e] + s, pages[e], s, turns[e]) for s in range(count)]
  return found


def turned(key: np.ndarray, steps: int, shape: Shape) -> np.ndarray:
  """As complex numbers, in float64."""
  rotary = rotary_of(shape)
  if rotary is None:
    return key
  n, first = len(rotary.frequencies), rotary.first
  pairs = first + (
    np.arange(2 * n).reshape(n, 2) if rotary.interleaved else np.arange(2 * n).reshape(2, n).T
  )
  numbers = key[pairs[:, 0]] + 1j * key[pairs[:, 1]]
  numbers = numbers * np.exp(1j * steps * rotary.frequencies.astype(np.float64))
  out = key.copy()
  out[pairs[:, 0]], out[pairs[:, 1]] = numbers.real, numbers.imag
  return out


def token_loop(arguments, shape: Shape) -> np.ndarray:
  """Query by query over turned keys one after the other, in float64."""
  pools = {
    k: None if arguments[k] is None else np.asarray(arguments[k], np.float64)
    for k in ("query", "keys", "values")
  }
  starts, counts = (np.asarray(arguments[k]) for k in ("starts", "counts"))
  out = np.zeros((shape.rows, shape.time, shape.heads, shape.value_dim))
  for r in range(shape.rows):
    tokens = held(arguments, shape, r)
    for h in range(shape.kv_heads):
      keys = np.array([turned(pools["keys"][p, h, s], n, shape) for _, p, s, n in tokens])
      pool = pools["keys"] if shape.latent else pools["values"]
      values = np.array([pool[p, h, s, : shape.value_dim] for _, p, s, _ in tokens])
      places = np.array([at for at, *_ in tokens])
      for t in range(counts[r]):
        back = starts[r] + t - places
        seen = (back >= 0) & (back < (shape.window or 10**9))
        for g in range(shape.heads // shape.kv_heads):
          head = h * (shape.heads // shape.kv_heads) + g
          scores = SCALE * keys[seen] @ pools["query"][r, t, head]
          weights = np.exp(scores - np.max(scores))
          out[r, t, head] = (weights / np.sum(weights)) @ values[seen]
  return out


# Interpreted kernels take seconds a call: of some tests they are run only with the slow ones.
EVERY_FEW = pytest.mark.parametrize(
  "implementation",
  [pytest.param(i, marks=[pytest.mark.slow] if i in PALLAS else []) for i in IMPLEMENTATIONS],
)
OFTEN = ("a step", "a window", "latent")


@pytest.mark.parametrize(
  ("name", "implementation"),
  [
    pytest.param(n, i, marks=[pytest.mark.slow] if i in PALLAS and n not in OFTEN else [])
    for n in CHECKED
    for i in IMPLEMENTATIONS
  ],
)
def test_implementations_are_the_loop_over_tokens(name, implementation):
  shape = CHECKED[name]
  arguments = draw(shape)
  np.testing.assert_allclose(
    run(arguments, shape, implementation), token_loop(arguments, shape), atol=1e-5
  )


@EVERY_FEW
def test_pages_without_turns_are_paged_attention(implementation):
  shape = SMALL._replace(packets=(3 * SMALL.page,), turned=0)
  arguments = draw(shape)
  table = arguments.pop("table")
  plain = paged_attention(**arguments, page_table=table.pages, scale=SCALE, window=shape.window)
  found = run(arguments | {"table": table}, shape, implementation)
  np.testing.assert_allclose(found, plain, atol=2e-6)
  still = run(
    arguments | {"table": table._replace(turns=jnp.zeros_like(table.turns))},
    shape._replace(turned=16),
    implementation,
  )
  np.testing.assert_allclose(still, plain, atol=2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_not_seen_changes_no_bit(implementation):
  """Places of pages, NaN in what nobody sees, numbers of pages without tokens, other rows."""
  arguments = draw(SMALL)
  used = arguments["table"]
  arguments["table"] = PageTable(*(jnp.pad(v, ((0, 0), (0, 3))) for v in used))
  expected = run(arguments, SMALL, implementation)
  starts, counts = (np.asarray(arguments[k]) for k in ("starts", "counts"))
  number = arguments["keys"].shape[0]
  order = np.random.default_rng(5).permutation(number)
  keys, values = (np.full(arguments[k].shape, np.nan, np.float32) for k in ("keys", "values"))
  for row in range(SMALL.rows):
    for at, page, slot, _ in held(arguments, SMALL, row):
      if counts[row] and starts[row] - SMALL.window < at < starts[row] + counts[row]:
        keys[order[page], :, slot] = arguments["keys"][page, :, slot]
        values[order[page], :, slot] = arguments["values"][page, :, slot]
  junk = jnp.full((SMALL.rows, 3), 10**6, jnp.int32)
  moved = jnp.concatenate([jnp.asarray(order)[used.pages], junk], axis=1)
  table = arguments["table"]._replace(pages=moved)
  other = arguments | {"keys": jnp.asarray(keys), "values": jnp.asarray(values), "table": table}
  np.testing.assert_array_equal(run(other, SMALL, implementation), expected)

  alone = arguments | {"starts": arguments["starts"].at[0].set(7)}
  np.testing.assert_array_equal(run(alone, SMALL, implementation)[1:], expected[1:])


@pytest.mark.parametrize("name", ["a step", "a prefill"])
def test_the_size_of_pages_changes_rounding_only(name):
  shape = CHECKED[name]
  arguments = draw(shape)
  expected = run(arguments, shape, "xla")
  small = shape._replace(page=4)
  other = draw(small)
  keys, values = (np.zeros(other[k].shape, np.float32) for k in ("keys", "values"))
  for row in range(shape.rows):
    places = {at: (page, slot) for at, page, slot, _ in held(arguments, shape, row)}
    for at, page, slot, _ in held(other, small, row):
      old = places[at]
      keys[page, :, slot] = arguments["keys"][old[0], :, old[1]]
      values[page, :, slot] = arguments["values"][old[0], :, old[1]]
  other |= {"query": arguments["query"], "keys": jnp.asarray(keys), "values": jnp.asarray(values)}
  np.testing.assert_allclose(run(other, small, "xla"), expected, atol=1e-6)


@EVERY_FEW
def test_a_group_reads_what_each_of_its_rows_would(implementation):
  shape = CHECKED["a step of a group"]
  arguments = draw(shape)
  expected = run(arguments, shape, implementation)
  shared = arguments.pop("shared")
  members = shape.rows // shape.groups
  own = (jnp.repeat(v, members, axis=0) for v in shared)
  pairs = zip(own, arguments["table"], strict=True)
  arguments["table"] = PageTable(*(jnp.concatenate(pair, axis=1) for pair in pairs))
  alone = run(arguments, shape._replace(groups=0), implementation)
  np.testing.assert_allclose(alone, expected, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", ["a step", "a prefill", "latent"])
def test_narrow_pages_stay_as_they_are(name, implementation):
  shape = CHECKED[name]
  arguments = draw(shape)
  wide = dict(arguments)
  for kind in ("key", "value"):
    pool = arguments[f"{kind}s"]
    if pool is not None:
      narrow, scales = quantize_tokens(pool, "int8")
      arguments |= {f"{kind}s": narrow, f"{kind}_scales": scales}
      wide[f"{kind}s"] = narrow.astype(jnp.float32) * scales[..., None]
  np.testing.assert_allclose(
    run(arguments, shape, implementation), token_loop(wide, shape), atol=1e-5
  )


@EVERY_FEW
def test_rows_without_tokens_are_zero(implementation):
  arguments = draw(SMALL) | {"counts": jnp.zeros(SMALL.rows, jnp.int32)}
  assert not np.any(run(arguments, SMALL, implementation))
  arguments = draw(SMALL) | {"starts": jnp.full(SMALL.rows, -SMALL.time, jnp.int32)}
  assert not np.any(run(arguments, SMALL, implementation))


def test_turns_add_up_and_nothing_turns_by_zero():
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(5, 3, 24)), jnp.float32)
  rotary = Rotary(np.array([1.0, 0.3, 0.0, 0.01], np.float32), 7, True)
  np.testing.assert_array_equal(turn(x, jnp.zeros(3, jnp.int32), rotary), x)
  once = turn(x, jnp.asarray([50, 9, 700]), rotary)
  twice = turn(turn(x, jnp.asarray([20, 9, 0]), rotary), jnp.asarray([30, 0, 700]), rotary)
  np.testing.assert_allclose(once, twice, atol=2e-5)
  np.testing.assert_array_equal(once[..., :7], x[..., :7])
  np.testing.assert_array_equal(once[..., 15:], x[..., 15:])
  assert np.max(np.abs(once - x)) > 0.5


@pytest.mark.parametrize("implementation", STATE_IMPLEMENTATIONS)
def test_states_follow_each_other_as_maps(implementation):
  rng = np.random.default_rng(0)
  rows, pieces, heads = 3, 4, 2
  log_decays = -jnp.asarray(rng.exponential(size=(rows, pieces, heads)), jnp.float32)
  states = jnp.asarray(rng.normal(size=(rows, pieces, heads, 5, 6)), jnp.float32)
  initial = jnp.asarray(rng.normal(size=(rows, heads, 5, 6)), jnp.float32)
  counts = np.array([4, 0, 2])
  run = functools.partial(compose_states, implementation=implementation)
  expected = np.asarray(initial, np.float64)
  for r in range(rows):
    for k in range(counts[r]):
      decay = np.exp(np.asarray(log_decays[r, k], np.float64))[:, None, None]
      expected[r] = decay * expected[r] + states[r, k]
  found = run(log_decays, states, initial_state=initial, counts=jnp.asarray(counts))
  np.testing.assert_allclose(found, expected, atol=1e-6)
  # Any bracketing, and not any order.
  first = run(log_decays[:, :2], states[:, :2], initial_state=initial)
  apart = run(log_decays[:, 2:], states[:, 2:], initial_state=first)
  whole = run(log_decays, states, initial_state=initial)
  np.testing.assert_allclose(apart, whole, atol=1e-6)
  back = run(log_decays[:, ::-1], states[:, ::-1], initial_state=initial)
  assert np.max(np.abs(back - whole)) > 0.1
  np.testing.assert_array_equal(run(log_decays[:, :1], states[:, :1]), states[:, 0])


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"window": 0}, "window=0"),
    ({"rotary": Rotary(np.ones(9, np.float32))}, "18 channels from 0"),
    ({"implementation": "cuda"}, "no implementation='cuda'.*'pallas_tpu'"),
    ({"shared": "3 groups"}, "a divisor of R=4"),
    ({"counts": jnp.zeros(3, jnp.int32)}, r"counts must have shape \(4,\)"),
  ],
)
def test_wrong_arguments_are_told(changes, message):
  arguments = draw(SMALL)
  if "shared" in changes:
    changes = {"shared": PageTable(*(v[:3] for v in arguments["table"]))}
  with pytest.raises(ValueError, match=message):
    packet_attention(**{**arguments, "scale": SCALE, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a step of a group", "a window"])
def test_the_tpu_kernel_waits_for_its_copies(monkeypatch, name):
  """Copies run as late as they may, memory begins as NaN; small blocks, so many steps."""
  late = pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan")
  monkeypatch.setattr(pallas_tpu, "on_platform", lambda _, call, *arrays: call(late)(*arrays))
  monkeypatch.setattr(pallas_tpu, "_QUERIES", 16)
  shape = CHECKED[name]._replace(time=11)
  arguments = draw(shape)
  found = run(arguments, shape, "pallas_tpu")
  np.testing.assert_allclose(found, token_loop(arguments, shape), atol=1e-5)


@pytest.mark.parametrize(
  ("implementation", "changes", "dtype", "message"),
  [
    ("pallas_tpu", {"page": 8}, "bfloat16", "of 16; got bfloat16, bfloat16 and 8 tokens"),
    ("pallas_tpu", {}, "float16", "got float16"),
    ("pallas_gpu", {}, "float16", "got float16"),
    ("pallas_gpu", {"width": 1040}, "float32", "widths up to 1024.*D=1040"),
  ],
)
def test_a_kernel_says_what_it_does_not_take(implementation, changes, dtype, message):
  with pytest.raises(ValueError, match=rf"{message}(.|\n)*implementation='xla'"):
    run(draw(SMALL._replace(**changes), dtype), SMALL, implementation)


def test_bfloat16_rounds_turned_queries_weights_and_results_only():
  shape = CHECKED["a step of a group"]._replace(page=16)
  arguments = draw(shape, "bfloat16")
  expected = token_loop(arguments, shape)
  for implementation in ("xla", *PALLAS):
    found = run(arguments, shape, implementation)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(np.float32), expected, atol=4 * 4 * 2**-8)


# Attention layers of Llama 3 8B and, without positions, of Nemotron 3 Nano; 128 lanes wide, of MLA.
LAYERS = {
  "decode": Shape(64, 1, 32, 8, 128, 128, 64, (2000, 1000), 500, turned=128, groups=4),
  "prefill": Shape(4, 256, 32, 8, 128, 128, 64, (2000, 1000), 500, turned=128),
  "no positions": Shape(64, 1, 32, 2, 128, 128, 64, (2000, 1000), 500),
  "latent": Shape(16, 1, 64, 1, 640, 512, 64, (2000,), 500, 64, 512, True, latent=True),
}


def abstract(shape: Shape, dtype: str):
  of, number = jax.ShapeDtypeStruct, 8192
  lead = (number, shape.kv_heads, shape.page)
  tail = -(-shape.tail // shape.page)

  def table(rows: int, entries: int) -> PageTable:
    return PageTable(*[of((rows, entries), jnp.int32)] * 4)

  arguments = {
    "query": of((shape.rows, shape.time, shape.heads, shape.width), dtype),
    "keys": of((*lead, shape.width), dtype),
    "values": None if shape.latent else of((*lead, shape.value_dim), dtype),
    "table": table(shape.rows, tail + (0 if shape.groups else pages_of(shape))),
    "starts": of((shape.rows,), jnp.int32),
    "counts": of((shape.rows,), jnp.int32),
  }
  if shape.groups:
    arguments["shared"] = table(shape.groups, pages_of(shape))
  return arguments


def kernel(shape: Shape, implementation: str, arguments):
  return packet_attention(
    **arguments,
    scale=0.1,
    rotary=rotary_of(shape),
    value_dim=shape.value_dim if shape.latent else None,
    implementation=implementation,
  )


@pytest.mark.parametrize("layer", LAYERS)
def test_the_gpu_kernel_is_lowered_for_cuda(layer):
  shape = LAYERS[layer]
  with h100():
    traced = jax.jit(functools.partial(kernel, shape, "pallas_gpu")).trace(
      abstract(shape, "bfloat16")
    )
    lowered = traced.lower(lowering_platforms=("cuda",))
  assert lowered.as_text().count("__gpu$xla.gpu.triton") == (2 if shape.groups else 1)


@pytest.mark.tpu
@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("layer", LAYERS)
def test_the_tpu_kernel_compiles_without_a_copy_of_a_pool(chip, layer):
  shape = LAYERS[layer]
  arguments = abstract(shape, "bfloat16")
  compiled = compile_for(chip, functools.partial(kernel, shape, "pallas_tpu"), arguments)
  pool = arguments["keys"].size * 2
  assert compiled.memory_analysis().temp_size_in_bytes < pool / 2


def test_implementations_are_those_of_the_contract():
  assert tuple(IMPLEMENTATIONS) == ("reference", "xla", "pallas_tpu", "pallas_gpu")
