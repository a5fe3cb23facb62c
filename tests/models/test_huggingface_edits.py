"""Every key of every family's config.json, removed and changed: what transformers computes, or no.

The edits and their numbers are made by ``tests/golden/make_config_edits.py``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.models.huggingface import (
  CheckpointError,
  family_of,
  load_pretrained,
  read_config,
  save_pretrained,
)
from tests.models import parity

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
FAMILIES = sorted(path.name for path in (GOLDEN / "hf").iterdir())
# Edits whose numbers are faults of the library: it zeroes the row of the pad token and divides the
# output projections again when it loads a file, and cannot run a router with one choice, nor layers
# that read the keys of others where keys are values.
LIBRARY_FAULTS = {
  "youtu": {"pad_token_id"},
  "mamba2": {"rescale_prenorm_residual"},
  "longcat_flash": {"moe_topk", "num_experts_per_tok"},
  "gemma4_31b": {"num_kv_shared_layers"},
}
FLOAT32 = {"compute_dtype": "float32"}
EDITS = json.loads((GOLDEN / "config_edits.json").read_text())


def last_logits(params: models.Params, config: models.ModelConfig, token_ids: jax.Array):
  """Float32 [B, vocab]. One operation after the other: each config would compile for seconds."""
  positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
  with jax.disable_jit():
    hidden = models.forward(params, config, token_ids, jnp.ones_like(token_ids), positions).hidden
    return models.compute_logits(params, config, hidden[:, -1:])[:, 0]


def edited(settings: dict[str, Any], path: list[str], *value: Any) -> dict[str, Any]:
  """A config.json with one key changed, or without it."""
  settings = copy.deepcopy(settings)
  here = functools.reduce(lambda node, key: node[key], path[:-1], settings)
  if value:
    here[path[-1]] = value[0]
  else:
    del here[path[-1]]
  return settings


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_edited_config_computes_what_transformers_computes_or_is_refused(name, tmp_path):
  folder = GOLDEN / "hf" / name
  settings = json.loads((folder / "config.json").read_text())
  expected = np.load(GOLDEN / "config_edits.npz")[name]
  token_ids = jnp.asarray(np.load(folder / "expected.npz")["token_ids"])
  (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")

  def without(path: list[str]) -> models.ModelConfig | None:
    """What the file means without the key; None where it is then refused."""
    there = path[-1] in functools.reduce(lambda node, key: node[key], path[:-1], settings)
    (tmp_path / "config.json").write_text(json.dumps(edited(settings, path) if there else settings))
    try:
      return read_config(tmp_path, overrides=FLOAT32)
    except (ConfigError, CheckpointError):
      return None

  wrong = []
  for path, *value, row in EDITS[name]:
    (tmp_path / "config.json").write_text(json.dumps(edited(settings, path, *value)))
    edit = f"{'.'.join(path)} " + (f"= {value[0]!r}" if value else "removed")
    try:
      params, config = load_pretrained(tmp_path, overrides=FLOAT32)
    except (ConfigError, CheckpointError):
      continue
    except Exception as error:
      wrong.append(f"{edit}: {error!r}")
      continue
    faulty = path[-1] in LIBRARY_FAULTS.get(name, ())
    if faulty and (row is None or config == without(path)):
      continue
    if row is None and config == without(path):
      continue  # The library minds the type of a key that means nothing, or null for no key.
    if row in (None, -1):
      wrong.append(f"{edit}: loads, transformers {'raises' if row is None else 'draws weights'}")
      continue
    ours = np.asarray(last_logits(params, config, token_ids))
    apart = np.abs(ours - expected[row]).max() / np.abs(expected[row]).max()
    if not apart <= parity.TOLERANCE:
      wrong.append(f"{edit}: {apart:.1e} of the scale from transformers")
  assert not wrong, f"{name}, {len(wrong)} of {len(EDITS[name])}:\n" + "\n".join(wrong)


def folder_with(tmp_path: pathlib.Path, name: str, *edits: tuple[Any, ...]) -> pathlib.Path:
  """A family's folder with an edited config.json."""
  settings = json.loads((GOLDEN / "hf" / name / "config.json").read_text())
  for path, *value in edits:
    settings = edited(settings, path.split("."), *value)
  (tmp_path / "config.json").write_text(json.dumps(settings))
  (tmp_path / "model.safetensors").symlink_to(GOLDEN / "hf" / name / "model.safetensors")
  return tmp_path


def test_a_head_beside_tied_embeddings_is_taken_where_it_differs(tmp_path):
  """As transformers does; ``read_config`` and ``load_pretrained`` agree."""
  folder = folder_with(tmp_path, "llama", ("tie_word_embeddings", True))
  params, config = load_pretrained(folder)
  assert not config.tie_embeddings and read_config(folder) == config
  untied, _ = load_pretrained(GOLDEN / "hf" / "llama")
  np.testing.assert_array_equal(params.lm_head, untied.lm_head)

  same = dataclasses.replace(params, lm_head=params.embedding.T)
  save_pretrained(tmp_path / "same", same, config)
  settings = json.loads((tmp_path / "same" / "config.json").read_text())
  (tmp_path / "same" / "config.json").write_text(
    json.dumps(settings | {"tie_word_embeddings": True})
  )
  params, config = load_pretrained(tmp_path / "same")
  assert config.tie_embeddings and params.lm_head is None


def test_nemotron_h_is_never_tied(tmp_path):
  folder = folder_with(tmp_path, "nemotron_h", ("tie_word_embeddings", True))
  assert not read_config(folder).tie_embeddings
  tied = dataclasses.replace(read_config(folder), tie_embeddings=True)
  with pytest.raises(ConfigError, match="nemotron_h would change tie_embeddings"):
    family_of(tied)


def test_rope_scaling_goes_before_rope_parameters(tmp_path):
  scaling = {"type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
  folder = folder_with(tmp_path, "llama", ("rope_scaling", scaling), ("rope_theta", 500.0))
  config = read_config(folder)
  assert (config.rope_scaling_factor, config.rope_theta) == (4.0, 500.0)
  assert config.rope_original_length == 256  # max_position_embeddings


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_missing_key_of_the_rotary_embedding_is_named_with_the_file(key, tmp_path):
  folder = folder_with(tmp_path, "llama", (f"rope_parameters.{key}",))
  with pytest.raises(ConfigError, match=rf"{folder}/config\.json.*rope_parameters has no {key},"):
    read_config(folder)


def test_longcat_has_defaults_of_its_own(tmp_path):
  folder = folder_with(
    tmp_path, "longcat_flash", ("rope_parameters.rope_theta",), ("routed_scaling_factor",)
  )
  config = read_config(folder)
  assert (config.rope_theta, config.routed_scaling) == (1e7, 6.0)


@pytest.mark.parametrize("name", ["youtu", "longcat_flash"])
def test_latent_attention_takes_an_odd_number_of_heads(name, tmp_path):
  heads = (("num_attention_heads", 3), ("num_key_value_heads", 3))
  assert read_config(folder_with(tmp_path, name, *heads)).num_heads == 3


def test_the_limit_of_steps_is_not_where_they_start(tmp_path):
  """The code published with the checkpoints clamps by ``time_step_limit`` alone."""
  folder = folder_with(
    tmp_path, "nemotron_h", ("time_step_limit", [0.01, 0.5]), ("time_step_min", 0.002)
  )
  config = read_config(folder)
  assert (config.dt_limit_low, config.dt_limit_high, config.dt_min) == (0.01, 0.5, 0.002)
