"""Loops and multi-token prediction over eight devices against one. As a script: the comparison."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models, sharding
from agentjax.adapters.model_families.parcae import Draws
from tests.sharding.test_model_on_eight_devices import CONFIG, packed_rows

CASES = {
  "loop": {"pattern": "-*-*", "loop": models.LoopConfig(1, 1, mean_depth=3, gradient_depth=2)},
  "values": {"pattern": "VV-*", "loop": models.LoopConfig(1, 1, mean_depth=2)},
  "second_pass": {"pattern": "*-*-", "second_pass": models.SecondPassConfig(4)},
  "mtp": {"pattern": "-", "mtp": models.MtpConfig(2, "*E")},
}


def compare(config: models.ModelConfig, mesh: jax.sharding.Mesh) -> None:
  """Largest differences between the mesh and one device must be rounding."""

  def loss(params, tokens, segments, positions):
    drawn = Draws(1 + segments % 4, segments.astype(jnp.uint32)) if config.loop else None
    scores = models.score_tokens(params, config, tokens, segments, positions, drawn=drawn)
    weights = jnp.cos(jnp.arange(tokens.size, dtype=jnp.float32)).reshape(tokens.shape)
    total = jnp.sum(weights * scores.log_probs)
    if config.mtp:
      hidden = scores.hidden
      total += models.mtp_loss(params, config, hidden, tokens, segments, positions, weights).loss
    return total

  params, rows = models.init(config, jax.random.key(0)), packed_rows(8, 24)
  step = jax.jit(jax.value_and_grad(loss))
  expected, wanted = step(params, *rows)
  placed = jax.device_put(params, sharding.shardings(models.param_specs(config), mesh))
  rows = jax.device_put(rows, sharding.batch_sharding(mesh))
  with jax.set_mesh(mesh):
    value, gradients = step(placed, *rows)
  np.testing.assert_allclose(value, expected, rtol=2e-5, atol=2e-5)
  for gradient, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
    scale = 1.0 + float(np.max(np.abs(want)))
    np.testing.assert_allclose(np.asarray(gradient) / scale, np.asarray(want) / scale, atol=2e-5)


@pytest.mark.slow
def test_values_and_gradients_on_eight_devices_are_those_of_one(on_eight_devices):
  assert on_eight_devices(__file__).split() == ["loop", "values", "second_pass", "mtp", "agree"]


if __name__ == "__main__":
  assert jax.device_count() == 8
  grid = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tensor=2))
  for changes in CASES.values():
    compare(dataclasses.replace(CONFIG, **changes), grid)
  print(*CASES, "agree")
