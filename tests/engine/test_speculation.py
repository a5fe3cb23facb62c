"""Drafts change how fast tokens come, and nothing else."""

from __future__ import annotations

import asyncio
import dataclasses

import jax
import numpy as np
import pytest
import scipy.stats

from agentjax import models
from agentjax.config import ConfigError
from agentjax.engine import (
  EngineConfig,
  Sample,
  SamplingConfig,
  SlotEngine,
  compile_regex,
  compile_schema,
)
from agentjax.engine.speculation import NGRAM, lookup
from tests.engine.conftest import sizes
from tests.engine.generate import generate
from tests.engine.test_grammar import ROOM, SCHEMA, STOP, TOKENIZER, decode, request
from tests.engine.test_scheduler import run_episodes
from tests.engine.test_slots import PROMPTS, assert_same_bits, trainer_scores

LOOP = [3, 4, 5, 6] * 4


@pytest.fixture
def drafting(model_config, params) -> SlotEngine:
  engine = SlotEngine(model_config, sizes(speculate="ngram"))
  engine.publish(params, 0)
  return engine


def assert_same_tokens(
  found: list[list[Sample]], expected: list[list[Sample]], *, atol: float = 2e-5
) -> None:
  for a, b in zip(sum(found, []), sum(expected, []), strict=True):
    np.testing.assert_array_equal(a.token_ids, b.token_ids)
    assert a.finish == b.finish
    for name in ("behaviour_log_probs", "entropies", "sampling_log_probs"):
      np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=atol, err_msg=name)


@pytest.mark.parametrize(
  "settings",
  [{}, {"temperature": 0.3}, {"temperature": 0.0}, {"top_p": 0.8, "temperature": 0.7}],
  ids=str,
)
def test_tokens_and_log_probs_are_those_without_drafts(slot_engine, drafting, settings):
  asked = {
    "seed": 3,
    "max_tokens": 37,
    "samples": 2,
    "sampling": SamplingConfig(**settings),
    "stop_ids": (5, 11),
    "stop_strings": ("ab",),
  }
  prompts = [*PROMPTS, LOOP, [1] * 60, [1] * 64]
  assert_same_tokens(generate(drafting, prompts, **asked), generate(slot_engine, prompts, **asked))


def test_log_probs_are_those_of_the_trainer(drafting, params, model_config):
  results = generate(drafting, [LOOP, PROMPTS[2]], seed=0, max_tokens=30)
  for prompt, [sample] in zip([LOOP, PROMPTS[2]], results, strict=True):
    scores = trainer_scores(params, model_config, [*prompt, *sample.token_ids])
    np.testing.assert_allclose(
      sample.behaviour_log_probs, scores.log_probs[0, len(prompt) :], atol=2e-5
    )


def test_order_slots_and_neighbours_change_no_bit(drafting):
  together = generate(drafting, [*PROMPTS, LOOP], seed=3, max_tokens=17)
  for i in (1, 4, 5):
    prompt = [*PROMPTS, LOOP][i]
    alone = generate(drafting, [[1]] * i + [prompt], seed=3, max_tokens=17)
    assert_same_bits(together[i][0], alone[i][0])


def test_what_follows_a_call_stands_on_the_accepted_tokens_alone(make_engine):
  plain = run_episodes(make_engine(), range(6))
  engine = make_engine(speculate="ngram")
  for i, turns in run_episodes(engine, range(6)).items():
    assert_same_tokens([turns], [plain[i]])
  stats = engine.stats
  assert 0 <= stats.accepted_tokens <= stats.drafted_tokens


def test_parked_contexts_keep_what_drafts_are_made_of(make_engine):
  calm = run_episodes(make_engine(speculate="ngram"), range(4))
  engine = make_engine(speculate="ngram", host_turns=0)
  crowded = run_episodes(engine, range(9, -1, -1), pause=0.01)
  assert engine.stats.parked > 0
  for i in range(4):
    for a, b in zip(calm[i], crowded[i], strict=True):
      assert_same_bits(a, b)


def test_text_that_repeats_itself_is_drafted_right(make_engine):
  engine = make_engine(**ROOM, speculate="ngram")
  again = compile_regex("(057){9}", TOKENIZER, STOP)

  async def main(**fields):
    context = await engine.open_ids([1, 2])
    sample = await context.generate(request(0, again, **fields))
    context.close()
    return sample

  sample = asyncio.run(main())
  stats = dataclasses.replace(engine.stats)
  assert TOKENIZER.decode(sample.token_ids[:-1]) == "057" * 9
  assert 0.6 < stats.accepted_tokens / stats.drafted_tokens <= 1.0
  # Ids that are given need no luck, and are no drafts.
  forced = tuple(sample.token_ids.tolist())
  assert_same_tokens([[asyncio.run(main(forced_ids=forced))]], [[sample]])
  assert engine.stats.drafted_tokens == stats.drafted_tokens


def test_the_distribution_is_that_of_the_model(drafting, params, model_config):
  count, temperature = 1200, 0.4
  sampling = SamplingConfig(temperature=temperature)
  [samples] = generate(drafting, [LOOP], seed=0, max_tokens=2, samples=count, sampling=sampling)

  def probabilities(ids):
    hidden = trainer_scores(params, model_config, ids).hidden[0]
    logits = np.asarray(models.compute_logits(params, model_config, hidden), np.float64)
    weights = np.exp((logits - logits.max(axis=-1, keepdims=True)) / temperature)
    return weights[len(ids) - 1] / weights[len(ids) - 1].sum()

  first = probabilities(LOOP)
  second = sum(first[i] * probabilities([*LOOP, i]) for i in range(48))
  for place, expected in ((0, first), (1, second)):
    observed = np.bincount([s.token_ids[place] for s in samples], minlength=48)
    often = expected * count >= 8
    bins = np.append(expected[often], expected[~often].sum()) * count
    seen = np.append(observed[often], observed[~often].sum())
    # One fixed draw: an honest sampler fails at this level with probability 1e-4.
    assert scipy.stats.chisquare(seen, bins).pvalue > 1e-4


def test_grammars_forced_ids_and_drafts_go_together(model_config, params):
  grammar = compile_schema(SCHEMA, TOKENIZER, STOP)
  engines = []
  for speculate in ("none", "ngram"):
    engine = SlotEngine(model_config, sizes(**ROOM, speculate=speculate))
    engine.publish(params, 0)
    engines.append(engine)
  asked = [request(0, grammar), request(1, None), request(2, grammar), request(3, grammar)]
  plain, drafted = (decode(engine, *asked) for engine in engines)
  assert_same_tokens([drafted], [plain])
  forced = [
    dataclasses.replace(r, forced_ids=tuple(s.token_ids[:7].tolist()))
    for r, s in zip(asked, plain, strict=True)
  ]
  assert_same_tokens([decode(engines[1], *forced)], [plain])


def test_experts_are_recorded_for_accepted_tokens(model_config, params):
  found = []
  for speculate in ("none", "ngram"):
    config = sizes(record_experts=True, speculate=speculate)
    engine = SlotEngine(model_config, config)
    engine.publish(params, 0)
    [[sample]] = generate(engine, [LOOP], seed=0, max_tokens=20)
    found.append(sample)
  assert found[0].experts.shape == (20, 1, model_config.experts_per_token)
  np.testing.assert_array_equal(found[0].token_ids, found[1].token_ids)
  np.testing.assert_array_equal(found[0].experts, found[1].experts)


def drafts_by_hand(ids: list[int], tokens: int) -> list[int] | None:
  for size in range(NGRAM, 0, -1):
    for end in range(len(ids) - 2, size - 2, -1):
      if len(ids) > size and ids[end - size + 1 : end + 1] == ids[-size:]:
        rest = ids[end + 1 :]
        return [rest[j % len(rest)] for j in range(tokens)]
  return None


def test_drafts_follow_the_longest_latest_match():
  rng = np.random.default_rng(0)
  history = rng.integers(0, 4, (200, 24)).astype(np.int32)
  counts = rng.integers(1, 25, 200).astype(np.int32)
  drafts, found = jax.device_get(jax.jit(lookup, static_argnums=2)(history, counts, 5))
  for row in range(200):
    expected = drafts_by_hand(history[row, : counts[row]].tolist(), 5)
    assert found[row] == (expected is not None), row
    assert drafts[row].tolist() == (expected or [0] * 5), row


def test_compilation_stays_bounded(drafting):
  drafting.warmup()
  before = dict(drafting.programs.traces)
  generate(drafting, PROMPTS, seed=0, max_tokens=9, sampling=SamplingConfig(top_k=3))
  assert dict(drafting.programs.traces) == before
  assert set(drafting.executables()) <= set(before)


def test_impossible_drafts_name_the_field(model_config):
  with pytest.raises(ConfigError, match="engine.draft_tokens"):
    EngineConfig(draft_tokens=0).validate()
  with pytest.raises(ConfigError, match="engine.speculate"):
    EngineConfig(speculate="suffix").validate()
  looped = models.ModelConfig(
    vocab_size=48, d_model=32, pattern="*-*-*-", num_heads=2, num_kv_heads=1, head_dim=16,
    d_mlp=32, loop=models.LoopConfig(2, 2, mean_depth=2),
  )  # fmt: skip
  with pytest.raises(ConfigError, match=r"engine.speculate.*model.loop"):
    SlotEngine(looped, sizes(speculate="ngram"))
