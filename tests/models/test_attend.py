import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.models import attend as attend_module
from agentjax.models import flash, splash
from agentjax.models.attend import attend, attend_cache, max_scores
from tests.pallas_kernels.test_ssd_pallas_gpu import h100

SETTINGS = {"scale": 0.3, "window": None}


def draw(batch, time, heads, kv_heads, width, value_width, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = ((heads, width), (kv_heads, width), (kv_heads, value_width))
  return tuple(
    jax.random.normal(k, (batch, time, *shape)).astype(dtype)
    for k, shape in zip(keys, shapes, strict=True)
  )


def segment_ids(*rows):
  """Rows of (id, tokens) pairs."""
  return jnp.array([[i for i, size in row for _ in range(size)] for row in rows], jnp.int32)


def scores(query, key, segments, scale, window):
  """All scores [B, heads, T, T], and which of them count."""
  key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
  ahead = jnp.arange(query.shape[1])[:, None] - jnp.arange(query.shape[1])
  seen = (segments[:, :, None] == segments[:, None]) & (ahead >= 0)
  seen &= ahead < (query.shape[1] if window is None else window)
  return scale * jnp.einsum("bqhd,bkhd->bhqk", query, key), seen


def plain(query, key, value, segments, scale, window):
  value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
  products, seen = scores(query, key, segments, scale, window)
  weights = jax.nn.softmax(jnp.where(seen[:, None], products, -jnp.inf), axis=-1)
  return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def value_and_slopes(f, *arrays):
  def total(*arrays):
    out = f(*arrays)
    return jnp.sum(jnp.sin(3 * out)), out

  return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(*arrays)


@pytest.mark.parametrize("window", [None, 7])
def test_tiles_and_straight_line_equal_one_square_product(window):
  arrays = draw(2, 37, heads=4, kv_heads=2, width=12, value_width=8)
  segments = segment_ids([(1, 14), (2, 1), (3, 22)], [(0, 3), (4, 30), (0, 4)])
  settings = {"segment_ids": segments, "scale": 0.3, "window": window}
  wanted = value_and_slopes(lambda *v: plain(*v, segments, 0.3, window), *arrays)
  for block in (2, 15):  # 19 blocks run as tiles, 3 in a straight line
    got = value_and_slopes(functools.partial(attend, block=block, **settings), *arrays)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=5e-5), got, wanted)


def test_neither_program_nor_memory_grows_with_the_square_of_time():
  def compiled(time):
    arrays = draw(1, time, heads=2, kv_heads=1, width=8, value_width=8)
    f = functools.partial(attend, segment_ids=jnp.ones((1, time), jnp.int32), block=16, **SETTINGS)
    loss = jax.jit(jax.grad(lambda *v: jnp.sum(f(*v)), (0, 1, 2)))
    lowered = loss.lower(*arrays)
    return len(lowered.as_text().splitlines()), lowered.compile().memory_analysis()

  lines, small = compiled(512)
  more_lines, large = compiled(2048)
  assert more_lines == lines
  assert large.temp_size_in_bytes < 4.5 * small.temp_size_in_bytes
  # One row of weights alone, 2 heads by 2048 by 2048, would be 32 MiB.
  assert large.temp_size_in_bytes < 2**21


@pytest.mark.parametrize("window", [None, 70])
def test_the_tpu_kernel_interpreted_equals_the_tiles(window):
  arrays = draw(2, 256, heads=4, kv_heads=2, width=16, value_width=8)
  segments = segment_ids([(1, 100), (2, 150), (0, 6)], [(3, 256)])
  made = splash.kernel(256, 4, 1, window, interpret=True)
  settings = {"segment_ids": segments, "scale": 0.3, "window": window}
  wanted = value_and_slopes(functools.partial(attend, block=8, **settings), *arrays)
  got = value_and_slopes(
    lambda *v: splash.attend_splash(made, *v, segments, segments, scale=0.3), *arrays
  )
  jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=5e-5), got, wanted)


def test_the_gpu_kernel_interpreted_rounds_as_bfloat16_does():
  arrays = draw(2, 192, heads=4, kv_heads=2, width=24, value_width=24, dtype=jnp.bfloat16)
  segments = segment_ids([(1, 70), (2, 100), (0, 22)], [(3, 192)])
  wide = tuple(v.astype(jnp.float32) for v in arrays)
  settings = {"segment_ids": segments, "scale": 0.3}
  wanted = value_and_slopes(functools.partial(attend, block=64, **settings), *wide)
  straight = value_and_slopes(functools.partial(attend, block=64, **settings), *arrays)
  got = value_and_slopes(
    lambda *v: flash.attend_flash(*v, segments, segments, scale=0.3, interpret=True), *arrays
  )

  def errors(found):
    def error(value, want):
      value = np.asarray(value, np.float32)
      return np.linalg.norm(value - want) / np.linalg.norm(want)

    return [error(v, w) for v, w in zip(*map(jax.tree.leaves, (found, wanted)), strict=True)]

  assert max(errors(straight)[1:]) < 0.02
  for mine, other in zip(errors(got)[1:], errors(straight)[1:], strict=True):
    assert mine < 2 * other


@pytest.mark.parametrize(
  ("kernels", "dtype", "width", "window", "calls"),
  [
    ("pallas_gpu", jnp.bfloat16, 64, None, 3),  # forward, and two of the backward pass
    ("pallas_gpu", jnp.bfloat16, 64, 100, 0),
    ("pallas_gpu", jnp.bfloat16, 192, None, 0),
    ("pallas_gpu", jnp.float32, 64, None, 0),
    (None, jnp.bfloat16, 64, None, 0),  # nobody has measured it
  ],
)
def test_the_gpu_kernel_runs_where_it_is_named_and_fits(kernels, dtype, width, window, calls):
  arrays = draw(1, 256, heads=4, kv_heads=2, width=width, value_width=width, dtype=dtype)
  f = functools.partial(
    attend,
    segment_ids=jnp.ones((1, 256), jnp.int32),
    block=64,
    scale=0.3,
    window=window,
    kernels=kernels,
  )
  loss = jax.jit(jax.grad(lambda *v: jnp.sum(f(*v).astype(jnp.float32))))
  with h100():
    lowered = loss.trace(*arrays).lower(lowering_platforms=("cuda",))
  assert lowered.as_text().count("__gpu$xla.gpu.triton") == calls


@pytest.mark.parametrize(
  ("platform", "dtype", "time", "kernel"),
  [
    ("tpu", jnp.bfloat16, 256, True),
    ("tpu", jnp.float32, 256, False),  # the kernel would round float32 products
    ("tpu", jnp.bfloat16, 200, False),
    ("cpu", jnp.bfloat16, 256, False),
  ],
)
def test_the_platform_compiled_for_picks_the_kernel(platform, dtype, time, kernel):
  arrays = draw(1, time, heads=4, kv_heads=2, width=64, value_width=64, dtype=dtype)
  f = functools.partial(attend, segment_ids=jnp.ones((1, time), jnp.int32), block=64, **SETTINGS)
  loss = jax.jit(jax.grad(lambda *v: jnp.sum(f(*v).astype(jnp.float32))))
  lowered = loss.trace(*arrays).lower(lowering_platforms=(platform,))
  assert ("tpu_custom_call" in lowered.as_text()) == kernel


@pytest.mark.parametrize("window", [None, 7])
def test_max_scores_are_the_largest_of_each_head_over_real_pairs(window):
  query, key, _ = draw(2, 37, heads=4, kv_heads=2, width=12, value_width=8)
  segments = segment_ids([(1, 14), (2, 1), (3, 22)], [(0, 3), (4, 30), (0, 4)])
  query = query.at[1, :3].mul(100.0)  # padding, whose scores must not count
  products, seen = scores(query, key, segments, 0.3, window)
  seen &= (segments != 0)[:, None]
  wanted = jnp.max(jnp.where(seen[:, None], products, -jnp.inf), axis=(0, 2, 3))
  for block in (5, 64):
    got = max_scores(query, key, segment_ids=segments, scale=0.3, block=block, window=window)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("length", [8, 24, 29])  # one block, whole blocks, a last one that overlaps
def test_cache_is_read_as_far_as_it_is_held(monkeypatch, length, window):
  monkeypatch.setattr(attend_module, "CACHE_BLOCK", 8)
  keys = jax.random.split(jax.random.key(1), 3)
  query = jax.random.normal(keys[0], (3, 2, 4, 6))
  cached, values = (jax.random.normal(k, (5, 2, length, 6)) for k in keys[1:])
  rows = jnp.array([4, 0, 2])
  positions = jnp.array([[0, 1], [5, 6], [length - 2, length - 1]])
  read = jax.jit(functools.partial(attend_cache, scale=0.3, window=window))
  got = read(query, cached, values, positions=positions, rows=rows)
  for r, slot in enumerate(rows):
    for t, place in enumerate(positions[r]):
      first = 0 if window is None else max(0, int(place) + 1 - window)
      key, value = (jnp.repeat(v[slot, :, first : place + 1], 2, axis=0) for v in (cached, values))
      weights = jax.nn.softmax(0.3 * jnp.einsum("hd,hkd->hk", query[r, t], key))
      wanted = jnp.einsum("hk,hkd->hd", weights, value)
      np.testing.assert_allclose(got[r, t], wanted, atol=1e-6)


def test_bits_of_a_slot_do_not_depend_on_how_far_others_are(monkeypatch):
  monkeypatch.setattr(attend_module, "CACHE_BLOCK", 8)
  keys = jax.random.split(jax.random.key(1), 3)
  query = jax.random.normal(keys[0], (2, 1, 4, 6))
  cached, values = (jax.random.normal(k, (2, 2, 40, 6)) for k in keys[1:])
  read = jax.jit(functools.partial(attend_cache, scale=0.3))
  near = read(query, cached, values, positions=jnp.array([[11], [3]]))
  far = read(query, cached, values, positions=jnp.array([[11], [39]]))
  np.testing.assert_array_equal(near[0], far[0])


@pytest.mark.parametrize("window", [None, 5])
def test_the_gradient_of_a_long_cache_is_that_of_one_block(monkeypatch, window):
  keys = jax.random.split(jax.random.key(1), 4)
  query = jax.random.normal(keys[0], (3, 2, 4, 6))
  cached, values = (jax.random.normal(k, (5, 2, 29, 6)) for k in keys[1:3])
  weights = jax.random.normal(keys[3], query.shape)
  positions, rows = jnp.array([[0, 1], [5, 6], [27, 28]]), jnp.array([4, 0, 2])

  def loss(query, cached, values):
    read = attend_cache(
      query, cached, values, positions=positions, scale=0.3, rows=rows, window=window
    )
    return jnp.sum(read * weights)

  expected = jax.grad(loss, (0, 1, 2))(query, cached, values)
  monkeypatch.setattr(attend_module, "CACHE_BLOCK", 8)
  found = jax.grad(loss, (0, 1, 2))(query, cached, values)
  assert np.max(np.abs(expected[1])) > 0.1
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)
