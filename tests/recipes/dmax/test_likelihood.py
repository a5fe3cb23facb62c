"""The supervised loss against a dense transformer, and the bound against all that it averages."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.recipes.dmax.blocks import share_mask, subset_mask
from agentjax.recipes.dmax.likelihood import bound_scores, on_policy_scores
from tests.recipes.dmax.dense import (
  BLOCK,
  MASK,
  MODEL,
  SETTINGS,
  block_log_probs,
  policy,
)
from tests.recipes.dmax.test_blocks import IDS, NOISE, POSITIONS, SEGMENTS, _moved, fill

ROWS = tuple(jnp.asarray(v) for v in (IDS, SEGMENTS, POSITIONS, NOISE))
SHARPNESS = 3.0


@functools.partial(jax.jit, static_argnums=0)
def _run(score, params, rows):
  *rows, noise = rows
  return score(params, MODEL, *rows, marks=noise)


def _dense_log_probs(params, text, noisy):
  """float64 [T] of the filled rows, block by block; every sequence alone."""
  found = np.zeros(text.token_ids.shape[1])
  for start, stop in ((0, 8), (8, 12)):
    clean = np.asarray(text.token_ids[0, start:stop])
    for number in range((stop - start) // BLOCK):
      at = slice(start + number * BLOCK, start + (number + 1) * BLOCK)
      rows = block_log_probs(params, clean, np.asarray(noisy[0, at]), number)
      found[at] = rows[np.arange(BLOCK), np.asarray(text.token_ids[0, at])]
      found[at] *= np.asarray(text.noise[0, at]) > 0
  return found


def _folded(found):
  """With the fill of the first sequence on its last token."""
  found = found.copy()
  found[5] += found[6] + found[7]
  found[6:8] = 0
  return found


@pytest.mark.parametrize("second_pass", [False, True])
def test_the_supervised_loss_is_that_of_the_dense_definition(second_pass):
  params, text = policy(sharpness=SHARPNESS), fill()
  masked = share_mask(text, BLOCK, 0, 0, 0.75) | text.unknown
  noisy = jnp.where(masked, MASK, text.token_ids)
  wanted = _dense_log_probs(params, text, noisy)
  if second_pass:
    own = np.array(noisy)
    for start, stop in ((0, 8), (8, 12)):
      clean = np.asarray(text.token_ids[0, start:stop])
      for number in range((stop - start) // BLOCK):
        at = slice(start + number * BLOCK, start + (number + 1) * BLOCK)
        rows = block_log_probs(params, clean, np.asarray(noisy[0, at]), number)
        own[0, at] = rows[:, : SETTINGS.vocab_limit].argmax(axis=1)
    predicted = np.where(masked, own, noisy)
    assert (predicted != np.asarray(text.token_ids)).any()  # its own, partly wrong tokens
    wanted = (wanted + _dense_log_probs(params, text, predicted)) / 2
  found = _run(on_policy_scores(SETTINGS, second_pass=second_pass), params, ROWS)
  np.testing.assert_allclose(found.log_probs[0], _folded(wanted), atol=2e-5)


def test_the_estimate_of_the_bound_is_that_of_the_dense_definition():
  params, text = policy(sharpness=SHARPNESS), fill()
  settings = SETTINGS._replace(draws=2)
  wanted = np.zeros(16)
  for draw in range(2):
    masked, scale = subset_mask(text, BLOCK, 0, draw)
    noisy = jnp.where(masked | text.unknown, MASK, text.token_ids)
    wanted += np.asarray(scale[0]) * _dense_log_probs(params, text, noisy) / 2
  found = _run(bound_scores(settings), params, ROWS)
  np.testing.assert_allclose(found.log_probs[0], _folded(wanted), atol=5e-5)


@pytest.mark.parametrize("kind", ["on_policy", "bound"])
def test_gradients_are_those_of_finite_differences(kind):
  score = {
    "on_policy": on_policy_scores(SETTINGS, second_pass=True),
    "bound": bound_scores(SETTINGS),
  }[kind]
  params = policy(sharpness=SHARPNESS)

  def loss(params):
    return -jnp.sum(score(params, MODEL, *ROWS[:3], marks=ROWS[3]).log_probs)

  slope = jax.jit(jax.grad(loss))(params)
  rng = np.random.default_rng(3)
  way = jax.tree.map(lambda w: jnp.asarray(rng.standard_normal(w.shape), w.dtype), params)
  step = 4e-5  # so small that no most likely token of the first pass becomes another

  def at(distance):
    return loss(jax.tree.map(lambda w, v: w + distance * v, params, way))

  numeric = (jax.jit(at)(step) - jax.jit(at)(-step)) / (2 * step)
  exact = sum(jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (slope, way)), strict=True))
  assert float(numeric) == pytest.approx(float(exact), rel=2e-2)


@pytest.mark.parametrize("kind", ["on_policy", "bound"])
def test_neither_padding_nor_neighbours_change_a_score(kind):
  score = {
    "on_policy": on_policy_scores(SETTINGS, second_pass=True),
    "bound": bound_scores(SETTINGS),
  }[kind]
  params = policy(sharpness=SHARPNESS)
  beside = _run(score, params, ROWS).log_probs[0, :6]
  moved = tuple(jnp.asarray(v) for v in _moved((IDS, SEGMENTS, POSITIONS, NOISE), at=3))
  # Whatever stands on padding must not matter.
  moved = (jnp.where(moved[1] > 0, moved[0], 7), *moved[1:])
  alone = _run(score, params, moved).log_probs[0]
  np.testing.assert_allclose(alone[12:18], beside, atol=1e-5)
  assert not alone[:12].any()
  assert not alone[18:].any()


def _all_log_probs(params, prompt, texts):
  """float64 [texts, masks, 3]: of the three tokens behind ``prompt``, for every set of masks."""
  found = np.zeros((len(texts), 8, 3))
  for i, text in enumerate(texts):
    for j, mask in enumerate(itertools.product([False, True], repeat=3)):
      noisy = np.concatenate([[prompt], np.where(mask, MASK, text)])
      rows = block_log_probs(params, noisy, noisy, 0)
      found[i, j] = rows[np.arange(1, 4), text]
  return found


def _sets(mask):
  return int("".join("1" if m else "0" for m in mask), 2)


def _exact_bound(log_probs):
  """The bound as an average over all sets, and log p over all orders, of one text."""
  bound = 0.0
  for size in (1, 2, 3):
    sets = list(itertools.combinations(range(3), size))
    for chosen in sets:
      row = log_probs[_sets([t in chosen for t in range(3)])]
      bound += sum(row[t] for t in chosen) / size / len(sets)
  orders = []
  for order in itertools.permutations(range(3)):
    left = [True] * 3
    total = 0.0
    for t in order:
      total += log_probs[_sets(left)][t]
      left[t] = False
    orders.append(total)
  return bound, np.logaddexp.reduce(orders) - math.log(6)


def test_the_bound_is_the_mean_of_its_draws_and_below_the_likelihood():
  params, number = policy(sharpness=SHARPNESS), 600
  text = np.array([5, 2, 8])
  bound, log_p = _exact_bound(_all_log_probs(params, 4, [text])[0])
  assert bound < log_p
  ids = np.tile(np.concatenate([[4], text]), (number, 1))
  noise = np.tile([0, 1, 1, 1], (number, 1)) * np.arange(1, number + 1)[:, None]
  rows = (ids, np.ones_like(ids), np.tile(np.arange(4), (number, 1)), noise)
  found = _run(bound_scores(SETTINGS), params, tuple(map(jnp.asarray, rows))).log_probs
  draws = np.asarray(found).sum(axis=1)
  error = float(draws.std()) / number**0.5
  assert draws.mean() == pytest.approx(bound, abs=4 * error)
  assert error < 0.05 * abs(bound)  # so that the line above says something
