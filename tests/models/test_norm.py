"""Norms against published numbers."""

from __future__ import annotations

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.models.norm import gated_rms_norm, rms_norm

_DATA = os.environ.get("AGENTJAX_DATA")
EPS = 1e-5


def norm_then_gate(x, gate, weight, groups, eps):
  """The other order, which ``rms_norm`` alone gives; for Mamba-2 models outside Nemotron-H."""
  parts = rms_norm(x.reshape(*x.shape[:-1], groups, -1), None, eps)
  return parts.reshape(x.shape) * weight * jax.nn.silu(gate)


@pytest.mark.skipif(_DATA is None, reason="AGENTJAX_DATA is not set")
@pytest.mark.parametrize("case", range(4))
def test_published_gated_norms_and_their_gradients(case):
  golden = np.load(pathlib.Path(_DATA or "") / "peer_golden" / "mamba_step_and_gated_norm.npz")
  stored = {k.split("/")[1]: golden[k] for k in golden.files if k.startswith(f"gnorm{case}/")}
  channels = stored["x"].shape[-1]
  groups = channels // (int(stored["group_size"]) or channels)
  run = norm_then_gate if stored["norm_before_gate"] else gated_rms_norm

  def loss(x, gate, weight):
    out = run(x, gate, weight, groups, EPS)
    return jnp.sum(out * stored["cotangent"]), out

  gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(
    stored["x"], stored["z"], stored["w"]
  )
  np.testing.assert_allclose(out, stored["out"], atol=2e-6)
  for name, got in zip(("dx", "dz", "dw"), gradients, strict=True):
    np.testing.assert_allclose(got, stored[name], atol=1e-5, err_msg=name)
