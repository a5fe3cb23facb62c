"""The loss of DiffusionNFT against numbers made by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.recipes.diffusion_nft.nft import (
  NftConfig,
  follow,
  group_advantages,
  nft_loss,
  optimality,
)

# One image of two pixels: image (1, -1), noise (0, 1), t = 1/2, so x_t = (1/2, 0).
_CLEAN, _NOISY, _TIME = jnp.array([[1.0, -1.0]]), jnp.array([[0.5, 0.0]]), jnp.array([0.5])
_VELOCITY, _REFERENCE = jnp.array([[-0.5, 1.5]]), jnp.array([[-0.5, 0.5]])
_OLD = jnp.zeros((1, 2))
_KEPT = jnp.array([True])


def _loss(velocity, good, *, old=_OLD, config=None, kept=_KEPT):
  good = jnp.full(1, good)
  return nft_loss(
    velocity, old, _REFERENCE, _NOISY, _CLEAN, _TIME, good, kept, config or NftConfig()
  )


def test_golden_loss():
  # v+ = v: x0+ = (.75, -.75), error (-.25, .25), w = .25, .0625 / .25 = .25.
  # v- = -v: x0- = (.25, .75), error (-.75, 1.75), w = 1.25, 1.8125 / 1.25 = 1.45.
  # |v - v_ref|² = (0 + 1) / 2.
  loss, parts = _loss(_VELOCITY, 0.8)
  assert float(loss) == pytest.approx(5 * (0.8 * 0.25 + 0.2 * 1.45) + 1e-4 * 0.5)
  assert float(parts["from_reference"]) == pytest.approx(0.5)


def test_golden_loss_with_another_beta():
  # v+ = v / 2: error (-.375, .625), w = .5, .265625 / .5; v- = -v / 2: error (-.625, 1.375), w = 1.
  loss, _ = _loss(_VELOCITY, 0.8, config=NftConfig(beta=0.5, reference=0.0))
  assert float(loss) == pytest.approx(5 * (0.8 * 0.53125 + 0.2 * 1.140625) / 0.5)


def test_v_plus_and_v_minus_mix_the_old_policy():
  # beta .5, v_old = (2, 0): v+ = (.75, .75), v- = (3.25, -.75).
  old = jnp.array([[2.0, 0.0]])
  plus, _ = _loss(_VELOCITY, 1.0, old=old, config=NftConfig(beta=0.5, reference=0.0))
  error = np.array([0.5 - 0.375 - 1, -0.375 + 1])
  assert float(plus) == pytest.approx(5 * np.square(error).mean() / np.abs(error).mean() / 0.5)
  minus, _ = _loss(_VELOCITY, 0.0, old=old, config=NftConfig(beta=0.5, reference=0.0))
  error = np.array([0.5 - 1.625 - 1, 0.375 + 1])
  assert float(minus) == pytest.approx(5 * np.square(error).mean() / np.abs(error).mean() / 0.5)


@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("good", [0.0, 0.35, 1.0])
def test_the_gradient_is_that_of_finite_differences_with_the_weights_held(good, beta):
  rng = np.random.default_rng(0)
  count, pixels, step = 3, 5, 1e-5
  old, reference, noisy, clean, velocity = rng.normal(size=(5, count, pixels))
  time, kept = rng.uniform(0.1, 0.9, count), np.array([True, False, True])

  def errors(v):
    spread = time[:, None]
    plus, minus = beta * v + (1 - beta) * old, (1 + beta) * old - beta * v
    return noisy - spread * plus - clean, noisy - spread * minus - clean

  weights = [np.abs(error).mean(axis=1) for error in errors(velocity)]

  def value(v):
    plus, minus = (
      np.square(error).mean(axis=1) / weight
      for error, weight in zip(errors(v), weights, strict=True)
    )
    rest = 1e-4 * np.square(v - reference).mean(axis=1)
    return (5 * (good * plus + (1 - good) * minus) / beta + rest)[kept].mean()

  expected = np.zeros_like(velocity)
  for place in np.ndindex(velocity.shape):
    moved = np.zeros_like(velocity)
    moved[place] = step
    expected[place] = (value(velocity + moved) - value(velocity - moved)) / (2 * step)
  arrays = [jnp.asarray(a, jnp.float32) for a in (old, reference, noisy, clean, time)]
  found = jax.grad(
    lambda v: nft_loss(v, *arrays, jnp.full(count, good), jnp.asarray(kept), NftConfig(beta=beta))[
      0
    ]
  )(jnp.asarray(velocity, jnp.float32))
  np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)  # float32
  assert not np.asarray(found)[1].any()  # of a group that was left out


def test_good_images_attract_and_bad_images_repel():
  config = NftConfig(reference=0.0)
  old = jnp.array([[0.3, 0.4]])
  gradient = jax.grad(lambda v, good: _loss(v, good, old=old, config=config)[0])
  good, bad, middle = (np.asarray(gradient(old, r)) for r in (1.0, 0.0, 0.5))
  perfect = np.array([[-1.0, 2.0]])  # noise - image
  assert ((perfect - np.asarray(old)) * -good).sum() > 0
  np.testing.assert_allclose(bad, -good, rtol=1e-6)  # at the old policy
  np.testing.assert_allclose(middle, 0, atol=1e-6)


def test_no_gradient_reaches_the_old_policy_or_the_reference():
  def loss(old, reference):
    return nft_loss(
      _VELOCITY, old, reference, _NOISY, _CLEAN, _TIME, jnp.array([0.3]), _KEPT, NftConfig()
    )[0]

  for gradient in jax.grad(loss, argnums=(0, 1))(_OLD, _REFERENCE):
    assert not np.asarray(gradient).any()


def test_images_below_the_mean_are_not_all_equally_bad():
  advantages = jnp.array([-9.0, -5.0, -1.0, 0.0, 1.0, 5.0, 9.0])
  np.testing.assert_allclose(optimality(advantages, 5.0), [0, 0, 0.4, 0.5, 0.6, 1, 1], atol=1e-6)


def test_golden_advantages_and_which_groups_are_left_out():
  rewards = jnp.array(
    [
      [0.0, 0.0, 1.0, 1.0],
      [0.5, 0.5, 0.5, 0.5],  # no deviation
      [0.48, 0.5, 0.52, 0.5],  # hardly any
      [0.8, 1.0, 1.0, 1.0],  # mean .95, deviation .087
      [0.7, 0.9, 0.9, 0.9],
    ]
  )
  advantages, kept = group_advantages(rewards, NftConfig())
  np.testing.assert_array_equal(kept, [True, False, False, False, True])
  np.testing.assert_allclose(advantages[0], np.array([-1, -1, 1, 1]) * 0.5 / 0.5001, rtol=1e-5)
  assert np.isfinite(np.asarray(advantages)).all()


def test_a_batch_without_a_kept_group_has_no_loss_and_no_gradient():
  kept = jnp.array([False])
  loss, gradient = jax.value_and_grad(lambda v: _loss(v, 0.2, kept=kept)[0])(_VELOCITY)
  assert float(loss) == 0 and not np.asarray(gradient).any()


def test_the_old_policy_follows_ever_more_slowly():
  config, old, new = NftConfig(), {"w": jnp.zeros(2)}, {"w": jnp.ones(2)}
  for step, stays in ((0, 0.0), (100, 0.1), (500, 0.5), (9000, 0.5)):
    np.testing.assert_allclose(follow(old, new, step, config)["w"], 1 - stays, rtol=1e-6)
