"""A model over an engine as a judge: exact log-probs, addressed replies, other threads."""

import asyncio
import threading

import jax
import numpy as np
import pytest

from agentjax import models
from agentjax.engine import ContextLengthError, Engine, EngineConfig, SamplingConfig
from agentjax.rewards.c2 import C2Config, arrange, measure, synthesise
from agentjax.rewards.judges import LetterJudge
from agentjax.rollout.judge import EngineJudge
from agentjax.text.chat import MarkedChat
from agentjax.trajectory.record import Message
from tests.rewards.judging import Scripted
from tests.rollout.scripted_engine import TOKENIZER

MODEL = models.ModelConfig(
  vocab_size=TOKENIZER.vocab_size, d_model=16, pattern="M*", num_heads=2, num_kv_heads=1,
  head_dim=8, mamba_heads=2, mamba_head_dim=8, mamba_state=8, chunk_size=16,
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
  choices, opening = ("A", "B", "helpful"), "<analyze>x</analyze><answer>"
  found = asyncio.run(judge.log_probs(ASKED, opening, choices))
  prefix = [i for span in CHAT.prompt(ASKED) for i in span.ids] + TOKENIZER.encode(opening)
  exact = models.cross_log_probs(params, MODEL, [prefix], [TOKENIZER.encode(c) for c in choices])
  np.testing.assert_allclose(found, exact[:, 0], atol=2e-4)
  # A letter that is nowhere near the 20 most likely tokens has a log-prob all the same.
  scores = models.score_responses(params, MODEL, [prefix], [TOKENIZER.encode("A")], full=True)
  rare = int(np.argmin(scores[0].distributions[0][32 : 32 + 95])) + 32
  letter = TOKENIZER.decode([rare])
  if TOKENIZER.encode(letter) == [rare]:
    (log_prob,) = asyncio.run(judge.log_probs(ASKED, opening, (letter,)))
    np.testing.assert_allclose(log_prob, scores[0].distributions[0][rare], atol=2e-4)


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


def test_what_does_not_fit_is_named(engine):
  judge = judge_over(engine)
  with pytest.raises(ContextLengthError, match="max_length"):
    asyncio.run(judge.log_probs((Message("user", "x" * 3000),), "", ("A",)))
  with pytest.raises(ValueError, match="at least one token"):
    asyncio.run(judge.log_probs(ASKED, "", ("A", "")))


def test_c2_takes_its_margins_from_an_engine(engine):
  judge = judge_over(engine)
  pair = arrange(0, ASKED, "this", "that")
  swapped = arrange(0, ASKED, "that", "this")
  written = [f"<analyze>x</analyze>\n1. Safety: Is it {word}?" for word in ("this", "that", "so")]
  generator = Scripted(lambda messages, key: written[len(generator.asked) - 1])

  async def both():
    return await synthesise(pair, generator, judge, C2Config(rubrics=3)), await measure(
      swapped, None, judge, key=1
    )

  result, margin = asyncio.run(both())
  assert len(set(result.margins)) == 3 and np.isfinite([result.without, margin]).all()
