"""Hugging Face folders in and out: every bit kept, every fault named, nothing half done."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from agentjax import models
from agentjax.config import ConfigError
from agentjax.models import huggingface
from agentjax.models.config import MtpConfig
from agentjax.models.huggingface import (
  CheckpointError,
  checkpoint,
  families,
  family_of,
  find_family,
  load_pretrained,
  save_pretrained,
)
from agentjax.models.huggingface.layout import Layout, Pattern
from agentjax.models.huggingface.mapping import resolve
from agentjax.models.spec import is_spec

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "hf"
FOLDERS = sorted(p.name for p in GOLDEN.iterdir())

_DENSE = models.ModelConfig(
  vocab_size=24,
  d_model=16,
  pattern="*-*-",
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  rope_theta=1e4,
  d_mlp=20,
  mlp_activation="swiglu",
)
_MAMBA = models.ModelConfig(
  vocab_size=24,
  d_model=16,
  pattern="MMM",
  mamba_heads=4,
  mamba_head_dim=8,
  mamba_state=5,
  mamba_groups=2,
  dt_limit_high=0.5,
)
_HYBRID = dataclasses.replace(
  _MAMBA,
  pattern="ME*-ME",
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  d_mlp=12,
  num_experts=6,
  d_expert=8,
  d_shared_expert=12,
)
CONFIGS = {
  "llama": dataclasses.replace(_DENSE, rope_scaling_factor=8.0, rope_original_length=64),
  "llama_tied": dataclasses.replace(_DENSE, tie_embeddings=True),
  "qwen2": dataclasses.replace(_DENSE, attention_bias=True),
  "qwen3": dataclasses.replace(_DENSE, qk_norm=True),
  "qwen3_moe": dataclasses.replace(
    _DENSE,
    pattern="*E*-*E",
    qk_norm=True,
    num_experts=6,
    d_expert=8,
    d_shared_expert=0,
    router_scores="softmax",
  ),
  "mamba2": _MAMBA,
  "nemotron_h": _HYBRID,
  "nemotron_h_latent": dataclasses.replace(
    _HYBRID, latent_size=4, num_expert_groups=2, routed_scaling=2.5
  ),
  "nemotron_h_mtp": dataclasses.replace(
    _HYBRID, mtp=MtpConfig(depths=2, shared=False, detach=True)
  ),
}


def drawn(config):
  """Random arrays, those that no tensor holds zero."""
  rng = np.random.default_rng(0)
  zeros = resolve(family_of(config), config)[1]

  def draw(path, spec):
    if jax.tree_util.keystr(path, simple=True, separator=".") in zeros:
      return jnp.zeros(spec.shape, spec.dtype)
    return jnp.asarray(rng.standard_normal(spec.shape).astype(spec.dtype))

  specs = models.param_specs(config)
  return jax.tree_util.tree_map_with_path(draw, specs, is_leaf=is_spec)


@pytest.fixture
def llama(tmp_path):
  """A folder of several files, its parameters and its config."""
  config = CONFIGS["llama"]
  params = drawn(config)
  save_pretrained(tmp_path / "llama", params, config, max_shard_bytes=6_000)
  return tmp_path / "llama", params, config


def assert_same(got, wanted):
  assert jax.tree.structure(got) == jax.tree.structure(wanted)
  for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
    assert ours.dtype == theirs.dtype
    assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def tensors(folder):
  found = {}
  for file in sorted(folder.glob("*.safetensors")):
    found |= load_file(str(file))
  return found


# Both directions.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_what_was_saved_loads_again_bit_for_bit(name, dtype, tmp_path):
  config = dataclasses.replace(CONFIGS[name], param_dtype=dtype, compute_dtype=dtype)
  params = drawn(config)
  save_pretrained(tmp_path / "saved", params, config)
  loaded, back = load_pretrained(tmp_path / "saved")
  assert_same(loaded, params)
  assert family_of(config).model_type == re.sub(r"_(tied|latent|mtp)$", "", name)
  kept = {n: getattr(config, n) for n in huggingface.RUNTIME_FIELDS}
  assert not checkpoint._differing(config, dataclasses.replace(back, **kept))
  assert back.param_dtype == dtype


@pytest.mark.parametrize("name", FOLDERS)
def test_a_loaded_folder_is_saved_as_it_was(name, tmp_path):
  params, config = load_pretrained(GOLDEN / name)
  stored = tensors(GOLDEN / name)
  dtype = "bfloat16" if config.param_dtype == "bfloat16" else None
  save_pretrained(tmp_path / "saved", params, config, dtype=dtype)
  written = tensors(tmp_path / "saved")
  ignored = find_family(_json(GOLDEN / name / "config.json")["model_type"]).ignored
  for key in stored.keys() - written.keys():
    assert any(re.fullmatch(pattern, key) for pattern in ignored), key
  for key, value in written.items():
    assert (value.dtype, value.shape) == (stored[key].dtype, stored[key].shape), key
    assert value.tobytes() == stored[key].tobytes(), key
  again = load_pretrained(tmp_path / "saved")
  assert_same(again[0], params)
  assert again[1] == config


def test_float16_loads_without_loss_and_goes_back(tmp_path):
  folder = _copy(GOLDEN / "qwen3", tmp_path / "half")
  half = {k: v.astype(np.float16) for k, v in tensors(folder).items()}
  save_file(half, str(folder / "model.safetensors"))
  params, config = load_pretrained(folder)
  assert config.param_dtype == "float32"
  np.testing.assert_array_equal(params.embedding, half["model.embed_tokens.weight"])
  save_pretrained(tmp_path / "back", params, config, dtype="float16")
  for key, value in tensors(tmp_path / "back").items():
    assert value.tobytes() == half[key].tobytes()


def test_several_files_hold_what_one_does(llama, tmp_path):
  folder, params, config = llama
  assert_same(load_pretrained(folder)[0], params)
  save_pretrained(tmp_path / "one", params, config)
  one = tensors(tmp_path / "one")
  index = _json(folder / "model.safetensors.index.json")
  assert index["weight_map"].keys() == one.keys()
  assert index["metadata"]["total_size"] == sum(v.nbytes for v in one.values())
  assert len(set(index["weight_map"].values())) > 3
  for file in set(index["weight_map"].values()):
    held = load_file(str(folder / file))
    assert sum(v.nbytes for v in held.values()) <= 6_000 or len(held) == 1
    for key, value in held.items():
      np.testing.assert_array_equal(value, one[key])


@pytest.mark.parametrize("name", ["qwen3_moe", "nemotron_h"])
def test_stacked_experts_are_read_as_single_ones(name, tmp_path):
  folder = _copy(GOLDEN / name, tmp_path / "stacked")
  single = tensors(folder)
  experts = sorted(
    {key.split(".experts.")[0] + ".experts." for key in single if ".experts." in key}
  )
  for at in experts:
    count = len({key.removeprefix(at).split(".")[0] for key in single if key.startswith(at)})
    stacked = {
      kind: np.stack([single.pop(f"{at}{j}.{kind}.weight") for j in range(count)])
      for kind in ("gate_proj", "up_proj", "down_proj")
      if f"{at}0.{kind}.weight" in single
    }
    if "gate_proj" in stacked:
      joined = (stacked.pop("gate_proj"), stacked.pop("up_proj"))
      stacked["gate_up_proj"] = np.concatenate(joined, axis=1)
    single |= {f"{at}{kind}": value for kind, value in stacked.items()}
  save_file(single, str(folder / "model.safetensors"))
  assert_same(load_pretrained(folder)[0], load_pretrained(GOLDEN / name)[0])


def test_nemotron_reads_the_names_of_transformers_in_memory(tmp_path):
  folder = _copy(GOLDEN / "nemotron_h", tmp_path / "renamed")
  renamed = {re.sub("^backbone", "model", k): v for k, v in tensors(folder).items()}
  renamed["mtp.layers.0.enorm.weight"] = np.zeros(3, np.float32)
  save_file(renamed, str(folder / "model.safetensors"))
  assert_same(load_pretrained(folder)[0], load_pretrained(GOLDEN / "nemotron_h")[0])


def test_older_keys_of_nemotron_say_the_same(tmp_path):
  folder = _copy(GOLDEN / "nemotron_h", tmp_path / "older")
  values = _json(folder / "config.json")
  letters = {"linear_attention": "M", "full_attention": "*", "moe": "E", "mlp": "-"}
  names = values.pop("layers_block_type")
  values["hybrid_override_pattern"] = "".join(letters[n] for n in names)
  values["mamba_n_groups"] = values.pop("n_groups")
  values["mamba_d_conv"] = values.pop("conv_kernel")
  values["mamba_chunk_size"] = values.pop("chunk_size")
  values["mamba_dt_limit"] = [0.0, float("inf")]
  del values["time_step_limit"]
  (folder / "config.json").write_text(json.dumps(values))
  assert huggingface.read_config(folder) == huggingface.read_config(GOLDEN / "nemotron_h")


def test_a_tied_folder_may_hold_the_output_projection_too(tmp_path):
  folder = _copy(GOLDEN / "llama_tied", tmp_path / "tied")
  held = tensors(folder)
  held["lm_head.weight"] = held["model.embed_tokens.weight"].copy()
  save_file(held, str(folder / "model.safetensors"))
  assert_same(load_pretrained(folder)[0], load_pretrained(GOLDEN / "llama_tied")[0])


def test_overrides_say_how_the_model_runs(tmp_path):
  params, config = load_pretrained(
    GOLDEN / "qwen3_bf16", overrides={"param_dtype": "float32", "remat": "block"}
  )
  assert (config.param_dtype, config.compute_dtype, config.remat) == (
    "float32",
    "bfloat16",
    "block",
  )
  narrow = load_pretrained(GOLDEN / "qwen3_bf16")[0]
  assert_same(params, jax.tree.map(lambda w: w.astype(jnp.float32), narrow))
  rounded = load_pretrained(GOLDEN / "qwen3", overrides={"param_dtype": "bfloat16"})[0]
  wide = load_pretrained(GOLDEN / "qwen3")[0]
  assert_same(rounded, jax.tree.map(lambda w: w.astype(jnp.bfloat16), wide))
  with pytest.raises(ConfigError, match="remta"):
    load_pretrained(GOLDEN / "qwen3", overrides={"remta": "block"})


def test_tokenizer_files_and_special_ids_travel_along(tmp_path):
  source = _copy(GOLDEN / "qwen3", tmp_path / "source")
  for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
    (source / name).write_text(f"{name}\r\n")
  params, config = load_pretrained(source)
  save_pretrained(tmp_path / "saved", params, config, tokenizer_from=source)
  for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
    assert (tmp_path / "saved" / name).read_bytes() == (source / name).read_bytes()
  assert not (tmp_path / "saved" / "vocab.json").exists()
  before, after = _json(source / "config.json"), _json(tmp_path / "saved" / "config.json")
  for key in ("bos_token_id", "eos_token_id", "max_position_embeddings"):
    assert after[key] == before[key]


@pytest.mark.skipif(
  importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
  reason="torch and transformers are not installed",
)
@pytest.mark.parametrize("name", [name for name in sorted(CONFIGS) if not name.endswith("_mtp")])
def test_transformers_loads_what_was_saved(name, tmp_path):
  import torch
  import transformers

  config = CONFIGS[name]
  params = drawn(config)
  save_pretrained(tmp_path / "saved", params, config)
  theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / "saved", output_loading_info=True
  )
  assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
  for block in theirs.modules():  # it clamps steps where config.json does not say so
    if name.startswith("nemotron") and hasattr(block, "time_step_limit"):
      block.time_step_limit = tuple(theirs.config.time_step_limit)
  ids = np.arange(22).reshape(2, 11) % config.vocab_size
  with torch.no_grad():
    wanted = theirs(torch.tensor(ids), use_cache=False).logits.numpy()
  positions = jnp.broadcast_to(jnp.arange(11), ids.shape)
  hidden = models.forward(params, config, jnp.asarray(ids), jnp.ones_like(ids), positions).hidden
  got = np.asarray(models.compute_logits(params, config, hidden))
  np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())


# Several processes, and memory.

_PROCESS = """
import os, sys
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from agentjax.models.huggingface import load_pretrained, save_pretrained, tensor_entries
from agentjax.sharding import MeshConfig, make_mesh
reads, read = [], os.preadv
def counted(*arguments):
  reads.append(read(*arguments))
  return reads[-1]
os.preadv = counted
params, config = load_pretrained(sys.argv[3], mesh=make_mesh(MeshConfig(fsdp=2)))
assert not params.embedding.is_fully_addressable
size = sum(entry.size for entry in tensor_entries(sys.argv[3]).values())
assert 0.49 < sum(reads) / size < 0.52, sum(reads) / size
save_pretrained(sys.argv[4], params, config)
"""


@pytest.mark.slow
def test_two_processes_read_a_half_each_and_write_the_whole(tmp_path):
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{probe.getsockname()[1]}"
  folder, saved = GOLDEN / "nemotron_h", tmp_path / "saved"
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", _PROCESS, address, str(i), str(folder), str(saved)],
      env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)},
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  errors = [process.communicate(timeout=300)[1] for process in processes]
  assert [process.returncode for process in processes] == [0, 0], errors
  before, after = tensors(folder), tensors(saved)
  assert before.keys() == after.keys()
  assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def test_loading_and_saving_hold_little_beside_the_arrays(tmp_path):
  config = dataclasses.replace(_DENSE, vocab_size=4096, d_model=256, d_mlp=1024, pattern="*-" * 6)
  params = jax.tree.map(np.asarray, drawn(config))
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  assert size > 20_000_000
  tracemalloc.start()
  save_pretrained(tmp_path / "saved", params, config, max_shard_bytes=8_000_000)
  written = tracemalloc.get_traced_memory()[1]
  tracemalloc.reset_peak()
  before = tracemalloc.get_traced_memory()[0]
  loaded, _ = load_pretrained(tmp_path / "saved")
  peak = tracemalloc.get_traced_memory()[1] - before
  tracemalloc.stop()
  assert_same(loaded, params)
  assert peak < 1.3 * size, f"{peak / size:.2f} of the arrays while loading"
  # The largest tensor, a fifth of the model, and a block of it.
  assert written < 0.3 * size, f"{written / size:.2f} of the arrays while saving"


# Faults.


def _copy(source, target):
  target.mkdir()
  for name in ("config.json", "model.safetensors"):
    (target / name).write_bytes((source / name).read_bytes())
  return target


def _json(file):
  return json.loads(file.read_text())


def _header(file):
  data = file.read_bytes()
  length = int.from_bytes(data[:8], "little")
  return json.loads(data[8 : 8 + length]), data[8 + length :]


def _rewrite(file, header, data):
  encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
  file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def _drop(file):
  held = load_file(str(file))
  del held["model.norm.weight"]
  save_file(held, str(file))


def _reshape(file):
  held = load_file(str(file))
  held["model.norm.weight"] = held["model.norm.weight"].reshape(2, -1)
  save_file(held, str(file))


def _integers(file):
  held = load_file(str(file))
  held["model.norm.weight"] = held["model.norm.weight"].astype(np.int32)
  save_file(held, str(file))


def _extra(file):
  save_file({**load_file(str(file)), "model.more": np.zeros(3, np.float32)}, str(file))


def _cut(file):
  file.write_bytes(file.read_bytes()[:-1000])


def _longer(file):
  file.write_bytes(file.read_bytes() + b"12345678")


def _overlap(file):
  header, data = _header(file)
  same = [k for k in header if "input_layernorm" in k]
  header[same[0]]["data_offsets"] = header[same[1]]["data_offsets"]
  _rewrite(file, header, data)


def _wrong_size(file):
  header, data = _header(file)
  header["model.norm.weight"]["data_offsets"][1] -= 4
  _rewrite(file, header, data)


def _twice(file):
  header, data = _header(file)
  other = next(name for name in header if "input_layernorm" in name)
  entry = json.dumps({"model.norm.weight": header[other]})[1:-1]
  _rewrite(file, json.dumps(header)[:-1].encode() + f",{entry}}}".encode(), data)


def _unknown_dtype(file):
  header, data = _header(file)
  header["model.norm.weight"]["dtype"] = "F99"
  _rewrite(file, header, data)


_NOT_WHOLE = "model.safetensors is no whole safetensors file"
FAULTS = {
  "a tensor is missing": (_drop, r"model\.norm\.weight \[\d+\] is missing"),
  "a tensor is misshapen": (_reshape, r"model\.norm\.weight has shape \[2, .* asks for \[\d+\]"),
  "a tensor is no float": (_integers, r"model\.norm\.weight is I32; supported: F32, F16, BF16"),
  "a tensor is one too many": (_extra, r"model\.more is no tensor of this model"),
  "the file is cut": (_cut, _NOT_WHOLE),
  "the file is too long": (_longer, _NOT_WHOLE),
  "tensors overlap": (_overlap, _NOT_WHOLE),
  "a size is wrong": (_wrong_size, _NOT_WHOLE),
  "a name stands for two ranges": (_twice, _NOT_WHOLE),
  "a dtype is unknown": (_unknown_dtype, _NOT_WHOLE),
  "no header": (lambda file: file.write_bytes(b"1234"), _NOT_WHOLE),
  "a bad header": (lambda file: _rewrite(file, b"{no json", b""), _NOT_WHOLE),
  "a header that is a list": (lambda file: _rewrite(file, b"[1]", b""), _NOT_WHOLE),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_is_named_before_an_array_is_made(fault, tmp_path, monkeypatch):
  break_it, message = FAULTS[fault]
  folder = _copy(GOLDEN / "llama", tmp_path / "broken")
  break_it(folder / "model.safetensors")
  monkeypatch.setattr(checkpoint, "_aligned", lambda *_: pytest.fail("an array was made"))
  with pytest.raises(CheckpointError, match=message):
    load_pretrained(folder)


def test_all_faults_come_in_one_error_with_their_number(llama):
  folder, _, _ = llama
  files = sorted(folder.glob("*.safetensors"))
  files[0].unlink()
  _cut(files[1])
  _longer(files[2])
  with pytest.raises(CheckpointError) as caught:
    load_pretrained(folder)
  text = str(caught.value)
  assert f"names {files[0].name!r}, which is no file of the folder" in text
  assert f"{files[1].name} is no whole" in text and f"{files[2].name} is no whole" in text
  assert "is missing" in text and re.search(r"\(\d+ problems\)", text)


def test_a_tensor_wider_than_config_json_says_is_not_rounded_silently(tmp_path):
  folder = _copy(GOLDEN / "qwen3", tmp_path / "wide")
  values = _json(folder / "config.json")
  (folder / "config.json").write_text(json.dumps({**values, "dtype": "bfloat16"}))
  with pytest.raises(CheckpointError, match="param_dtype") as caught:
    load_pretrained(folder)
  count = len(tensors(folder))
  assert f"({count} problems)" in str(caught.value)
  assert f"and {count - 20} more" in str(caught.value)


def test_a_file_cut_after_it_was_checked_raises(tmp_path, monkeypatch):
  folder = _copy(GOLDEN / "llama", tmp_path / "cut")
  compare = checkpoint._compare

  def cut(*arguments):
    _cut(folder / "model.safetensors")
    return compare(*arguments)

  monkeypatch.setattr(checkpoint, "_compare", cut)
  with pytest.raises(OSError, match="truncated"):
    load_pretrained(folder)


@pytest.mark.parametrize(
  ("changed", "message"),
  [
    ({"model_type": "gpt2"}, "model_type='gpt2' is not supported; supported: .*llama"),
    ({"attention_bias": True}, "attention_bias=True is not supported; supported: False"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported: 'silu'"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'.*'default', 'llama3'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"num_hidden_layers": None}, "no 'num_hidden_layers'"),
  ],
)
def test_what_the_model_lacks_is_named_by_its_key(changed, message, tmp_path):
  folder = _copy(GOLDEN / "llama", tmp_path / "other")
  values = _json(folder / "config.json")
  (folder / "config.json").write_text(json.dumps({**values, **changed}))
  with pytest.raises(ConfigError, match=message):
    load_pretrained(folder)


def test_a_folder_without_safetensors_says_what_it_holds(tmp_path):
  with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
    load_pretrained(tmp_path)
  (tmp_path / "config.json").write_bytes((GOLDEN / "llama" / "config.json").read_bytes())
  (tmp_path / "pytorch_model.bin").touch()
  with pytest.raises(CheckpointError, match="pytorch_model.bin"):
    load_pretrained(tmp_path)


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
  written = []

  def fail(file, entries, data):
    written.append(file)
    if len(written) > 2:
      raise OSError("disk full")
    return checkpoint_write(file, entries, data)

  checkpoint_write = checkpoint.write_file
  monkeypatch.setattr(checkpoint, "write_file", fail)
  with pytest.raises(OSError, match="disk full"):
    save_pretrained(tmp_path / "saved", drawn(_DENSE), _DENSE, max_shard_bytes=5_000)
  assert not list(tmp_path.iterdir())


def test_saving_never_touches_a_folder_that_holds_something(tmp_path):
  (tmp_path / "note").write_text("mine")
  with pytest.raises(CheckpointError, match="not empty"):
    save_pretrained(tmp_path, drawn(_DENSE), _DENSE)
  assert [p.name for p in tmp_path.iterdir()] == ["note"]
  (tmp_path / "empty").mkdir()
  save_pretrained(tmp_path / "empty", drawn(_DENSE), _DENSE)
  assert (tmp_path / "empty" / "config.json").is_file()


def test_what_no_family_can_say_is_refused(tmp_path):
  config = dataclasses.replace(_HYBRID, rope_theta=1e4)
  with pytest.raises(ConfigError, match=r"nemotron_h would change rope_theta=10000\.0 to None"):
    save_pretrained(tmp_path / "saved", drawn(_HYBRID), config)
  config = CONFIGS["qwen3_moe"]
  params = drawn(config)
  attend, mixture, *rest = params.groups[0]
  bias = mixture.mixer.router_bias + 1
  mixture = mixture.replace(mixer=mixture.mixer.replace(router_bias=bias))
  params = params.replace(groups=((attend, mixture, *rest), *params.groups[1:]))
  with pytest.raises(CheckpointError, match=r"router_bias is not zero, and qwen3_moe"):
    save_pretrained(tmp_path / "saved", params, config)
  with pytest.raises(CheckpointError, match=r"embedding has shape \(24, 16\)"):
    other = dataclasses.replace(_DENSE, vocab_size=25)
    save_pretrained(tmp_path / "saved", drawn(_DENSE), other)


def test_the_tables_of_fields_name_fields():
  fields = {field.name for field in dataclasses.fields(models.ModelConfig)}
  named = {n for names in checkpoint._FIELDS_OF_KINDS.values() for n in names.split()}
  assert named <= fields
  assert huggingface.RUNTIME_FIELDS <= fields
  assert not named & huggingface.RUNTIME_FIELDS


# Views.


@st.composite
def _joined(draw):
  """A pattern with a join, sizes of two arrays that share the tensor, and a box of the second."""
  axes = list("abcd"[: draw(st.integers(1, 4))])
  cuts = sorted(draw(st.sets(st.integers(1, len(axes) - 1)) if len(axes) > 1 else st.just(set())))
  groups = [axes[i:j] for i, j in itertools.pairwise([0, *cuts, len(axes)])]
  dimension = draw(st.integers(0, len(groups) - 1))
  first = draw(st.integers(0, len(groups[dimension]) - 1))
  sizes = {axis: draw(st.integers(1, 4)) for axis in axes}
  other = dict(sizes)
  for axis in groups[dimension][first:]:
    other[axis] = draw(st.integers(1, 4))
  ours = draw(st.permutations(axes))
  box = []
  for axis in ours:
    start = draw(st.integers(0, sizes[axis] - 1))
    box.append(slice(start, draw(st.integers(start + 1, sizes[axis]))))
  return groups, (dimension, first), ours, other, sizes, tuple(box), draw(st.integers(1, 70))


@settings(max_examples=150, deadline=None)
@given(_joined())
def test_any_part_of_a_view_is_that_part_of_the_mapped_array(case):
  groups, (dimension, first), ours, other, sizes, box, most = case
  shown = [list(group) for group in groups]
  shown[dimension][first] += "+"
  left = " ".join(f"({' '.join(group)})" for group in shown)
  pattern = Pattern.parse(f"{left} -> {' '.join(ours)}")
  total = pattern.joined(other) + pattern.joined(sizes)
  shape = pattern.stored_shape(sizes, total)
  assert pattern.stored_shape(other, total) == shape
  tensor = np.arange(np.prod(shape), dtype=np.int64)
  layout = pattern.layout(sizes, start=pattern.joined(other), total=total)

  # The same with numpy: split the joined dimension, take the second part, split the rest.
  lead = int(np.prod([sizes[a] for a in groups[dimension][:first]], dtype=int))
  split = tensor.reshape(*shape[:dimension], lead, -1, *shape[dimension + 1 :])
  second = np.split(split, [pattern.joined(other)], axis=dimension + 1)[1]
  names = list(itertools.chain(*groups))
  mapped = second.reshape([sizes[a] for a in names]).transpose([names.index(a) for a in ours])

  np.testing.assert_array_equal(layout.of(tensor), mapped)
  part = layout[box]
  np.testing.assert_array_equal(part.of(tensor), mapped[box])
  # What is read in runs, box by box, is the part, and no element is read twice.
  seen = np.full(part.shape, -1)
  order = part.stored_order()
  for small in part.boxes(most):
    runs = [tensor[at : at + n] for at, n in part[small].runs()]
    data = np.concatenate(runs).reshape([small[d].stop - small[d].start for d in order])
    assert data.size <= most and (seen[small] == -1).all()
    seen[small] = data.transpose(np.argsort(order))
  np.testing.assert_array_equal(seen, mapped[box])


def test_runs_are_as_long_as_the_tensor_allows():
  whole = Layout(5, (3, 4, 2), (8, 2, 1))
  assert list(whole.runs()) == [(5, 24)]
  rows = whole[slice(1, 3), slice(0, 4), slice(0, 2)]
  assert list(rows.runs()) == [(13, 16)]
  columns = whole[slice(0, 3), slice(1, 3), slice(0, 2)]
  assert list(columns.runs()) == [(7, 4), (15, 4), (23, 4)]


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("a a -> a", "every axis stands once"),
    ("a b -> a", "those on the left on both"),
    ("a+ b+ -> a b", "at most one"),
  ],
)
def test_a_pattern_that_cannot_be_is_refused(text, message):
  with pytest.raises(ValueError, match=message):
    Pattern.parse(text)


OWN_FAMILY = """
import dataclasses
from agentjax.models.huggingface import find_family
FAMILY = dataclasses.replace(find_family("llama"), model_type="own", architecture="Own")
LLAMA = "llama"
"""


def test_an_own_family_is_one_file_and_a_name(tmp_path, monkeypatch):
  (tmp_path / "own_family.py").write_text(OWN_FAMILY)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))
  shutil.copytree(GOLDEN / "llama", tmp_path / "folder")
  values = _json(tmp_path / "folder" / "config.json") | {"model_type": "own"}
  (tmp_path / "folder" / "config.json").write_text(json.dumps(values))
  with pytest.raises(ConfigError, match="model_type='own' is not supported; supported: .*llama"):
    load_pretrained(tmp_path / "folder")
  huggingface.register_family("own", "own_family:FAMILY")
  params, config = load_pretrained(tmp_path / "folder")
  assert_same(params, load_pretrained(GOLDEN / "llama")[0])
  assert find_family("own").architecture == "Own"
  assert family_of(config).model_type == "llama"  # the first that can say it
  huggingface.register_family("own", "own_family:LLAMA")
  with pytest.raises(ConfigError, match="is str; allowed: a models.huggingface.Family"):
    load_pretrained(tmp_path / "folder")
  with pytest.raises(ConfigError, match="register_family.*'own_family'; allowed: 'module:attr"):
    huggingface.register_family("own", "own_family")


def test_a_map_that_forgets_an_array_is_refused():
  def tensors(config):
    return list(find_family("llama").tensors(config))[:-1]

  family = dataclasses.replace(find_family("llama"), tensors=tensors)
  with pytest.raises(ValueError, match=r"does not hold every element of groups.*down once"):
    resolve(family, CONFIGS["llama"])


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_tensors_of_a_map_hold_every_number_once(name):
  config = CONFIGS[name]
  for stored in resolve(family_of(config), config)[0]:
    count = np.zeros(int(np.prod(stored.shape)), np.int64)
    for piece in stored.pieces:
      piece.layout.of(count)[...] += 1
    assert (count == 1).all(), stored.name


def test_files_are_what_the_safetensors_package_writes(tmp_path):
  save_pretrained(tmp_path / "ours", drawn(_DENSE), _DENSE)
  file = tmp_path / "ours" / "model.safetensors"
  with safetensors.safe_open(str(file), "numpy") as opened:
    assert opened.metadata() == {"format": "pt"}
  assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0  # so that data is aligned
