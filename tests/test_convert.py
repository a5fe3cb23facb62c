"""Weights between Hugging Face folders and checkpoints of runs."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from agentjax import convert
from agentjax.adapters.huggingface_text.chat import TemplateChat
from agentjax.config import ConfigError
from agentjax.files import CheckpointError
from agentjax.models import ModelConfig, abstract, load_pretrained
from agentjax.models.lora import LoraConfig, merge_lora
from agentjax.text import ByteTokenizer
from agentjax.training.checkpoint import (
  CheckpointStore,
  latest_checkpoint,
  load_networks,
  read_metadata,
)
from agentjax.training.state import Network, TrainState, Weights, network_specs
from tests.text.folders import write_vocabulary

ROOT = pathlib.Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "hf"
COMPANIONS = ("chat_template.jinja", "generation_config.json", "tokenizer_config.json")


@pytest.fixture
def folder(tmp_path):
  """A Hugging Face folder with files beside the weights."""
  target = tmp_path / "folder"
  target.mkdir()
  for name in ("config.json", "model.safetensors"):
    (target / name).write_bytes((GOLDEN / "qwen3" / name).read_bytes())
  for name in COMPANIONS:
    (target / name).write_bytes(f"{name}\r\n\xe9".encode())
  return target


def test_there_and_back_keeps_every_byte(folder, tmp_path):
  there = convert.to_checkpoint(folder, tmp_path / "run", overrides={}, tokenizer="byte")
  back = convert.to_folder(tmp_path / "run", tmp_path / "back", max_shard_bytes=40_000)
  before, after = load_file(str(folder / "model.safetensors")), {}
  for file in (tmp_path / "back").glob("*.safetensors"):
    after |= load_file(str(file))
  assert before.keys() == after.keys()
  assert all(before[k].tobytes() == after[k].tobytes() for k in before)
  for name in COMPANIONS:
    assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
  values = [json.loads((d / "config.json").read_text()) for d in (folder, tmp_path / "back")]
  assert values[0]["eos_token_id"] == values[1]["eos_token_id"]
  for summary in (there, back):
    assert (summary.family, summary.dtype) == ("qwen3", "F32")
    assert summary.tensors == len(before)
    assert summary.parameters == sum(v.size for v in before.values())
    assert summary.size == sum(v.nbytes for v in before.values())
    assert set(summary.companions) == set(COMPANIONS)


def test_a_run_starts_from_the_result(folder, tmp_path):
  overrides = {"remat": "block"}
  convert.to_checkpoint(folder, tmp_path / "run", overrides=overrides, tokenizer="byte")
  config = ModelConfig.from_dict(json.loads((tmp_path / "run" / "model.json").read_text()))
  assert config.remat == "block"
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  target = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
    abstract(network_specs(config, critic=False)),
  )
  described = {k: v for k, v in config.to_dict().items() if k != "exact_chunk"}
  identity = {"model": described, "tokenizer": ByteTokenizer().fingerprint()}
  networks = load_networks(tmp_path / "run", target, identity)
  wanted, _ = load_pretrained(folder)
  for got, leaf in zip(jax.tree.leaves(networks.policy), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_array_equal(got, leaf)
  with pytest.raises(ConfigError, match="tokenizer"):
    load_networks(tmp_path / "run", target, {**identity, "tokenizer": "another"})


def test_the_vocabulary_of_the_folder_is_that_of_the_checkpoint(folder, tmp_path):
  write_vocabulary(folder)
  convert.to_checkpoint(folder, tmp_path / "run", overrides={})
  identity = read_metadata(latest_checkpoint(tmp_path / "run"))["identity"]
  kept = TemplateChat.from_folder(tmp_path / "run" / "huggingface")
  assert identity["tokenizer"] == kept.fingerprint()


def _filled(specs, value):
  return jax.tree.map(lambda leaf: jnp.full(leaf.shape, value, leaf.dtype), abstract(specs))


def _save(run, identity, networks, reference=None):
  found = {"policy": Network(networks)}
  if reference is not None:
    found["reference"] = Network(Weights(reference))
  state = TrainState(jnp.zeros((), jnp.int32), found)
  CheckpointStore(run / "checkpoints", 1, {"tokenizer": "t", **identity}).save(3, state, {})


def test_a_checkpoint_with_a_value_head_is_converted_too(folder, tmp_path):
  params, config = load_pretrained(folder)
  networks = Weights(params, _filled(network_specs(config, critic=True).value, 1.0))
  _save(tmp_path / "run", {"model": config.to_dict()}, networks)
  summary = convert.to_folder(
    tmp_path / "run" / "checkpoints" / "3",
    tmp_path / "back",
    dtype="bfloat16",
    tokenizer_from=folder,
  )
  assert summary.dtype == "BF16"
  assert set(summary.companions) == set(COMPANIONS)


def test_a_further_policy_is_converted_by_its_name(folder, tmp_path):
  params, config = load_pretrained(folder)
  other = jax.tree.map(lambda leaf: leaf + 1, params)
  networks = {"policy": Network(Weights(params)), "right": Network(Weights(other), jnp.zeros(3))}
  state = TrainState(jnp.zeros((), jnp.int32), networks)
  identity = {"tokenizer": "t", "model": config.to_dict()}
  store = CheckpointStore(tmp_path / "run" / "checkpoints", 1, identity, policies=("right",))
  store.save(3, state, {})
  convert.to_folder(tmp_path / "run", tmp_path / "back", policy="right")
  got, _ = load_pretrained(tmp_path / "back")
  for ours, theirs in zip(*map(jax.tree.leaves, (got, other)), strict=True):
    np.testing.assert_array_equal(ours, theirs)
  with pytest.raises(CheckpointError, match="no policy 'left'; .*right"):
    convert.to_folder(tmp_path / "run", tmp_path / "more", policy="left")


def test_adapters_are_added_to_what_they_were_trained_on(folder, tmp_path):
  params, config = load_pretrained(folder)
  lora = LoraConfig(rank=2)
  adapters = _filled(network_specs(config, critic=False, lora=lora).policy, 0.1)
  identity = {"model": config.to_dict(), "lora": lora.to_dict()}
  _save(tmp_path / "run", identity, Weights(adapters, None), reference=params)
  convert.to_folder(tmp_path / "run", tmp_path / "back")
  got, _ = load_pretrained(tmp_path / "back")
  wanted = merge_lora(params, adapters, lora)
  changed = 0
  for ours, theirs, before in zip(*map(jax.tree.leaves, (got, wanted, params)), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    changed += not np.array_equal(ours, before)
  assert changed


def test_nothing_is_overwritten_or_left_half_done(folder, tmp_path, monkeypatch):
  with pytest.raises(CheckpointError, match="not empty"):
    convert.to_checkpoint(folder, folder, overrides={}, tokenizer="byte")
  with pytest.raises(ConfigError, match="no tokenizer.json; say with --tokenizer"):
    convert.to_checkpoint(folder, tmp_path / "run", overrides={})

  def fail(*_):
    raise OSError("disk full")

  monkeypatch.setattr(CheckpointStore, "save", fail)
  with pytest.raises(OSError, match="disk full"):
    convert.to_checkpoint(folder, tmp_path / "run", overrides={}, tokenizer="byte")
  assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def _command(*arguments):
  return subprocess.run(
    [sys.executable, "-m", "agentjax.convert", *arguments],
    env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "COLUMNS": "120"},
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )


@pytest.mark.slow
def test_the_command_finds_the_direction_and_tells_what_it_did(folder, tmp_path):
  run, back = tmp_path / "run", tmp_path / "back"
  done = _command(
    f"--input={folder}", f"--output={run}", "--tokenizer=byte", '--model=remat="block"'
  )
  assert done.returncode == 0, done.stderr
  for shown in ("qwen3", "F32", "parameters", "tensors", "bytes", "chat_template.jinja"):
    assert shown in done.stdout
  done = _command(f"--input={run}", f"--output={back}", "--dtype=float16")
  assert done.returncode == 0, done.stderr
  assert "F16" in done.stdout and (back / "model.safetensors").is_file()
  done = _command(f"--input={tmp_path}", f"--output={tmp_path / 'other'}")
  assert done.returncode == 2
  assert "neither a Hugging Face folder" in done.stderr and "Traceback" not in done.stderr
