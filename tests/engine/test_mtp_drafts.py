"""Drafts of prediction heads change how fast tokens come, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.engine import SamplingConfig, SlotEngine, compile_schema
from tests.engine.conftest import sizes
from tests.engine.generate import generate
from tests.engine.test_grammar import ROOM, SCHEMA, STOP, TOKENIZER, decode
from tests.engine.test_grammar import request as bound
from tests.engine.test_scheduler import PROMPTS, assert_same_bits, episode, request, run_episodes
from tests.engine.test_speculation import assert_same_tokens


@pytest.fixture(scope="module")
def model_config(model_config) -> models.ModelConfig:
  """Two depths of one layer: the third token of a draft applies the last one again."""
  return dataclasses.replace(model_config, mtp=models.MtpConfig(depths=2, pattern="*E"))


def heads_that_know(params: models.Params, rest: float) -> models.Params:
  """Models and heads that look at the last token, and to a part ``rest`` at all the others.

  With nothing of the rest each head says exactly what the model would say one token later.
  """
  shrink = functools.partial(jax.tree.map, lambda w: rest * w)
  eye = jnp.eye(params.embedding.shape[1])
  join = jnp.broadcast_to(jnp.concatenate([eye, rest * eye]), params.mtp.join.shape)
  mtp = dataclasses.replace(params.mtp, join=join, blocks=shrink(params.mtp.blocks))
  return dataclasses.replace(params, groups=shrink(params.groups), mtp=mtp)


@pytest.fixture(scope="module")
def untouched(model_config) -> models.Params:
  return models.init(model_config, jax.random.key(0))


@pytest.fixture(scope="module")
def params(untouched) -> models.Params:
  """Heads that are right now and then."""
  return heads_that_know(untouched, 0.6)


def laid_out(engine: SlotEngine) -> models.MtpCache:
  """What the heads keep of every slot."""
  programs = engine.programs
  read = jax.jit(lambda state, tables: programs._laid_out(programs._with_tables(state, tables)))
  return jax.device_get(read(engine.device.state, engine._entries.copy())).mtp_cache


@pytest.fixture
def drafting(model_config, params) -> SlotEngine:
  engine = SlotEngine(model_config, sizes(speculate="mtp"))
  engine.publish(params, 0)
  return engine


@pytest.mark.parametrize(
  "settings", [{}, {"temperature": 0.0}, {"top_p": 0.8, "temperature": 0.7}], ids=str
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
  prompts = [*PROMPTS, [2], [1] * 60, [1] * 64]
  assert_same_tokens(
    generate(drafting, prompts, **asked), generate(slot_engine, prompts, **asked), atol=1e-5
  )


def test_heads_hold_after_drafts_what_they_hold_of_the_same_ids_read_at_once(drafting):
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 48, size).astype(np.int32) for size in (1, 2, 5)]
  drafting.place(None, [0, 1, 2, 3])
  drafting.extend(list(enumerate(prompts)))
  ids = [prompt.tolist() for prompt in prompts]
  for turn in range(3):
    plan = drafting.idle_plan()
    plan.budget[:3], plan.filters.temperature[:3], plan.key_data[:3] = (
      (8, 3, 5),
      1.0,
      [[turn, 1]] * 3,
    )
    chunk = drafting.decode(plan)
    for slot in range(3):
      ids[slot] += [*chunk.token_ids[slot, : chunk.counts[slot]], turn]
      drafting.extend([(slot, np.array([turn], np.int32))])
  found = laid_out(drafting)
  drafting.place(None, [0, 1, 2, 3])
  drafting.extend([(slot, np.array(held, np.int32)) for slot, held in enumerate(ids)])
  expected = laid_out(drafting)
  for slot, held in enumerate(ids):
    np.testing.assert_allclose(found.states[slot], expected.states[slot], atol=2e-5)
    for depth in range(2):
      places = len(held) - 1 - depth
      for a, b in zip(*(jax.tree.leaves(v.entries[depth]) for v in (found, expected)), strict=True):
        np.testing.assert_allclose(a[slot, :, :places], b[slot, :, :places], atol=2e-5)
        assert np.abs(b[slot, :, :places]).min() > 0


def test_order_slots_and_neighbours_change_no_bit(drafting):
  together = generate(drafting, PROMPTS, seed=3, max_tokens=17)
  for i in (1, 4, 5):
    alone = generate(drafting, [[1]] * i + [PROMPTS[i]], seed=3, max_tokens=17)
    assert_same_bits(together[i], alone[i])


def test_turns_after_drafts_stand_on_the_accepted_tokens_alone(make_engine):
  plain = run_episodes(make_engine(), range(6))
  engine = make_engine(speculate="mtp")
  for i, turns in run_episodes(engine, range(6)).items():
    assert_same_tokens([turns], [plain[i]], atol=1e-5)
  assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens


def test_parked_contexts_keep_what_the_heads_need(make_engine):
  def episodes(engine, at_once: int) -> tuple[dict, int]:
    results = {}
    for first in range(0, 8, at_once):
      results |= run_episodes(engine, range(first, first + at_once), pause=0.01)
    return results, engine.stats.accepted_tokens

  calm, right = episodes(make_engine(speculate="mtp"), at_once=4)
  engine = make_engine(speculate="mtp", host_turns=0)
  crowded, still_right = episodes(engine, at_once=8)
  assert engine.stats.parked > 0
  for i in range(8):
    assert_same_bits(crowded[i], calm[i])
  assert still_right == right > 0


def test_forks_and_known_prompts_keep_what_the_heads_need(make_engine):
  async def main(engine, forked: bool):
    results = []
    for branch in range(3):
      source = await engine.open_ids(PROMPTS[2])
      context = (await source.fork(1))[0] if forked else source
      with contextlib.closing(source), contextlib.closing(context):
        results.append(await context.generate(request(branch, tokens=14)))
    return results

  straight = make_engine(speculate="mtp", prefix_reuse="none")
  expected = asyncio.run(main(straight, False))
  for forked in (False, True):
    engine = make_engine(speculate="mtp")
    assert_same_bits(asyncio.run(main(engine, forked)), expected)
    assert engine.stats.accepted_tokens == straight.stats.accepted_tokens > 0
  assert_same_tokens([expected], [asyncio.run(main(make_engine(), False))], atol=1e-5)


def test_heads_that_know_the_model_save_most_of_its_steps(model_config, untouched, make_engine):
  knowing = heads_that_know(untouched, 0.0)
  results = []
  for speculate in ("none", "mtp"):
    engine = make_engine(speculate=speculate)
    engine.publish(knowing, 1)
    results.append(asyncio.run(episode(engine, 2)))
  stats = engine.stats
  assert_same_tokens([results[1]], [results[0]], atol=1e-5)
  # Turns of 5, 8 and 11 tokens, in steps of four, drafts past the end of a turn or chunk included.
  tokens = sum(len(s.token_ids) for s in results[1])
  assert tokens - stats.accepted_tokens == 2 + 2 + 3
  assert stats.drafted_tokens == 3 * 7


@pytest.mark.slow
def test_grammars_forced_ids_and_drafts_go_together(model_config, params):
  grammar = compile_schema(SCHEMA, TOKENIZER, STOP)
  engines = []
  for speculate in ("none", "mtp"):
    engine = SlotEngine(model_config, sizes(**ROOM, speculate=speculate))
    engine.publish(params, 0)
    engines.append(engine)
  asked = [bound(0, grammar), bound(1, None), bound(2, grammar)]
  plain, drafted = (decode(engine, *asked) for engine in engines)
  assert_same_tokens([drafted], [plain])
  forced = [
    dataclasses.replace(r, forced_ids=tuple(s.token_ids[:7].tolist()))
    for r, s in zip(asked, plain, strict=True)
  ]
  assert_same_tokens([decode(engines[1], *forced)], [plain])


def test_compilation_stays_bounded(drafting):
  drafting.warmup()
  before = dict(drafting.programs.traces)
  generate(drafting, PROMPTS, seed=0, max_tokens=9, sampling=SamplingConfig(top_k=3))
  assert dict(drafting.programs.traces) == before
  assert set(drafting.executables()) <= set(before)


def test_heads_cost_nothing_where_they_do_not_draft(model_config, slot_engine):
  assert slot_engine.weights.params.mtp is None
  plain = SlotEngine(dataclasses.replace(model_config, mtp=None), sizes())
  assert slot_engine.programs.state_bytes == plain.programs.state_bytes
  assert slot_engine.programs.context_bytes(9) == plain.programs.context_bytes(9)


def test_a_context_is_cut_only_where_nothing_but_keys_and_values_was_kept(model_config):
  attending = dataclasses.replace(model_config, pattern="*-")
  whole = [SlotEngine(attending, sizes(speculate=s)).programs for s in ("none", "ngram", "mtp")]
  assert [programs.attention_only for programs in whole] == [True, True, False]


def test_impossible_drafts_name_the_field(model_config):
  def refused(**changes):
    SlotEngine(dataclasses.replace(model_config, **changes), sizes(speculate="mtp"))

  with pytest.raises(ConfigError, match=r"engine.speculate.*model.mtp is None"):
    refused(mtp=None)
  with pytest.raises(ConfigError, match=r"engine.speculate.*model.mtp.pattern='M-'"):
    refused(mtp=models.MtpConfig(pattern="M-"))
  with pytest.raises(ConfigError, match=r"engine.speculate.*model.second_pass"):
    refused(pattern="*-", second_pass=models.SecondPassConfig())
