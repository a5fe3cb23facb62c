"""Logits, log-probs and gradients of a random Nemotron-H as transformers computes them."""

from __future__ import annotations

import functools
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.models.stack import unstack

DATA = os.environ.get("AGENTJAX_DATA")
pytestmark = pytest.mark.skipif(not DATA, reason="AGENTJAX_DATA names no folder of golden files")


@functools.cache
def golden():
  folder = pathlib.Path(DATA or "") / "peer_golden"
  theirs = json.loads((folder / "nemotron_h_tiny.config.json").read_text())
  kinds = {"linear_attention": "M", "full_attention": "*", "moe": "E", "mlp": "-"}
  config = models.ModelConfig(
      vocab_size=theirs["vocab_size"],
      d_model=theirs["hidden_size"],
      pattern="".join(kinds[kind] for kind in theirs["layers_block_type"]),
      norm_eps=theirs["layer_norm_epsilon"],
      num_heads=theirs["num_attention_heads"],
      num_kv_heads=theirs["num_key_value_heads"],
      head_dim=theirs["head_dim"],
      d_mlp=theirs["intermediate_size"],
      mamba_heads=theirs["mamba_num_heads"],
      mamba_head_dim=theirs["mamba_head_dim"],
      mamba_state=theirs["ssm_state_size"],
      mamba_groups=theirs["n_groups"],
      conv_kernel=theirs["conv_kernel"],
      chunk_size=theirs["chunk_size"],
      # transformers clamps the step from below in its training path, whatever time_step_limit says.
      dt_limit_low=theirs["time_step_min"],
      num_experts=theirs["n_routed_experts"],
      experts_per_token=theirs["num_experts_per_tok"],
      d_expert=theirs["moe_intermediate_size"],
      d_shared_expert=theirs["moe_shared_expert_intermediate_size"],
      routed_scaling=theirs["routed_scaling_factor"],
  )
  config.validate()
  arrays = np.load(folder / "nemotron_h_tiny.npz")
  return config, {name: arrays[name] for name in arrays.files}


def mapped(config, arrays, prefix):
  """Their arrays in our tree; works for gradients too, the map being linear."""

  def get(name):
    return jnp.asarray(arrays[f"{prefix}/{name}"])

  specs = unstack(models.param_specs(config), config_without_stack := config)
  del config_without_stack
  inner = config.mamba_heads * config.mamba_head_dim
  state = config.mamba_groups * config.mamba_state
  blocks = []
  for i, (kind, spec) in enumerate(zip(config.pattern, specs, strict=True)):
    at = f"model.layers.{i}.mixer."
    match kind:
      case "M":
        gate, x, b, c, step = jnp.split(
            get(at + "in_proj.weight").T, np.cumsum([inner, inner, state, state]), axis=1
        )
        taps = jnp.split(
            get(at + "conv1d.weight")[:, 0].T, np.cumsum([inner, state]), axis=1
        )
        biases = jnp.split(get(at + "conv1d.bias"), np.cumsum([inner, state]))
        found = {
            "gate": gate, "x": x, "b": b, "c": c, "step": step,
            "conv_x": taps[0], "conv_b": taps[1], "conv_c": taps[2],
            "conv_x_bias": biases[0], "conv_b_bias": biases[1], "conv_c_bias": biases[2],
            "step_bias": get(at + "dt_bias"),
            "decay_rate": get(at + "A_log"),
            "skip": get(at + "D"),
            "norm": get(at + "norm.weight"),
            "out": get(at + "out_proj.weight").T,
        }  # fmt: skip
      case "*":
        names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
        found = {ours: get(at + f"{name}.weight").T for ours, name in names.items()}
      case "-":
        found = {n: get(at + f"{n}_proj.weight").T for n in ("up", "down")}
      case "E":
        bias = at + "gate.e_score_correction_bias"
        found = {
            "router": get(at + "gate.weight").T,
            "router_bias": jnp.asarray(arrays[f"buffer/{bias}"]),
            "expert_up": jnp.swapaxes(get(at + "experts.up_proj"), 1, 2),
            "expert_down": jnp.swapaxes(get(at + "experts.down_proj"), 1, 2),
        }
        found["shared"] = spec.mixer.shared.replace(
            **{n: get(at + f"shared_experts.{n}_proj.weight").T for n in ("up", "down")}
        )
    shaped = {
        n: v if n == "shared" else v.reshape(getattr(spec.mixer, n).shape)
        for n, v in found.items()
    }
    blocks.append(
        spec.replace(norm=get(f"model.layers.{i}.norm.weight"), mixer=spec.mixer.replace(**shaped))
    )
  groups, at = [], 0
  for unit, repeats in models.factor_pattern(config.pattern):
    members = [blocks[at + i : at + len(unit) * repeats : len(unit)] for i in range(len(unit))]
    groups.append(tuple(jax.tree.map(lambda *w: jnp.stack(w), *m) for m in members))
    at += len(unit) * repeats
  return models.Params(
      embedding=get("model.embeddings.weight"),
      groups=tuple(groups),
      final_norm=get("model.norm_f.weight"),
      lm_head=get("lm_head.weight").T,
  )
