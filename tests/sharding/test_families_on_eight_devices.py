"""Published families, made tiny, over eight devices against one. As a script: the comparison."""

from __future__ import annotations

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models, sharding
from agentjax.models.config import Gemma4Config, MlaConfig

_SHARED = models.ModelConfig(
  vocab_size=32,
  d_model=16,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  rope_theta=1e4,
  attention_block=8,
  d_mlp=32,
  mlp_activation="swiglu",
  num_experts=4,
  d_expert=16,
  d_shared_expert=0,
  router_scores="softmax",
  expert_block=8,
  logits_chunk=16,
)
_MLA = MlaConfig(query_lora=12, kv_lora=8, nope_dim=6, rope_dim=4, value_dim=10)
_GEMMA = dataclasses.replace(_SHARED, tie_embeddings=True, mlp_activation="geglu")
_HEADS = Gemma4Config(window=5, global_kv_heads=2, global_head_dim=16, per_layer_width=6)
FAMILIES = {
  "youtu": dataclasses.replace(_SHARED, pattern="A-A-", tie_embeddings=True, mla=_MLA),
  "longcat_flash": dataclasses.replace(
    _SHARED,
    pattern="SS",
    mla=dataclasses.replace(_MLA, align_variance=True),
    zero_experts=2,
    norm_topk=False,
    routed_scaling=6.0,
  ),
  "gemma4_e2b": dataclasses.replace(_GEMMA, pattern="llLGrR", gemma=_HEADS),
  "gemma4_moe": dataclasses.replace(
    _GEMMA,
    pattern="xX",
    expert_scale=True,
    gemma=dataclasses.replace(_HEADS, per_layer_width=0, global_key_is_value=True),
  ),
}


def compare(name: str) -> None:
  """The loss and its gradient on a mesh are those of one device, up to rounding."""
  config = FAMILIES[name]
  config.validate()
  mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tensor=2))
  params = models.init(config, jax.random.key(0))
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, config.vocab_size, (8, 24)).astype(np.int32)
  segments = np.sort(rng.integers(1, 4, tokens.shape), axis=1).astype(np.int32)
  segments[:, -3:] = 0
  positions = np.broadcast_to(np.arange(24, dtype=np.int32), tokens.shape)
  rows = tokens, segments, positions

  def loss(params, *rows):
    scores = models.score_tokens(params, config, *rows)
    weights = jnp.cos(jnp.arange(tokens.size, dtype=jnp.float32)).reshape(tokens.shape)
    return jnp.sum(weights * scores.log_probs) + scores.balance_loss

  step = jax.jit(jax.value_and_grad(loss))
  expected, expected_gradients = step(params, *rows)
  split = jax.device_put(params, sharding.shardings(models.param_specs(config), mesh))
  rows = jax.device_put(rows, sharding.batch_sharding(mesh))
  with jax.set_mesh(mesh):
    value, gradients = step(split, *rows)
  matrices = [w for w in jax.tree.leaves(split.groups) if w.ndim > 2]
  assert all(not w.is_fully_replicated for w in matrices if w.size > 200)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  # Rounding the weights anew moves Gemma's gradients by 1e-4: its scores have no 1 / sqrt(width).
  for (path, gradient), wanted in zip(
    jax.tree_util.tree_leaves_with_path(gradients),
    jax.tree.leaves(expected_gradients),
    strict=True,
  ):
    scale = 1.0 + float(np.max(np.abs(wanted)))
    np.testing.assert_allclose(
      np.asarray(gradient) / scale,
      np.asarray(wanted) / scale,
      atol=2e-4,
      err_msg=jax.tree_util.keystr(path),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradient_on_eight_devices_are_those_of_one(name, on_eight_devices):
  assert on_eight_devices(__file__, name).split() == [name, "agrees"]


if __name__ == "__main__":
  assert jax.device_count() == 8
  compare(sys.argv[1])
  print(f"{sys.argv[1]} agrees")
