"""Every family computes from a published checkpoint what `transformers` computes from it.

The checkpoints and numbers are made by ``tests/golden/make_hf_checkpoints.py``, which also sees to
it that each stored tensor moves the logits.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.models.huggingface import load_pretrained
from tests.models import parity

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hf"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir())


@functools.cache
def load(name: str) -> tuple[models.Params, models.ModelConfig]:
  params, config = load_pretrained(GOLDEN / name)
  return params, dataclasses.replace(config, compute_dtype="float32")


# Close to another folder, compiled for as long.
VARIANTS = ("gemma4_31b", "gemma4_moe", "iquestcoder", "llama_tied", "nemotron_h", "qwen2")


@pytest.mark.parametrize(
  "name",
  [pytest.param(name, marks=[pytest.mark.slow] if name in VARIANTS else []) for name in FAMILIES],
)
def test_logits_log_probs_and_decoding_are_those_of_transformers(name):
  params, config = load(name)
  expected = np.load(GOLDEN / name / "expected.npz")
  computed = parity.compute(params, config, jnp.asarray(expected["token_ids"]))
  far = {
    quantity: distance
    for quantity, distance in parity.distances(computed, expected).items()
    if not distance <= parity.TOLERANCE
  }
  assert not far, f"{name} leaves transformers by {far} of the scale"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_stored_number_is_among_the_parameters(name):
  params, _ = load(name)
  ours = np.concatenate([np.ravel(leaf).astype(np.float32) for leaf in jax.tree.leaves(params)])
  for key, values in parity.stored_numbers(GOLDEN / name).items():
    assert np.isin(values, ours).all(), f"{name}: {key} is not in the parameters"


def test_weights_stored_in_bfloat16_stay_so():
  params, config = load("qwen3_bf16")
  assert config.param_dtype == "bfloat16"
  assert params.embedding.dtype == jnp.bfloat16


def _rope_apart(settings):
  """The rotary settings as files before version 5 of transformers hold them."""
  rope = settings.pop("rope_parameters")
  settings["rope_theta"] = rope.pop("rope_theta")
  settings["rope_scaling"] = rope if rope["rope_type"] != "default" else None
  settings["torch_dtype"] = settings.pop("dtype")


def _named_experts(settings):
  _rope_apart(settings)
  settings["num_experts"] = settings.pop("num_local_experts")


def _pattern_string(settings):
  letters = {"linear_attention": "M", "full_attention": "*", "moe": "E", "mlp": "-"}
  blocks = settings.pop("layers_block_type")
  settings["hybrid_override_pattern"] = "".join(letters[block] for block in blocks)
  settings["num_hidden_layers"] = len(blocks)
  settings["time_step_limit"] = [0.0, float("inf")]  # json writes the bare word Infinity


def _plain_limit(settings):
  settings["time_step_limit"] = [0.0, float("inf")]


def _global_fields(settings):
  layers = settings.pop("per_layer_config")
  settings["global_head_dim"] = next(iter(layers.values()))["head_dim"]
  settings["num_global_key_value_heads"] = next(iter(layers.values())).get("num_key_value_heads")


@pytest.mark.parametrize(
  "name, rewrite",
  [
    ("llama", _rope_apart),
    ("qwen2", _rope_apart),
    ("qwen3", _rope_apart),
    ("qwen3_moe", _named_experts),
    ("mamba2", _plain_limit),
    ("nemotron_h", _pattern_string),
    ("gemma4_e2b", _global_fields),
    ("gemma4_31b", _global_fields),
  ],
)
def test_older_spellings_of_a_config_mean_the_same(name, rewrite, tmp_path):
  settings = json.loads((GOLDEN / name / "config.json").read_text())
  rewrite(settings)
  (tmp_path / "config.json").write_text(json.dumps(settings))
  (tmp_path / "model.safetensors").symlink_to(GOLDEN / name / "model.safetensors")
  assert load_pretrained(tmp_path)[1] == load_pretrained(GOLDEN / name)[1]
