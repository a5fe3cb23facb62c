"""SSD: each implementation against the recurrence, published numbers, and its edges."""

from __future__ import annotations

import functools
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pallas_kernels.ssd import api, ssd_step
from pallas_kernels.ssd.shapes import CHECKED, Shape

_DATA = os.environ.get("AGENTJAX_DATA")
needs_data = pytest.mark.skipif(_DATA is None, reason="AGENTJAX_DATA is not set")
ssd = jax.jit(api.ssd, static_argnames=("chunk_size", "implementation"))
# The Pallas kernels have files of their own.
every_implementation = pytest.mark.parametrize("implementation", ["reference", "xla"])


def inputs(shape: Shape, seed: int = 0) -> dict[str, jax.Array]:
  """Random arguments of ``ssd``; the step sizes reach from almost none to strong decay."""
  rng = np.random.default_rng(seed)
  batch, time, heads, width, groups, size, _ = shape

  def normal(*sizes: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=sizes), jnp.float32)

  return {
    "x": normal(batch, time, heads, width),
    "dt": jax.nn.softplus(2.0 * normal(batch, time, heads) - 1.0),
    "a": -jnp.exp(normal(heads)),
    "b": normal(batch, time, groups, size),
    "c": normal(batch, time, groups, size),
    "d": normal(heads),
    "initial_state": normal(batch, heads, width, size),
  }


def numpy_scan(x, dt, a, b, c, d, initial_state, segment_ids=None):
  """The recurrence in float64, sequence by sequence; padding is skipped."""
  x, dt, a, b, c, d = (np.asarray(v, np.float64) for v in (x, dt, a, b, c, d))
  state = np.array(initial_state, np.float64)
  batch, time, heads, _ = x.shape
  y = np.zeros_like(x)
  for row in range(batch):
    previous = None
    for t in range(time):
      segment = 1 if segment_ids is None else int(segment_ids[row, t])
      if segment == 0:
        continue
      if previous is not None and segment != previous:
        state[row] = 0.0
      previous = segment
      for h in range(heads):
        g = h * b.shape[2] // heads
        state[row, h] = np.exp(dt[row, t, h] * a[h]) * state[row, h] + dt[row, t, h] * np.outer(
          x[row, t, h], b[row, t, g]
        )
        y[row, t, h] = state[row, h] @ c[row, t, g] + d[h] * x[row, t, h]
  return y, state


@every_implementation
@pytest.mark.parametrize("name", CHECKED)
def test_values_are_those_of_the_recurrence(name, implementation):
  arguments = inputs(CHECKED[name])
  y, state = ssd(**arguments, chunk_size=CHECKED[name].chunk, implementation=implementation)
  expected_y, expected_state = numpy_scan(**arguments)
  np.testing.assert_allclose(y, expected_y, atol=3e-5, rtol=3e-5)
  np.testing.assert_allclose(state, expected_state, atol=3e-5, rtol=3e-5)
  assert state.dtype == jnp.float32


@pytest.mark.parametrize("name", CHECKED)
def test_gradients_of_the_chunked_scan_are_those_of_the_token_loop(name):
  shape = CHECKED[name]
  arguments = inputs(shape)
  rng = np.random.default_rng(1)
  weights = jnp.asarray(rng.normal(size=arguments["x"].shape), jnp.float32)
  state_weights = jnp.asarray(rng.normal(size=arguments["initial_state"].shape), jnp.float32)
  segment_ids = packed_ids(shape)

  @functools.partial(jax.jit, static_argnums=1)
  @jax.grad
  def gradient(arguments, implementation):
    y, state = ssd(
      **arguments,
      segment_ids=segment_ids,
      chunk_size=shape.chunk,
      implementation=implementation,
    )
    return jnp.sum(y * weights) + jnp.sum(state * state_weights)

  expected = gradient(arguments, "reference")
  for key, value in gradient(arguments, "xla").items():
    scale = 1.0 + float(jnp.max(jnp.abs(expected[key])))
    np.testing.assert_allclose(value / scale, expected[key] / scale, atol=2e-5, err_msg=key)


def packed_ids(shape: Shape) -> jax.Array:
  """Sequences of 1, 2, 3, ... tokens with a hole of padding and padding at the end."""
  lengths = np.repeat(np.arange(1, shape.time + 1), np.arange(1, shape.time + 1))[: shape.time]
  ids = np.stack([lengths + 10 * row for row in range(shape.batch)])
  ids[:, 4:6] = 0
  ids[-1, -3:] = 0
  return jnp.asarray(ids, jnp.int32)


@every_implementation
@pytest.mark.parametrize("name", CHECKED)
def test_state_restarts_with_every_sequence_and_padding_leaves_it(name, implementation):
  shape = CHECKED[name]
  arguments = inputs(shape)
  segment_ids = packed_ids(shape)
  y, state = ssd(
    **arguments, segment_ids=segment_ids, chunk_size=shape.chunk, implementation=implementation
  )
  expected_y, expected_state = numpy_scan(**arguments, segment_ids=np.asarray(segment_ids))
  np.testing.assert_allclose(y, expected_y, atol=3e-5, rtol=3e-5)
  np.testing.assert_allclose(state, expected_state, atol=3e-5, rtol=3e-5)


@every_implementation
@pytest.mark.parametrize("start", [7, 8, 9])
def test_a_packed_sequence_gives_what_it_gives_alone(start, implementation):
  shape = Shape(1, 24, 2, 4, 1, 8, 8)
  arguments = inputs(shape)
  del arguments["initial_state"]
  ids = jnp.where(jnp.arange(24) < start, 5, 3)[None]
  options = {"chunk_size": 8, "implementation": implementation}
  packed, packed_state = ssd(**arguments, segment_ids=ids, **options)
  alone = {k: v if v.ndim == 1 else v[:, start:] for k, v in arguments.items()}
  expected, expected_state = ssd(**alone, **options)
  np.testing.assert_allclose(packed[:, start:], expected, atol=2e-5)
  np.testing.assert_allclose(packed_state, expected_state, atol=2e-5)


@every_implementation
def test_no_gradient_crosses_a_sequence_border_or_reaches_padding(implementation):
  shape = Shape(1, 24, 2, 4, 1, 8, 8)
  arguments = inputs(shape)
  ids = jnp.asarray([[1] * 6 + [2] * 10 + [0] * 8], jnp.int32)

  def loss(arguments):
    y, _ = ssd(**arguments, segment_ids=ids, chunk_size=8, implementation=implementation)
    return jnp.sum(jnp.square(y[:, 6:]))

  gradients = jax.jit(jax.grad(loss))(arguments)
  assert float(jnp.max(jnp.abs(gradients["initial_state"]))) == 0.0
  for key in ("x", "dt", "b", "c"):
    assert float(jnp.max(jnp.abs(gradients[key][:, :6]))) == 0.0, key
    assert float(jnp.max(jnp.abs(gradients[key][:, 16:]))) == 0.0, key
    assert float(jnp.max(jnp.abs(gradients[key][:, 6:16]))) > 0.0, key


@every_implementation
@pytest.mark.parametrize("cuts", [(1,), (8,), (3, 16, 17)])
def test_calls_that_hand_on_the_state_equal_one_call(cuts, implementation):
  shape = Shape(2, 21, 4, 4, 2, 8, 8)
  arguments = inputs(shape)
  state = arguments.pop("initial_state")
  options = {"chunk_size": 8, "implementation": implementation}
  expected, expected_state = ssd(**arguments, initial_state=state, **options)
  pieces = []
  for begin, end in zip((0, *cuts), (*cuts, 21), strict=True):
    part = {k: v if v.ndim == 1 else v[:, begin:end] for k, v in arguments.items()}
    y, state = ssd(**part, initial_state=state, **options)
    pieces.append(y)
  np.testing.assert_allclose(jnp.concatenate(pieces, 1), expected, atol=2e-5)
  np.testing.assert_allclose(state, expected_state, atol=2e-5)


def test_steps_equal_the_scan():
  shape = Shape(2, 9, 4, 4, 2, 8, 4)
  arguments = inputs(shape)
  expected, expected_state = ssd(**arguments, chunk_size=4)
  state = arguments["initial_state"]
  for t in range(shape.time):
    y, state = ssd_step(
      arguments["x"][:, t],
      arguments["dt"][:, t],
      arguments["a"],
      arguments["b"][:, t],
      arguments["c"][:, t],
      arguments["d"],
      state,
    )
    np.testing.assert_allclose(y, expected[:, t], atol=2e-5)
  np.testing.assert_allclose(state, expected_state, atol=2e-5)


@every_implementation
def test_tokens_without_a_step_leave_the_state_bit_for_bit(implementation):
  shape = Shape(3, 20, 4, 4, 1, 8, 8)
  arguments = inputs(shape)

  def run(**changed):
    return ssd(**changed, chunk_size=8, implementation=implementation)[1]

  resting = {**arguments, "dt": jnp.zeros_like(arguments["dt"])}
  np.testing.assert_array_equal(run(**resting), arguments["initial_state"])
  unused = run(**arguments, segment_ids=jnp.zeros((3, 20), jnp.int32))
  np.testing.assert_array_equal(unused, arguments["initial_state"])
  # What stands at padding has no influence either.
  half = {**arguments, "dt": arguments["dt"].at[:, 11:].set(0.0)}
  other = {k: v.at[:, 11:].add(100.0) if k in ("x", "b", "c") else v for k, v in half.items()}
  np.testing.assert_array_equal(run(**half), run(**other))


@every_implementation
@pytest.mark.parametrize("time", [1, 19])
def test_a_row_has_the_same_bits_in_any_place_beside_any_rows(time, implementation):
  shape = Shape(6, time, 4, 8, 2, 16, 8)
  rows = ("x", "dt", "b", "c", "initial_state")
  arguments = inputs(shape)
  others = inputs(shape, seed=1)
  order = np.array([3, 5, 0, 2, 1, 4])
  run = functools.partial(ssd, chunk_size=8, implementation=implementation)
  y, state = run(**arguments)
  moved_y, moved_state = run(**{k: v[order] if k in rows else v for k, v in arguments.items()})
  np.testing.assert_array_equal(moved_y, y[order])
  np.testing.assert_array_equal(moved_state, state[order])
  mixed = {k: others[k].at[2].set(v[2]) if k in rows else v for k, v in arguments.items()}
  mixed_y, mixed_state = run(**mixed)
  np.testing.assert_array_equal(mixed_y[2], y[2])
  np.testing.assert_array_equal(mixed_state[2], state[2])


def test_a_decoding_step_has_the_same_bits_in_any_slot():
  arguments = inputs(Shape(5, 1, 4, 8, 2, 16, 8))
  state = arguments.pop("initial_state")
  a, d = arguments.pop("a"), arguments.pop("d")
  token = {k: v[:, 0] for k, v in arguments.items()}
  order = np.array([4, 2, 0, 1, 3])
  run = jax.jit(lambda state, **kw: ssd_step(a=a, d=d, state=state, **kw))
  y, new = run(state, **token)
  moved_y, moved = run(state[order], **{k: v[order] for k, v in token.items()})
  np.testing.assert_array_equal(moved_y, y[order])
  np.testing.assert_array_equal(moved, new[order])


@every_implementation
def test_strong_decay_over_a_long_chunk_gives_finite_values_and_gradients(implementation):
  arguments = inputs(Shape(1, 64, 2, 4, 1, 4, 64))
  arguments["dt"] = jnp.full_like(arguments["dt"], 20.0)
  arguments["a"] = jnp.asarray([-16.0, -0.01])
  ids = jnp.repeat(jnp.arange(1, 5, dtype=jnp.int32), 16)[None]

  def loss(arguments):
    y, state = ssd(**arguments, segment_ids=ids, chunk_size=64, implementation=implementation)
    return jnp.sum(y) + jnp.sum(state)

  value, gradients = jax.jit(jax.value_and_grad(loss))(arguments)
  assert np.isfinite(value)
  for key, gradient in gradients.items():
    assert bool(jnp.all(jnp.isfinite(gradient))), key


def test_bfloat16_inputs_keep_a_float32_state():
  shape = Shape(2, 20, 4, 8, 1, 16, 8)
  full = inputs(shape)
  half = {k: v.astype(jnp.bfloat16) if k in ("x", "b", "c") else v for k, v in full.items()}
  y, state = ssd(**half, chunk_size=8)
  assert (y.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
  rounded = {k: half[k].astype(jnp.float32) for k in full}
  expected, expected_state = ssd(**rounded, chunk_size=8, implementation="reference")
  np.testing.assert_allclose(state, expected_state, atol=3e-5, rtol=3e-5)
  # One bfloat16 rounding of the output, 8 bits of significand.
  np.testing.assert_allclose(y.astype(jnp.float32), expected, atol=1e-3, rtol=2**-8)


def test_memory_of_a_gradient_stays_far_below_one_state_a_token():
  shape = Shape(1, 1024, 4, 16, 1, 64, 64)
  arguments = inputs(shape)

  def loss(arguments):
    return jnp.sum(jnp.square(ssd(**arguments, chunk_size=shape.chunk)[0]))

  compiled = jax.jit(jax.grad(loss)).lower(arguments).compile()
  states = 4 * shape.batch * shape.time * shape.heads * shape.width * shape.size
  assert compiled.memory_analysis().temp_size_in_bytes < states / 2


@needs_data
@every_implementation
@pytest.mark.parametrize("case", ["c0", "c1", "c2", "c3"])
def test_published_kernel_values_and_gradients(case, implementation):
  golden = np.load(pathlib.Path(_DATA or "") / "peer_golden" / "mamba2_ssd.npz")
  stored = {k.split("/")[1]: golden[k] for k in golden.files if k.startswith(f"{case}/")}
  names = [k for k in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias") if k in stored]

  def forward(arguments):
    dt = arguments["dt"] + arguments.get("dt_bias", 0.0)
    y, state = ssd(
      arguments["x"],
      jax.nn.softplus(dt) if stored["softplus"] else dt,
      arguments["A"],
      arguments["B"],
      arguments["C"],
      arguments["D"],
      chunk_size=int(stored["chunk"]),
      implementation=implementation,
    )
    if "z" in arguments:
      y = y * jax.nn.silu(arguments["z"])
    return jnp.sum(y * stored["cotangent"]), (y, state)

  gradients, (y, state) = jax.jit(jax.grad(forward, has_aux=True))(
    {k: jnp.asarray(stored[k]) for k in names}
  )
  np.testing.assert_allclose(y, stored["out"], atol=2e-5, rtol=2e-5)
  np.testing.assert_allclose(state, stored["final_state"], atol=2e-5, rtol=2e-5)
  for name in names:
    expected = stored[f"d{name}"]
    scale = 1.0 + np.max(np.abs(expected))
    np.testing.assert_allclose(gradients[name] / scale, expected / scale, atol=1e-5, err_msg=name)


@needs_data
@pytest.mark.parametrize("case", ["step1", "step2"])
def test_published_decoding_step(case):
  golden = np.load(pathlib.Path(_DATA or "") / "peer_golden" / "mamba_step_and_gated_norm.npz")
  stored = {k.split("/")[1]: golden[k] for k in golden.files if k.startswith(f"{case}/")}
  # There every state entry [h, p, n] has its own rate: each is a head of width 1 and size 1 here.
  sizes = stored["state"].shape
  heads_per_group = sizes[1] // stored["B"].shape[1]
  dt = jax.nn.softplus(stored["dt"] + stored["dt_bias"])

  def spread(v):
    return jnp.broadcast_to(v, sizes).reshape(sizes[0], -1)

  def spread_map(v):
    return spread(np.repeat(v, heads_per_group, axis=1)[:, :, None])[..., None]

  parts, state = ssd_step(
    spread(stored["x"][..., None])[..., None],
    spread(dt[..., None]),
    stored["A"].reshape(-1),
    spread_map(stored["B"]),
    spread_map(stored["C"]),
    None,
    stored["state"].reshape(sizes[0], -1, 1, 1),
  )
  y = jnp.sum(parts.reshape(sizes), axis=-1) + stored["D"] * stored["x"]
  if "z" in stored:
    y = y * jax.nn.silu(stored["z"])
  np.testing.assert_allclose(y, stored["out"], atol=1e-5)
  np.testing.assert_allclose(state.reshape(sizes), stored["new_state"], atol=1e-5)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"dt": (2, 5, 3)}, r"dt must have shape \(2, 5, 4\), got \(2, 5, 3\)"),
    ({"b": (2, 5, 3, 8), "c": (2, 5, 3, 8)}, "G dividing H=4"),
    ({"x": (2, 0, 4, 4)}, "without an empty axis"),
    ({"initial_state": (2, 4, 8, 4)}, "initial_state must have shape"),
  ],
)
def test_shapes_that_do_not_fit_are_named(change, message):
  arguments = inputs(Shape(2, 5, 4, 4, 2, 8, 4))
  for name, sizes in change.items():
    arguments[name] = jnp.zeros(sizes)
  with pytest.raises(ValueError, match=message):
    ssd(**arguments, chunk_size=4)


def test_an_implementation_that_is_not_there_fails_and_lists_the_others():
  arguments = inputs(CHECKED["one token"])
  with pytest.raises(ValueError, match="'triton' .*available: 'reference', 'xla'"):
    ssd(**arguments, implementation="triton")


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({"dt_limit": (2.0, 1.0)}, "lower bound must not be above"),
    ({"dt_bias": jnp.zeros(3)}, r"dt_bias must have shape \(4,\), got \(3,\)"),
    ({"lengths": jnp.zeros((2, 1), jnp.int32)}, r"lengths must have shape \(2,\)"),
    ({"time_axis": "context", "lengths": jnp.zeros(2, jnp.int32)}, "neither lengths nor"),
  ],
)
def test_options_that_do_not_fit_are_named(given, message):
  arguments = inputs(Shape(2, 5, 4, 4, 2, 8, 4))
  if "time_axis" in given:
    del arguments["initial_state"]
  with pytest.raises(ValueError, match=message):
    api.ssd(**arguments, **given)


def loss_and_gradients(arguments, weights, **options):
  """Weighted sum of outputs and last state, and its gradient for every argument."""

  @jax.jit
  def run(arguments, segment_ids=None, lengths=None):
    def loss(arguments):
      y, state = api.ssd(**arguments, segment_ids=segment_ids, lengths=lengths, **options)
      return jnp.sum(y * weights["y"]) + jnp.sum(state * weights["state"]), (y, state)

    return jax.grad(loss, has_aux=True)(arguments)

  return run


def random_weights(arguments, seed=9):
  rng = np.random.default_rng(seed)
  return {
    "y": jnp.asarray(rng.normal(size=arguments["x"].shape), jnp.float32),
    "state": jnp.asarray(rng.normal(size=arguments["initial_state"].shape), jnp.float32),
  }


@pytest.mark.parametrize("decay", [1e-6, 1e-3, 1.0, 50.0])
def test_gradients_keep_their_digits_from_almost_no_decay_to_almost_nothing_left(decay):
  """Beside float64 autodiff of the token loop; one token in five decays by ``decay``."""
  shape = Shape(1, 50, 2, 4, 1, 8, 16)
  arguments = inputs(shape)
  arguments["a"] = jnp.asarray([-1.0, -0.5])
  strong = np.arange(shape.time)[None, :, None] % 5 == 0
  arguments["dt"] = jnp.where(strong, decay, 1e-2 * arguments["dt"])
  weights = random_weights(arguments)
  got, _ = loss_and_gradients(arguments, weights, chunk_size=16)(arguments)
  with jax.enable_x64(True):
    wide = {k: jnp.asarray(np.asarray(v, np.float64)) for k, v in arguments.items()}
    want, _ = loss_and_gradients(wide, weights, implementation="reference")(wide)
  want = jax.tree.map(np.asarray, want)
  for key in arguments:
    scale = np.max(np.abs(want[key]))
    np.testing.assert_allclose(got[key] / scale, want[key] / scale, atol=5e-6, err_msg=key)
  # Where almost nothing gets past a token, what its step size owes to decay is almost nothing, not
  # the rounding of larger sums: each entry by its own size.
  slope = np.asarray(got["dt"], np.float64) - want["dt"]
  assert np.max(np.abs(slope) / (1e-3 + np.abs(want["dt"]))) < 5e-4


@pytest.mark.parametrize("time", [1, 7, 8, 9])
def test_gradients_at_the_edges_of_a_chunk(time):
  arguments = inputs(Shape(2, time, 4, 4, 2, 8, 8))
  weights = random_weights(arguments)
  got, _ = loss_and_gradients(arguments, weights, chunk_size=8)(arguments)
  want, _ = loss_and_gradients(arguments, weights, implementation="reference")(arguments)
  for key, value in want.items():
    np.testing.assert_allclose(got[key], value, atol=3e-5, rtol=1e-4, err_msg=key)


def test_gradients_are_those_of_finite_differences():
  with jax.enable_x64(True):
    small = inputs(Shape(1, 7, 2, 2, 1, 3, 4))
    wide = {k: jnp.asarray(np.asarray(v, np.float64)) for k, v in small.items()}
    wide["dt_bias"] = jnp.asarray([0.3, -0.2])
    ids = jnp.asarray([[1, 1, 2, 2, 2, 0, 0]], jnp.int32)

    def loss(arguments):
      y, state = api.ssd(
        **arguments, segment_ids=ids, dt_softplus=True, chunk_size=4, implementation="xla"
      )
      return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(state))

    check_grads(jax.jit(loss), (wide,), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


@every_implementation
def test_a_reset_at_every_token_leaves_only_the_token_itself(implementation):
  shape = Shape(1, 19, 2, 4, 1, 8, 8)
  arguments = inputs(shape)
  ids = jnp.arange(1, 20, dtype=jnp.int32)[None]
  y, state = ssd(**arguments, segment_ids=ids, chunk_size=8, implementation=implementation)
  x, dt, b, c = (np.asarray(arguments[k], np.float64) for k in ("x", "dt", "b", "c"))
  alone = dt[..., None] * x * np.sum(b * c, -1)[..., None] + np.asarray(arguments["d"])[:, None] * x
  np.testing.assert_allclose(y[:, 1:], alone[:, 1:], atol=2e-5, rtol=2e-5)
  last = dt[:, -1, :, None, None] * x[:, -1, :, :, None] * b[:, -1, 0][:, None, None, :]
  np.testing.assert_allclose(state, last, rtol=1e-6)


@pytest.mark.slow
def test_a_long_sequence_has_the_bits_of_its_pieces():
  shape = Shape(1, 32768, 2, 16, 1, 16, 64)
  arguments = inputs(shape)
  state = arguments.pop("initial_state")
  whole, last = ssd(**arguments, initial_state=state, chunk_size=64)
  piece = shape.time // 8
  for begin in range(0, shape.time, piece):
    part = {k: v if v.ndim == 1 else v[:, begin : begin + piece] for k, v in arguments.items()}
    y, state = ssd(**part, initial_state=state, chunk_size=64)
    np.testing.assert_array_equal(y, whole[:, begin : begin + piece])
  np.testing.assert_array_equal(state, last)


def test_pieces_of_whole_chunks_have_the_bits_of_one_call():
  shape = Shape(2, 64, 4, 16, 2, 16, 16)
  arguments = inputs(shape)
  state = arguments.pop("initial_state")
  whole, last = ssd(**arguments, initial_state=state, chunk_size=16)
  for begin in range(0, 64, 16):
    part = {k: v if v.ndim == 1 else v[:, begin : begin + 16] for k, v in arguments.items()}
    y, state = ssd(**part, initial_state=state, chunk_size=16)
    np.testing.assert_array_equal(y, whole[:, begin : begin + 16])
  np.testing.assert_array_equal(state, last)


@every_implementation
@pytest.mark.parametrize("how", ["segments", "lengths"])
def test_nan_at_padding_reaches_neither_results_nor_gradients(how, implementation):
  shape = Shape(2, 21, 2, 4, 1, 8, 8)
  clean = inputs(shape)
  clean["dt_bias"] = jnp.asarray([0.3, -0.2])
  real = np.arange(21) < np.asarray([[13], [21]])
  given = {
    "segments": {"segment_ids": jnp.asarray(real * np.where(np.arange(21) < 5, 1, 2), jnp.int32)},
    "lengths": {"lengths": jnp.asarray([13, 21], jnp.int32)},
  }[how]
  poisoned = {
    k: jnp.where(real.reshape(2, 21, *[1] * (v.ndim - 2)), v, jnp.nan)
    if k in ("x", "dt", "b", "c")
    else v
    for k, v in clean.items()
  }
  run = loss_and_gradients(
    clean, random_weights(clean), chunk_size=8, dt_softplus=True, implementation=implementation
  )
  want_gradients, want = run(clean, **given)
  gradients, got = run(poisoned, **given)
  jax.tree.map(np.testing.assert_array_equal, got, want)
  jax.tree.map(np.testing.assert_array_equal, gradients, want_gradients)
  np.testing.assert_array_equal(got[0][0, 13:], 0.0)
  np.testing.assert_array_equal(gradients["x"][0, 13:], 0.0)


def test_step_sizes_are_biased_passed_through_softplus_and_bounded():
  arguments = inputs(CHECKED["a rest"])
  raw = 4.0 * arguments["dt"] - 3.0
  bias = jnp.linspace(-1.0, 1.0, 4)
  inside = ssd(**{**arguments, "dt": jnp.clip(jax.nn.softplus(raw + bias), 0.1, 2.0)}, chunk_size=8)
  got = api.ssd(
    **{**arguments, "dt": raw},
    dt_bias=bias,
    dt_softplus=True,
    dt_limit=(0.1, 2.0),
    chunk_size=8,
  )
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5), got, inside)


def test_under_checkpoint_and_vmap_it_is_the_same_scan():
  shape = Shape(2, 13, 2, 4, 1, 8, 8)
  arguments = inputs(shape)
  weights = random_weights(arguments)

  def loss(arguments, weight):
    return jnp.sum(api.ssd(**arguments, chunk_size=8)[0] * weight)

  plain = jax.jit(jax.grad(loss))(arguments, weights["y"])
  again = jax.jit(jax.grad(jax.checkpoint(loss)))(arguments, weights["y"])
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), again, plain)
  twice = {k: jnp.stack([v, 0.5 * v]) for k, v in arguments.items()}
  gradients = jax.jit(jax.vmap(jax.grad(loss), (0, None)))(twice, weights["y"])
  jax.tree.map(
    lambda g, w: np.testing.assert_allclose(g[0], w, atol=1e-5, rtol=1e-4), gradients, plain
  )


@pytest.mark.slow
def test_bfloat16_inputs_do_not_drift_over_eight_thousand_tokens():
  """The state is float32, so an error of the inputs is forgotten at the rate of the decay."""
  shape = Shape(1, 8192, 2, 16, 1, 16, 64)
  full = inputs(shape)
  half = {k: v.astype(jnp.bfloat16) if k in ("x", "b", "c") else v for k, v in full.items()}
  rounded = {k: half[k].astype(jnp.float32) for k in full}
  y, _ = ssd(**half, chunk_size=64)
  expected, _ = ssd(**rounded, chunk_size=64, implementation="reference")
  error = np.abs(np.asarray(y, np.float64) - np.asarray(expected, np.float64))
  scale = np.sqrt(np.mean(np.square(expected)))
  assert np.sqrt(np.mean(np.square(error[:, -1024:]))) < 2**-8 * scale
  assert np.max(error[:, -1024:]) < 2 * np.max(error[:, :1024]) + 2**-8 * scale


def test_memory_of_training_is_bounded_and_a_rest_costs_one_more_chunk():
  """At most 100 MB at the size below, and T = 64 k + 1 as much work as T = 64 (k + 1)."""
  shape = Shape(1, 2048, 8, 64, 1, 128, 64)

  def compiled(time):
    arguments = jax.eval_shape(lambda: inputs(shape._replace(time=time)))

    def loss(arguments):
      return jnp.sum(jnp.square(api.ssd(**arguments, chunk_size=64)[0]))

    return jax.jit(jax.grad(loss)).lower(arguments).compile()

  assert compiled(2048).memory_analysis().temp_size_in_bytes < 100e6
  rest, whole = compiled(1921), compiled(1984)
  ratio = rest.memory_analysis().temp_size_in_bytes / whole.memory_analysis().temp_size_in_bytes
  assert ratio < 1.25


def test_a_decoding_step_keeps_idle_slots_and_writes_the_state_in_place():
  arguments = inputs(Shape(8, 1, 4, 16, 2, 32, 8))
  state, a, d = (arguments.pop(k) for k in ("initial_state", "a", "d"))
  token = {k: v[:, 0] for k, v in arguments.items()}
  active = jnp.asarray([True, False] * 4)

  def step(state, active, **token):
    return ssd_step(a=a, d=d, state=state, active=active, **token)

  compiled = jax.jit(step, donate_argnums=0).lower(state, active, **token).compile()
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes == state.nbytes
  assert memory.temp_size_in_bytes < state.nbytes / 2
  before = np.asarray(state)
  _, new = compiled(state, active, **token)
  np.testing.assert_array_equal(new[1::2], before[1::2])
  assert np.all(np.any(np.asarray(new[::2]) != before[::2], axis=(1, 2, 3)))
