import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.models.linear import linear, matmul


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_linear_and_its_gradient_are_the_plain_product(lead):
  x = jax.random.normal(jax.random.key(0), (*lead, 5))
  weight = jax.random.normal(jax.random.key(1), (5, 2, 4))

  def plain(x, weight):
    return jnp.einsum("...i,ihk->...hk", x, weight).reshape(*lead, 8)

  np.testing.assert_allclose(linear(x, weight), plain(x, weight), rtol=1e-6, atol=1e-6)
  got = jax.grad(lambda x, w: jnp.sum(jnp.sin(linear(x, w))), (0, 1))(x, weight)
  want = jax.grad(lambda x, w: jnp.sum(jnp.sin(plain(x, w))), (0, 1))(x, weight)
  jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


def test_a_batched_product_has_the_gradient_of_the_plain_one():
  x = jax.random.normal(jax.random.key(0), (3, 6, 5))
  weight = jax.random.normal(jax.random.key(1), (3, 5, 4))
  got = jax.grad(lambda x, w: jnp.sum(jnp.sin(matmul(x, w))), (0, 1))(x, weight)
  want = jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), (0, 1))(x, weight)
  jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


def test_a_second_derivative_exists():
  weight = jax.random.normal(jax.random.key(1), (5, 4))

  def slope(scale):
    return jax.grad(lambda s: jnp.sum(jnp.sin(linear(s * jnp.ones((3, 5)), weight))))(scale)

  got = jax.grad(slope)(0.3)
  row = jnp.sum(weight, axis=0)
  np.testing.assert_allclose(got, -3 * jnp.sum(row**2 * jnp.sin(0.3 * row)), rtol=1e-4)
