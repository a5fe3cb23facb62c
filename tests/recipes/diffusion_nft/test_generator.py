import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.models.spec import init_params
from agentjax.recipes.diffusion_nft.critic import write_rationale
from agentjax.recipes.diffusion_nft.drawings import TOTAL, UNCLEAR
from agentjax.recipes.diffusion_nft.generator import (
  condition_of,
  draw,
  flow_loss,
  generator_spec,
  mix,
  velocity,
)
from agentjax.recipes.diffusion_nft.refine import RefineConfig, refine


@pytest.fixture(scope="module")
def params():
  """Random where training would have moved the zeros of a new generator."""
  fresh = init_params(generator_spec(1, 16, 2), jax.random.key(0))
  leaves, tree = jax.tree.flatten(fresh)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  moved = [p + 0.1 * jax.random.normal(key, p.shape) for p, key in zip(leaves, keys, strict=True)]
  return jax.tree.unflatten(tree, moved)


def test_golden_condition():
  condition = condition_of(np.array([[1, 0, 2, 3]]))
  assert condition.shape == (1, TOTAL)
  assert np.flatnonzero(condition[0]).tolist() == [1, 4, 12, 16]


def test_a_new_generator_predicts_an_empty_image():
  fresh = init_params(generator_spec(1, 16, 2), jax.random.key(0))
  condition = condition_of(np.zeros((400, 4), int))
  noisy = jax.random.normal(jax.random.key(2), (2, 32, 32, 3))
  found = velocity(fresh, noisy, jnp.array([0.5, 0.05]), condition[:2])
  np.testing.assert_allclose(found, noisy / np.array([0.5, 0.1]).reshape(2, 1, 1, 1), rtol=1e-5)
  # Of an empty image it is right from t = .1 on; below, the error is noise (t / .1 - 1), whose
  # mean square over t is 1/10 of 1/3.
  images = np.zeros((400, 32, 32, 3), np.float32)
  loss = flow_loss(fresh, jax.random.key(1), images, condition, 0.1)
  assert float(loss) == pytest.approx(1 / 30, abs=0.012)


def test_an_aspect_that_is_left_out_has_no_influence(params):
  images = np.random.default_rng(0).uniform(-1, 1, (2, 32, 32, 3)).astype(np.float32)
  losses = {
    (share, value): float(
      flow_loss(params, jax.random.key(1), images, condition_of(np.full((2, 4), value)), share)
    )
    for share in (0.0, 1.0)
    for value in (0, 1)
  }
  assert losses[1.0, 0] == losses[1.0, 1] and losses[0.0, 0] != losses[0.0, 1]


def test_time_and_condition_reach_the_velocity(params):
  noisy = jax.random.normal(jax.random.key(2), (2, 32, 32, 3))
  one, other = condition_of(np.array([[0, 0, 0, 0], [0, 1, 0, 0]]))
  both = jnp.stack([one, one])
  base = velocity(params, noisy, jnp.array([0.3, 0.3]), both)
  later = velocity(params, noisy, jnp.array([0.3, 0.9]), both)
  asked = velocity(params, noisy, jnp.array([0.3, 0.3]), jnp.stack([one, other]))
  for changed in (later, asked):
    np.testing.assert_allclose(changed[0], base[0], atol=1e-6)
    assert np.abs(changed[1] - base[1]).max() > 1e-3


def test_drawing_takes_euler_steps_from_noise_to_the_image(params):
  condition = condition_of(np.array([[0, 1, 2, 3], [3, 2, 1, 0]]))
  x = jax.random.normal(jax.random.key(5), (2, 32, 32, 3))
  for time in (1.0, 0.75, 0.5, 0.25):
    x = x - 0.25 * velocity(params, x, jnp.full(2, time), condition)
  found = draw(params, jax.random.key(5), condition, 4)
  np.testing.assert_allclose(found, jnp.clip(x, -1, 1), atol=1e-4)


def test_an_image_stands_at_time_0_and_its_noise_at_time_1():
  clean, noise = jnp.ones((3, 2, 2, 3)), jnp.zeros((3, 2, 2, 3))
  mixed = mix(clean, noise, jnp.array([0.0, 0.25, 1.0]))
  np.testing.assert_allclose(mixed[:, 0, 0, 0], [1.0, 0.75, 0.0])


def test_golden_refinement():
  prompts = np.array([[0, 1, 2, 3]] * 3)
  seen = np.array([[0, 1, 2, 3], [0, 4, 2, 3], [1, 1, 2, UNCLEAR]])
  edited = refine(prompts, write_rationale(seen, prompts), RefineConfig(emphasis=0.5, avoid=0.25))
  expected = condition_of(prompts)
  expected[1, 4 + 1] = 1.5  # the colour that is wanted, and the one that was seen
  expected[1, 4 + 4] = -0.25
  expected[2, 0], expected[2, 1] = 1.5, -0.25
  expected[2, 13 + 3] = 1.5  # a place that is unclear: nothing to avoid
  np.testing.assert_allclose(edited, expected)


def test_only_what_was_criticised_is_edited():
  prompts = np.array([[2, 2, 2, 2]])
  same = refine(prompts, write_rationale(prompts, prompts), RefineConfig())
  np.testing.assert_array_equal(same, condition_of(prompts))
