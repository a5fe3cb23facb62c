import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.models.stack import unstack
from tests.models.rows import by_sequence, draw, forward, pack, score_tokens

ALONE = [[0], [1], [2], [3], [4]]
PACKED = [[0, 2, None], [None, 1], [3, None, 4]]
SHUFFLED = [[4, 0], [3], [None, 2, 1], []]


@pytest.mark.parametrize(
  ("pattern", "units"),
  [
    ("M*-M*-M", (("M*-", 2), ("M", 1))),
    ("MMMM", (("M", 4),)),
    ("M*E-", (("M*E-", 1),)),
    ("*-" * 32, (("*-", 32),)),
    ("M-M-M-MM-M-M*-", (("M-", 3), ("M", 1), ("M-", 2), ("M*-", 1))),
  ],
)
def test_a_pattern_is_split_into_few_units(pattern, units):
  found = models.factor_pattern(pattern)
  assert "".join(unit * repeats for unit, repeats in found) == pattern
  assert sum(len(u) for u, _ in found) <= sum(len(u) for u, _ in units)
  if pattern != "M-M-M-MM-M-M*-":
    assert found == units


def test_a_deep_hybrid_compiles_a_few_blocks_only():
  nano = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
  units = models.factor_pattern(nano)
  assert "".join(unit * repeats for unit, repeats in units) == nano
  assert sum(len(unit) for unit, _ in units) <= 14


@pytest.mark.slow
def test_scanning_over_repeats_equals_running_each_block(tiny):
  config = dataclasses.replace(tiny, pattern="MEMEME-", unrolled_blocks=1)
  params = draw(config, seed=0)
  assert [repeats for _, repeats in models.factor_pattern(config.pattern)] == [3, 1]
  blocks = unstack(params.groups, config)
  # One group per block: the same weights without a scan.
  flat = params.replace(groups=tuple((jax.tree.map(lambda w: w[None], block),) for block in blocks))
  rows = pack([np.arange(11), np.arange(6)], [[0], [None, 1]], 13)

  def loss(params, split):
    with pytest.MonkeyPatch.context() as patch:
      if split:
        alone = tuple((kind, 1) for kind in config.pattern)
        patch.setattr("agentjax.models.stack.factor_pattern", lambda pattern: alone)
      out = models.forward(params, config, *rows)
    real = (rows.segment_ids > 0)[..., None]
    return jnp.sum(jnp.where(real, jnp.sin(out.hidden), 0.0)), out

  run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
  (_, scanned), scanned_grads = run(params, False)
  (_, single), single_grads = run(flat, True)
  np.testing.assert_allclose(scanned.hidden, single.hidden, atol=1e-5)
  np.testing.assert_array_equal(scanned.routing.load, single.routing.load)
  want = [jax.tree.map(lambda w: w[0], group[0]) for group in single_grads.groups]

  def near(got, want):
    # Sums in another order: roundings of the array's largest values, which reach 40.
    scale = 1.0 + np.max(np.abs(want))
    np.testing.assert_allclose(got / scale, want / scale, atol=1e-5)

  jax.tree.map(near, unstack(scanned_grads.groups, config), want)


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes", [pytest.param({"remat": "block"}, marks=pytest.mark.slow), {"unrolled_blocks": 1}]
)
def test_how_the_gradient_is_scheduled_does_not_change_it(tiny, changes):
  config = dataclasses.replace(tiny, pattern="MEME")
  params = draw(config, seed=0)
  rows = pack([np.arange(11), np.arange(6)], [[0], [None, 1]], 13)

  def loss(params, config):
    out = forward(params, config, *rows)
    return jnp.sum(jnp.where((rows.segment_ids > 0)[..., None], out.hidden, 0.0) ** 3)

  run = jax.jit(jax.grad(loss), static_argnums=1)
  plain, other = run(params, config), run(params, dataclasses.replace(config, **changes))
  jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), other, plain)


@functools.partial(jax.jit, static_argnums=1)
def scored(params, config, rows):
  """Summed score of every sequence, its gradient and everything per token."""

  def loss(params):
    scores = score_tokens(params, config, *rows)
    return jnp.sum(scores.log_probs + 0.3 * scores.entropies), scores

  return jax.value_and_grad(loss, has_aux=True)(params)


@pytest.mark.parametrize(
  "layout", [PACKED, pytest.param(SHUFFLED, marks=pytest.mark.slow)], ids=["packed", "shuffled"]
)
def test_packing_and_padding_change_neither_values_nor_gradients(
  tiny, tiny_params, sequences, layout
):
  """Nothing leaks through attention, convolution, state or router statistics."""
  alone, packed = pack(sequences, ALONE, 21), pack(sequences, layout, 28)
  (_, want), want_grads = scored(tiny_params, tiny, alone)
  (_, got), grads = scored(tiny_params, tiny, packed)
  for field in ("log_probs", "entropies", "hidden"):
    expected = by_sequence(getattr(want, field), alone)
    for index, values in by_sequence(getattr(got, field), packed).items():
      np.testing.assert_allclose(values, expected[index], atol=1e-5)
  np.testing.assert_array_equal(got.routing.load, want.routing.load)
  np.testing.assert_allclose(got.balance_loss, want.balance_loss, rtol=1e-5)
  jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=3e-5), grads, want_grads)


def test_what_stands_in_padding_does_not_matter(tiny, tiny_params, sequences):
  rows = pack(sequences, PACKED, 28)
  real = rows.segment_ids > 0
  other = rows._replace(token_ids=jnp.where(real, rows.token_ids, tiny.vocab_size - 1))
  assert not np.array_equal(rows.token_ids, other.token_ids)
  (_, scores), grads = scored(tiny_params, tiny, rows)
  (_, other_scores), other_grads = scored(tiny_params, tiny, other)
  np.testing.assert_array_equal(scores.hidden[real], other_scores.hidden[real])
  np.testing.assert_array_equal(scores.log_probs, other_scores.log_probs)
  np.testing.assert_array_equal(scores.routing.load, other_scores.routing.load)
  jax.tree.map(np.testing.assert_array_equal, grads, other_grads)


def test_the_router_counts_every_real_token_once_per_choice(tiny, tiny_params, sequences):
  out = forward(tiny_params, tiny, *pack(sequences, PACKED, 28))
  assert out.routing.load.shape == (1, tiny.num_experts)
  assert jnp.sum(out.routing.load) == tiny.experts_per_token * sum(map(len, sequences))


def test_a_token_sees_its_past_only(tiny, tiny_params):
  rows = pack([np.arange(20)], [[0]], 20)
  changed = rows._replace(token_ids=rows.token_ids.at[0, 12].set(40))
  before = forward(tiny_params, tiny, *rows).hidden
  after = forward(tiny_params, tiny, *changed).hidden
  np.testing.assert_allclose(before[:, :12], after[:, :12], atol=1e-6)
  assert jnp.all(jnp.max(jnp.abs(before - after)[:, 12:], axis=-1) > 1e-5)


@pytest.mark.slow
def test_gradients_agree_with_finite_differences(tiny, tiny_params, sequences):
  """In each array the entry with the largest gradient, by a central difference.

  Every expert is chosen here: where the choice changes the loss jumps.
  """
  config = dataclasses.replace(tiny, experts_per_token=tiny.num_experts)
  rows = pack(sequences, PACKED, 28)

  @jax.jit
  def loss(params):
    out = models.forward(params, config, *rows)
    return jnp.sum(jnp.where((rows.segment_ids > 0)[..., None], out.hidden, 0.0) ** 3)

  grads = jax.jit(jax.grad(loss))(tiny_params)
  leaves, tree = jax.tree.flatten(tiny_params)
  for index, grad in enumerate(jax.tree.leaves(grads)):
    at = np.unravel_index(np.argmax(np.abs(grad)), grad.shape)
    sides = []
    for step in (4e-3, -4e-3):
      moved = leaves.copy()
      moved[index] = leaves[index].at[at].add(step)
      sides.append(float(loss(tree.unflatten(moved))))
    # Float32 rounding of the loss, about 1e-4, over the width of the difference.
    np.testing.assert_allclose((sides[0] - sides[1]) / 8e-3, grad[at], rtol=2e-2, atol=5e-2)


def test_the_router_bias_moves_towards_balance_and_only_the_choice(tiny, tiny_params, sequences):
  rows = pack(sequences, PACKED, 28)
  load = forward(tiny_params, tiny, *rows).routing.load
  moved = models.update_router_bias(tiny_params, tiny, load, 0.25)
  change = moved.groups[0][1].mixer.router_bias - tiny_params.groups[0][1].mixer.router_bias
  np.testing.assert_allclose(change, 0.25 * np.sign(load.mean() - load), atol=1e-6)
  level = models.update_router_bias(tiny_params, tiny, jnp.ones((1, 4)), 0.25)
  jax.tree.map(np.testing.assert_array_equal, level, tiny_params)
  for _ in range(60):
    load = forward(moved, tiny, *rows).routing.load
    moved = models.update_router_bias(moved, tiny, load, 0.02)
  first = forward(tiny_params, tiny, *rows).routing.load
  assert jnp.max(jnp.abs(load - load.mean())) < 0.5 * jnp.max(jnp.abs(first - first.mean()))


def test_the_router_bias_has_no_gradient(tiny, tiny_params, sequences):
  (_, _), grads = scored(tiny_params, tiny, pack(sequences, PACKED, 28))
  np.testing.assert_array_equal(grads.groups[0][1].mixer.router_bias, 0.0)
  assert jnp.max(jnp.abs(grads.groups[0][1].mixer.router)) > 1e-4


def test_the_bias_of_a_scanned_stack_is_updated_in_pattern_order(tiny):
  config = dataclasses.replace(tiny, pattern="-EE-EE*E")
  specs = models.abstract(models.param_specs(config))
  params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), specs)
  load = jnp.zeros((5, config.num_experts)).at[jnp.arange(5), jnp.array([0, 1, 2, 3, 0])].set(8.0)
  moved = models.update_router_bias(params, config, load, 1.0)
  biases = [
    b.mixer.router_bias for b in unstack(moved.groups, config) if hasattr(b.mixer, "router_bias")
  ]
  assert [int(jnp.argmin(b)) for b in biases] == [0, 1, 2, 3, 0]


def test_bfloat16_is_near_float32(tiny, tiny_params, sequences):
  rows = pack(sequences, PACKED, 28)
  narrow = dataclasses.replace(tiny, compute_dtype="bfloat16")
  wide = score_tokens(tiny_params, tiny, *rows)
  scores = score_tokens(tiny_params, narrow, *rows)
  assert scores.hidden.dtype == jnp.bfloat16 and scores.log_probs.dtype == jnp.float32
  assert jnp.mean(jnp.abs(scores.log_probs - wide.log_probs)) < 0.05


def test_a_pattern_without_mixtures_reports_none(tiny):
  config = dataclasses.replace(tiny, pattern="M-")
  out = forward(draw(config, seed=0), config, *pack([np.arange(5)], [[0]], 6))
  assert out.routing is None and out.balance_loss == 0.0
