"""Tiny random checkpoints of every model family, with what `transformers` computes from them.

  python tests/golden/make_hf_checkpoints.py [--output DIR] [--only NAME ...]

needs torch and transformers; the committed folders were made by transformers 5.23.0 and torch
2.13.0 on a CPU. Each folder ``tests/golden/hf/<name>/`` holds ``config.json`` and
``model.safetensors`` as ``save_pretrained`` wrote them, and ``expected.npz``:

  token_ids      int32 [2, 37], two sequences of full length
  logits         float32 [2, 37, vocab], one forward pass over the whole sequence
  log_probs      float32 [2, 37], log p(token t | its past), nats; 0 on the first token
  decode_logits  float32 [2, 37, vocab], a cached forward over 13 tokens, then one token at a time

Weights are drawn by name from a seed, not by the library's initialisation, so that nothing stands
where it starts: norms are not 1, biases not 0, decay rates, steps and router biases are spread. The
script fails where a stored tensor does not move the logits (a map that forgot it would pass), where
cached decoding leaves the full pass by more than 1e-5 of the scale, and where a trap below does not
show in the numbers. Running it again gives the same bytes.

Traps, by family:

  llama           The llama3 frequency rule shows only where wavelengths pass
                  ``original_max_position_embeddings``; it is 64 here, so that three bands are met.
  llama_tied      The file holds no ``lm_head.weight``.
  iquestcoder     A Llama by another ``model_type``.
  qwen2           Biases on q, k and v and none on o, with no field in the config that says so.
  qwen3           ``head_dim`` times heads is not the width; one RMSNorm weight for all heads.
  qwen3_bf16      Weights stored in bfloat16; the numbers are of those weights widened to float32.
  qwen3_moe       Gates are divided by their sum only with ``norm_topk_prob``.
  mamba2          Gated norm over groups of channels, gate first; ``n_groups`` is 2.
  nemotron_h*     The library clamps the step below at ``time_step_min`` in the full pass and not in
                  decoding; published weights were trained without a clamp. The clamp is taken off
                  here and half of the steps lie below it. ``n_groups`` (state space) is not
                  ``n_group`` (routing). Attention has no position embedding, whatever
                  ``rope_theta`` says. The router bias chooses and does not weigh.
  gemma4_*        No 1/sqrt(head_dim); v has a norm without weight; global layers rotate a quarter
                  of the frequency pairs, with exponents over the whole head; K = V means before the
                  norms; the last layers have queries only and twice the hidden width; embeddings
                  are scaled by sqrt(width) and the per-layer table by sqrt(its width);
                  ``layer_scalar`` is a stored buffer.
  gemma4_moe      The router reads the residual stream without the pre-norm, with its own scale.
  youtu           Interleaved rotary pairs; the latent norms use 1e-6 whatever ``rms_norm_eps`` is;
                  the file holds no ``lm_head.weight``. No ``pad_token_id`` here: the library zeroes
                  that row of the embedding when it loads a file.
  longcat_flash   As youtu, and query and latent are scaled by sqrt(width / rank); the identity
                  experts have router rows and biases; gates are not divided by their sum. The
                  library stacks unused gate and up weights for the identity experts too, and saves
                  them under the experts' numbers.
"""

from __future__ import annotations

import argparse
import pathlib
import zlib

import numpy as np
import torch
import transformers

LENGTH = 37
PREFILL = 13
SEED = 20260
# Among those of SEED one token magnifies roundings several times more than any other does.
_TOKEN_SEEDS = {"gemma4_31b": 3}
TOLERANCE = 1e-5


def family_configs() -> dict[str, transformers.PreTrainedConfig]:
  """One small config a family, by folder name.

  The epsilon of the norms is far from every default, so that a constant in its place shows.
  """
  epsilon = 1e-3
  shared = dict(
    vocab_size=97,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
  )
  dense = dict(
    hidden_size=40,
    intermediate_size=72,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    rms_norm_eps=epsilon,
    **shared,
  )
  hybrid = dict(
    hidden_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    intermediate_size=72,
    mamba_num_heads=6,
    mamba_head_dim=8,
    ssm_state_size=12,
    n_groups=2,
    chunk_size=8,
    moe_intermediate_size=20,
    moe_shared_expert_intermediate_size=36,
    layer_norm_epsilon=epsilon,
    **shared,
  )
  gemma = dict(
    hidden_size=40,
    intermediate_size=40,
    num_attention_heads=4,
    head_dim=12,
    global_head_dim=16,
    sliding_window=8,
    final_logit_softcapping=30.0,
    vocab_size_per_layer_input=97,
    rms_norm_eps=epsilon,
    **shared,
  )
  local, full = "sliding_attention", "full_attention"
  rope = {"rope_type": "default", "rope_theta": 1e4}
  llama3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
  }
  return {
    "llama": transformers.LlamaConfig(**dense | dict(head_dim=16), rope_parameters=llama3),
    "llama_tied": transformers.LlamaConfig(**dense, rope_parameters=rope, tie_word_embeddings=True),
    "iquestcoder": transformers.IQuestCoderConfig(**dense, rope_parameters=rope),
    "qwen2": transformers.Qwen2Config(
      **{k: v for k, v in dense.items() if k != "head_dim"}, rope_parameters=rope
    ),
    "qwen3": transformers.Qwen3Config(**dense, rope_parameters=rope),
    "qwen3_bf16": transformers.Qwen3Config(
      **dense | dict(hidden_size=32, intermediate_size=48), rope_parameters=rope
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(
      **dense,
      moe_intermediate_size=20,
      num_experts=6,
      num_experts_per_tok=2,
      norm_topk_prob=True,
      rope_parameters=rope,
    ),
    "mamba2": transformers.Mamba2Config(
      hidden_size=40,
      num_hidden_layers=2,
      num_heads=10,
      head_dim=8,
      expand=2,
      state_size=12,
      n_groups=2,
      chunk_size=8,
      layer_norm_epsilon=epsilon,
      **{k: v for k, v in shared.items() if k != "max_position_embeddings"},
    ),
    "nemotron_h": transformers.NemotronHConfig(
      hybrid_override_pattern="ME*-ME",
      n_routed_experts=8,
      num_experts_per_tok=3,
      n_group=4,
      topk_group=2,
      routed_scaling_factor=2.5,
      **hybrid,
    ),
    "nemotron_h_latent": transformers.NemotronHConfig(
      hybrid_override_pattern="ME*ME",
      n_routed_experts=10,
      num_experts_per_tok=4,
      moe_latent_size=24,
      routed_scaling_factor=5.0,
      **hybrid,
    ),
    "gemma4_e2b": transformers.Gemma4TextConfig(
      num_hidden_layers=6,
      layer_types=[local, local, full] * 2,
      num_key_value_heads=1,
      num_kv_shared_layers=3,
      use_double_wide_mlp=True,
      hidden_size_per_layer_input=10,
      **gemma,
    ),
    "gemma4_31b": transformers.Gemma4TextConfig(
      num_hidden_layers=4,
      layer_types=[local, full] * 2,
      num_key_value_heads=4,
      num_global_key_value_heads=2,
      attention_k_eq_v=True,
      hidden_size_per_layer_input=0,
      **gemma,
    ),
    "gemma4_moe": transformers.Gemma4TextConfig(
      num_hidden_layers=3,
      layer_types=[local, local, full],
      num_key_value_heads=2,
      num_global_key_value_heads=1,
      attention_k_eq_v=True,
      hidden_size_per_layer_input=0,
      enable_moe_block=True,
      num_experts=6,
      top_k_experts=2,
      moe_intermediate_size=20,
      **gemma,
    ),
    "youtu": transformers.YoutuConfig(
      hidden_size=40,
      intermediate_size=72,
      num_hidden_layers=2,
      num_attention_heads=4,
      num_key_value_heads=4,
      q_lora_rank=24,
      kv_lora_rank=20,
      qk_nope_head_dim=12,
      qk_rope_head_dim=8,
      v_head_dim=10,
      rms_norm_eps=epsilon,
      rope_parameters=rope,
      **shared | dict(pad_token_id=None),
    ),
    "longcat_flash": transformers.LongcatFlashConfig(
      hidden_size=40,
      ffn_hidden_size=40,
      num_layers=2,
      num_attention_heads=4,
      q_lora_rank=24,
      kv_lora_rank=20,
      qk_nope_head_dim=12,
      qk_rope_head_dim=8,
      head_dim=8,
      v_head_dim=10,
      rms_norm_eps=epsilon,
      moe_topk=3,
      n_routed_experts=6,
      zero_expert_num=3,
      expert_ffn_hidden_size=16,
      rope_parameters=rope,
      **shared,
    ),
  }


def build(name: str, seed: int) -> transformers.PreTrainedModel:
  """A model of the family in float32 and eval mode, its weights drawn from the seed.

  The numbers of ``qwen3_bf16`` fit bfloat16 without rounding.
  """
  config = family_configs()[name]
  model = transformers.AutoModelForCausalLM.from_config(
    config, attn_implementation="eager", dtype=torch.float32
  ).eval()
  with torch.no_grad():
    for key, tensor in stored(model).items():
      rng = np.random.default_rng([seed, zlib.crc32(key.encode())])
      values = torch.from_numpy(_draw(key, tuple(tensor.shape), rng).astype(np.float32))
      tensor.copy_(values.bfloat16() if name.endswith("_bf16") else values)
  _set_step_limit(model, 0.0)
  return model


def stored(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
  """The model's own tensors by name, a tied one once."""
  seen: dict[int, str] = {}
  for key, tensor in model.state_dict().items():
    seen.setdefault(tensor.data_ptr(), key)
  return {key: model.state_dict()[key] for key in seen.values()}


def draw_token_ids(name: str, seed: int) -> np.ndarray:
  """Token ids int32 [2, 37]."""
  rng = np.random.default_rng([_TOKEN_SEEDS.get(name, seed), zlib.crc32(name.encode())])
  return rng.integers(0, family_configs()[name].vocab_size, (2, LENGTH), dtype=np.int32)


def compute_expected(
  model: transformers.PreTrainedModel, token_ids: np.ndarray
) -> dict[str, np.ndarray]:
  """What ``expected.npz`` holds."""
  logits = full_logits(model, token_ids)
  wide = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1).numpy()
  chosen = np.take_along_axis(wide[:, :-1], token_ids[:, 1:, None], axis=-1)[..., 0]
  return {
    "token_ids": token_ids,
    "logits": logits,
    "log_probs": np.pad(chosen, ((0, 0), (1, 0))).astype(np.float32),
    "decode_logits": decode_logits(model, token_ids),
  }


@torch.no_grad()
def full_logits(model: transformers.PreTrainedModel, token_ids: np.ndarray) -> np.ndarray:
  """Logits [2, T, vocab] of one pass without a cache."""
  return model(torch.from_numpy(token_ids).long(), use_cache=False).logits.numpy()


@torch.no_grad()
def decode_logits(model: transformers.PreTrainedModel, token_ids: np.ndarray) -> np.ndarray:
  """Logits [2, T, vocab] of a cached pass over the first tokens, then of one token at a time."""
  ids = torch.from_numpy(token_ids).long()
  recurrent = isinstance(model, transformers.Mamba2ForCausalLM)
  field = "cache_params" if recurrent else "past_key_values"
  out = model(ids[:, :PREFILL], use_cache=True)
  parts = [out.logits]
  for t in range(PREFILL, ids.shape[1]):
    out = model(ids[:, t : t + 1], use_cache=True, **{field: getattr(out, field)})
    parts.append(out.logits)
  return torch.cat(parts, dim=1).numpy()


def save(
  name: str,
  model: transformers.PreTrainedModel,
  expected: dict[str, np.ndarray],
  directory: pathlib.Path,
) -> None:
  """Writes the folder of one family; raises where the library reads other numbers back."""
  if name.endswith("_bf16"):
    model = model.bfloat16()
  model.save_pretrained(directory)
  (directory / "generation_config.json").unlink(missing_ok=True)
  np.savez(directory / "expected.npz", **expected)
  back = read(directory)
  if not np.array_equal(full_logits(back, expected["token_ids"]), expected["logits"]):
    raise AssertionError(f"{name}: the saved model computes other logits.")


def read(directory: pathlib.Path) -> transformers.PreTrainedModel:
  """The model of a folder as the library reads it, in float32 and without a clamp of the step."""
  model = transformers.AutoModelForCausalLM.from_pretrained(
    directory, attn_implementation="eager", dtype=torch.float32
  ).eval()
  _set_step_limit(model, 0.0)
  return model


def check(name: str, model: transformers.PreTrainedModel, expected: dict[str, np.ndarray]) -> str:
  """Raises where the numbers would not catch a mistake; else a line with the figures."""
  logits, ids = expected["logits"], expected["token_ids"]
  scale = float(np.abs(logits).max())
  decoding = float(np.abs(expected["decode_logits"] - logits).max()) / scale
  if not decoding <= TOLERANCE:
    raise AssertionError(f"{name}: cached decoding is off by {decoding:.1e} of the scale.")
  weakest, weakest_key = np.inf, ""
  with torch.no_grad():
    for key, tensor in stored(model).items():
      kept = tensor.clone()
      # A scale would not show before a norm; an order or a sign does.
      tensor.copy_(kept.roll(1, 0) if tensor.shape[0] > 1 else -kept)
      moved = float(np.abs(full_logits(model, ids) - logits).max()) / scale
      tensor.copy_(kept)
      if moved < weakest:
        weakest, weakest_key = moved, key
  if not weakest > 100 * TOLERANCE:
    raise AssertionError(f"{name}: {weakest_key} moves the logits by {weakest:.1e} only.")
  line = (
    f"{name}: scale {scale:.2f}, decode - full {decoding:.1e} of it, "
    f"least moved by {weakest_key} ({weakest:.1e})"
  )
  if name.startswith("nemotron_h"):
    _set_step_limit(model, model.config.time_step_min)
    clamped = float(np.abs(full_logits(model, ids) - logits).max()) / scale
    _set_step_limit(model, 0.0)
    if not clamped > 10 * TOLERANCE:
      raise AssertionError(f"{name}: the clamp of the step shows by {clamped:.1e} only.")
    line += f", clamp {clamped:.1e}"
  return line


def _set_step_limit(model: transformers.PreTrainedModel, low: float) -> None:
  if isinstance(model, transformers.NemotronHForCausalLM):
    for layer in model.model.layers:
      if layer.block_type == "linear_attention":
        layer.mixer.time_step_limit = (low, float("inf"))


def _draw(key: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
  """Values of one tensor, by what its name says it is."""
  last = key.rsplit(".", 1)[-1]
  if last == "A_log":
    return np.log(rng.uniform(0.5, 8.0, shape))
  if last == "dt_bias":
    # Every other head far below 0.001, the least step of the published configs.
    return np.where(np.arange(shape[0]) % 2, -9.0, -2.0) + rng.uniform(-0.5, 0.5, shape)
  if last == "e_score_correction_bias":
    return rng.uniform(-0.1, 0.1, shape)
  if ".q_norm." in key or ".k_norm." in key:
    # Their product is near 1 / sqrt(head_dim), which trained Gemma weights hold too: scores of
    # ten and more would blow roundings up.
    return rng.uniform(0.25, 0.75, shape)
  if "norm" in key or last in ("D", "scale", "per_expert_scale", "layer_scalar"):
    return rng.uniform(0.5, 1.5, shape)
  if last == "bias":
    return rng.uniform(-0.5, 0.5, shape)
  if "embed" in key:
    return rng.normal(size=shape) * (2.0 / np.sqrt(shape[-1]))
  fan_in = np.prod(shape[1:]) if "conv1d" in key else shape[-1]
  return rng.normal(size=shape) / np.sqrt(fan_in)


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(__file__).parent / "hf")
  parser.add_argument("--only", nargs="*", choices=sorted(family_configs()))
  arguments = parser.parse_args()
  transformers.utils.logging.disable_progress_bar()
  torch.set_num_threads(1)
  torch.use_deterministic_algorithms(True)
  for name in arguments.only or family_configs():
    model = build(name, SEED)
    expected = compute_expected(model, draw_token_ids(name, SEED))
    line = check(name, model, expected)
    save(name, model, expected, arguments.output / name)
    print(line)


if __name__ == "__main__":
  main()
