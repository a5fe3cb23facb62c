"""How the networks of signals begin."""

import jax
import numpy as np
import pytest

from agentjax.models import ModelConfig
from agentjax.sharding import MeshConfig, make_mesh
from agentjax.training.optimizer import OptimizerConfig, build_optimizer
from agentjax.training.state import (
  NetworkSpec,
  begin_stage,
  init_state,
  network_specs,
  state_shardings,
)

_MODEL = ModelConfig(
  vocab_size=16, d_model=8, pattern="*-", num_heads=2, num_kv_heads=1, head_dim=4, d_mlp=8
).freeze()


@pytest.mark.parametrize("begun", [False, True])
def test_a_network_that_starts_from_the_policy_has_a_head_of_its_own(begun):
  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  with_head, plain = (network_specs(_MODEL, critic=critic) for critic in (True, False))
  own, others = (build_optimizer(OptimizerConfig(), 3, specs) for specs in (with_head, plain))
  further = {"own": NetworkSpec(with_head, own, "policy")}
  key = jax.random.key(0)
  placed = state_shardings(_MODEL, others, mesh, critic=False, reference=False, further=further)
  state = init_state(_MODEL, others, key, placed, further=further)
  if begun:
    state = begin_stage(state, others, placed, key, further=further)
  weights = state.networks["own"].weights
  np.testing.assert_array_equal(weights.value.weight, np.zeros(_MODEL.d_model))
  for mine, policys in zip(
    jax.tree.leaves(weights.policy), jax.tree.leaves(state.weights.policy), strict=True
  ):
    np.testing.assert_array_equal(mine, policys)
