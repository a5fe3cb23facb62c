r"""Decoding speed of the engine: tokens a second, and CPU seconds.

  JAX_PLATFORMS=cpu python benchmarks/engine.py

The dense model has 4.46M parameters (4 layers, d=256, ffn 1024, 4 query and 2 key/value heads of
64, vocabulary 1024): 16 prompts of 64 tokens, 128 tokens each. The hybrid and the mixture are of
the size that the quickstart trains. `agentic` runs 16 episodes of 3 turns of 32 tokens with 16
observed tokens between them, through the asyncio engine. CPU seconds count all threads.
"""

from __future__ import annotations

import asyncio
import statistics
import time

import jax
import numpy as np
from absl import app, flags

from agentjax import models
from agentjax.engine import Engine, EngineConfig, SampleRequest, address_key

_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed runs of each workload.")
_LANES = flags.DEFINE_multi_integer("lanes", [1, 2], "Lanes to try.")
_CHUNK = flags.DEFINE_integer("chunk_tokens", 16, "Tokens a decode dispatch.")
_MODELS = flags.DEFINE_multi_enum(
  "model", ["dense", "hybrid", "mixture"], ["dense", "hybrid", "mixture"], "Models to run."
)

_BATCH, _PROMPT, _TOKENS, _TURNS, _OBSERVED = 16, 64, 128, 3, 16


def _config(name: str) -> models.ModelConfig:
  small = {
    "vocab_size": 512,
    "d_model": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "d_mlp": 384,
    "mamba_heads": 8,
    "mamba_head_dim": 32,
    "mamba_state": 32,
    "num_experts": 4,
    "d_expert": 192,
    "d_shared_expert": 192,
  }
  match name:
    case "dense":
      return models.ModelConfig(
        vocab_size=1024,
        d_model=256,
        pattern="*-" * 4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        rope_theta=10_000.0,
        d_mlp=1024,
        mlp_activation="swiglu",
      )
    case "hybrid":
      return models.ModelConfig(pattern="M-M*-M-", **small)
    case _:
      return models.ModelConfig(pattern="M*EM*E", **small)


async def _single_turn(engine: Engine, prompts: np.ndarray) -> int:
  """Every prompt once; returns sampled tokens."""

  async def one(i: int) -> int:
    context = await engine.open_ids(prompts[i])
    sample = await context.generate(SampleRequest(address_key(0, i), _TOKENS))
    context.close()
    return len(sample.token_ids)

  return sum(await asyncio.gather(*(one(i) for i in range(len(prompts)))))


async def _agentic(engine: Engine, prompts: np.ndarray) -> int:
  """Turns with observations between; returns sampled tokens."""

  async def one(i: int) -> int:
    context = await engine.open_ids(prompts[i])
    tokens = 0
    for turn in range(_TURNS):
      sample = await context.generate(SampleRequest(address_key(0, i, turn), 32))
      tokens += len(sample.token_ids)
      await context.extend(prompts[i][:_OBSERVED])
    context.close()
    return tokens

  return sum(await asyncio.gather(*(one(i) for i in range(len(prompts)))))


def _measure(name: str, lanes: int) -> None:
  config = _config(name)
  engine = Engine(
    config,
    EngineConfig(
      slots=_BATCH,
      lanes=lanes,
      max_length=_PROMPT + _TOKENS + _TURNS * _OBSERVED,
      chunk_tokens=_CHUNK.value,
      extend_buckets=(_OBSERVED, _PROMPT),
      extend_rows=(8, 4),
    ),
    devices=jax.local_devices()[:1],
  )
  start = time.perf_counter()
  engine.publish(models.init(config, jax.random.key(0)), 0)
  compiled = time.perf_counter() - start
  prompts = np.random.default_rng(0).integers(0, config.vocab_size, (_BATCH, _PROMPT))
  size = models.count(models.param_specs(config)) / 1e6
  print(f"{name} {config.pattern}, {size:.2f}M parameters, {lanes} lanes, compile {compiled:.1f} s")
  for workload in (_single_turn, _agentic):
    seconds, cpu, tokens = [], [], 0
    for _ in range(_REPEATS.value):
      start, start_cpu = time.perf_counter(), time.process_time()
      tokens = asyncio.run(workload(engine, prompts))
      seconds.append(time.perf_counter() - start)
      cpu.append(time.process_time() - start_cpu)
    median = statistics.median(seconds)
    print(
      f"  {workload.__name__[1:]:12s} {tokens} tokens: median {median:.3f} s "
      f"({tokens / median:.0f} tokens/s), best {min(seconds):.3f} s "
      f"({tokens / min(seconds):.0f} tokens/s), CPU {statistics.median(cpu):.2f} s"
    )
  engine.close()


def main(argv: list[str]) -> None:
  del argv
  for name in _MODELS.value:
    for lanes in _LANES.value:
      _measure(name, lanes)


if __name__ == "__main__":
  app.run(main)
