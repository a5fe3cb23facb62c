"""Selective scan: the recurrence, its gradients, published numbers, and its edges."""

from __future__ import annotations

import functools
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.selective_scan import IMPLEMENTATIONS, api, selective_scan_step
from pallas_kernels.selective_scan.shapes import CHECKED, Shape

_DATA = os.environ.get("AGENTJAX_DATA")
needs_data = pytest.mark.skipif(_DATA is None, reason="AGENTJAX_DATA is not set")
selective_scan = jax.jit(
  api.selective_scan,
  static_argnames=("chunk_size", "implementation", "dt_softplus", "dt_limit"),
)
# Those for accelerators are interpreted on CPU; they have a file of tests of their own.
every_implementation = pytest.mark.parametrize("implementation", ["reference", "xla"])
TOKENS = ("x", "dt", "b", "c")
# Every shape as it is, and some with several sequences and padding in a row.
CASES = [(name, False) for name in CHECKED]
CASES += [("a chunk and one", True), ("a rest, odd sizes", True)]


def inputs(shape: Shape, seed: int = 0, dtype: object = jnp.float32) -> dict[str, jax.Array]:
  """Random arguments; the step sizes reach from almost none to strong decay."""
  rng = np.random.default_rng(seed)
  batch, time, channels, groups, size, _ = shape

  def normal(*sizes: int) -> np.ndarray:
    return rng.normal(size=sizes)

  values = {
    "x": normal(batch, time, channels),
    "dt": np.log1p(np.exp(2.0 * normal(batch, time, channels) - 1.0)),
    "a": -np.exp(normal(channels, size)),
    "b": normal(batch, time, groups, size),
    "c": normal(batch, time, groups, size),
    "d": normal(channels),
    "initial_state": normal(batch, channels, size),
  }
  return {k: jnp.asarray(v, dtype) for k, v in values.items()}


def packed_ids(shape: Shape) -> jax.Array:
  """Sequences of 1, 2, 3, ... tokens with a hole of padding and padding at the end."""
  lengths = np.repeat(np.arange(1, shape.time + 1), np.arange(1, shape.time + 1))[: shape.time]
  ids = np.stack([lengths + 10 * row for row in range(shape.batch)])
  ids[:, 4:6] = 0
  ids[-1, -3:] = 0
  return jnp.asarray(ids, jnp.int32)


def numpy_scan(x, dt, a, b, c, d, initial_state, segment_ids=None):
  """The recurrence in float64, sequence by sequence; padding is skipped, its output 0."""
  x, dt, a, b, c, d = (np.asarray(v, np.float64) for v in (x, dt, a, b, c, d))
  state = np.array(initial_state, np.float64)
  batch, time, channels = x.shape
  group = np.arange(channels) * b.shape[2] // channels
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
      inflow = (dt[row, t] * x[row, t])[:, None] * b[row, t, group]
      state[row] = np.exp(dt[row, t][:, None] * a) * state[row] + inflow
      y[row, t] = (state[row] * c[row, t, group]).sum(-1) + d * x[row, t]
  return y, state


def gradients(arguments, weights, **options):
  """Of random weights on the outputs and the last state, for every argument."""
  to_y, to_state = weights

  @functools.partial(jax.jit, static_argnames=("chunk_size", "implementation"))
  def run(arguments, segment_ids, chunk_size, implementation):
    def loss(arguments):
      y, state = api.selective_scan(
        **arguments, segment_ids=segment_ids, chunk_size=chunk_size, implementation=implementation
      )
      return jnp.sum(y * to_y) + jnp.sum(state * to_state)

    return jax.grad(loss)(arguments)

  return run(arguments, options.pop("segment_ids", None), **options)


def random_weights(arguments):
  rng = np.random.default_rng(1)
  return tuple(
    jnp.asarray(rng.normal(size=arguments[k].shape), arguments[k].dtype)
    for k in ("x", "initial_state")
  )


@every_implementation
@pytest.mark.parametrize(("name", "packed"), CASES)
def test_values_are_those_of_the_recurrence(name, packed, implementation):
  shape = CHECKED[name]
  arguments = inputs(shape)
  ids = packed_ids(shape) if packed else None
  y, state = selective_scan(
    **arguments, segment_ids=ids, chunk_size=shape.chunk, implementation=implementation
  )
  expected_y, expected_state = numpy_scan(**arguments, segment_ids=ids)
  np.testing.assert_allclose(y, expected_y, atol=2e-5, rtol=2e-5)
  np.testing.assert_allclose(state, expected_state, atol=2e-5, rtol=2e-5)
  assert state.dtype == jnp.float32


@pytest.mark.parametrize(("name", "packed"), CASES)
def test_gradients_in_chunks_are_those_of_the_token_loop_in_float64(name, packed):
  shape = CHECKED[name]
  arguments = inputs(shape)
  options = {"segment_ids": packed_ids(shape) if packed else None, "chunk_size": shape.chunk}
  found = gradients(arguments, random_weights(arguments), implementation="xla", **options)
  with jax.enable_x64(True):
    wide = inputs(shape, dtype=jnp.float64)
    expected = jax.device_get(
      gradients(wide, random_weights(wide), implementation="reference", **options)
    )
  for key, value in found.items():
    scale = 1.0 + np.max(np.abs(expected[key]))
    np.testing.assert_allclose(value / scale, expected[key] / scale, atol=2e-6, err_msg=key)


def test_gradients_are_finite_differences():
  shape = Shape(2, 11, 4, 2, 3, 4)
  ids = packed_ids(shape)
  with jax.enable_x64(True):
    arguments = inputs(shape, dtype=jnp.float64)
    weights = random_weights(arguments)

    @jax.jit
    def loss(arguments):
      y, state = api.selective_scan(
        **arguments, segment_ids=ids, chunk_size=shape.chunk, implementation="xla"
      )
      return jnp.sum(y * weights[0]) + jnp.sum(state * weights[1])

    slopes = jax.jit(jax.grad(loss))(arguments)
    towards = inputs(shape, seed=2, dtype=jnp.float64)
    for key, slope in slopes.items():
      ahead, behind = (
        loss({**arguments, key: arguments[key] + step * towards[key]}) for step in (1e-5, -1e-5)
      )
      expected = float(jnp.sum(slope * towards[key]))
      assert float(ahead - behind) / 2e-5 == pytest.approx(expected, rel=1e-7), key


@pytest.mark.parametrize("starts", ["every token", "chunk edges", "beside chunk edges"])
def test_a_new_sequence_meets_an_empty_state(starts):
  shape = Shape(1, 25, 4, 2, 4, 8)
  arguments = inputs(shape)
  begins = {"every token": range(25), "chunk edges": (8, 16, 24), "beside chunk edges": (7, 9, 17)}
  marks = np.zeros((1, 25), np.int32)
  marks[:, list(begins[starts])] = 1
  ids = jnp.asarray(1 + np.cumsum(marks, axis=1), jnp.int32)
  y, state = selective_scan(**arguments, segment_ids=ids, chunk_size=8)
  expected_y, expected_state = numpy_scan(**arguments, segment_ids=ids)
  np.testing.assert_allclose(y, expected_y, atol=1e-5, rtol=1e-5)
  np.testing.assert_allclose(state, expected_state, atol=1e-5, rtol=1e-5)
  last = int(np.flatnonzero(marks[0])[-1])

  def loss(arguments):
    y, state = selective_scan(**arguments, segment_ids=ids, chunk_size=8)
    return jnp.sum(jnp.square(y[:, last:])) + jnp.sum(jnp.square(state))

  slopes = jax.jit(jax.grad(loss))(arguments)
  np.testing.assert_array_equal(slopes["initial_state"], 0.0)
  for key in TOKENS:
    np.testing.assert_array_equal(slopes[key][:, :last], 0.0, err_msg=key)
    assert float(jnp.max(jnp.abs(slopes[key][:, last:]))) > 0.0, key


@every_implementation
def test_tokens_without_a_step_leave_the_state_bit_for_bit(implementation):
  shape = Shape(2, 20, 4, 1, 4, 8)
  arguments = inputs(shape)
  run = functools.partial(selective_scan, chunk_size=8, implementation=implementation)
  _, state = run(**{**arguments, "dt": jnp.zeros_like(arguments["dt"])})
  np.testing.assert_array_equal(state, arguments["initial_state"])
  half = {**arguments, "dt": arguments["dt"].at[:, 11:].set(0.0)}
  _, stopped = run(**half)
  _, short = run(**{k: v[:, :11] if k in TOKENS else v for k, v in arguments.items()})
  np.testing.assert_array_equal(stopped, short)


@pytest.mark.parametrize("padding", ["segment 0", "lengths", "both"])
def test_nan_at_padding_reaches_no_output_and_no_gradient(padding):
  shape = Shape(2, 21, 4, 2, 4, 8)
  arguments = {**inputs(shape), "dt_bias": jnp.ones((4,))}
  lengths = jnp.asarray([13, 0])
  ids = jnp.where(jnp.arange(21) < 5, 7, 9)[None] * jnp.ones((2, 1), jnp.int32)
  real = jnp.arange(21) < lengths[:, None]
  where = {
    "segment 0": {"segment_ids": jnp.where(real, ids, 0)},
    "lengths": {"lengths": lengths},
    "both": {"segment_ids": ids, "lengths": lengths},
  }[padding]

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def run(arguments):
    y, state = api.selective_scan(
      **arguments, **where, dt_softplus=True, chunk_size=8, implementation="xla"
    )
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(state)), (y, state)

  def filled(filling):
    return {
      k: jnp.where(real.reshape(2, 21, *[1] * (v.ndim - 2)), v, filling) if k in TOKENS else v
      for k, v in arguments.items()
    }

  poisoned, clean = run(filled(jnp.nan)), run(filled(0.0))
  for value, expected in zip(jax.tree.leaves(poisoned), jax.tree.leaves(clean), strict=True):
    np.testing.assert_array_equal(value, expected)
  slopes, (y, state) = poisoned
  for key in TOKENS:
    np.testing.assert_array_equal(slopes[key][~real], 0.0, err_msg=key)
  np.testing.assert_array_equal(y[~real], 0.0)
  np.testing.assert_array_equal(state[1], arguments["initial_state"][1])


def test_lengths_bias_softplus_and_limits_are_what_they_say():
  shape = Shape(2, 12, 4, 1, 4, 8)
  arguments = inputs(shape)
  bias = jnp.asarray([0.5, -1.0, 0.0, 2.0])
  y, state = selective_scan(
    **arguments,
    lengths=jnp.asarray([12, 7]),
    dt_bias=bias,
    dt_softplus=True,
    dt_limit=(0.4, 2.0),
    chunk_size=8,
  )
  done = {**arguments, "dt": np.clip(np.log1p(np.exp(arguments["dt"] + bias)), 0.4, 2.0)}
  ids = (np.arange(12) < np.asarray([[12], [7]])).astype(np.int32)
  expected_y, expected_state = numpy_scan(**done, segment_ids=ids)
  np.testing.assert_allclose(y, expected_y, atol=1e-5, rtol=1e-5)
  np.testing.assert_allclose(state, expected_state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cuts", [(8,), (16, 24), (8, 16, 24, 32)])
def test_pieces_of_whole_chunks_that_hand_on_the_state_have_the_bits_of_one_call(cuts):
  arguments = inputs(Shape(2, 37, 6, 2, 4, 8))
  state = arguments.pop("initial_state")
  expected, expected_state = selective_scan(**arguments, initial_state=state, chunk_size=8)
  pieces = []
  for begin, end in zip((0, *cuts), (*cuts, 37), strict=True):
    part = {k: v[:, begin:end] if k in TOKENS else v for k, v in arguments.items()}
    y, state = selective_scan(**part, initial_state=state, chunk_size=8)
    pieces.append(y)
  np.testing.assert_array_equal(jnp.concatenate(pieces, axis=1), expected)
  np.testing.assert_array_equal(state, expected_state)


def test_a_long_sequence_has_the_bits_of_its_eight_pieces():
  shape = Shape(1, 32768, 4, 1, 4, 64)
  arguments = inputs(shape)
  state = arguments.pop("initial_state")
  expected, expected_state = selective_scan(**arguments, initial_state=state)
  pieces = []
  for begin in range(0, shape.time, shape.time // 8):
    part = {
      k: v[:, begin : begin + shape.time // 8] if k in TOKENS else v for k, v in arguments.items()
    }
    y, state = selective_scan(**part, initial_state=state)
    pieces.append(y)
  np.testing.assert_array_equal(jnp.concatenate(pieces, axis=1), expected)
  np.testing.assert_array_equal(state, expected_state)


def test_values_and_gradients_hold_from_weak_to_strong_decay():
  shape = Shape(1, 200, 4, 4, 3, 64)
  rates = np.asarray([1e-6, 1e-3, 1.0, 50.0])[:, None] * np.asarray([0.1, 0.5, 1.0])

  def weak_to_strong(dtype):
    arguments = inputs(shape, dtype=dtype)
    steps = jnp.full_like(arguments["dt"], 0.5).at[:, ::3].set(1.0)
    return {**arguments, "a": jnp.asarray(-rates, dtype), "dt": steps}

  def by_channel(v):
    """[4, ...]; every channel has a group of its own, so each array has one axis of size 4."""
    return np.moveaxis(np.asarray(v, np.float64), v.shape.index(4), 0).reshape(4, -1)

  arguments = weak_to_strong(jnp.float32)
  found = {
    **gradients(arguments, random_weights(arguments), chunk_size=64, implementation="xla"),
    **dict(zip(("y", "state"), selective_scan(**arguments, chunk_size=64), strict=True)),
  }
  with jax.enable_x64(True):
    wide = weak_to_strong(jnp.float64)
    expected = gradients(wide, random_weights(wide), chunk_size=64, implementation="reference")
    expected = jax.device_get(expected)
  expected.update(zip(("y", "state"), numpy_scan(**arguments), strict=True))
  for key, value in found.items():
    truth = by_channel(expected[key])
    scale = np.max(np.abs(truth), axis=1, keepdims=True)
    np.testing.assert_allclose(by_channel(value) / scale, truth / scale, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("time", [1, 19])
def test_a_row_has_the_same_bits_in_any_place_beside_any_rows(time):
  shape = Shape(6, time, 8, 2, 16, 8)
  rows = (*TOKENS, "initial_state")
  arguments, others = inputs(shape), inputs(shape, seed=1)
  order = np.array([3, 5, 0, 2, 1, 4])
  run = functools.partial(selective_scan, chunk_size=8)
  y, state = run(**arguments)
  moved_y, moved_state = run(**{k: v[order] if k in rows else v for k, v in arguments.items()})
  np.testing.assert_array_equal(moved_y, y[order])
  np.testing.assert_array_equal(moved_state, state[order])
  mixed_y, mixed_state = run(
    **{k: others[k].at[2].set(v[2]) if k in rows else v for k, v in arguments.items()}
  )
  np.testing.assert_array_equal(mixed_y[2], y[2])
  np.testing.assert_array_equal(mixed_state[2], state[2])


def test_steps_equal_the_scan():
  shape = Shape(2, 9, 6, 2, 4, 4)
  arguments = inputs(shape)
  options = {"dt_bias": jnp.ones((6,)), "dt_softplus": True, "dt_limit": (0.2, 3.0)}
  expected, expected_state = selective_scan(**arguments, **options, chunk_size=4)
  state = arguments.pop("initial_state")
  for t in range(shape.time):
    token = {k: v[:, t] if k in TOKENS else v for k, v in arguments.items()}
    y, state = selective_scan_step(**token, state=state, **options)
    np.testing.assert_allclose(y, expected[:, t], atol=1e-5)
  np.testing.assert_allclose(state, expected_state, atol=1e-5)


def test_a_slot_that_is_not_active_keeps_its_state_bit_for_bit():
  arguments = inputs(Shape(4, 1, 6, 2, 4, 4))
  state = arguments.pop("initial_state")
  token = {k: v[:, 0] if k in TOKENS else v for k, v in arguments.items()}
  active = jnp.asarray([True, False, True, False])
  poisoned = {k: v.at[1].set(jnp.nan) if k in TOKENS else v for k, v in token.items()}
  step = jax.jit(selective_scan_step)
  _, every = step(**token, state=state, active=jnp.ones((4,), bool))
  _, new = step(**poisoned, state=state, active=active)
  np.testing.assert_array_equal(new[~active], state[~active])
  np.testing.assert_array_equal(new[active], every[active])


def test_bfloat16_inputs_do_not_drift_over_many_tokens():
  shape = Shape(1, 8192, 4, 1, 4, 64)
  full = inputs(shape)
  half = {k: v.astype(jnp.bfloat16) if k in ("x", "b", "c") else v for k, v in full.items()}
  y, state = selective_scan(**half)
  assert (y.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
  rounded = {k: half[k].astype(jnp.float32) for k in full}
  expected_y, expected_state = numpy_scan(**rounded)
  np.testing.assert_allclose(state, expected_state, atol=2e-5, rtol=2e-5)
  # One bfloat16 rounding of the output, 8 bits of significand.
  np.testing.assert_allclose(y.astype(jnp.float32), expected_y, atol=1e-4, rtol=2**-8)


def test_checkpointed_and_mapped_gradients_are_the_same():
  shape = Shape(3, 13, 4, 2, 4, 8)
  arguments = inputs(shape)
  rows = {k: 0 if k in (*TOKENS, "initial_state") else None for k in arguments}

  def loss(arguments):
    y, state = api.selective_scan(**arguments, chunk_size=8, implementation="xla")
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(state))

  def loss_of_row(arguments):
    return loss({k: v if rows[k] is None else v[None] for k, v in arguments.items()})

  def loss_of_rows(arguments):
    return jnp.sum(jax.vmap(loss_of_row, in_axes=(rows,))(arguments))

  expected = jax.jit(jax.grad(loss))(arguments)
  for other in (jax.checkpoint(loss), loss_of_rows):
    for key, value in jax.jit(jax.grad(other))(arguments).items():
      np.testing.assert_allclose(value, expected[key], atol=1e-5, rtol=1e-5, err_msg=key)


def test_memory_of_a_gradient_stays_far_below_one_state_a_token():
  shape = Shape(1, 1024, 64, 1, 16, 64)
  arguments = inputs(shape)

  def loss(arguments):
    return jnp.sum(jnp.square(api.selective_scan(**arguments)[0]))

  compiled = jax.jit(jax.grad(loss)).lower(arguments).compile()
  states = 4 * shape.batch * shape.time * shape.channels * shape.size
  assert compiled.memory_analysis().temp_size_in_bytes < 0.75 * states


def golden_case(file: str, case: str) -> dict[str, np.ndarray]:
  golden = np.load(pathlib.Path(_DATA or "") / "peer_golden" / file)
  return {k.split("/")[1]: golden[k] for k in golden.files if k.startswith(f"{case}/")}


def check_published_values_and_gradients(case: str, implementation: str, **compiler: object):
  stored = golden_case("mamba1_selective_scan.npz", case)
  names = [k for k in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias") if k in stored]

  def maps(v):
    """[B, (G,) N, T] to [B, T, G, N]."""
    return jnp.moveaxis(v if v.ndim == 4 else v[:, None], -1, 1)

  def forward(arguments):
    y, state = api.selective_scan(
      jnp.swapaxes(arguments["u"], 1, 2),
      jnp.swapaxes(arguments["delta"], 1, 2),
      arguments["A"],
      maps(arguments["B"]),
      maps(arguments["C"]),
      arguments.get("D"),
      dt_bias=arguments.get("delta_bias"),
      dt_softplus=bool(stored["softplus"]),
      chunk_size=16,
      implementation=implementation,
    )
    y = jnp.swapaxes(y, 1, 2)
    if "z" in arguments:
      y = y * jax.nn.silu(arguments["z"])
    return jnp.sum(y * stored["cotangent"]), (y, state)

  found, (y, state) = jax.jit(jax.grad(forward, has_aux=True), **compiler)(
    {k: jnp.asarray(stored[k]) for k in names}
  )
  np.testing.assert_allclose(y, stored["out"], atol=1e-5, rtol=1e-5)
  np.testing.assert_allclose(state, stored["last_state"], atol=1e-5, rtol=1e-5)
  for name in names:
    expected = stored[f"d{name}"]
    scale = 1.0 + np.max(np.abs(expected))
    np.testing.assert_allclose(found[name] / scale, expected / scale, atol=5e-6, err_msg=name)


@needs_data
@pytest.mark.parametrize(
  ("case", "implementation"),
  [(case, "xla") for case in ("c0", "c1", "c2", "c3", "c4")] + [("c1", "reference")],
)
def test_published_kernel_values_and_gradients(case, implementation):
  check_published_values_and_gradients(case, implementation)


@needs_data
@pytest.mark.parametrize("case", ["step0", "step1", "step2"])
def test_published_decoding_step(case):
  stored = golden_case("mamba_step_and_gated_norm.npz", case)
  rows, size = stored["B"].shape[0], stored["B"].shape[-1]
  # Heads, where there are some, are runs of channels.
  y, state = selective_scan_step(
    stored["x"].reshape(rows, -1),
    stored["dt"].reshape(rows, -1),
    stored["A"].reshape(-1, size),
    stored["B"].reshape(rows, -1, size),
    stored["C"].reshape(rows, -1, size),
    stored["D"].reshape(-1),
    jnp.asarray(stored["state"].reshape(rows, -1, size)),
    dt_bias=stored["dt_bias"].reshape(-1),
    dt_softplus=True,
  )
  y = y.reshape(stored["x"].shape)
  if "z" in stored:
    y = y * jax.nn.silu(stored["z"])
  np.testing.assert_allclose(y, stored["out"], atol=1e-5)
  np.testing.assert_allclose(state.reshape(stored["state"].shape), stored["new_state"], atol=1e-5)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"dt": (2, 5, 3)}, r"dt must have shape \(2, 5, 4\), got \(2, 5, 3\)"),
    ({"a": (4,)}, r"a must have shape \(4, 8\)"),
    ({"b": (2, 5, 3, 8), "c": (2, 5, 3, 8)}, "G dividing D=4"),
    ({"x": (2, 0, 4)}, "without an empty axis"),
    ({"initial_state": (2, 8, 4)}, "initial_state must have shape"),
    ({"lengths": (3,)}, "lengths must have shape"),
  ],
)
def test_shapes_that_do_not_fit_are_named(change, message):
  arguments = inputs(Shape(2, 5, 4, 2, 8, 4))
  for name, sizes in change.items():
    arguments[name] = jnp.zeros(sizes)
  with pytest.raises(ValueError, match=message):
    selective_scan(**arguments, chunk_size=4)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"chunk_size": 0}, "chunk_size=0; allowed: at least 1"),
    ({"time_axis": "time", "lengths": jnp.ones((1,), jnp.int32)}, "neither lengths nor"),
    ({"dt_limit": (1.0, 0.5)}, "lower bound must not be above"),
  ],
)
def test_options_that_do_not_fit_are_named(change, message):
  arguments = inputs(Shape(1, 5, 4, 2, 8, 4))
  del arguments["initial_state"]
  with pytest.raises(ValueError, match=message):
    api.selective_scan(**arguments, **change)


def test_an_implementation_that_is_not_there_fails_and_lists_the_others():
  names = ", ".join(repr(name) for name in IMPLEMENTATIONS)
  with pytest.raises(ValueError, match=f"'cuda' .*available: {names}"):
    selective_scan(**inputs(CHECKED["one token"]), implementation="cuda")
