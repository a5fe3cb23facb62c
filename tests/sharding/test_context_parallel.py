"""Rows cut along time over eight devices against one. As a script: the comparisons."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models, sharding
from agentjax.models import splash
from agentjax.models.attend import attend, max_scores
from agentjax.models.mamba2 import mamba2, mamba2_spec
from pallas_kernels.ssd import ssd

CONFIG = models.ModelConfig(
  vocab_size=40,
  d_model=40,
  pattern="M*",
  num_heads=8,
  num_kv_heads=4,
  head_dim=8,
  rope_theta=1e4,
  d_mlp=32,
  attention_block=4,
  record_max_scores=True,
  mamba_heads=8,
  mamba_head_dim=8,
  mamba_state=4,
  mamba_groups=2,
  chunk_size=4,
  logits_chunk=64,
)
TIME = 64

# Lengths of the pieces of each row; negative ones are padding. A shard of eight is 8 tokens.
ROWS = (
  (64,),
  (8, 8, 16, 8, 24),
  (3, 20, -5, 12, 1, 1, -6, 16),
  (7, 2, -23, 15, -1, 5, 11),
)


def packed_rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Token ids, segment ids and positions [4, 64]."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, CONFIG.vocab_size, (len(ROWS), TIME))
  segments, positions = np.zeros((2, len(ROWS), TIME), np.int64)
  for row, pieces in enumerate(ROWS):
    at = 0
    for number, size in enumerate(pieces, start=1):
      positions[row, at : at + abs(size)] = np.arange(abs(size))
      segments[row, at : at + abs(size)] = number if size > 0 else 0
      at += abs(size)
    assert at == TIME
  return tuple(v.astype(np.int32) for v in (tokens, segments, positions))


def loss(params, tokens, segments, positions):
  scores = models.score_tokens(params, CONFIG, tokens, segments, positions)
  weights = jnp.cos(jnp.arange(tokens.size, dtype=jnp.float32)).reshape(tokens.shape)
  total = jnp.sum(weights * (scores.log_probs + 0.1 * scores.entropies))
  return total, (scores.log_probs, scores.max_scores)


def close(value, wanted, name: str) -> None:
  """Sums are taken in another order: a few roundings of the array's scale."""
  scale = 1.0 + float(np.max(np.abs(wanted)))
  np.testing.assert_allclose(
    np.asarray(value) / scale, np.asarray(wanted) / scale, atol=2e-5, err_msg=name
  )


def compare_model(mesh: jax.sharding.Mesh) -> None:
  params = models.init(CONFIG, jax.random.key(0))
  rows = packed_rows()
  step = jax.jit(jax.value_and_grad(loss, has_aux=True))
  expected = step(params, *rows)
  split = jax.device_put(params, sharding.shardings(models.param_specs(CONFIG), mesh))
  with jax.set_mesh(mesh):
    split_rows = jax.device_put(rows, sharding.batch_sharding(mesh))
    compiled = step.lower(split, *split_rows).compile()
    values = compiled(split, *split_rows)
  wanted = jax.tree_util.tree_leaves_with_path(expected)
  for value, (path, want) in zip(jax.tree.leaves(values), wanted, strict=True):
    close(value, want, jax.tree_util.keystr(path))
  if mesh.shape["context"] == mesh.size:
    # Nothing is whole in time that is wider than keys or values: not the stream, x or logits.
    width = CONFIG.num_kv_heads * CONFIG.head_dim
    sizes = gathered_sizes(compiled.as_text())
    assert sizes and max(sizes) <= len(ROWS) * TIME * width, sorted(sizes)


def gathered_sizes(program: str) -> list[int]:
  """Elements of what each all-gather of a compiled program makes."""
  shapes = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", program)
  return [math.prod(int(n) for n in shape.split(",")) for shape in shapes]


def compare_mamba(mesh: jax.sharding.Mesh) -> None:
  """Heads over devices: groups that divide over them, and groups that two devices share."""
  _, segments, _ = packed_rows()
  x = jax.random.normal(jax.random.key(1), (len(ROWS), TIME, CONFIG.d_model))
  for groups in (4, 3):
    config = dataclasses.replace(CONFIG, mamba_heads=12, mamba_groups=groups)
    specs = mamba2_spec(config)
    params = models.init_params(specs, jax.random.key(0))

    def total(params, x, config=config):
      out = mamba2(params, x, config, segment_ids=segments)
      return jnp.sum(jnp.sin(3 * out)), out

    step = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
    expected = step(params, x)
    split = jax.device_put(params, sharding.shardings(specs, mesh))
    with jax.set_mesh(mesh):
      split_x = jax.device_put(x, sharding.batch_sharding(mesh))
      compiled = step.lower(split, split_x).compile()
      got = compiled(split, split_x)
    jax.tree.map(functools.partial(close, name=f"{groups} groups"), got, expected)
    if groups == 4:
      # Not even a device's own part of x, in time and heads, is put together from others.
      own = len(ROWS) * TIME * 12 * CONFIG.mamba_head_dim // mesh.size
      assert all(size < own for size in gathered_sizes(compiled.as_text()))


def compare_ssd(mesh: jax.sharding.Mesh) -> None:
  """The scan by itself, of rows that are one sequence each and of packed ones, in bfloat16 too."""
  rows = jax.sharding.PartitionSpec(None, "context")
  _, segments, _ = packed_rows()
  keys = jax.random.split(jax.random.key(3), 4)
  shapes = ((4, TIME, 4, 4), (4, TIME, 4), (4, TIME, 2, 4), (4, TIME, 2, 4))
  x, dt, b, c = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))
  a = -jnp.linspace(0.1, 2.0, 4)
  for ids, dtype in ((None, x.dtype), (segments, x.dtype), (segments, jnp.bfloat16)):

    def scan(x, dt, b, c, time_axis=None, ids=ids, dtype=dtype):
      split = ids
      if ids is not None and time_axis is not None:
        size = TIME // mesh.shape[time_axis]
        start = jax.lax.axis_index(time_axis) * size
        split = jax.lax.dynamic_slice_in_dim(jnp.asarray(ids), start, size, axis=1)
      inputs = (x.astype(dtype), dt, a, b.astype(dtype), c.astype(dtype))
      y, _ = ssd(*inputs, segment_ids=split, dt_softplus=True, time_axis=time_axis, chunk_size=4)
      return y.astype(jnp.float32)

    cut = jax.shard_map(
      functools.partial(scan, time_axis="context"), mesh=mesh, in_specs=rows, out_specs=rows
    )

    def total(run, *inputs):
      y = run(*inputs)
      return jnp.sum(jnp.sin(3 * y)), y

    expected, got = (
      jax.jit(jax.value_and_grad(functools.partial(total, run), (0, 1, 2, 3), has_aux=True))(
        x, dt, b, c
      )
      for run in (scan, cut)
    )
    if dtype == x.dtype:
      jax.tree.map(functools.partial(close, name="ssd"), got, expected)
    else:
      scale = float(jnp.max(jnp.abs(expected[0][1])))
      np.testing.assert_allclose(got[0][1] / scale, expected[0][1] / scale, atol=2**-7)


def compare_attention(mesh: jax.sharding.Mesh) -> None:
  """A window, wide keys, tiles that do not divide a shard."""
  _, segments, _ = packed_rows()
  keys = jax.random.split(jax.random.key(1), 3)
  shapes = ((4, TIME, 4, 12), (4, TIME, 2, 12), (4, TIME, 2, 8))
  query, key, value = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))

  def run(query, key, value):
    settings = {"segment_ids": segments, "scale": 0.3, "block": 5, "window": 11}
    out = attend(query, key, value, **settings)
    return jnp.sum(jnp.sin(3 * out)), (out, max_scores(query, key, **settings))

  step = jax.jit(jax.value_and_grad(run, (0, 1, 2), has_aux=True))
  expected = step(query, key, value)
  with jax.set_mesh(mesh):
    got = step(query, key, value)
  jax.tree.map(functools.partial(close, name="attention"), got, expected)


def compare_splash(mesh: jax.sharding.Mesh) -> None:
  """The part of the TPU kernel that each shard runs, interpreted."""
  time, shards = 512, mesh.shape["context"]
  keys = jax.random.split(jax.random.key(2), 3)
  shapes = ((1, time, 2, 16), (1, time, 1, 16), (1, time, 1, 8))
  query, key, value = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))
  segments = jnp.repeat(jnp.array([[1, 2, 3, 0]]), jnp.array([130, 200, 150, 32]), axis=1)
  made = splash.kernel(time, 2, shards, 140, interpret=True)

  def part(query, key, value, ids, made):
    return splash.attend_splash(
      made, query, sharding.whole(key), sharding.whole(value), ids, sharding.whole(ids), scale=0.3
    )

  def ours(query, key, value):
    arguments = [(v, ("batch", "time", None, None)) for v in (query, key, value)]
    arguments.append((segments, ("batch", "time")))
    arguments.append((made, functools.partial(splash.kernel_spec, made)))
    return sharding.on_shards(part, arguments, ("batch", "time", None, None), name="splash")

  def theirs(query, key, value):
    return attend(query, key, value, segment_ids=segments, scale=0.3, block=128, window=140)

  def slopes(f):
    return jax.jit(jax.grad(lambda *v: jnp.sum(jnp.sin(3 * f(*v))), (0, 1, 2)))

  wanted = slopes(theirs)(query, key, value)
  with jax.set_mesh(mesh):
    got = slopes(ours)(query, key, value)
  for value, want in zip(got, wanted, strict=True):
    close(value, want, "splash")


@pytest.mark.parametrize(
  ("what", "mesh"),
  [
    ("model", {"context": 8}),
    pytest.param("model", {"context": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
    pytest.param("mamba", {"context": 2, "tensor": 4}, marks=pytest.mark.slow),
    ("ssd", {"context": 8}),
    pytest.param("attention", {"context": 4, "tensor": 2}, marks=pytest.mark.slow),
    pytest.param("splash", {"data": 1, "context": 4}, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_rows_cut_along_time_have_the_values_and_gradients_of_whole_ones(
  what, mesh, on_eight_devices
):
  assert on_eight_devices(__file__, what, json.dumps(mesh)).split() == ["agree"]


if __name__ == "__main__":
  assert jax.device_count() == 8
  sizes = {"fsdp": 1, **json.loads(sys.argv[2])}
  count = math.prod(sizes.values())
  compare = globals()[f"compare_{sys.argv[1]}"]
  compare(sharding.make_mesh(sharding.MeshConfig(**sizes), jax.devices()[:count]))
  print("agree")
