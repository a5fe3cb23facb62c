"""A random policy under the grammar of tool calls: whatever it calls is well formed."""

import asyncio
import dataclasses

import jax
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.engine import Engine, EngineConfig, GrammarError, SamplingConfig
from agentjax.rollout.config import RolloutConfig
from agentjax.rollout.loop import collect
from agentjax.rollout.program import Player
from agentjax.text.chat import MarkedChat
from agentjax.tools.function import function_tool
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import Flag, Status
from agentjax.world.question import QuestionEnvironment
from tests.engine.test_grammar import SmallTokenizer
from tests.rollout.conftest import REWARDS, make_task


class Tokenizer(SmallTokenizer):
  """A vocabulary so small that a random policy draws calls and ends."""

  def encode(self, text):
    return [8 + ord(character) % 30 for character in text[:9]]


TOKENIZER = Tokenizer()


@function_tool
def pick(a: int, b: bool | None = None) -> int:
  """Takes one of some."""
  return a + bool(b)


REGISTRY = ToolRegistry([pick])
MODEL = models.ModelConfig(
  vocab_size=48, d_model=16, pattern="*-", num_heads=1, num_kv_heads=1, head_dim=16, d_mlp=16
)
CONFIG = RolloutConfig(max_turns=3, max_tokens_per_turn=48, max_total_tokens=320)


@pytest.fixture(scope="module")
def params():
  return models.init(MODEL, jax.random.key(0))


def run(params, grammar, states=200):
  sizes = EngineConfig(
    slots=8, max_length=320, chunk_tokens=8, extend_buckets=(32,), extend_rows=(4,), warmup=False,
    grammar_states=states,
  )  # fmt: skip
  engine = Engine(MODEL, sizes, decode=TOKENIZER.decode)
  engine.publish(params, 0)
  player = Player(
    engine=engine,
    chat=MarkedChat(TOKENIZER),
    sampling=SamplingConfig(temperature=1.3),
    config=dataclasses.replace(CONFIG, grammar=grammar),
    run_seed=0,
  )
  try:
    return asyncio.run(
      collect(
        [make_task(0)],
        step=0,
        samples_per_task=40,
        player=player,
        make_environment=lambda task: QuestionEnvironment(REGISTRY, max_turns=3),
        rewards=REWARDS,
      )
    )
  finally:
    engine.close()


def calls(trajectories):
  chat = MarkedChat(TOKENIZER)
  turns = [s for t in trajectories for s in t.segments if s.versions[0] >= 0]
  whole = [s for s in turns if Flag.TRUNCATED not in s.flags]
  return [c for s in whole for c in chat.parse(s.token_ids, [pick]).calls]


def test_every_call_that_a_policy_finishes_is_well_formed(params):
  free, masked = run(params, "none"), run(params, "tool_calls")
  assert any(c.error is not None or c.name != "pick" for c in calls(free))
  assert len(calls(masked)) > 5
  for call in calls(masked):
    assert call.error is None and call.name == "pick"
    assert isinstance(call.arguments["a"], int)
  assert Status.POLICY_ERROR in {t.status for t in free}
  assert Status.POLICY_ERROR not in {t.status for t in masked}
  assert all(record.status == "ok" for t in masked for record in t.tools)


def test_a_grammar_without_room_in_the_engine_names_the_setting(params):
  with pytest.raises(GrammarError, match="engine.grammar_states=0"):
    run(params, "tool_calls", states=0)


def test_an_unknown_grammar_is_refused():
  with pytest.raises(ConfigError, match="rollout.grammar"):
    RolloutConfig(grammar="json").validate("rollout")
