"""Exact log-probs: what sampling records and what training computes are the same bits."""

from __future__ import annotations

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.engine import Engine, EngineConfig, SampleRequest, SamplingConfig, SlotEngine
from agentjax.trajectory.packing import PackedSequence, pack
from tests.models.rows import TINY, by_sequence, draw
from tests.models.rows import pack as pack_by_layout

pytestmark = pytest.mark.optimised

# Sizes that fill no vector evenly, so that a result could depend on its place in one.
HYBRID = models.ModelConfig(
  vocab_size=49,
  d_model=36,
  pattern="M*E-ME",
  num_heads=6,
  num_kv_heads=2,
  head_dim=6,
  rope_theta=100.0,
  qk_norm=True,
  d_mlp=44,
  mamba_heads=3,
  mamba_head_dim=12,
  mamba_state=10,
  chunk_size=8,
  attention_block=16,
  num_experts=6,
  d_expert=20,
  d_shared_expert=28,
  latent_size=20,
  exact_chunk=8,
)
DENSE = dataclasses.replace(
  HYBRID, pattern="*-*-", exact_chunk=4, mlp_activation="swiglu", attention_bias=True
)
LATENT = dataclasses.replace(
  HYBRID,
  pattern="A-",
  exact_chunk=1,
  tie_embeddings=True,
  mla=models.config.MlaConfig(query_lora=20, kv_lora=12, nope_dim=6, rope_dim=4, value_dim=6),
)
PROMPT, OBSERVATION = list(range(5, 26)), [7, 8, 9, 10, 11, 12]
_SIZES = EngineConfig(
  slots=5,
  max_length=96,
  chunk_tokens=6,
  extend_buckets=(4, 16),
  extend_rows=(3, 2),
  warmup=False,
)

_score = jax.jit(models.score_tokens, static_argnums=1)


def play(config: models.ModelConfig, sizes: EngineConfig, temperature: float) -> list[dict]:
  """Contexts of several turns with forks, run together: their ids, and what was drawn where."""

  async def branch(context, key: int, ids: list, drawn: list) -> dict:
    await context.extend(OBSERVATION[: 1 + key % 6])
    sample = await context.generate(
      SampleRequest((key, 4), 9 + key, SamplingConfig(temperature=temperature))
    )
    start = len(ids) + 1 + key % 6
    ids = [*ids, *OBSERVATION[: 1 + key % 6], *sample.token_ids]
    context.close()
    return {"ids": ids, "drawn": [*drawn, (start, sample)]}

  async def context(prompt: list[int], key: int) -> list[dict]:
    prefix = await engine.prefill(prompt)
    context = await engine.open(prefix)
    first = await context.generate(
      SampleRequest((key, 2), 11, SamplingConfig(temperature=temperature, top_p=0.9))
    )
    ids, drawn = [*prompt, *first.token_ids], [(len(prompt), first)]
    (fork,) = await context.fork(1)
    return await asyncio.gather(branch(context, key, ids, drawn), branch(fork, key + 1, ids, drawn))

  async def everything() -> list[dict]:
    prompts = [PROMPT[: 1 + 5 * i] for i in range(4)]
    found = await asyncio.gather(*(context(p, 3 * i) for i, p in enumerate(prompts)))
    return [one for pair in found for one in pair]

  engine = Engine(config, sizes, devices=jax.local_devices()[:1])
  engine.publish(draw(config, seed=4), 0)
  try:
    return asyncio.run(everything())
  finally:
    engine.close()


def trained(config: models.ModelConfig, played: list[dict], temperature: float) -> list[np.ndarray]:
  """The trainer's log-probs of each context, as the packer places them."""
  count = [len(one["ids"]) for one in played]
  zeros = [np.zeros(n, np.float32) for n in count]
  sequences = [
    PackedSequence(
      str(i), np.array(one["ids"], np.int32), z, z, z, z.astype(np.int32), z.astype(np.int32)
    )
    for i, (one, z) in enumerate(zip(played, zeros, strict=True))
  ]
  align = max(1, config.exact_chunk)
  batch = pack(sequences, row_length=128 // align * align, pad_id=3, align=align)
  rows = [jnp.asarray(v) for v in (batch.token_ids, batch.segment_ids, batch.positions)]
  scores = _score(draw(config, seed=4), config, *rows, temperature=temperature)
  log_probs, segments = np.asarray(scores.log_probs), np.asarray(batch.segment_ids)
  return [log_probs[segments == i + 1] for i in range(len(played))]


def assert_exact(config: models.ModelConfig, sizes: EngineConfig, temperature: float) -> None:
  played = play(config, sizes, temperature)
  for one, log_probs in zip(played, trained(config, played, temperature), strict=True):
    assert len(one["drawn"]) == 2
    for start, sample in one["drawn"]:
      end = start + len(sample.token_ids)
      np.testing.assert_array_equal(sample.behaviour_log_probs, log_probs[start:end])


@pytest.mark.parametrize(
  ("config", "temperature"),
  [(HYBRID, 0.7), (DENSE, 1.0), (dataclasses.replace(DENSE, compute_dtype="bfloat16"), 1.0)],
  ids=["hybrid", "dense", "dense bfloat16"],
)
def test_log_probs_of_sampling_and_training_are_the_same_bits(config, temperature):
  assert_exact(config, _SIZES, temperature)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("config", "temperature"),
  [
    (dataclasses.replace(HYBRID, exact_chunk=1), 1.0),
    (dataclasses.replace(HYBRID, exact_chunk=13, chunk_size=4, attention_block=64), 0.7),
    (dataclasses.replace(HYBRID, compute_dtype="bfloat16"), 0.7),
    (dataclasses.replace(DENSE, rope_theta=None, qk_norm=False), 1.3),
    (dataclasses.replace(HYBRID, mlp_activation="swiglu", router_scores="softmax"), 1.0),
    (dataclasses.replace(HYBRID, zero_experts=2, latent_size=0, num_heads=2), 1.0),
    (dataclasses.replace(HYBRID, unrolled_blocks=1, pattern="M*M*E-E-"), 1.0),
    (LATENT, 0.7),
  ],
  ids=[
    "chunks of one token",
    "odd chunks",
    "bfloat16",
    "no position embedding",
    "gated softmax",
    "zero experts",
    "scanned layers",
    "latent attention",
  ],
)
def test_so_they_are_for_every_kind_of_block(config, temperature):
  assert_exact(config, _SIZES, temperature)


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    {"slots": 8, "lanes": 2},
    {"slots": 3, "extend_buckets": (1, 7), "extend_rows": (1, 1)},
    {"record_experts": True, "chunk_tokens": 1},
  ],
  ids=str,
)
def test_slots_lanes_and_cuts_of_an_extension_change_no_bit(changes):
  assert_exact(HYBRID, dataclasses.replace(_SIZES, **changes), 1.0)


@pytest.mark.slow
def test_recorded_experts_are_those_of_training():
  params, config = draw(HYBRID, seed=4), HYBRID
  engine = SlotEngine(config, dataclasses.replace(_SIZES, record_experts=True))
  engine.publish(params, 0)
  ids = np.arange(21, dtype=np.int32)
  engine.place(None, [3])
  found = [r.experts() for r in engine.extend([(3, ids[:7]), (3, ids[7:])])]
  plan = engine.idle_plan()
  plan.budget[3] = 6
  plan.filters.temperature[3] = 1.0
  chunk = engine.decode(plan)
  found = np.concatenate([*found, chunk.experts[3]])
  rows = pack_by_layout([np.concatenate([ids, chunk.token_ids[3]])], [[0]], 32)
  own = _score(params, config, *rows).routing.experts
  np.testing.assert_array_equal(found, np.moveaxis(own[:, 0, :27], 0, 1))


@functools.partial(jax.jit, static_argnums=1)
def _gradients(params, config, rows, weights):
  def loss(params):
    scores = models.score_tokens(params, config, *rows, temperature=0.7)
    real = (rows.segment_ids != 0)[..., None]
    return jnp.sum(weights * (scores.log_probs + 0.1 * scores.entropies)) + jnp.sum(
      jnp.where(real, jnp.square(scores.hidden), 0.0)
    )

  return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize(
  "exact",
  [pytest.param(TINY, marks=pytest.mark.slow, id="hybrid"), pytest.param(DENSE, id="dense")],
)
def test_gradients_are_those_of_the_ordinary_computation(exact):
  exact = dataclasses.replace(exact, exact_chunk=4, logits_chunk=6)
  rng = np.random.default_rng(2)
  sequences = [rng.integers(0, 41, n) for n in (12, 16, 20, 8)]
  rows = pack_by_layout(sequences, [[0, 2], [1, 3]], 32)
  params, weights = draw(exact, seed=1), jnp.asarray(rng.standard_normal((2, 32)), jnp.float32)
  ordinary = dataclasses.replace(exact, exact_chunk=0)
  value, found = _gradients(params, exact, rows, weights)
  expected_value, expected = _gradients(params, ordinary, rows, weights)
  assert float(value) == pytest.approx(float(expected_value), rel=1e-5)
  for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(got, wanted, atol=1e-4 * float(jnp.abs(wanted).max()) + 1e-8)
  assert float(max(jnp.abs(g).max() for g in jax.tree.leaves(found))) > 1e-2


def test_exact_values_are_those_of_the_ordinary_computation():
  exact = dataclasses.replace(TINY, exact_chunk=4)
  sequences = [np.arange(n) % 41 for n in (12, 16, 20, 7)]
  rows = pack_by_layout(sequences, [[0, 2], [1, 3]], 32)
  params = draw(exact, seed=1)
  found = _score(params, exact, *rows)
  wanted = _score(params, TINY, *rows)
  for name in ("log_probs", "entropies", "log_normalizers"):
    np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), atol=2e-5)
  hidden = (by_sequence(v.hidden, rows) for v in (found, wanted))
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), *hidden)
  np.testing.assert_allclose(found.routing.load, wanted.routing.load)


@pytest.mark.slow
def test_bfloat16_without_the_grid_is_off_by_less_than_half_a_nat():
  """What ``exact_chunk`` takes away; the largest gaps are where a router chose another expert."""
  config = dataclasses.replace(HYBRID, compute_dtype="bfloat16", exact_chunk=0)
  played = play(config, _SIZES, 1.0)
  found = trained(config, played, 1.0)
  gaps = [
    np.abs(sample.behaviour_log_probs - log_probs[start : start + len(sample.token_ids)]).max()
    for one, log_probs in zip(played, found, strict=True)
    for start, sample in one["drawn"]
  ]
  assert 0.01 < max(gaps) < 0.5


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"pattern": "S", "mla": LATENT.mla}, r"exact_chunk=8; allowed: 0 with blocks 'S' \(LongCat"),
    ({"pattern": "*-*-", "second_pass": models.SecondPassConfig()}, "second_pass"),
    ({"pattern": "*-*-*-", "loop": models.LoopConfig()}, "0 with config.loop"),
    ({"kernels": "pallas_gpu"}, "kernels='pallas_gpu'"),
    ({"exact_chunk": -1}, "exact_chunk=-1"),
  ],
  ids=str,
)
def test_what_cannot_be_exact_is_refused(changes, message):
  with pytest.raises(ConfigError, match=message):
    dataclasses.replace(HYBRID, **changes).validate()


def test_rows_off_the_grid_and_replayed_experts_are_refused():
  rows = pack_by_layout([np.arange(20)], [[0]], 30)
  params = draw(HYBRID, seed=0)
  with pytest.raises(ValueError, match=r"rows of 30 tokens.*model\.exact_chunk=8"):
    models.score_tokens(params, HYBRID, *rows)
  rows = pack_by_layout([np.arange(20)], [[0]], 32)
  experts = jnp.zeros((2, 1, 32, 2), jnp.int32)
  with pytest.raises(ValueError, match="leave them out"):
    models.score_tokens(params, HYBRID, *rows, experts=experts)
