"""A hybrid mixture model over eight devices against one. As a script: the comparison."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models, sharding

CONFIG = models.ModelConfig(
  vocab_size=32,
  d_model=16,
  pattern="M*EM*E-",
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  rope_theta=1e4,
  d_mlp=32,
  mamba_heads=4,
  mamba_head_dim=8,
  mamba_state=8,
  mamba_groups=1,
  chunk_size=8,
  num_experts=4,
  d_expert=16,
  d_shared_expert=16,
  expert_block=8,
  logits_chunk=16,
)


def packed_rows(rows: int, time: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Token ids, segment ids and positions: rows of different packing, one of padding only."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, CONFIG.vocab_size, (rows, time))
  segments = np.sort(rng.integers(1, 4, (rows, time)), axis=1)
  segments[:, -3:] = 0
  segments[1] = 0
  starts = np.maximum.accumulate(
    np.where(np.diff(segments, axis=1, prepend=-1) != 0, np.arange(time), 0), axis=1
  )
  positions = np.arange(time) - starts
  return tuple(v.astype(np.int32) for v in (tokens, segments, positions))


def loss(params, tokens, segments, positions):
  """A loss that touches log-probs, entropies and the router's scores."""
  scores = models.score_tokens(params, CONFIG, tokens, segments, positions)
  weights = jnp.cos(jnp.arange(tokens.size, dtype=jnp.float32)).reshape(tokens.shape)
  total = jnp.sum(weights * (scores.log_probs + 0.1 * scores.entropies))
  values = {
    "log_probs": scores.log_probs,
    "entropies": scores.entropies,
    "router_load": scores.routing.load,
  }
  return total + scores.balance_loss, values


def compare(mesh_config: sharding.MeshConfig) -> None:
  """Largest differences between the mesh and one device must be rounding."""
  mesh = sharding.make_mesh(mesh_config)
  params = models.init(CONFIG, jax.random.key(0))
  rows = packed_rows(8, 24)
  step = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (_, expected), expected_gradients = step(params, *rows)

  placements = sharding.shardings(models.param_specs(CONFIG), mesh)
  split = jax.device_put(params, placements)
  rows = jax.device_put(rows, sharding.batch_sharding(mesh))
  with jax.set_mesh(mesh):
    (_, values), gradients = step(split, *rows)

  assert not split.embedding.is_fully_replicated
  assert not values["log_probs"].is_fully_replicated
  np.testing.assert_array_equal(values["router_load"], expected["router_load"])
  for name in ("log_probs", "entropies"):
    np.testing.assert_allclose(values[name], expected[name], atol=2e-5, err_msg=name)
  # Sums over rows are taken in another order; a gradient is off by a few roundings of its scale.
  for (path, value), wanted in zip(
    jax.tree_util.tree_leaves_with_path(gradients),
    jax.tree.leaves(expected_gradients),
    strict=True,
  ):
    scale = 1.0 + float(np.max(np.abs(wanted)))
    np.testing.assert_allclose(
      np.asarray(value) / scale,
      np.asarray(wanted) / scale,
      atol=2e-5,
      err_msg=jax.tree_util.keystr(path),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
  "mesh",
  [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "expert": 2, "context": 2}],
  ids=str,
)
def test_values_and_gradients_on_eight_devices_are_those_of_one(mesh, on_eight_devices):
  assert on_eight_devices(__file__, json.dumps(mesh)).split() == ["8", "devices", "agree"]


if __name__ == "__main__":
  assert jax.device_count() == 8
  compare(sharding.MeshConfig(**json.loads(sys.argv[1])))
  print("8 devices agree")
