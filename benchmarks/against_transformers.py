r"""A training step of a small Nemotron-H and a small Qwen3, beside transformers on the same CPU.

  python benchmarks/against_transformers.py --torch_python=PATH [--repeats=7] [--rows=8]

PATH is a Python with torch and transformers. Both sides take one step each in turn, in processes of
their own, on the same shapes: mean token NLL, its gradient, AdamW, float32, all cores. Prints wall
and CPU seconds, peak memory above what the process held before its model, and the ratios.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time

MODELS = {
  "nemotron_h": {
    "pattern": "MEM*EM-E" * 2,
    "d_model": 256,
    "vocab": 2048,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 32,
    "d_mlp": 512,
    "mamba_heads": 16,
    "mamba_head_dim": 32,
    "state": 64,
    "groups": 2,
    "chunk": 64,
    "experts": 8,
    "choices": 2,
    "d_expert": 256,
    "d_shared": 512,
  },
  "qwen3": {
    "layers": 8,
    "d_model": 256,
    "vocab": 2048,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 32,
    "d_mlp": 768,
  },
}


def torch_model(name: str):
  import torch
  from transformers import NemotronHConfig, NemotronHForCausalLM, Qwen3Config, Qwen3ForCausalLM

  torch.manual_seed(0)
  m = MODELS[name]
  if name == "qwen3":
    return Qwen3ForCausalLM(
      Qwen3Config(
        vocab_size=m["vocab"],
        hidden_size=m["d_model"],
        num_hidden_layers=m["layers"],
        num_attention_heads=m["heads"],
        num_key_value_heads=m["kv_heads"],
        head_dim=m["head_dim"],
        intermediate_size=m["d_mlp"],
        tie_word_embeddings=False,
      )
    )
  return NemotronHForCausalLM(
    NemotronHConfig(
      vocab_size=m["vocab"],
      hidden_size=m["d_model"],
      hybrid_override_pattern=m["pattern"],
      num_hidden_layers=len(m["pattern"]),
      num_attention_heads=m["heads"],
      num_key_value_heads=m["kv_heads"],
      head_dim=m["head_dim"],
      intermediate_size=m["d_mlp"],
      ssm_state_size=m["state"],
      mamba_num_heads=m["mamba_heads"],
      mamba_head_dim=m["mamba_head_dim"],
      n_groups=m["groups"],
      conv_kernel=4,
      chunk_size=m["chunk"],
      n_routed_experts=m["experts"],
      n_shared_experts=1,
      num_experts_per_tok=m["choices"],
      moe_intermediate_size=m["d_expert"],
      moe_shared_expert_intermediate_size=m["d_shared"],
    )
  )


def torch_step(name: str, rows: int, length: int):
  import torch

  model = torch_model(name).float().train()
  ids = torch.randint(0, MODELS[name]["vocab"], (rows, length))
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
  count = sum(p.numel() for p in model.parameters())

  def step() -> float:
    loss = model(ids, labels=ids, use_cache=False).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)

  return step, count


def jax_step(name: str, rows: int, length: int):
  import functools

  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax

  from agentjax import models

  m = MODELS[name]
  shared = {
    "vocab_size": m["vocab"],
    "d_model": m["d_model"],
    "num_heads": m["heads"],
    "num_kv_heads": m["kv_heads"],
    "head_dim": m["head_dim"],
    "d_mlp": m["d_mlp"],
  }
  if name == "qwen3":
    config = models.ModelConfig(
      **shared,
      pattern="*-" * m["layers"],
      mlp_activation="swiglu",
      qk_norm=True,
      rope_theta=1e4,
      norm_eps=1e-6,
    )
  else:
    config = models.ModelConfig(
      **shared,
      pattern=m["pattern"],
      mamba_heads=m["mamba_heads"],
      mamba_head_dim=m["mamba_head_dim"],
      mamba_state=m["state"],
      mamba_groups=m["groups"],
      chunk_size=m["chunk"],
      num_experts=m["experts"],
      experts_per_token=m["choices"],
      d_expert=m["d_expert"],
      d_shared_expert=m["d_shared"],
    )
  config.validate()
  optimizer = optax.adamw(1e-4, weight_decay=0.0)
  params = jax.jit(functools.partial(models.init, config))(jax.random.key(0))
  ids = jnp.asarray(np.random.default_rng(0).integers(0, m["vocab"], (rows, length)), jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), ids.shape)
  ones = jnp.ones_like(ids)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def update(params, state):
    def loss(params):
      scores = models.score_tokens(params, config, ids, ones, positions)
      return -jnp.sum(scores.log_probs) / (rows * (length - 1))

    value, grads = jax.value_and_grad(loss, allow_int=True)(params)
    changes, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, changes), state, value

  held = [params, jax.jit(optimizer.init)(params)]

  def step() -> float:
    *held[:], value = update(*held)
    return float(value)

  return step, models.count(models.param_specs(config))


def worker(side: str, name: str, rows: int, length: int) -> None:
  """Builds the model, then answers every line of stdin with the seconds of one step."""
  build = {"torch": torch_step, "agentjax": jax_step}[side]
  if side == "torch":
    import torch  # noqa: F401
    import transformers  # noqa: F401
  else:
    import jax

    jax.devices()
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  step, count = build(name, rows, length)
  step()
  print(json.dumps({"parameters": count}), flush=True)
  for _ in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step()
    print(
      json.dumps(
        {
          "wall": time.perf_counter() - wall,
          "cpu": time.process_time() - cpu,
          "loss": loss,
          "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before,
        }
      ),
      flush=True,
    )


class _Side:
  def __init__(self, python: str, side: str, name: str, rows: int, length: int) -> None:
    self.name = side
    self._process = subprocess.Popen(
      [python, __file__, "--worker", side, name, str(rows), str(length)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    self.parameters = self._read()["parameters"]
    self.rows: list[dict[str, float]] = []

  def _read(self) -> dict[str, float]:
    assert self._process.stdout is not None
    return json.loads(self._process.stdout.readline())

  def step(self) -> None:
    assert self._process.stdin is not None
    self._process.stdin.write("\n")
    self._process.stdin.flush()
    self.rows.append(self._read())

  def median(self, key: str) -> float:
    return statistics.median(row[key] for row in self.rows)

  def close(self) -> None:
    assert self._process.stdin is not None
    self._process.stdin.close()
    self._process.wait()


def main(argv: list[str]) -> None:
  from absl import flags

  values = flags.FLAGS
  del argv
  for name in MODELS:
    sides = [
      _Side(python, side, name, values.rows, values.time)
      for side, python in (("agentjax", sys.executable), ("torch", values.torch_python))
    ]
    for _ in range(values.repeats):
      for side in sides:
        side.step()
    for side in sides:
      side.close()
      print(
        f"{name:10s} {side.name:8s} {side.parameters:,} parameters"
        f"  wall {side.median('wall'):.3f} s  CPU {side.median('cpu'):.3f} s"
        f"  peak {side.median('peak') / 1024:,.0f} MiB  loss {side.rows[-1]['loss']:.3f}"
      )
    ours, theirs = sides
    print(
      f"{name:10s} transformers / agentjax: wall {theirs.median('wall') / ours.median('wall'):.2f}"
      f"  CPU {theirs.median('cpu') / ours.median('cpu'):.2f}"
      f"  peak {theirs.median('peak') / ours.median('peak'):.2f}"
    )


if __name__ == "__main__":
  if sys.argv[1:2] == ["--worker"]:
    worker(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
  else:
    from absl import app, flags

    flags.DEFINE_string("torch_python", sys.executable, "Python with torch and transformers.")
    flags.DEFINE_integer("repeats", 7, "Steps of each side.")
    flags.DEFINE_integer("rows", 8, "Rows of the batch.")
    flags.DEFINE_integer("time", 512, "Tokens a row.")
    app.run(main)
