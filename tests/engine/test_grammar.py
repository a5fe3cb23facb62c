"""Masks on the device: what is sampled fits, what fits is never masked, and both log-probs hold."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import re

import jax
import jsonschema
import numpy as np
import pytest

from agentjax import models
from agentjax.engine import (
  EngineConfig,
  Finish,
  Grammar,
  GrammarError,
  SampleRequest,
  SamplingConfig,
  SlotEngine,
  address_key,
  compile_regex,
  compile_schema,
  compile_tool_calls,
)
from agentjax.engine.grammar import GrammarTable, check_fits
from agentjax.engine.request import Generation
from agentjax.text.chat import MarkedChat
from agentjax.text.tokenizer import SpecialTokens
from tests.engine.conftest import sizes, text
from tests.engine.generate import generate
from tests.engine.test_slots import assert_same_bits, trainer_scores

PIECES = [
  *'{}":,[] 01257-abn', '{"', '":', '": "', '"}', '"a": ', "null", "tr", "ue", "true", '","', "ab",
  "12", b"\xc3", b"\xa9", "é", b'a\xc3', b'\xa9"', "pick ",
]  # fmt: skip


class SmallTokenizer:
  """48 ids: the special ones, then merged and cut characters across the borders of JSON."""

  name = "small"
  special = SpecialTokens()
  pad_id = 0
  vocab_size = 48

  def __init__(self):
    pieces = [piece if isinstance(piece, bytes) else piece.encode() for piece in PIECES]
    self.pieces = [b"<special>"] * 8 + pieces + [b""] * (48 - 8 - len(pieces))

  def token_bytes(self):
    return [None] * 8 + self.pieces[8:]

  def decode(self, ids):
    return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")


TOKENIZER = SmallTokenizer()
STOP = (TOKENIZER.special.end,)
ROOM = {"grammar_states": 600, "grammar_classes": 48, "grammars": 3}
SCHEMA = {
  "type": "object",
  "properties": {
    "a": {"type": "integer", "minimum": -5, "maximum": 120},
    "b": {"type": "array", "items": {"type": ["boolean", "null"]}, "maxItems": 2},
    "n": {"type": "string", "maxLength": 3},
  },
  "required": ["a", "n"],
}


class Pick:
  name, description = "pick", "Takes one of some."
  parameters = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": [True, None, "ab"]}},
    "required": ["a", "b"],
  }


@pytest.fixture
def engine(model_config, params) -> SlotEngine:
  engine = SlotEngine(model_config, sizes(**ROOM))
  engine.publish(params, 0)
  return engine


def sample(engine, grammar, *, count=40, seed=0, tokens=60, **sampling):
  settings = SamplingConfig(**{"temperature": 1.5, **sampling})
  [samples] = generate(
    engine,
    [[1, 2]],
    seed=seed,
    max_tokens=tokens,
    samples=count,
    sampling=settings,
    stop_ids=STOP,
    grammar=grammar,
  )
  return samples


@pytest.mark.parametrize("seed", range(3))
def test_all_that_a_random_policy_says_satisfies_the_schema(engine, seed):
  grammar = compile_schema(SCHEMA, TOKENIZER, STOP)
  validator = jsonschema.Draft202012Validator(SCHEMA)
  samples = sample(engine, grammar, seed=seed)
  assert {s.finish for s in samples} == {Finish.STOP}
  texts = [TOKENIZER.decode(s.token_ids[:-1]) for s in samples]
  for written in texts:
    validator.validate(json.loads(written))
  assert len(set(texts)) > 20


@pytest.mark.parametrize("tool_call_format", ["compact", "json"])
def test_calls_of_a_random_policy_are_read_and_fit_their_tool(engine, tool_call_format):
  tokenizer = SmallTokenizer()
  if tool_call_format == "json":
    # In the place of letters that the little vocabulary lacks.
    free = [i for i in range(8, 48) if not tokenizer.pieces[i]]
    for i, piece in zip(free, (b'name": "pick"', b' "arguments"'), strict=False):
      tokenizer.pieces[i] = piece
  chat = MarkedChat(tokenizer, tool_call_format)
  grammar = compile_tool_calls(chat, [Pick()])
  assert compile_tool_calls(chat, [Pick()]) is grammar
  samples = sample(engine, grammar, count=60)
  validator = jsonschema.Draft202012Validator(Pick.parameters)
  calls = 0
  for one in samples:
    if one.finish is Finish.STOP:
      for call in chat.parse(one.token_ids, [Pick()]).calls:
        assert call.error is None
        validator.validate(dict(call.arguments))
        calls += 1
    assert chat.reserved_ids.isdisjoint(one.token_ids.tolist())
  assert calls > 5


@pytest.mark.parametrize(
  "pattern", ["(a|ab|b{1,3})[12]?", '"(aé|é)"|true', "-?1(2|5)*7", '[{]"a": (true|1),?[}]']
)
def test_nothing_that_the_grammar_allows_is_masked(pattern):
  grammar = compile_regex(pattern, TOKENIZER, STOP)
  depth = 5
  # All texts of up to so many tokens, by brute force over the vocabulary.
  spelled = {(): b""}
  layer = {(): b""}
  letters = [i for i in range(8, 48) if TOKENIZER.pieces[i]]
  usable = [i for i in letters if all(chr(b) in pattern or b > 127 for b in TOKENIZER.pieces[i])]
  for _ in range(depth):
    layer = {
      (*ids, i): data + TOKENIZER.pieces[i] for ids, data in layer.items() for i in usable
      if _begins(pattern, data + TOKENIZER.pieces[i])
    }  # fmt: skip
    spelled.update(layer)
  for ids, data in spelled.items():
    state = grammar.advance(0, ids)
    assert state >= 0
    allowed = set(np.flatnonzero(grammar.allowed(state)).tolist())
    expected = {i for i in letters if _begins(pattern, data + TOKENIZER.pieces[i])}
    whole = _matches(pattern, data)
    assert allowed == expected | (set(STOP) if whole else set()), (ids, data)


def _matches(pattern: str, data: bytes) -> bool:
  try:
    return re.fullmatch(pattern, data.decode()) is not None
  except UnicodeDecodeError:
    return False


ENDINGS = [
  "", *'ab127"}', *(a + b for a in "abé127-," for b in '"}127b,'), "bb", 'é"', 'b"', "ue", "rue}",
  "ue}", "e}", '"a": 1}', 'a": 1}', '": 1}', ": 1}", " 1}", "1}", "true}", "117", "17", "11", "b1",
  "b2", "bb1", 'aé"', "true", "rue,}", "ue,}", "e,}",
]  # fmt: skip


def _begins(pattern: str, data: bytes) -> bool:
  """Whether some ending makes a whole text of it: the patterns here need short ones only."""
  endings = [e.encode() for e in ENDINGS]
  endings += [b"\xa9" + e for e in endings]
  return any(_matches(pattern, data + ending) for ending in endings)


@pytest.mark.parametrize(
  "settings", [{}, {"top_k": 3, "temperature": 0.7}, {"top_p": 0.8}, {"temperature": 0.0}], ids=str
)
def test_log_probs_of_both_distributions_are_recorded(engine, params, model_config, settings):
  grammar = compile_schema(SCHEMA, TOKENIZER, STOP)
  samples = sample(engine, grammar, count=4, **settings)
  temperature = {"temperature": 1.5, **settings}["temperature"]
  for one in samples:
    ids = one.token_ids
    scores = trainer_scores(params, model_config, [1, 2, *ids], temperature or 1.0)
    np.testing.assert_allclose(one.behaviour_log_probs, scores.log_probs[0, 2:], atol=3e-5)
    np.testing.assert_allclose(one.entropies, scores.entropies[0, 2:], atol=3e-5)
    logits = np.asarray(models.compute_logits(params, model_config, scores.hidden[0]), np.float64)
    state = 0
    for t, token in enumerate(ids):
      allowed = grammar.allowed(state)
      weights = np.where(allowed, np.exp(logits[t + 1] / (temperature or 1.0)), 0.0)
      if temperature == 0.0:
        assert weights.argmax() == token and one.sampling_log_probs[t] == 0.0
      else:
        order = np.argsort(-weights)
        kept = np.zeros(48, bool)
        mass = np.cumsum(weights[order]) - weights[order]
        kept[order[mass < settings.get("top_p", 1.0) * weights.sum()]] = True
        kept[order[settings.get("top_k") or 48 :]] = False
        expected = np.log(weights[token] / weights[kept & allowed].sum())
        np.testing.assert_allclose(one.sampling_log_probs[t], expected, atol=3e-5)
      state = grammar.advance(state, [token])
  if not settings:
    gap = np.concatenate([s.sampling_log_probs - s.behaviour_log_probs for s in samples])
    assert gap.max() > 1.0


def decode(engine, *requests: SampleRequest):
  """One request a slot, after the prompt [1, 2]."""
  slots = range(len(requests))
  engine.place(None, list(slots))
  engine.extend([(slot, np.array([1, 2], np.int32)) for slot in slots])
  most = engine.config.max_stop_ids
  running = {
    slot: Generation(r, max_stop_ids=most, decode=text)
    for slot, r in zip(slots, requests, strict=True)
  }
  results = {}
  while running:
    plan = engine.idle_plan()
    for slot, generation in running.items():
      generation.write(plan, slot, 64 - int(engine.lengths[slot]))
    chunk = engine.decode(plan)
    for slot, generation in list(running.items()):
      if generation.read(chunk, slot, 64 - int(engine.lengths[slot]), 0, 0):
        results[slot] = generation.result()
        del running[slot]
  return [results[slot] for slot in slots]


def request(seed: int, grammar: Grammar | None, tokens=50, **fields) -> SampleRequest:
  return SampleRequest(
    address_key(seed), tokens, SamplingConfig(1.5), STOP, grammar=grammar, **fields
  )


@pytest.mark.parametrize("cut", [1, 8, 11])
def test_a_forced_continuation_resumes_in_the_right_state_to_the_same_bits(engine, cut):
  asked = request(3, compile_schema(SCHEMA, TOKENIZER, STOP))
  [whole] = decode(engine, asked)
  forced = tuple(whole.token_ids[:cut].tolist())
  [again] = decode(engine, dataclasses.replace(asked, forced_ids=forced))
  assert len(whole.token_ids) > cut
  assert_same_bits(whole, again)


def test_neighbours_with_a_grammar_change_no_bit(engine, slot_engine):
  grammar = compile_schema(SCHEMA, TOKENIZER, STOP)
  [alone, _] = decode(slot_engine, request(0, None), request(1, None))
  [beside, masked] = decode(engine, request(0, None), request(1, grammar))
  assert_same_bits(alone, beside)
  [masked_alone] = decode(engine, request(1, grammar))
  assert_same_bits(masked, masked_alone)


def test_grammars_that_do_not_fit_together_take_turns(engine, model_config, params):
  patterns = ["[ab]{9}1", '"[ab ]{12}"', "(1|2){20}", "a{30}"]
  grammars = [compile_regex(p, TOKENIZER, STOP) for p in patterns]
  asked = [request(i, grammar) for i, grammar in enumerate(grammars)]
  asked[3] = request(3, grammars[0])
  states = max(g.shape[0] for g in grammars)
  tight = SlotEngine(model_config, sizes(**{**ROOM, "grammar_states": states}))
  tight.publish(params, 0)
  for a, b in zip(decode(engine, *asked), decode(tight, *asked), strict=True):
    assert_same_bits(a, b)
  assert tight.device.dispatches["decode"] > engine.device.dispatches["decode"]


def test_the_table_gives_way_to_what_is_wanted_and_starves_nobody():
  config = sizes(grammar_states=40, grammar_classes=48, grammars=2)
  table = GrammarTable(config, 4, 48)
  small = [compile_regex(f"a{{{n}}}", TOKENIZER, STOP) for n in (10, 11, 12)]
  large = compile_regex("b{35}", TOKENIZER, STOP)
  served = collections.Counter()
  for _ in range(12):
    wanted = dict(enumerate([*small, large]))
    masks, waiting = table.masks(
      {slot: (grammar, 2) for slot, grammar in wanted.items()}, jax.device_put
    )
    for slot in set(wanted) - set(waiting):
      served[slot] += 1
      row, state = masks.grammar[slot], masks.state[slot]
      grammar = wanted[slot]
      classes = np.asarray(masks.class_of_token)[row]
      following = np.asarray(masks.next_state)[state, classes]
      np.testing.assert_array_equal(following >= 0, grammar.allowed(2))
  assert min(served.values()) >= 3
  first, _ = table.masks({0: (small[0], 0)}, jax.device_put)
  again, _ = table.masks({0: (small[0], 0)}, jax.device_put)
  assert again.next_state is first.next_state  # nothing moves while nothing changes


def test_new_grammars_compile_nothing(engine):
  sample(engine, compile_regex("[ab]*", TOKENIZER, STOP), count=1)
  before = dict(engine.programs.traces)
  for i in range(6):
    sample(engine, compile_regex(f"[ab1]{{{i + 1}}}", TOKENIZER, STOP), count=2)
  assert dict(engine.programs.traces) == before


def test_contexts_of_the_event_loop_follow_their_grammars(make_engine):
  engine = make_engine(**ROOM)
  grammar = compile_schema(SCHEMA, TOKENIZER, STOP)

  async def episode(i):
    context = await engine.open_ids([1, 2, i])
    first = await context.generate(request(i, grammar, tokens=25, stop_strings=("0",)))
    await context.extend([5, 6])
    second = await context.generate(request(100 + i, compile_regex("[ab]{4}", TOKENIZER, STOP)))
    context.close()
    return first, second

  async def main():
    return await asyncio.gather(*(episode(i) for i in range(6)))

  for first, second in asyncio.run(main()):
    if first.finish is Finish.STOP:
      json.loads(TOKENIZER.decode(first.token_ids[:-1]))
    assert re.fullmatch("[ab]{4}", TOKENIZER.decode(second.token_ids[:-1]))


def test_what_cannot_work_is_refused_with_the_numbers(engine, slot_engine, model_config):
  grammar = compile_regex("[ab]{9}1", TOKENIZER, STOP)
  with pytest.raises(GrammarError, match="engine.grammar_states=0"):
    check_fits(grammar, slot_engine.config, 48)
  with pytest.raises(GrammarError, match=r"702 states.*engine.grammar_states=600"):
    check_fits(compile_regex("[ab]{700}", TOKENIZER, STOP), engine.config, 48)
  with pytest.raises(GrammarError, match="stop_ids"):
    request(0, compile_regex("a", TOKENIZER, (7, 6)))
  with pytest.raises(GrammarError, match=r"forced_ids\[1\]"):
    ids = (PIECES.index("a") + 8, PIECES.index("1") + 8)
    request(0, grammar, forced_ids=ids)
  with pytest.raises(GrammarError, match="spell"):
    compile_regex("xyz", TOKENIZER, STOP)
  with pytest.raises(GrammarError, match="stop_ids"):
    compile_regex("a", TOKENIZER, ())
  with pytest.raises(ValueError, match="engine.grammar_states"):
    EngineConfig(grammar_states=-1).validate()


def test_bytes_the_vocabulary_lacks_are_no_dead_end():
  # "x" cannot be spelled: what would need it is not begun.
  grammar = compile_regex("a(1|2x)b|ax", TOKENIZER, STOP)
  ids = [PIECES.index(p) + 8 for p in "a12b"]
  state = grammar.advance(0, ids[:1])
  assert np.flatnonzero(grammar.allowed(state)).tolist() == [ids[1]]
  assert grammar.advance(0, [ids[0], ids[1], ids[3], *STOP]) >= 0


def test_masks_are_not_computed_without_grammars(engine, slot_engine):
  assert slot_engine._grammars is None
  lowered = slot_engine.programs.decode.lower(
    slot_engine.device.state, slot_engine.weights.params, slot_engine.idle_plan()
  )
  assert jax.tree.leaves(slot_engine.idle_plan().grammars) == []
  assert "i16" not in lowered.as_text()
