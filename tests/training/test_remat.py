"""Memory for time, and narrow parameters: gradients stay, small updates are not lost."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agentjax import models
from agentjax.models import ParamSpec
from agentjax.training.optimizer import OptimizerConfig, build_optimizer
from agentjax.training.update import UpdateSettings
from tests.models import rows
from tests.training.machine import MIXTURE, machine, sequences, step, update_batch


@pytest.mark.slow
def test_less_is_kept_with_remat_and_the_gradient_is_the_same():
  base = dataclasses.replace(rows.TINY, pattern="*-" * 3, d_mlp=256)
  rng = np.random.default_rng(0)
  tokens = rows.pack([rng.integers(0, 41, 64) for _ in range(4)], [[0], [1], [2], [3]], 64)
  params = rows.draw(base, seed=3)
  memory, grads = {}, {}
  for remat in ("none", "dots", "block"):
    config = dataclasses.replace(base, remat=remat)

    def loss(params, config=config):
      return -models.score_tokens(params, config, *tokens).log_probs.mean()

    compiled = jax.jit(jax.grad(loss)).lower(params).compile()
    memory[remat] = compiled.memory_analysis().temp_size_in_bytes
    grads[remat] = compiled(params)
  assert memory["block"] < memory["dots"] < memory["none"], memory
  for remat in ("dots", "block"):
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
      grads[remat],
      grads["none"],
    )


_SPECS = {"w": ParamSpec((4, 4), ("embed", "mlp"), "bfloat16"), "norm": ParamSpec((4,), (None,))}


def _many_small_steps(master, steps=100, name="adamw"):
  optimizer = build_optimizer(
    OptimizerConfig(name=name, learning_rate=1e-4, clip_norm=None, master_dtype=master),
    steps,
    _SPECS,
  )
  params = {"w": jnp.ones((4, 4), jnp.bfloat16), "norm": jnp.ones(4)}
  state = optimizer.init(params)
  grads = {"w": jnp.eye(4), "norm": jnp.ones(4)}

  @jax.jit
  def one(params, state):
    changes, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, changes), state

  for _ in range(steps):
    params, state = one(params, state)
  return params, state


def test_updates_below_the_resolution_of_the_parameters_add_up_in_the_masters():
  # 1 - 1e-4 rounds to 1 in bfloat16, whose steps below 1 are 2^-8.
  lost, _ = _many_small_steps(master=None)
  kept, state = _many_small_steps(master="float32")
  assert (np.diag(lost["w"].astype(jnp.float32)) == 1.0).all()
  masters = state.inner_state.masters["w"]
  np.testing.assert_allclose(np.diag(masters), 1 - 100 * 1e-4, atol=1e-5)
  np.testing.assert_array_equal(kept["w"], masters.astype(jnp.bfloat16))
  assert kept["w"].dtype == jnp.bfloat16 and (np.diag(kept["w"].astype(jnp.float32)) < 1.0).all()
  # What is float32 already has no second copy, and moves the same either way.
  assert isinstance(state.inner_state.masters["norm"], optax.MaskedNode)
  np.testing.assert_array_equal(lost["norm"], kept["norm"])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_of_narrow_parameters_are_float32(name):
  _, state = _many_small_steps("float32", steps=1, name=name)
  moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
  assert {leaf.dtype for leaf in moments} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_a_narrow_run_moves_as_a_wide_one_does():
  _, whole = update_batch(sequences(), 4)
  moved = {}
  for dtype in ("float32", "bfloat16"):
    model = dataclasses.replace(MIXTURE, param_dtype=dtype, compute_dtype=dtype)
    made = machine(model, UpdateSettings(), OptimizerConfig(learning_rate=1e-2, eps=1e-2))
    before = made.fresh().weights
    state, metrics = step(made, made.fresh(), whole, 2)
    moved[dtype] = metrics
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state.weights), strict=True):
      assert old.dtype == new.dtype
  for name, tolerance in (("loss", 0.02), ("grad_norm", 0.02), ("update_norm", 0.1)):
    wide, narrow = (moved[d][name] for d in ("float32", "bfloat16"))
    assert narrow == pytest.approx(wide, rel=tolerance, abs=1e-2), name
