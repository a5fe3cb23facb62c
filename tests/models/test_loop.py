import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax import models
from agentjax.adapters.model_families.parcae import (
  Draws,
  Injection,
  decay_and_step,
  draw_sequences,
  hash_histories,
  sample_depths,
  start_states,
)
from agentjax.config import ConfigError
from agentjax.models.blocks import KINDS, Rows
from agentjax.models.stack import unstack
from agentjax.sharding import MESH_AXES, partition_spec
from tests.models.rows import by_sequence, draw, forward, pack, score_tokens
from tests.models.slots import read_slots

LAST = 2  # iterations with a gradient


def looped(tiny, pattern="-*-*", **changes):
  """Prelude "-", core "*-", coda "*"."""
  loop = models.LoopConfig(prelude=1, coda=1, mean_depth=3, gradient_depth=LAST, **changes)
  return dataclasses.replace(tiny, pattern=pattern, loop=loop)


def two_pass(tiny, window=4):
  second_pass = models.SecondPassConfig(window=window)
  return dataclasses.replace(tiny, pattern="*-*-", qk_norm=False, second_pass=second_pass)


def draw_looped(config, seed=0):
  """Parameters with an injection that is near its start, neither all decay nor all drive."""
  params, rng = draw(config, seed), np.random.default_rng(seed)
  width = config.d_model

  def near(middle):
    return jnp.asarray(middle + 0.1 * rng.standard_normal(np.shape(middle)), jnp.float32)

  return params.replace(
    loop=Injection(
      norm=near(np.ones(width)),
      decay_rate=near(np.zeros(width)),
      step_bias=near(np.full(width, 0.3)),
      into=near(np.eye(width)),
      out=near(np.eye(width)),
    )
  )


def rms(x, weight):
  return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight


def loop_by_hand(params, config, rows, depth, start):
  """A straight-line program of one sequence; the state before the last iterations is a constant."""
  blocks = list(zip(config.pattern, unstack(params.groups, config), strict=True))
  run = Rows(rows.segment_ids, rows.positions)

  def through(x, part):
    for kind, block in part:
      x, _ = KINDS[kind].forward(block, x, config, run, None)
    return x

  x = through(params.embedding[rows.token_ids], blocks[:1])
  inputs = rms(x, params.loop.norm)
  step = jnp.log1p(jnp.exp(params.loop.step_bias))
  kept = jnp.exp(-step * jnp.exp(params.loop.decay_rate))
  state = start
  for i in range(depth):
    if i == depth - LAST:
      state = jax.lax.stop_gradient(state)
    state = through(kept * state + step * (inputs @ params.loop.into), blocks[1:-1])
  return rms(through(state @ params.loop.out, blocks[-1:]), params.final_norm)


def wave(tokens, hidden):
  """A scalar of every token's hidden state."""
  return jnp.sum(jnp.sin(hidden * (1.0 + tokens[..., None] % 3)), axis=-1)


@pytest.mark.slow
def test_sequences_of_different_depth_in_one_row_are_the_programs_written_out(tiny):
  """Values, and the gradient that stops before the last iterations; remat changes neither."""
  config = dataclasses.replace(looped(tiny, start="zeros"), remat="block")
  params = draw_looped(config)
  sequences = [np.arange(5), np.arange(9, 16), np.arange(20, 24)]
  depths = {1: 1, 2: 5, 3: 3}
  packed = pack(sequences, [[0, None, 1], [2]], 15)
  # Whatever stands on padding must not keep the loop going.
  by_token = np.vectorize({**depths, 0: 10**9}.get)(packed.segment_ids)

  @jax.jit
  def ours(params, depths):
    hidden = models.forward(params, config, *packed, drawn=Draws(depths)).hidden
    values = jnp.where(packed.segment_ids > 0, wave(packed.token_ids, hidden), 0.0)
    return jnp.sum(values), hidden

  (_, hidden), grads = jax.value_and_grad(ours, has_aux=True)(params, jnp.asarray(by_token))

  @jax.jit
  def written_out(params):
    total, states = 0.0, {}
    for i, tokens in enumerate(sequences, start=1):
      rows = pack([tokens], [[0]], len(tokens))
      start = jnp.zeros((1, len(tokens), config.d_model))
      states[i] = loop_by_hand(params, config, rows, depths[i], start)
      total += jnp.sum(wave(rows.token_ids, states[i]))
    return total, states

  (_, wanted), wanted_grads = jax.value_and_grad(written_out, has_aux=True)(params)
  for i, values in by_sequence(hidden, packed).items():
    np.testing.assert_allclose(values, wanted[i][0], atol=2e-5)
  jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=5e-4), grads, wanted_grads)


@settings(deadline=None, max_examples=200)
@given(
  st.floats(width=32, allow_nan=False, allow_infinity=False),
  st.floats(width=32, allow_nan=False, allow_infinity=False),
)
def test_the_spectral_radius_is_below_one_whatever_the_parameters(decay_rate, step_bias):
  with jax.disable_jit():
    params = Injection(
      norm=None,
      decay_rate=np.float32([decay_rate]),
      step_bias=np.float32([step_bias]),
      into=None,
      out=None,
    )
    kept, step = decay_and_step(params)
  assert 0.0 <= kept[0] < 1.0
  assert step[0] >= 0.0


def test_the_injection_starts_as_published(tiny):
  config = looped(tiny)
  specs = models.param_specs(config)
  injection = models.init_params(specs.loop, jax.random.key(0))
  kept, step = decay_and_step(injection)
  np.testing.assert_allclose(kept, np.sqrt(1 / 5), rtol=1e-6)
  np.testing.assert_allclose(step, -np.log(np.sqrt(1 / 5)), rtol=1e-6)
  np.testing.assert_array_equal(injection.into, np.eye(config.d_model))
  decayed = models.decay_mask(specs).loop
  assert not (decayed.norm or decayed.decay_rate or decayed.step_bias or decayed.into)
  base = models.param_specs(dataclasses.replace(config, loop=None))
  assert models.count(specs) - models.count(base) == 2 * 24 * 24 + 3 * 24


@pytest.mark.parametrize("by", ["sequence", "place"])
def test_the_first_state_does_not_depend_on_the_row(tiny, sequences, by):
  config = looped(tiny, start_by=by)
  params = draw_looped(config)
  alone, packed = pack(sequences, [[0], [1]], 21), pack(sequences, [[None, 1], [0]], 24)
  expected = by_sequence(forward(params, config, *alone).hidden, alone)
  for index, values in by_sequence(forward(params, config, *packed).hidden, packed).items():
    np.testing.assert_allclose(values, expected[index], atol=2e-5)
  zeros = forward(params, looped(tiny, start="zeros"), *alone).hidden
  assert jnp.max(jnp.abs(by_sequence(zeros, alone)[1] - expected[1])) > 1e-3


def starts(config, tokens, salts=None):
  """Start states [T, embed] of one sequence."""
  ids, places = jnp.asarray([tokens]), jnp.arange(len(tokens))[None]
  first = places == 0
  histories = hash_histories(ids, first, jnp.uint32(0) if salts is None else salts)
  if config.loop.start_by == "place":
    return start_states(config, places, None, salts)[0]
  return start_states(config, places, histories)[0]


def test_sequences_start_apart_from_the_first_token_in_which_they_differ(tiny):
  config = looped(tiny)
  one, other = starts(config, [5, 0, 7, 7, 7]), starts(config, [5, 0, 8, 7, 7])
  np.testing.assert_array_equal(one[:2], other[:2])
  assert jnp.all(jnp.any(one[2:] != other[2:], axis=1))
  assert len(jnp.unique(starts(config, [0] * 50), axis=0)) == 50
  by_place = looped(tiny, start_by="place")
  np.testing.assert_array_equal(starts(by_place, [1, 2, 3]), starts(by_place, [4, 5, 6]))
  scale = config.init_scale * config.d_model**-0.5
  many = starts(config, list(range(41)) * 20)
  np.testing.assert_allclose(jnp.std(many), 0.987 * scale, rtol=0.03)  # of a normal cut at 3
  assert jnp.max(jnp.abs(many)) <= 3.0 * scale


@pytest.mark.parametrize("by", ["sequence", "place"])
def test_in_training_no_two_sequences_and_no_two_updates_start_alike(tiny, by):
  config, ids = looped(tiny, start_by=by), jnp.asarray([[1, 2]])
  salts = [draw_sequences(config, jax.random.key(n), ids).salts[0] for n in range(2)]
  salts = [salt for update in salts for salt in update]
  found = [starts(config, [3, 1, 4], jnp.full((1, 3), salt)) for salt in salts]
  found.append(starts(config, [3, 1, 4]))
  for i, one in enumerate(found):
    for other in found[:i]:
      assert jnp.all(jnp.any(one != other, axis=1))
  again = draw_sequences(config, jax.random.key(0), ids[:, ::-1]).salts[0, ::-1]
  np.testing.assert_array_equal(again, salts[:2])


def test_the_start_states_of_an_update_reach_the_policy(tiny):
  """The same rows and depths, other salts; without salts they are those of scoring."""
  config = looped(tiny)
  params, rows = draw_looped(config), pack([np.arange(5), np.arange(5)], [[0, 1]], 10)
  depths = jnp.full((1, 10), config.loop.fixed_depth)
  run = jax.jit(lambda drawn: models.forward(params, config, *rows, drawn=drawn).hidden[0])
  np.testing.assert_array_equal(run(Draws(depths)), run(None))
  alike = run(None)
  np.testing.assert_allclose(alike[:5], alike[5:], atol=2e-5)
  apart = run(Draws(depths, jnp.uint32(rows.segment_ids + 7)))
  assert jnp.all(jnp.max(jnp.abs(apart[:5] - apart[5:]), axis=1) > 1e-3)
  assert jnp.max(jnp.abs(apart[:5] - alike[:5])) > 1e-3


def test_a_hash_is_the_same_however_its_tokens_are_cut():
  ids = np.random.default_rng(0).integers(0, 2**31, (2, 9))
  whole = hash_histories(ids, jnp.arange(9) == 0, jnp.uint32(5))
  last = jnp.full((2, 1), 5, jnp.uint32)
  for cut in ([0], [1, 2, 3], [4, 5, 6, 7, 8]):
    found = hash_histories(ids[:, cut], jnp.arange(len(cut)) == 0, last)
    np.testing.assert_array_equal(found, whole[:, cut])
    last = found[:, -1:]
  expected = [5, 5]
  for t in range(9):
    for i in range(2):
      h = int(ids[i, t]) + 1
      h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
      h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
      expected[i] = (expected[i] * 0x9E3779B1 + (h ^ (h >> 16))) % 2**32
    np.testing.assert_array_equal(whole[:, t], np.uint32(expected))


def test_the_core_forgets_its_start_where_a_plain_loop_keeps_it(tiny):
  """Without blocks that add, h goes to D e / (1 - decay); with decay 1 it is h_0 + T D e."""

  def reached(params, depth, **start):
    config = looped(tiny, eval_depth=depth, **start)
    rows = pack([np.arange(5)], [[0]], 5)
    return forward(params, config, *rows).hidden[0]

  params = draw_looped(looped(tiny))
  params = params.replace(groups=jax.tree.map(jnp.zeros_like, params.groups))
  plain = params.replace(
    loop=dataclasses.replace(params.loop, decay_rate=jnp.full_like(params.loop.decay_rate, -40.0))
  )

  def moved(one, deep, other):
    return float(jnp.max(jnp.abs(reached(one, deep) - reached(one, deep, **other))))

  drawn_otherwise = {"start_seed": 1}
  assert moved(params, 1, drawn_otherwise) > 1e-2
  assert moved(params, 60, drawn_otherwise) < 1e-5
  assert moved(plain, 60, drawn_otherwise) > 1e-3


def test_depths_follow_the_poisson_law_and_the_sequence_only(tiny):
  config = dataclasses.replace(looped(tiny), loop=models.LoopConfig(1, 1, mean_depth=3))
  ids = jnp.arange(6000).reshape(60, 100)
  depths = sample_depths(config, jax.random.key(1), ids)
  share = np.bincount(np.asarray(depths).ravel(), minlength=12)[:12] / ids.size
  law = np.exp(-3) * 3.0 ** np.arange(12) / np.cumprod([1, *range(1, 12)])
  law[1] += law[0]
  law[0] = 0.0
  np.testing.assert_allclose(share, law, atol=0.02)  # about four standard errors
  again = sample_depths(config, jax.random.key(1), ids.T[::-1])
  np.testing.assert_array_equal(again, depths.T[::-1])
  assert jnp.any(sample_depths(config, jax.random.key(2), ids) != depths)


def test_depths_need_a_looped_core(tiny, tiny_params):
  rows = pack([np.arange(5)], [[0]], 5)
  with pytest.raises(ValueError, match="set config.loop"):
    models.forward(tiny_params, tiny, *rows, drawn=Draws(jnp.ones((1, 5), jnp.int32)))


@pytest.mark.parametrize("decoding", [False, True], ids=["training", "decoding"])
def test_the_program_does_not_grow_with_the_number_of_iterations(tiny, decoding):
  def size(depth):
    config = looped(tiny, eval_depth=depth)
    params = models.abstract(models.param_specs(config))
    ids = jax.ShapeDtypeStruct((4, 8), jnp.int32)
    if not decoding:
      program = jax.jit(jax.grad(lambda p, *rows: models.forward(p, config, *rows).hidden.sum()))
      return program.lower(params, ids, ids, ids).as_text().count("\n")

    def step(params, token_ids):
      params = models.prepare_decode_params(params, config)
      cache = models.init_cache(config, 4, 16)
      return models.decode_step(params, config, cache, token_ids, token_ids > 0)

    return jax.jit(step).lower(params, ids.update(shape=(4,))).as_text().count("\n")

  assert size(40) == size(4)


def attend_by_hand(query, key, value, window):
  """[T, heads, D], causal, each token with the ``window`` last ones."""
  at = jnp.arange(len(query))
  ago = at[:, None] - at
  scores = jnp.einsum("qhk,shk->hqs", query, jnp.repeat(key, 2, axis=1)) / jnp.sqrt(8.0)
  scores = jnp.where((ago >= 0) & (ago < window), scores, -jnp.inf)
  return jnp.einsum("hqs,shk->qhk", jax.nn.softmax(scores), jnp.repeat(value, 2, axis=1))


def two_passes_by_hand(first, second, tokens, config):
  """One sequence without positions; ``first`` and ``second`` are the parameters of each pass."""
  x, kept, layers = first.embedding[tokens], [], iter(range(2))
  for kind, block in zip(config.pattern, unstack(first.groups, config), strict=True):
    inputs, mixer = rms(x, block.norm), block.mixer
    if kind == "-":
      x = x + jnp.square(jax.nn.relu(inputs @ mixer.up)) @ mixer.down
      continue
    query, key, value = (
      jnp.einsum("td,dhk->thk", inputs, w) for w in (mixer.query, mixer.key, mixer.value)
    )
    kept.append((key, value))
    x = x + jnp.einsum("thk,hkd->td", attend_by_hand(query, key, value, 99), mixer.out)
  for kind, block in zip(config.pattern, unstack(second.groups, config), strict=True):
    inputs, mixer = rms(x, block.norm), block.mixer
    if kind == "-":
      x = x + jnp.square(jax.nn.relu(inputs @ mixer.up)) @ mixer.down
      continue
    query, key, value = (
      jnp.einsum("td,dhk->thk", inputs, w) for w in (mixer.query, mixer.key, mixer.value)
    )
    i = next(layers)
    logits = jnp.einsum("thk,hk->th", query, second.second_pass.weight[i])
    gate = jax.nn.sigmoid(logits + second.second_pass.bias[i])[..., None]
    far = attend_by_hand(query, *kept[i], 99)
    near = attend_by_hand(query, key, value, config.second_pass.window)
    x = x + jnp.einsum("thk,hkd->td", gate * far + (1 - gate) * near, mixer.out)
  return rms(x, second.final_norm)


@pytest.mark.slow
def test_two_passes_mix_near_and_far_as_written_out_and_learn_from_both(tiny):
  """Values; the gradient is the sum over both uses of the weights, and a slope that is there."""
  config = dataclasses.replace(two_pass(tiny), rope_theta=None)
  params, tokens = draw(config, seed=0), np.arange(11)
  spread = jax.random.normal(jax.random.key(0), params.second_pass.weight.shape)
  params = params.replace(second_pass=params.second_pass.replace(weight=spread))
  rows = pack([tokens], [[0]], 11)

  @jax.jit
  def ours(params):
    hidden = models.forward(params, config, *rows).hidden[0]
    return jnp.sum(wave(tokens, hidden)), hidden

  @jax.jit
  def written_out(first, second):
    hidden = two_passes_by_hand(first, second, tokens, config)
    return jnp.sum(wave(tokens, hidden)), hidden

  (_, hidden), grads = jax.value_and_grad(ours, has_aux=True)(params)
  uses, wanted = jax.grad(written_out, argnums=(0, 1), has_aux=True)(params, params)
  np.testing.assert_allclose(hidden, wanted, atol=2e-5)
  jax.tree.map(lambda g, a, b: np.testing.assert_allclose(g, a + b, atol=1e-3), grads, *uses)
  assert all(jnp.any(g != 0.0) for use in uses for g in jax.tree.leaves(use.groups))
  length = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
  ends = [
    ours(jax.tree.map(lambda w, g, s=s: w + s * g / length, params, grads))[0]
    for s in (3e-3, -3e-3)
  ]
  np.testing.assert_allclose((ends[0] - ends[1]) / 6e-3, length, rtol=2e-2)


def test_with_closed_gates_and_a_wide_window_it_is_the_stack_twice(tiny):
  config = two_pass(tiny, window=99)
  params = draw(config, seed=0)
  closed = params.second_pass.replace(bias=jnp.full_like(params.second_pass.bias, -200.0))
  params = params.replace(second_pass=closed)
  rows = pack([np.arange(13), np.arange(5)], [[0], [None, 1]], 14)
  base = dataclasses.replace(config, second_pass=None)
  deep = dataclasses.replace(base, pattern=config.pattern * 2)
  group = tuple(
    jax.tree.map(lambda w: jnp.concatenate([w, w]), block) for block in params.groups[0]
  )
  twice = params.replace(groups=(group,), second_pass=None)
  expected = by_sequence(forward(twice, deep, *rows).hidden, rows)
  for index, values in by_sequence(forward(params, config, *rows).hidden, rows).items():
    np.testing.assert_allclose(values, expected[index], atol=2e-5)


def test_a_second_pass_adds_gates_and_changes_nothing_else(tiny):
  config = two_pass(tiny)
  base = dataclasses.replace(config, second_pass=None)
  specs = models.param_specs(config)
  assert specs.replace(second_pass=None) == models.param_specs(base)
  assert models.count(specs.second_pass) == 2 * (
    config.num_heads * config.head_dim + config.num_heads
  )


def decoded(params, config, tokens, prompt):
  """Logits after the prompt and after every later token, in one slot beside another one."""
  params = models.prepare_decode_params(params, config)
  cache = models.init_cache(config, 4, 16)
  ids = np.zeros((2, 8), np.int32)
  ids[0, :prompt], ids[1, :3] = tokens[:prompt], [5, 6, 7]
  extend = jax.jit(models.extend, static_argnums=1)
  logits, cache, *_ = extend(params, config, cache, np.array([2, 0]), ids, np.array([prompt, 3]))
  found = [logits[0]]
  step = jax.jit(models.decode_step, static_argnums=1, donate_argnums=2)
  for token in tokens[prompt:]:
    given = np.array([9, 0, token, 0], np.int32)
    logits, cache, *_ = step(params, config, cache, given, np.array([True, False, True, False]))
    found.append(logits[2])
  return jax.nn.log_softmax(jnp.stack(found)), cache


@pytest.mark.parametrize(
  "make",
  [
    looped,
    functools.partial(looped, start_by="place"),
    functools.partial(looped, pattern="-M*-"),
    functools.partial(looped, pattern="VV*V"),
    two_pass,
  ],
  ids=["*", "place", "M*", "V", "twice"],
)
def test_decoding_scores_tokens_as_training_does(tiny, make):
  config = make(tiny)
  params = draw_looped(config) if config.loop else draw(config, seed=0)
  tokens = np.random.default_rng(0).integers(0, config.vocab_size, 12)
  wanted = score_tokens(params, config, *pack([tokens], [[0]], 12)).log_probs[0]
  log_probs, cache = decoded(params, config, tokens, prompt=5)
  got = log_probs[np.arange(7), tokens[5:]]
  np.testing.assert_allclose(got, wanted[5:], atol=3e-5)
  assert all(v.shape[0] == 4 for v in jax.tree.leaves(cache))
  for v in jax.tree.leaves(read_slots(cache, np.array([1, 3])).blocks):
    np.testing.assert_array_equal(v, 0.0)


@pytest.mark.parametrize("make", [looped, two_pass])
def test_the_stream_stays_in_the_compute_dtype(tiny, make):
  config = dataclasses.replace(make(tiny), compute_dtype="bfloat16")
  specs, ids = models.param_specs(config), jax.ShapeDtypeStruct((4, 8), jnp.int32)

  def both(params, ids):
    hidden = models.forward(params, config, ids, ids, ids).hidden
    params = models.prepare_decode_params(params, config)
    cache = models.init_cache(config, 4, 16)
    return hidden, models.decode_step(params, config, cache, ids[:, 0], ids[:, 0] > 0), cache

  hidden, (logits, after, *_), cache = jax.eval_shape(both, models.abstract(specs), ids)
  assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
  assert after == cache


@pytest.mark.parametrize("make", [looped, two_pass])
def test_every_parameter_has_its_place_on_a_mesh(tiny, make):
  mesh = jax.sharding.AbstractMesh((2,) * len(MESH_AXES), MESH_AXES)
  specs = models.param_specs(dataclasses.replace(make(tiny), vocab_size=42))
  leaves = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, models.ParamSpec))
  assert all(len(partition_spec(s.axes, s.shape, mesh, name="it")) == len(s.shape) for s in leaves)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"pattern": "-E-", "loop": models.LoopConfig(1, 1)}, r"config\.loop\.prelude=1.*core='E'"),
    ({"pattern": "*-", "loop": models.LoopConfig(1, 1)}, r"config\.loop\.prelude=1.*core=''"),
    ({"pattern": "***", "loop": models.LoopConfig(1, 1, mean_depth=0)}, "mean_depth=0"),
    ({"pattern": "M-", "second_pass": models.SecondPassConfig()}, r"config\.second_pass="),
    ({"pattern": "*-", "second_pass": models.SecondPassConfig(0)}, "window=0; allowed: >= 1"),
  ],
)
def test_what_cannot_loop_is_refused(tiny, changes, message):
  with pytest.raises(ConfigError, match=message):
    dataclasses.replace(tiny, **changes).validate()
