"""Edited `config.json` files of every family, with what `transformers` computes from each of them.

  python tests/golden/make_config_edits.py [--output DIR] [--only NAME ...]

needs torch and transformers, and the folders of ``make_hf_checkpoints.py``; the committed files
were made by the versions that are named there. Each key of each ``config.json``, nested ones too,
is removed, set to null and changed; keys that other families or older files have are added. The
weights stay as they are.

  config_edits.json  family name to a list of [path, value, outcome]: the key's path, what it is
                     set to (absent where it is removed: [path, outcome]), and what came out: the
                     row of the family's array below; null where transformers raises; -1 where it
                     would draw weights at random, as the file has none of that name or shape.
  config_edits.npz   family name to float32 [outcomes, 2, vocab], logits of the last token of both
                     sequences of ``expected.npz``.

Nemotron-H is computed with the limit of its steps that ``time_step_limit`` says, as the code that
its checkpoints are published with has it; transformers takes ``time_step_min`` in its place.
"""

from __future__ import annotations

import argparse
import copy
import json
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import make_hf_checkpoints as library
import numpy as np
import torch
import transformers

FOLDERS = pathlib.Path(__file__).parent / "hf"
REMOVED = object()
_FIXED = {"architectures", "model_type", "transformers_version"}

_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
_LLAMA3 = {
  "rope_type": "llama3",
  "factor": 4.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 32,
}
_INFINITY = {"__float__": "Infinity"}

# Keys that a file may have and ours have not, and what may stand there.
_ADDED: dict[str, tuple[Any, ...]] = {
  "rope_theta": (500.0, 10_000, 1e6),
  "rope_scaling": (
    None,
    {},
    {"rope_type": "default"},
    {"type": "default", "rope_theta": 300.0},
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 2.0},
    {"type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0},
    _LLAMA3,
    {"type": "llama3", **{k: v for k, v in _LLAMA3.items() if k != "rope_type"}},
    *({k: v for k, v in _LLAMA3.items() if k != key} for key in _LLAMA3),
  ),
  "rope_parameters": (None, {}, {"rope_theta": 700.0}, {"rope_type": "linear", "factor": 2.0}),
  "original_max_position_embeddings": (16,),
  "partial_rotary_factor": (1.0, 0.5),
  "rope_interleave": (True, False),
  "attention_bias": (True,),
  "mlp_bias": (True,),
  "use_bias": (True,),
  "use_conv_bias": (False,),
  "head_dim": (8, 16),
  "num_key_value_heads": (4, 2, 1),
  "num_experts": (4, 8),
  "num_local_experts": (4, 8),
  "n_shared_experts": (2,),
  "moe_latent_size": (8,),
  "num_experts_per_tok": (1,),
  "sliding_window": (4,),
  "use_sliding_window": (True,),
  "max_window_layers": (0, 1),
  "layer_types": (["full_attention"] * 2, ["sliding_attention", "full_attention"], []),
  "hidden_activation": ("silu", "relu"),
  "hidden_act": ("silu", "gelu"),
  "mlp_hidden_act": ("relu2", "silu"),
  "tie_word_embeddings": (True, False),
  "final_logit_softcapping": (5.0,),
  "attn_logit_softcapping": (5.0,),
  "query_pre_attn_scalar": (64,),
  "logit_scale": (0.5,),
  "embedding_multiplier": (2.0,),
  "residual_multiplier": (0.5,),
  "use_qk_norm": (True,),
  "qk_norm": (False,),
  "norm_topk_prob": (True, False),
  "scoring_func": ("softmax",),
  "router_bias": (True,),
  "zero_expert_type": ("identity", "drop"),
  "attention_method": ("MLA", "MHA"),
  "mla_scale_q_lora": (True, False),
  "mla_scale_kv_lora": (True, False),
  "num_nextn_predict_layers": (0, 1),
  "num_hidden_layers": (1, 4),
  "num_layers": (1,),
  "intermediate_size": (24,),
  "moe_intermediate_size": (24,),
  "expand": (4,),
  "hybrid_override_pattern": ("M*", "MEM*"),
  "mamba_n_groups": (1,),
  "mamba_dt_limit": ([0.0, 0.01],),
  "mamba_dt_min": (0.05,),
  "mamba_chunk_size": (4,),
  "mamba_conv_bias": (False,),
  "mamba_d_conv": (2,),
  "time_step_limit": ([0.01, 0.1], [0.0, 0.05], [0.02, _INFINITY]),
  "norm_before_gate": (True,),
  "global_head_dim": (16, 12),
  "num_global_key_value_heads": (1, 2),
  "per_layer_config": (None,),
  "quantization_config": ({"quant_method": "fp8"},),
}


def edits(settings: dict[str, Any]) -> Iterator[tuple[list[str], Any]]:
  """(path, new value or REMOVED) of every edit, none twice."""
  seen: set[str] = set()
  for path, value in _all_edits(settings):
    key = json.dumps([path, None if value is REMOVED else [value]])
    before = _at(settings, path)
    if key not in seen and not (type(value) is type(before) and value == before):
      seen.add(key)
      yield path, value


def _all_edits(settings: dict[str, Any]) -> Iterator[tuple[list[str], Any]]:
  for path in _paths(settings):
    for value in (REMOVED, None, *_changes(path[-1], _at(settings, path))):
      yield path, value
    if path[-1] in ("rope_parameters", "full_attention", "sliding_attention"):
      for key, value in (*_LLAMA3.items(), ("type", "linear"), ("partial_rotary_factor", 0.5)):
        if key not in _at(settings, path):
          yield [*path, key], value
  for key, values in _ADDED.items():
    for value in values:
      yield [key], value


def _paths(settings: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[list[str]]:
  for key, value in settings.items():
    if key not in _FIXED:
      yield [*before, key]
      if isinstance(value, dict):
        yield from _paths(value, (*before, key))


def _at(settings: Any, path: list[str]) -> Any:
  """The value at a path; REMOVED where there is none."""
  for key in path:
    if not isinstance(settings, dict) or key not in settings:
      return REMOVED
    settings = settings[key]
  return settings


def _changes(key: str, value: Any) -> tuple[Any, ...]:
  """Other values of the kind that stands there."""
  if key == "rope_type":
    return _ROPE_TYPES
  if key == "dtype":
    return ("bfloat16", "float16")
  if key == "time_step_limit":
    return ([0.01, 0.1], [0.0, 0.05], [0.02, _INFINITY], [0.0])
  match value:
    case bool():
      return (not value,)
    case int():
      return (value + 1, 2 * value, max(value // 2, 1), 1, 0)
    case float():
      return (2 * value + 0.01, value / 2, 0.0)
    case str():
      return (*_ACTIVATIONS, "other") if "act" in key else ("other",)
    case list():
      return (value[::-1], value[:-1], value + value[:1], [], value[:1] * len(value))
    case dict():
      return ({},)
    case _:
      return (1, 4, True)


def edited(settings: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
  """The settings with one edit; a path whose parents are gone makes them anew."""
  settings = copy.deepcopy(settings)
  *parents, key = path
  here = settings
  for parent in parents:
    here = here[parent]
  if value is REMOVED:
    del here[key]
  else:
    here[key] = value
  return settings


def compute(
  folder: pathlib.Path, settings: dict[str, Any], ids: np.ndarray
) -> np.ndarray | int | None:
  """Logits [2, vocab] of the last token; None where the library raises, -1 where it draws."""
  with tempfile.TemporaryDirectory() as directory:
    copied = pathlib.Path(directory)
    (copied / "config.json").write_text(json.dumps(settings))
    (copied / "model.safetensors").symlink_to(folder / "model.safetensors")
    try:
      model, told = transformers.AutoModelForCausalLM.from_pretrained(
        copied,
        attn_implementation="eager",
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
      )
      if told["missing_keys"] or told["mismatched_keys"]:
        return -1
      if isinstance(model, transformers.NemotronHForCausalLM):
        for layer in model.model.layers:
          if layer.block_type == "linear_attention":
            layer.mixer.time_step_limit = model.config.time_step_limit
      return library.full_logits(model.eval(), ids)[:, -1]
    except Exception:  # whatever it raises, it does not compute a number
      return None


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(__file__).parent)
  parser.add_argument("--only", nargs="*", choices=sorted(p.name for p in FOLDERS.iterdir()))
  arguments = parser.parse_args()
  transformers.utils.logging.disable_progress_bar()
  transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
  torch.set_num_threads(1)
  torch.use_deterministic_algorithms(True)
  told: dict[str, list[Any]] = {}
  arrays: dict[str, np.ndarray] = {}
  for name in arguments.only or sorted(p.name for p in FOLDERS.iterdir()):
    settings = json.loads((FOLDERS / name / "config.json").read_text())
    ids = np.load(FOLDERS / name / "expected.npz")["token_ids"]
    rows: dict[bytes, int] = {}
    told[name] = []
    for path, value in edits(settings):
      logits = compute(FOLDERS / name, edited(settings, path, value), ids)
      if isinstance(logits, np.ndarray):
        row = rows.setdefault(logits.tobytes(), len(rows))
      else:
        row = logits
      told[name].append([path, row] if value is REMOVED else [path, value, row])
    arrays[name] = np.stack([np.frombuffer(b, np.float32).reshape(2, -1) for b in rows])
    raised, drawn = (sum(entry[-1] == row for entry in told[name]) for row in (None, -1))
    print(
      f"{name}: {len(told[name])} edits, {len(rows)} results, {raised} raise, {drawn} draw weights",
      flush=True,
    )
  text = ",\n".join(
    f'"{name}": [\n' + ",\n".join(f"  {json.dumps(entry)}" for entry in entries) + "\n]"
    for name, entries in told.items()
  )
  (arguments.output / "config_edits.json").write_text("{\n" + text + "\n}\n")
  np.savez_compressed(arguments.output / "config_edits.npz", **arrays)


if __name__ == "__main__":
  main()
