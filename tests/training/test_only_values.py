"""Value pre-training: the value head learns, and nothing of the policy moves."""

import jax
import jax.numpy as jnp
import numpy as np

from agentjax.objectives import preset
from agentjax.objectives.objective import policy_objective
from agentjax.objectives.preparation import prepare
from agentjax.sharding import MeshConfig, make_mesh, split_rows
from agentjax.training.optimizer import OptimizerConfig, build_optimizer
from agentjax.training.state import Network, StateSpec, network_specs
from agentjax.training.update import UpdateBatch, UpdateSettings, make_update
from agentjax.trajectory.packing import pack
from tests.training.machine import ATTENTION, sequences

VAPO = preset("vapo")
SPECS = network_specs(ATTENTION, critic=True)
# Weight decay would move a policy without a gradient, momentum one that had a gradient earlier.
OPTIMIZER = build_optimizer(OptimizerConfig(learning_rate=0.02, weight_decay=0.5), 10, SPECS)
STATE = StateSpec(ATTENTION, OPTIMIZER, make_mesh(MeshConfig(), jax.devices()[:1]), critic=True)


def stepper():
  update = make_update(
    ATTENTION, OPTIMIZER, policy_objective(VAPO), UpdateSettings(only_values=True), STATE.placed
  )
  batch = pack(sequences(), row_length=12, pad_id=0, rows=4)
  prepared, _ = prepare(batch, VAPO, values=np.zeros(batch.weights.shape, np.float32))
  whole = UpdateBatch(batch.token_ids, batch.positions, jax.tree.map(np.asarray, prepared))
  return lambda state: update(state, split_rows(whole, 4), 1)


def with_moments(state):
  """As if the policy had been trained before."""

  def filled(path, leaf):
    moment = ".policy" in jax.tree_util.keystr(path) and jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf + 0.1 if moment else leaf

  moved = jax.tree_util.tree_map_with_path(filled, state.networks["policy"].opt_state)
  return state.with_network("policy", Network(state.weights, moved))


def moments_of_policy(state):
  every = jax.tree_util.tree_leaves_with_path(state.networks["policy"].opt_state)
  return [np.array(leaf) for path, leaf in every if ".policy" in jax.tree_util.keystr(path)]


def leaves(tree):
  return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def same(before, after):
  return all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_value_head_learns_and_nothing_of_the_policy_moves():
  step = stepper()
  state = with_moments(STATE.create(jax.random.key(0)))
  policy, moments = leaves(state.weights.policy), moments_of_policy(state)
  value, losses = leaves(state.weights.value), []
  assert moments and all(m.any() for m in moments)
  for _ in range(3):
    state, metrics, _ = step(state)
    losses.append(float(metrics["value_loss"]))
  assert losses[-1] < losses[0]
  assert same(policy, leaves(state.weights.policy)) and same(moments, moments_of_policy(state))
  assert not same(value, leaves(state.weights.value))
