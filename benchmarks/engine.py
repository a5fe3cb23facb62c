r"""Decoding speed of the engine: tokens a second, and CPU seconds.

  JAX_PLATFORMS=cpu python benchmarks/engine.py

The dense model has 4.46M parameters (4 layers, d=256, ffn 1024, 4 query and 2 key/value heads of
64, vocabulary 1024): 16 prompts of 64 tokens, 128 tokens each. The hybrid and the mixture are of
the size that the quickstart trains. `agentic` runs 16 episodes of 3 turns of 32 tokens with 16
observed tokens between them, through the asyncio engine. `queue` runs 48 calls of 8 to 128 tokens,
so that newcomers take slots in the middle of others. CPU seconds count all threads. "idle" is the
share of the time in which the device waits for the host, and "ahead" the share of the chunks that
were dispatched before the last one was read: by what pays, or with --ahead always or never.

With `--speculation` one prompt alone, and 16, with and without drafts of 3 and 7 tokens, by n-grams
and by prediction heads of one depth ("*-"). "repeats" is a greedy policy whose blocks add nothing,
so that it goes round in circles, and whose heads say what it would: most drafts are right. "known"
is that policy at temperature 1, which repeats nothing. "random" draws from random weights, heads
included: hardly any draft is right. With `--grammar` the single turns again:
without room for grammars, with room that nobody uses, and with every call bound to a JSON schema.
Both print the best of the runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from agentjax import models
from agentjax.engine import (
  Engine,
  EngineConfig,
  SampleRequest,
  SamplingConfig,
  address_key,
  compile_schema,
)
from agentjax.engine.pace import Pace
from agentjax.text.tokenizer import ByteTokenizer

_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed runs of each workload.")
_LANES = flags.DEFINE_multi_integer("lanes", [1, 2], "Lanes to try.")
_CHUNK = flags.DEFINE_integer("chunk_tokens", 16, "Tokens a decode dispatch.")
_MODELS = flags.DEFINE_multi_enum(
  "model", ["dense", "hybrid", "mixture"], ["dense", "hybrid", "mixture"], "Models to run."
)
_AHEAD = flags.DEFINE_enum(
  "ahead", "paced", ["paced", "always", "never"], "Which chunks to dispatch ahead."
)
_SPECULATION = flags.DEFINE_bool("speculation", False, "Measure drafts in the place of lanes.")
_GRAMMAR = flags.DEFINE_bool("grammar", False, "Measure grammars in the place of lanes.")

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


async def _single_turn(engine: Engine, prompts: np.ndarray, **fields: Any) -> int:
  """Every prompt once; returns sampled tokens."""

  async def one(i: int) -> int:
    context = await engine.open_ids(prompts[i])
    sample = await context.generate(SampleRequest(address_key(0, i), _TOKENS, **fields))
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


async def _queue(engine: Engine, prompts: np.ndarray) -> int:
  """Calls of different lengths that wait for slots; returns sampled tokens."""

  async def one(i: int) -> int:
    context = await engine.open_ids(prompts[i % len(prompts)])
    length = int(np.random.default_rng(i).integers(8, _TOKENS + 1))
    sample = await context.generate(SampleRequest(address_key(0, i), length))
    context.close()
    return len(sample.token_ids)

  return sum(await asyncio.gather(*(one(i) for i in range(3 * len(prompts)))))


def _engine(config: models.ModelConfig, *, slots: int = _BATCH, **settings: Any) -> Engine:
  sizes = EngineConfig(
    slots=slots,
    max_length=_PROMPT + _TOKENS + _TURNS * _OBSERVED,
    chunk_tokens=_CHUNK.value,
    extend_buckets=(_OBSERVED, _PROMPT),
    extend_rows=(8, 4),
    **settings,
  )
  return Engine(config, sizes, devices=jax.local_devices()[:1])


def _measure(name: str, lanes: int) -> None:
  config = _config(name)
  engine = _engine(config, lanes=lanes)
  start = time.perf_counter()
  engine.publish(models.init(config, jax.random.key(0)), 0)
  compiled = time.perf_counter() - start
  prompts = np.random.default_rng(0).integers(0, config.vocab_size, (_BATCH, _PROMPT))
  size = models.count(models.param_specs(config)) / 1e6
  print(f"{name} {config.pattern}, {size:.2f}M parameters, {lanes} lanes, compile {compiled:.1f} s")
  for workload in (_single_turn, _agentic, _queue):
    seconds, cpu, tokens = [], [], 0
    before = dataclasses.replace(engine.stats)
    for _ in range(_REPEATS.value):
      start, start_cpu = time.perf_counter(), time.process_time()
      tokens = asyncio.run(workload(engine, prompts))
      seconds.append(time.perf_counter() - start)
      cpu.append(time.process_time() - start_cpu)
    median, now = statistics.median(seconds), engine.stats
    chunks = now.decode_dispatches - before.decode_dispatches
    idle = now.idle_seconds - before.idle_seconds
    busy = now.device_seconds - before.device_seconds
    print(
      f"  {workload.__name__[1:]:12s} {tokens} tokens: median {median:.3f} s "
      f"({tokens / median:.0f} tokens/s), best {min(seconds):.3f} s "
      f"({tokens / min(seconds):.0f} tokens/s), CPU {statistics.median(cpu):.2f} s, "
      f"idle {idle / (idle + busy):.1%}, {1e3 * idle / chunks:.2f} ms a chunk, "
      f"ahead {(now.ahead_dispatches - before.ahead_dispatches) / chunks:.0%} of {chunks}"
    )
  engine.close()


def _best(engine: Engine, prompts: np.ndarray, **fields: Any) -> tuple[float, float, int]:
  """Seconds and CPU seconds of the single turns, and their tokens."""
  seconds, cpu, tokens = [], [], 0
  for _ in range(_REPEATS.value):
    start, start_cpu = time.perf_counter(), time.process_time()
    tokens = asyncio.run(_single_turn(engine, prompts, **fields))
    seconds.append(time.perf_counter() - start)
    cpu.append(time.process_time() - start_cpu)
  return min(seconds), min(cpu), tokens


def _measure_drafts(name: str, slots: int) -> None:
  config = dataclasses.replace(_config(name), mtp=models.MtpConfig(pattern="*-"))
  prompts = np.random.default_rng(0).integers(0, config.vocab_size, (slots, _PROMPT))
  params = models.init(config, jax.random.key(0))
  # The heads look at the token alone, as the blank blocks of the model do.
  token_only = jnp.eye(2 * config.d_model, config.d_model)[None]
  nothing = jax.tree.map(jnp.zeros_like, (params.groups, params.mtp.blocks))
  heads = dataclasses.replace(params.mtp, join=token_only, blocks=nothing[1])
  blank = dataclasses.replace(params, groups=nothing[0], mtp=heads)
  cases = {
    "repeats": (blank, SamplingConfig(temperature=0.0)),
    "known": (blank, SamplingConfig()),
    "random": (params, SamplingConfig()),
  }
  plain: dict[str, float] = {}
  for speculate, drafted in (("none", 1), ("ngram", 3), ("ngram", 7), ("mtp", 3), ("mtp", 7)):
    engine = _engine(config, slots=slots, speculate=speculate, draft_tokens=drafted)
    for case, (weights, sampling) in cases.items():
      engine.publish(weights, 0)
      before = dataclasses.replace(engine.stats)
      seconds, cpu, tokens = _best(engine, prompts, sampling=sampling)
      plain.setdefault(case, seconds)
      proposed = engine.stats.drafted_tokens - before.drafted_tokens
      right = engine.stats.accepted_tokens - before.accepted_tokens
      print(
        f"{name}, {slots} slots, {case:8s} {speculate} {drafted}: {tokens / seconds:.0f} tokens/s "
        f"({plain[case] / seconds:.2f}x), CPU {cpu:.2f} s, {right}/{proposed} drafted tokens right"
      )
    engine.close()


def _measure_grammars(name: str) -> None:
  config, tokenizer = _config(name), ByteTokenizer()
  prompts = np.random.default_rng(0).integers(0, config.vocab_size, (_BATCH, _PROMPT))
  items = {"type": "array", "items": {"type": "string"}}
  start = time.perf_counter()
  grammar = compile_schema({"type": "object", "properties": {"a": items}}, tokenizer, (7,))
  compiled = time.perf_counter() - start
  states, classes = grammar.shape
  print(f"{name}: {states} states, {classes} classes of tokens, made in {compiled:.3f} s")
  bound = {"grammar": grammar, "stop_ids": (7,)}
  for case, settings, fields in (
    ("no room", {}, {}),
    ("unused", {"grammar_states": 256}, {}),
    ("bound", {"grammar_states": 256}, bound),
  ):
    engine = _engine(config, **settings)
    engine.publish(models.init(config, jax.random.key(0)), 0)
    seconds, cpu, tokens = _best(engine, prompts, **fields)
    steps = engine.stats.decode_dispatches * _CHUNK.value / _REPEATS.value
    print(
      f"  {case:8s} {tokens} tokens, {1e3 * seconds / steps:.2f} ms a step, "
      f"{1e3 * cpu / steps:.2f} of CPU"
    )
    engine.close()


def main(argv: list[str]) -> None:
  del argv
  if _AHEAD.value != "paced":
    setattr(Pace, "ahead", _AHEAD.value == "always")  # noqa: B010
  for name in _MODELS.value:
    if _SPECULATION.value:
      for slots in (1, _BATCH):
        _measure_drafts(name, slots)
    if _GRAMMAR.value:
      _measure_grammars(name)
    if _SPECULATION.value or _GRAMMAR.value:
      continue
    for lanes in _LANES.value:
      _measure(name, lanes)


if __name__ == "__main__":
  app.run(main)
