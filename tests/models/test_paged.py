"""Kernels over pages against the same places read in XLA: calls, whole models, compilation."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from agentjax import models
from agentjax.engine import EngineConfig
from agentjax.engine.home import Home
from agentjax.engine.programs import programs_of_lane
from agentjax.models import attend as attend_module
from agentjax.models import mla as mla_module
from agentjax.models import paged
from agentjax.models.attend import attend_cache
from agentjax.models.blocks import Appended
from agentjax.models.config import MlaConfig
from agentjax.models.pages import Paged, is_paged
from agentjax.sharding import MeshConfig, make_mesh
from pallas_kernels.paged_attention import quantize_tokens
from tests.models.rows import TINY, draw
from tests.pallas_kernels.test_ssd_pallas_gpu import h100
from tests.pallas_kernels.topologies import TOPOLOGIES, device, needs_libtpu
from tests.sharding.test_families_on_eight_devices import FAMILIES

PAGE, ENTRIES, LENGTH, WIDTH = 16, 5, 75, 8  # the last page is not full
SLOTS, HEADS, KV_HEADS = 4, 4, 2
LATENT = 5  # width of values that are the first channels of keys

# Positions; and slots of rows, tokens that are no padding and window, where there are any.
CALLS = {
  "a step": ([[40], [0], [74], [16]], {}),
  "idle slots": ([[40], [0], [0], [16]], {"counts": np.array([True, False, False, True])}),
  "a window": ([[40], [0], [74], [16]], {"window": 19}),
  "several tokens": ([[40, 41, 42], [0, 1, 2], [72, 73, 74], [15, 16, 17]], {}),
  "past the end": ([[40, 41, 42], [0, 1, 2], [74, 75, 76], [75, 76, 77]], {}),
  "heads that begin": ([[75, 0, 1], [75, 75, 0], [75, 75, 75], [7, 8, 9]], {}),
  "rows": (
    [[40, 41, 42], [3, 4, 5], [60, 61, 62]],
    {"rows": [2, 0, SLOTS], "counts": [3, 2, 0], "window": 30},
  ),
}


def held(latent: bool, narrow: str | None = None) -> tuple[Paged, Paged | None]:
  """Slots of random contents; slot 3 shares its first page with slot 2."""
  rng = np.random.default_rng(0)
  table = 1 + np.arange(SLOTS * ENTRIES).reshape(SLOTS, ENTRIES)
  table[3, 0] = table[2, 0]
  page = PAGE if narrow is None else 2 * PAGE  # which fills the sublanes of a TPU

  def pool(kv_heads: int) -> Paged:
    numbers = rng.standard_normal((1 + SLOTS * ENTRIES, kv_heads, page, WIDTH))
    paged = Paged(jnp.asarray(numbers, jnp.float32), jnp.asarray(table, jnp.int32), LENGTH)
    if narrow is None:
      return paged
    numbers, scales = quantize_tokens(paged.pool, narrow)
    return dataclasses.replace(paged, pool=numbers, scales=scales, dtype=jnp.float32)

  return (pool(1), None) if latent else (pool(KV_HEADS), pool(KV_HEADS))


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
@pytest.mark.parametrize("latent", [False, True], ids=["keys and values", "latents"])
@pytest.mark.parametrize(
  ("call", "narrow"),
  [*((call, None) for call in CALLS), ("rows", "int8"), ("several tokens", "float8_e4m3fn")],
)
def test_kernels_read_what_attend_cache_reads(call, narrow, latent, implementation):
  positions, given = CALLS[call]
  positions = jnp.asarray(positions)
  given = {k: v if k == "window" else jnp.asarray(v) for k, v in given.items()}
  keys, values = held(latent, narrow)
  query = jnp.asarray(
    np.random.default_rng(1).standard_normal((*positions.shape, HEADS, WIDTH)), jnp.float32
  )
  given |= {"positions": positions, "scale": 0.3, "value_width": LATENT if latent else None}
  expected = attend_cache(query, keys, values, **given)
  found = paged.attend_paged(query, keys, values, **given, implementation=implementation)
  real = np.asarray(positions) < LENGTH
  if "counts" in given:
    real &= np.arange(positions.shape[1]) < np.asarray(given["counts"])[:, None]
  assert found.shape == expected.shape and found.dtype == expected.dtype
  np.testing.assert_allclose(found[real], expected[real], atol=1e-5)
  assert not np.any(found[~real] if call != "heads that begin" else found[:2][~real[:2]])


DENSE = dataclasses.replace(TINY, pattern="*-*-")
CONFIGS = {
  "dense": DENSE,
  "latent": FAMILIES["youtu"],
  "latent, whole lanes": FAMILIES["youtu"],
  "gemma, windows": FAMILIES["gemma4_e2b"],
  "two passes, a window": dataclasses.replace(
    DENSE, qk_norm=False, second_pass=models.SecondPassConfig(window=20)
  ),
  "looped": dataclasses.replace(
    DENSE, pattern="*-V-*-", loop=models.LoopConfig(2, 2, mean_depth=2, start_by="place")
  ),
  "heads": dataclasses.replace(DENSE, mtp=models.MtpConfig(pattern="*-", depths=2, shared=False)),
}


def in_pages(cache):
  """The state with keys and values in pages of its own; page 0 is nobody's."""
  flags, (leaves, tree) = models.in_pages(cache), jax.tree.flatten(cache)
  table = 1 + jnp.arange(SLOTS * ENTRIES, dtype=jnp.int32).reshape(SLOTS, ENTRIES)

  def pages(v):
    return Paged(jnp.zeros((SLOTS * ENTRIES + 1, *v.shape[1:-2], PAGE, v.shape[-1])), table, LENGTH)

  return jax.tree.unflatten(
    tree, [pages(v) if f else v for v, f in zip(leaves, flags, strict=True)]
  )


def shared(cache):
  """Slot 3 goes on from the first page of slot 0."""
  blocks = jax.tree.map(
    lambda v: dataclasses.replace(v, table=v.table.at[3, 0].set(v.table[0, 0])),
    cache.blocks,
    is_leaf=is_paged,
  )
  return dataclasses.replace(cache, blocks=blocks, lengths=cache.lengths.at[3].set(PAGE))


def play(params, config: models.ModelConfig) -> list[jax.Array]:
  """Logits (drafts' too) of a prefill with padding, a fork, steps with idle slots, a window."""
  ids = jnp.asarray(np.random.default_rng(2).integers(0, config.vocab_size, (4, 24)))
  drafting = config.mtp is not None
  params = models.prepare_decode_params(params, config, heads=drafting)
  cache = in_pages(models.init_cache(config, SLOTS, LENGTH))
  rows, counts = jnp.array([2, 0, SLOTS, 1]), jnp.array([24, 20, 24, 0])
  out = models.extend(params, config, cache, rows, ids, counts)
  found = [out.logits[:2]]
  if drafting:
    heads = in_pages(models.init_mtp_cache(config, SLOTS, LENGTH, 2))
    positions = jnp.zeros((4, 1), jnp.int32) + jnp.arange(24)
    appended = Appended(jnp.where(counts > 0, rows, SLOTS), positions, counts)
    heads = models.follow(params, config, heads, appended, out.hidden, ids, max_length=LENGTH)
    models.draft(
      params,
      config,
      heads,
      out.cache.lengths,
      ids[:, 0],
      jnp.array([True, False, True, False]),
      tokens=2,
      max_length=LENGTH,
      choose=lambda step, logits: found.append(logits[::2]) or jnp.full(SLOTS, step),
    )
  cache = shared(out.cache)
  active = np.array([True, False, True, True])
  for step in range(2):
    out = models.decode_step(params, config, cache, ids[:, step], active)
    found.append(out.logits[active])
    cache = out.cache
  if models.unverifiable(config) is None:
    verified = models.verify(params, config, cache, ids[:, 3:6], active)
    found.append(verified.logits[active])
    cache = models.accept(params, config, cache.lengths, verified.pending, jnp.array([2, 0, 3, 1]))
    found.append(models.decode_step(params, config, cache, ids[:, 7], active).logits[active])
  return found


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(n, marks=pytest.mark.slow)
    if n in ("looped", "two passes, a window", "heads")
    else n
    for n in CONFIGS
  ],
)
def test_a_model_that_decodes_with_the_kernel_gives_the_same_logits(monkeypatch, name):
  """Here XLA's form of the kernel stands for it: the other forms are compared above."""
  config = CONFIGS[name]
  params = draw(config, seed=0)
  expected = jax.jit(play, static_argnums=1)(params, config)
  calls, plain = [], []
  attend_paged, attend_held = paged.attend_paged, attend_module._attend_held

  def counted(*args, implementation, **given):
    calls.append(implementation)
    return attend_paged(*args, **given, implementation="xla")

  def counted_plain(*args, **given):
    plain.append(args)
    return attend_held(*args, **given)

  monkeypatch.setattr(paged, "attend_paged", counted)
  monkeypatch.setattr(attend_module, "_attend_held", counted_plain)
  monkeypatch.setattr(paged, "platforms", lambda kernels: ("cpu",))
  monkeypatch.setattr(paged, "TPU_LANES", 8)
  monkeypatch.setattr(mla_module, "TPU_LANES", 8)
  kernels = "pallas_tpu" if name == "latent, whole lanes" else "pallas_gpu"
  named = dataclasses.replace(config, kernels=kernels)
  if kernels == "pallas_tpu":
    latents = models.init_cache(named, SLOTS, LENGTH).blocks[0].latents
    assert latents.shape[-1] == 16 > config.mla.kv_lora + config.mla.rope_dim
  found = jax.jit(play, static_argnums=1)(params, named)
  assert set(calls) == {kernels} and len(calls) == len(plain)  # both branches are traced
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


SIZES = dict(
  slots=4, max_length=512, chunk_tokens=8, extend_buckets=(32,), extend_rows=(2,), warmup=False
)
WIDE = models.ModelConfig(
  vocab_size=128,
  d_model=128,
  pattern="*-*-",
  num_heads=4,
  num_kv_heads=2,
  head_dim=128,
  rope_theta=1e4,
  d_mlp=128,
  compute_dtype="bfloat16",
)
NARROW_LATENTS = MlaConfig(query_lora=None, kv_lora=256, nope_dim=32, rope_dim=32, value_dim=32)
LANES = {
  "dense": WIDE,
  "dense, int8": WIDE,
  "latent": dataclasses.replace(WIDE, pattern="A-A-", mla=NARROW_LATENTS),
  "drafts": dataclasses.replace(WIDE, mtp=models.MtpConfig(pattern="*-", depths=2)),
}


def lane(name: str, kernels: str | None, home: Home, **changes):
  """Each program's name, itself and its abstract arguments."""
  speculate = "mtp" if name == "drafts" else "none"
  cache_dtype = "int8" if name.endswith("int8") else None
  sizes = EngineConfig(**SIZES, **changes, speculate=speculate, cache_dtype=cache_dtype)
  config = dataclasses.replace(LANES[name], kernels=kernels)
  programs = programs_of_lane(config, sizes, None, home.mesh)
  yield "decode", programs.decode, programs.abstract_arguments(home)
  yield "extend", programs.extend[32], programs.abstract_extension(home, 32)


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=pytest.mark.slow) if n == "drafts" else n for n in LANES]
)
def test_engines_for_gpus_hold_the_kernel_where_it_is_named(name):
  home = Home(tuple(jax.devices()[:1]))
  layers = 3 if name == "drafts" else 2
  for kernels, least in ((None, 0), ("pallas_tpu", 0), ("pallas_gpu", layers)):
    for what, program, arguments in lane(name, kernels, home):
      with h100():
        text = program.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
      count = text.count("__gpu$xla.gpu.triton")
      assert count >= least and bool(count) == bool(least), (what, kernels, count)


def compiled_programs(name: str, kernels: str | None, home: Home):
  """Compiled for TPUs that are only described; a pool of 2^18 tokens is larger than all else."""
  for what, program, arguments in lane(name, kernels, home, cache_tokens=2**18):
    flags = zip(jax.tree.leaves(arguments[0]), models.in_pages(arguments[0]), strict=True)
    pools = [v for v, flag in flags if flag and v.ndim == 4 - ("latent" in name)]  # no scales
    lowered = program.trace(*arguments).lower(lowering_platforms=("tpu",))
    smallest = min(v.size * v.dtype.itemsize for v in pools) // len(home.devices)
    yield what, lowered.compile(), smallest


@pytest.mark.tpu
@needs_libtpu
@pytest.mark.parametrize("name", LANES)
@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_engines_for_tpus_hold_the_kernel_and_copy_no_pool(chip, name):
  for what, compiled, pool in compiled_programs(name, "pallas_tpu", Home((device(chip),))):
    assert "tpu_custom_call" in compiled.as_text(), what
    assert compiled.memory_analysis().temp_size_in_bytes < pool, what


@pytest.mark.tpu
@needs_libtpu
@pytest.mark.parametrize("name", ["dense", "dense, int8", "latent"])
def test_a_lane_of_four_tpus_gathers_no_pool(name):
  """Slots over two devices, heads over two; prefills of such a lane do without the kernel."""
  described = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES["v5e"])
  mesh = make_mesh(MeshConfig(data=2, fsdp=1, tensor=2), described.devices)
  home = Home(tuple(described.devices), mesh)
  for what, compiled, pool in compiled_programs(name, "pallas_tpu", home):
    if what == "decode":
      assert "tpu_custom_call" in compiled.as_text()
      assert compiled.memory_analysis().temp_size_in_bytes < pool
