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
from agentjax.models import moe as moe_module
from agentjax.models.blocks import KINDS, Rows
from agentjax.models.norm import rms_norm
from agentjax.models.stack import unstack

DATA = os.environ.get("AGENTJAX_DATA")
pytestmark = pytest.mark.skipif(not DATA, reason="AGENTJAX_DATA names no folder of golden files")


NAMES = ("nemotron_h_tiny", "nemotron_h_tiny_latent_moe")
each_model = pytest.mark.parametrize("name", NAMES)


@functools.cache
def golden(name):
  folder = pathlib.Path(DATA or "") / "peer_golden"
  theirs = json.loads((folder / f"{name}.config.json").read_text())
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
    latent_size=theirs["moe_latent_size"] or 0,
    routed_scaling=theirs["routed_scaling_factor"],
  )
  config.validate()
  arrays = np.load(folder / f"{name}.npz")
  return config, {name: arrays[name] for name in arrays.files}


def mapped(config, arrays, prefix):
  """Their arrays in our tree; works for gradients too, the map being linear."""

  def get(name):
    return jnp.asarray(arrays[f"{prefix}/{name}"])

  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape), models.abstract(models.param_specs(config)))
  specs = unstack(zeros.groups, config)
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
        taps = jnp.split(get(at + "conv1d.weight")[:, 0].T, np.cumsum([inner, state]), axis=1)
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
        if config.latent_size:
          latent = {"latent_down": "fc1_latent_proj", "latent_up": "fc2_latent_proj"}
          found |= {ours: get(at + f"{name}.weight").T for ours, name in latent.items()}
        found["shared"] = spec.mixer.shared.replace(
          **{n: get(at + f"shared_experts.{n}_proj.weight").T for n in ("up", "down")}
        )
    shaped = {
      n: v if n == "shared" else v.reshape(getattr(spec.mixer, n).shape) for n, v in found.items()
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


def whole_rows(arrays):
  """Token ids, and rows of one sequence each."""
  token_ids = jnp.asarray(arrays["input_ids"], jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
  return token_ids, Rows(jnp.ones_like(token_ids), positions)


@each_model
def test_logits_loss_and_gradients_are_those_of_transformers(name):
  config, arrays = golden(name)
  params = mapped(config, arrays, "param")
  token_ids, rows = whole_rows(arrays)

  def loss(params):
    scores = models.score_tokens(params, config, token_ids, rows.segment_ids, rows.positions)
    return -jnp.mean(scores.log_probs[:, 1:]), scores

  (value, scores), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
  logits = models.compute_logits(params, config, scores.hidden)
  np.testing.assert_allclose(logits, arrays["logits"], atol=1e-5)
  np.testing.assert_allclose(scores.log_probs[:, 1:], arrays["token_logprobs"], atol=1e-5)
  np.testing.assert_allclose(value, arrays["loss"], atol=1e-6)
  want = mapped(config, arrays, "grad")
  for (path, got), expected in zip(
    jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want), strict=True
  ):
    if "router_bias" not in jax.tree_util.keystr(path):
      np.testing.assert_allclose(got, expected, atol=3e-6, err_msg=jax.tree_util.keystr(path))


@each_model
def test_what_every_block_and_router_gives_is_that_of_transformers(name):
  config, arrays = golden(name)
  params = mapped(config, arrays, "param")
  token_ids, rows = whole_rows(arrays)

  @jax.jit
  def run(params):
    x, found = params.embedding[token_ids], []
    for kind, block in zip(config.pattern, unstack(params.groups, config), strict=True):
      routes = None
      if kind == "E":
        inputs = rms_norm(x, block.norm, config.norm_eps)
        routes = moe_module._route(block.mixer, inputs, config, None)
      out, _ = KINDS[kind].forward(block, x, config, rows, None)
      found.append((out, out - x, routes))
      x = out
    return found

  for i, (out, added, routes) in enumerate(run(params)):
    np.testing.assert_allclose(out, arrays[f"act/layer{i}_out"], atol=5e-6)
    np.testing.assert_allclose(added, arrays[f"act/layer{i}_mixer_out"], atol=5e-6)
    if routes is not None:
      given = (routes.logits, routes.gates, routes.experts)
      logits, gates, experts = (v.reshape(-1, v.shape[-1]) for v in given)
      np.testing.assert_allclose(logits, arrays[f"act/layer{i}_router0"], atol=5e-6)
      # Theirs come in no order.
      theirs = np.argsort(arrays[f"act/layer{i}_router2"], axis=1)
      ours = np.argsort(experts, axis=1)
      for value, field in ((experts, "router2"), (gates, "router1")):
        np.testing.assert_allclose(
          np.take_along_axis(np.asarray(value), ours, 1),
          np.take_along_axis(arrays[f"act/layer{i}_{field}"], theirs, 1),
          atol=5e-6,
        )


@each_model
def test_cached_decoding_continues_as_transformers_does(name):
  config, arrays = golden(name)
  params = models.prepare_decode_params(mapped(config, arrays, "param"), config)
  token_ids = jnp.asarray(arrays["input_ids"], jnp.int32)
  cache = models.init_cache(config, 2, token_ids.shape[1])
  start = token_ids.shape[1] - arrays["decode_logits_from_pos12"].shape[1]
  extend = jax.jit(models.extend, static_argnums=1)
  step = jax.jit(models.decode_step, static_argnums=1)
  rows = jnp.arange(2)
  _, cache, *_ = extend(
    params, config, cache, rows, token_ids[:, :start], jnp.full((2,), start, jnp.int32)
  )
  for t in range(start, token_ids.shape[1]):
    logits, cache, *_ = step(params, config, cache, token_ids[:, t], jnp.ones(2, bool))
    np.testing.assert_allclose(logits, arrays["decode_logits_from_pos12"][:, t - start], atol=1e-5)
