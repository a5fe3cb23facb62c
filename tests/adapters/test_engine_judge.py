"""A model over an engine as a judge: exact log-probs, addressed replies, other threads."""

import asyncio
import threading

import jax
import numpy as np
import pytest

from agentjax import models
from agentjax.adapters.engine_judge import EngineJudge
from agentjax.engine import (
  ContextLengthError,
  Engine,
  EngineBusyError,
  EngineConfig,
  SamplingConfig,
)
from agentjax.rewards.judges import JudgeUnavailableError, LetterJudge
from agentjax.text.chat import MarkedChat
from agentjax.trajectory.record import Message
from tests.rollout.scripted_engine import TOKENIZER

MODEL = models.ModelConfig(
  vocab_size=TOKENIZER.vocab_size, d_model=16, pattern="*", num_heads=2, num_kv_heads=1,
  head_dim=8,
)  # fmt: skip
CHAT = MarkedChat(TOKENIZER)
ASKED = (Message("user", "Which one?"),)


@pytest.fixture(scope="module")
def params():
  return models.init(MODEL, jax.random.key(0))


@pytest.fixture(scope="module")
def engine(params):
  config = EngineConfig(
    slots=4, max_length=2048, chunk_tokens=4, extend_buckets=(64,), extend_rows=(4,), warmup=False
  )
  engine = Engine(MODEL, config, decode=TOKENIZER.decode)
  engine.publish(params, 0)
  yield engine
  engine.close()


def judge_over(engine, loop=None, temperature=1.0):
  sampling = SamplingConfig(temperature=temperature)
  return EngineJudge(engine, CHAT, sampling, max_tokens=12, seed=5, loop=loop)


def test_log_probs_of_letters_are_those_of_whole_distributions(engine, params):
  judge = judge_over(engine)
  assert isinstance(judge, LetterJudge)
  opening = "<analyze>x</analyze><answer>"
  prefix = [i for span in CHAT.prompt(ASKED) for i in span.ids] + TOKENIZER.encode(opening)
  choices = ["A", "B", "helpful"]
  scores = models.score_responses(
    params, MODEL, [prefix] * 3, [TOKENIZER.encode(c) for c in choices], full=True
  )
  found = asyncio.run(judge.log_probs(ASKED, opening, choices))
  np.testing.assert_allclose(found, [s.log_probs.sum() for s in scores], atol=2e-4)
  # The letter that is least likely, far from the 20 most likely tokens, has a log-prob like any.
  first = scores[0].distributions[0]
  log_probs = {chr(c): first[TOKENIZER.encode(chr(c))[0]] for c in range(33, 127)}
  rarest = min(log_probs, key=log_probs.__getitem__)
  assert np.sum(first > log_probs[rarest]) > 20
  (log_prob,) = asyncio.run(judge.log_probs(ASKED, opening, (rarest,)))
  np.testing.assert_allclose(log_prob, log_probs[rarest], atol=2e-4)


def test_a_key_addresses_a_reply(engine):
  judge = judge_over(engine)

  async def ask():
    return [await judge.reply(ASKED, key=key) for key in (1, 2, 1)]

  first, second, again = asyncio.run(ask())
  assert first == again != second
  greedy = judge_over(engine, temperature=0.0)
  replies = {asyncio.run(greedy.reply(ASKED, key=key)) for key in (1, 2)}
  assert len(replies) == 1


def test_scorers_in_other_threads_may_ask(engine):
  """The engine's loop runs in one thread; a scorer's own asks from another."""
  loop = asyncio.new_event_loop()
  thread = threading.Thread(target=loop.run_forever)
  thread.start()
  try:
    judge = judge_over(engine, loop)
    there = asyncio.run(judge.reply(ASKED, key=1))
    letters = asyncio.run(judge.log_probs(ASKED, "", ("A", "B")))
  finally:
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
  assert there == asyncio.run(judge_over(engine).reply(ASKED, key=1))
  assert letters == asyncio.run(judge_over(engine).log_probs(ASKED, "", ("A", "B")))


def test_a_busy_engine_is_an_unavailable_judge():
  class Busy:
    async def open_ids(self, ids):
      raise EngineBusyError("8 calls wait")

  with pytest.raises(JudgeUnavailableError, match="8 calls"):
    asyncio.run(judge_over(Busy()).reply(ASKED, key=1))


def test_what_does_not_fit_is_named(engine):
  judge = judge_over(engine)
  with pytest.raises(ContextLengthError, match="max_length"):
    asyncio.run(judge.log_probs((Message("user", "x" * 3000),), "", ("A",)))
  with pytest.raises(ValueError, match="at least one token"):
    asyncio.run(judge.log_probs(ASKED, "", ("A", "")))
