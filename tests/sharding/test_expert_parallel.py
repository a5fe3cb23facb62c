"""Experts over eight devices against one. As a script: the comparisons of one mesh."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models, sharding
from agentjax.models import expert_parallel
from agentjax.models import experts as experts_module
from agentjax.models import moe as moe_module

CONFIG = models.ModelConfig(
  d_model=16,
  num_experts=8,
  experts_per_token=3,
  d_expert=8,
  d_shared_expert=0,
  mlp_activation="swiglu",
  expert_block=4,
)
SHAPE = (8, 6)


def inputs(config):
  params = models.init_params(moe_module.moe_spec(config), jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (*SHAPE, config.d_model))
  # Two sequences a row, padding behind them, one row of padding only.
  segments = np.ones(SHAPE, np.int32)
  segments[:, 3:], segments[:, 5:], segments[1] = 2, 0, 0
  return params, x, jnp.asarray(segments)


@functools.partial(jax.jit, static_argnums=3)
def run(params, x, segments, config):
  """Everything a mixture block says, and a gradient through all of it."""

  def loss(params, x):
    out, stats = moe_module.moe(params, x, config, segment_ids=segments)
    losses = stats.balance_loss + stats.sequence_balance_loss + stats.router_z_loss
    return jnp.sum(jnp.sin(out)) + losses, (out, stats)

  return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)


def on_mesh(mesh, params, x, segments, config):
  params = jax.device_put(params, sharding.shardings(moe_module.moe_spec(config), mesh))
  x, segments = jax.device_put((x, segments), sharding.batch_sharding(mesh))
  with jax.set_mesh(mesh):
    return run(params, x, segments, config)


def assert_same(got, want):
  # Sums over devices are taken in another order: a few roundings of values up to about 10.
  for (path, value), expected in zip(
    jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
  ):
    np.testing.assert_allclose(value, expected, atol=5e-6, err_msg=jax.tree_util.keystr(path))


def compare(mesh, changes):
  config = dataclasses.replace(CONFIG, **changes)
  params, x, segments = inputs(config)
  got = on_mesh(mesh, params, x, segments, config)
  assert_same(got, run(params, x, segments, config))
  assert got[0][1][1].dropped == 0
  weights = got[1][0].expert_up
  assert weights.addressable_shards[0].data.size * 8 == weights.size * copies(mesh)


def copies(mesh):
  """Expert weights are copied along data, and along nothing else."""
  return mesh.shape["data"]


def one_device_with_room(params, x, segments, config, devices, room):
  """What is left of the sum where every pair of devices has ``room``, choice by choice."""
  rows = x.shape[0] // devices
  held = config.num_experts // devices
  routes = moe_module._route(params, x, config, None)
  ids, gates = np.asarray(routes.experts), np.array(routes.gates)
  left_out = 0
  for source in range(devices):
    used = np.zeros(devices, int)
    for choice in range(config.experts_per_token):
      for row in range(source * rows, (source + 1) * rows):
        for t in np.flatnonzero(segments[row]):
          owner = ids[row, t, choice] // held
          if used[owner] == room:
            gates[row, t, choice] = 0.0
            left_out += 1
          used[owner] = min(room, used[owner] + 1)
  weights = experts_module.Experts(
    up=params.expert_up,
    gate=params.expert_gate,
    down=params.expert_down,
    activation=config.mlp_activation,
  )
  tokens = x.reshape(-1, x.shape[-1])
  ids, gates = (jnp.asarray(v).reshape(tokens.shape[0], -1) for v in (ids, gates))
  out = experts_module._all_experts(weights, tokens, ids, gates).reshape(x.shape)
  return np.where(segments[..., None] != 0, out, 0.0), left_out


def crowd(mesh):
  """Every token wants experts 0 and 1, which one device holds, and there is little room."""
  config = dataclasses.replace(CONFIG, expert_capacity=1.5)
  params, x, segments = inputs(config)
  params = params.replace(router_bias=params.router_bias.at[:2].add(10.0))
  devices = mesh.shape["expert"]
  (_, (out, stats)), _ = on_mesh(mesh, params, x, segments, config)
  room = expert_parallel._room(SHAPE[0] * SHAPE[1] // devices, 3, devices, 8 // devices, 1.5)
  want, left_out = one_device_with_room(params, x, segments, config, devices, room)
  assert stats.dropped == left_out > 0
  np.testing.assert_allclose(out, want, atol=5e-6)
  # Enough room for the worst case drops nothing, however crowded.
  (_, (_, stats)), _ = on_mesh(mesh, params, x, segments, CONFIG)
  assert stats.dropped == 0


def compare_one_token_a_row(mesh):
  """As decoding asks for it."""
  params, x, segments = inputs(CONFIG)
  one = params, x[:, 0], segments[:, 0], CONFIG
  (_, (want, _)), _ = run(*one)
  with jax.set_mesh(mesh):
    (_, (got, _)), _ = run(*one)
  np.testing.assert_allclose(got, want, atol=5e-6)


def compare_sorted_as_on_tpu(mesh):
  """The exchange with the products that a TPU takes, which a CPU can take too."""
  experts_module._in_blocks = lambda experts, rows, ids, block: experts_module._ragged(
    experts, rows, ids
  )
  compare(mesh, {})


@pytest.mark.parametrize(
  "mesh",
  [
    {"fsdp": 1, "expert": 8},
    pytest.param({"expert": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
    pytest.param({"data": 2, "fsdp": 1, "expert": 4}, marks=pytest.mark.slow),
    pytest.param({"fsdp": 2, "expert": 2, "context": 2}, marks=pytest.mark.slow),
    pytest.param({"fsdp": 2, "tensor": 4}, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_a_mixture_over_eight_devices_is_that_of_one(mesh, on_eight_devices):
  assert on_eight_devices(__file__, json.dumps(mesh)).split() == ["8", "devices", "agree"]


@pytest.mark.parametrize(
  ("capacity", "room"), [(None, 40), (1.0, 8), (1.25, 10), (0.01, 1), (9.0, 40)]
)
def test_the_room_between_two_devices_is_a_share_of_balance_or_all(capacity, room):
  assert expert_parallel._room(20, 3, 8, 2, capacity) == room


if __name__ == "__main__":
  assert jax.device_count() == 8
  over = sharding.make_mesh(sharding.MeshConfig(**json.loads(sys.argv[1])))
  compare(over, {})
  match over.shape["expert"], over.shape["tensor"]:
    case 8, _:
      crowd(over)
      compare_one_token_a_row(over)
    case 2, 2:
      compare(over, {"latent_size": 8, "mlp_activation": "relu2", "num_expert_groups": 2})
      compare_sorted_as_on_tpu(over)
    case 4, _:
      compare(over, {"router_scores": "softmax", "zero_experts": 2, "norm_topk": False})
  print("8 devices agree")
