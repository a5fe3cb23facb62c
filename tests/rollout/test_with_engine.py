"""The whole way from a task to a scored trajectory with a real model, engine and calculator.

The weights are random, so the environment makes the calls: it hands whatever the policy wrote to
the calculator, which mostly answers with an error message of some length.
"""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.engine import Engine, EngineConfig, SamplingConfig
from agentjax.rollout.config import RolloutConfig
from agentjax.rollout.evaluation import HeldOutConfig
from agentjax.rollout.loop import collect
from agentjax.rollout.program import Player
from agentjax.text.chat import MarkedChat
from agentjax.trajectory.packing import pack, to_sequences
from agentjax.trajectory.record import Message, Status, Task, ToolCall
from agentjax.trajectory.store import to_record
from agentjax.world.question import QuestionEnvironment
from tests.rollout.conftest import REGISTRY, REWARDS, evaluate
from tests.rollout.scripted_engine import TOKENIZER

MODEL = models.ModelConfig(
  vocab_size=TOKENIZER.vocab_size,
  d_model=32,
  pattern="M*E",
  num_heads=2,
  num_kv_heads=1,
  head_dim=16,
  mamba_heads=4,
  mamba_head_dim=8,
  mamba_state=8,
  chunk_size=16,
  num_experts=4,
  d_expert=16,
  d_shared_expert=16,
)
TASKS = [
  Task(i, (Message("user", f"{i} + {i * i} is" + "?" * (3 * i)),), str(i + i * i), "made")
  for i in (4, 0, 7, 2, 9)
]
TEMPERATURE = 0.8


class Eager(QuestionEnvironment):
  """Takes every turn as an expression, and takes its time, differently at every call."""

  async def step(self, action):
    await asyncio.sleep(np.random.default_rng().uniform(0.0, 0.01))
    call = ToolCall("calculator", {"expression": action.text})
    return await super().step(dataclasses.replace(action, tool_calls=(call,), truncated=False))


@pytest.fixture(scope="module")
def params():
  return models.init(MODEL, jax.random.key(0))


@pytest.fixture(scope="module")
def engine(params):
  config = EngineConfig(
    slots=4, max_length=320, chunk_tokens=4, extend_buckets=(32,), extend_rows=(4,),
    warmup=False,
  )  # fmt: skip
  engine = Engine(MODEL, config, decode=TOKENIZER.decode)
  engine.publish(params, 12)
  yield engine
  engine.close()


def make_player(engine, *, concurrency=16):
  return Player(
    engine=engine,
    chat=MarkedChat(TOKENIZER),
    sampling=SamplingConfig(temperature=TEMPERATURE),
    config=RolloutConfig(
      max_turns=3, max_tokens_per_turn=7, max_total_tokens=320, concurrency=concurrency
    ),
    run_seed=3,
  )


def run(engine, tasks=TASKS, **settings):
  return asyncio.run(
    collect(
      tasks,
      step=12,
      samples_per_task=3,
      player=make_player(engine, **settings),
      make_environment=lambda task: Eager(REGISTRY, max_turns=9),
      rewards=REWARDS,
    )
  )


@pytest.fixture(scope="module")
def trajectories(engine):
  return run(engine)


def content(trajectories):
  """All bits that must not depend on time."""

  def timeless(trajectory):
    segments = [dataclasses.replace(s, seconds=0.0) for s in trajectory.segments]
    tools = [dataclasses.replace(t, seconds=0.0) for t in trajectory.tools]
    return to_record(dataclasses.replace(trajectory, segments=segments, tools=tools))

  return [timeless(t) for t in trajectories]


def test_episodes_have_several_turns_with_tool_results(trajectories):
  assert len(trajectories) == 15
  assert {t.status for t in trajectories} <= {Status.TRUNCATED, Status.POLICY_ERROR}
  assert sum(len(t.tools) == 3 for t in trajectories) >= 5
  assert all(v in (12, -1) for t in trajectories for s in t.segments for v in s.versions)
  assert len({t.segments[2].token_ids.tobytes() for t in trajectories}) == 15


def test_recorded_log_probs_are_the_trainers(trajectories, params):
  batch = pack(to_sequences(trajectories), row_length=384, pad_id=TOKENIZER.pad_id)
  scores = jax.jit(models.score_tokens, static_argnums=1)(
    params,
    MODEL,
    jnp.asarray(batch.token_ids),
    jnp.asarray(batch.segment_ids),
    jnp.asarray(batch.positions),
    temperature=TEMPERATURE,
  )
  drawn = np.asarray(batch.versions) >= 0
  assert drawn.sum() > 150
  for ours, trainers in (
    (batch.behaviour_log_probs, scores.log_probs),
    (batch.entropies, scores.entropies),
  ):
    pair = np.asarray(ours)[drawn], np.asarray(trainers)[drawn]
    np.testing.assert_allclose(*pair, rtol=0, atol=2e-5)


def test_numbers_that_break_down_in_one_slot_mask_that_episode_alone(
  engine, trajectories, monkeypatch
):
  """The third dispatch gives NaN in the slot of one episode."""
  slots = engine.scheduler.lanes[0].slots
  start, calls = slots.start, 0

  def poisoned(plan):
    nonlocal calls
    calls += 1
    drawing = start(plan)
    if calls != 3:
      return drawing
    chunk = drawing.chunk()
    log_probs = chunk.behaviour_log_probs.copy()
    log_probs[int(np.flatnonzero(chunk.counts)[0])] = np.nan
    return drawing._replace(dispatched=chunk._replace(behaviour_log_probs=log_probs))

  monkeypatch.setattr(slots, "start", poisoned)
  found = run(engine)
  broken = [i for i, t in enumerate(found) if t.status is Status.ENGINE_ERROR]
  assert len(broken) == 1
  (lost,) = (found[i] for i in broken)
  assert not lost.reward.valid and "not finite" in lost.metadata["reason"]
  assert not np.isnan(np.concatenate([s.behaviour_log_probs for s in lost.segments])).any()
  others = [t for i, t in enumerate(found) if i not in broken]
  np.testing.assert_equal(
    content(others), content([t for i, t in enumerate(trajectories) if i not in broken])
  )


def test_concurrency_and_order_change_no_bit(engine, trajectories):
  np.testing.assert_equal(content(run(engine, concurrency=1)), content(trajectories))
  np.testing.assert_equal(content(run(engine, TASKS[::-1], concurrency=5)), content(trajectories))


def test_a_group_resumed_in_the_middle_gets_the_same_bits(engine, trajectories):
  finished = {t.address: t for t in trajectories[::2]}
  resumed = asyncio.run(
    collect(
      TASKS,
      step=12,
      samples_per_task=3,
      player=make_player(engine),
      make_environment=lambda task: Eager(REGISTRY, max_turns=9),
      rewards=REWARDS,
      finished=finished,
    )
  )
  np.testing.assert_equal(content(resumed), content(trajectories))


def test_the_engine_survives_a_collection_that_was_cancelled(engine, trajectories):
  async def cancelled():
    work = asyncio.ensure_future(
      collect(
        TASKS,
        step=12,
        samples_per_task=3,
        player=make_player(engine),
        make_environment=lambda task: Eager(REGISTRY, max_turns=9),
        rewards=REWARDS,
      )
    )
    await asyncio.sleep(0.05)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
      await work

  asyncio.run(cancelled())
  np.testing.assert_equal(content(run(engine)), content(trajectories))


def test_an_evaluation_is_repeatable_to_the_bit(engine):
  def report():
    return asyncio.run(
      evaluate(
        TASKS,
        player=make_player(engine),
        make_environment=lambda task: Eager(REGISTRY, max_turns=9),
        rewards=REWARDS,
        plan=HeldOutConfig(samples=2, pass_at=(2,), resamples=50),
        tool_names=REGISTRY.schemas,
        step=12,
      )
    )

  first, again = report(), report()
  assert first.overall == again.overall
  for kind in ("greedy_trajectories", "sampled_trajectories"):
    np.testing.assert_equal(content(getattr(first, kind)), content(getattr(again, kind)))
