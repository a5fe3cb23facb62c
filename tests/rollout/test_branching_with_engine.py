"""Branches of a real model: a fork is worth as much as a fresh computation, bit for bit."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest

from agentjax import models
from agentjax.engine import Engine, EngineConfig, SampleRequest, SamplingConfig
from agentjax.recipes.arpo import BranchConfig, BranchSampler
from agentjax.recipes.tree_search import TreeConfig, TreeSearch
from agentjax.rollout import keys
from agentjax.rollout.config import RolloutConfig
from agentjax.rollout.loop import collect
from agentjax.rollout.program import Player
from agentjax.text.chat import MarkedChat
from agentjax.trajectory.builder import check_trajectory
from agentjax.trajectory.record import BRANCHES, Message, Task
from tests.rollout.conftest import REGISTRY, REWARDS, idle
from tests.rollout.scripted_engine import TOKENIZER
from tests.rollout.test_with_engine import MODEL, TEMPERATURE, Eager, content

SEED = 3
TASKS = [Task(i, (Message("user", f"{i} + {i * i} is"),), str(i + i * i), "made") for i in (4, 7)]
SAMPLING = SamplingConfig(temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def engine():
  config = EngineConfig(
    slots=4, max_length=320, chunk_tokens=4, extend_buckets=(32,), extend_rows=(4,), warmup=False
  )
  engine = Engine(MODEL, config, decode=TOKENIZER.decode)
  engine.publish(models.init(MODEL, jax.random.key(0)), 12)
  yield engine
  engine.close()


def run(engine, sampler, *, concurrency=16):
  async def main():
    try:
      return await collect(
        TASKS,
        step=12,
        samples_per_task=6,
        player=Player(
          engine=engine,
          chat=MarkedChat(TOKENIZER),
          sampling=SAMPLING,
          config=RolloutConfig(
            max_turns=3, max_tokens_per_turn=7, max_total_tokens=320, concurrency=concurrency
          ),
          run_seed=SEED,
        ),
        make_environment=lambda task: Eager(REGISTRY, max_turns=9),
        rewards=REWARDS,
        sampler=sampler,
      )
    finally:
      # The engine may still put away what closed contexts held; nothing else may be under way.
      driving = {lane.task for lane in engine.scheduler.lanes if lane.task is not None}
      assert not asyncio.all_tasks() - {asyncio.current_task()} - driving
      await asyncio.wait_for(asyncio.gather(*driving), 60)

  members = asyncio.run(main())
  assert idle(engine)
  return members


ARPO = BranchSampler(BranchConfig(roots=2, base=0.9))


@pytest.fixture(scope="module")
def members(engine):
  return run(engine, ARPO)


def replay(engine, trajectory):
  """The trajectory computed anew: everything forced but the last turn, which is drawn again."""
  branches = trajectory.metadata[BRANCHES]
  last = max(i for i, s in enumerate(trajectory.segments) if s.sampled.any())

  async def main():
    samples, pending = [], []
    context = None
    for i, segment in enumerate(trajectory.segments):
      if not segment.sampled.any():
        pending += segment.token_ids.tolist()
        continue
      if context is None:
        context = await engine.open_ids(pending)
      else:
        await context.extend(pending)
      pending = []
      address = (trajectory.step, trajectory.task_id, branches[i])
      sample = await context.generate(
        SampleRequest(
          keys.turn_key(SEED, address, segment.turn),
          7,
          SAMPLING,
          stop_ids=MarkedChat(TOKENIZER).stop_ids,
          forced_ids=() if i == last else tuple(segment.token_ids.tolist()),
        )
      )
      samples.append((segment, sample))
    context.close()
    return samples

  return asyncio.run(main())


def test_a_branch_is_what_a_fresh_computation_along_its_ids_gives(engine, members):
  branched = [t for t in members if len(set(t.metadata[BRANCHES])) > 1]
  assert len(members) == 12 and len(branched) >= 4
  for trajectory in branched:
    check_trajectory(trajectory)
    for segment, sample in replay(engine, trajectory):
      np.testing.assert_array_equal(segment.token_ids, sample.token_ids)
      np.testing.assert_array_equal(segment.behaviour_log_probs, sample.behaviour_log_probs)
      np.testing.assert_array_equal(segment.entropies, sample.entropies)


def test_branches_differ_from_where_they_begin(members):
  turns = {tuple(s.token_ids.tolist()) for t in members for s in t.segments if s.sampled.any()}
  writers = {
    (t.task_id, branch, segment.turn)
    for t in members
    for segment, branch in zip(t.segments, t.metadata[BRANCHES], strict=True)
    if segment.sampled.any()
  }
  assert len(turns) == len(writers)


def test_concurrency_changes_no_bit(engine, members):
  np.testing.assert_equal(content(run(engine, ARPO, concurrency=2)), content(members))


def test_a_tree_search_of_a_real_model_does_not_depend_on_time(engine):
  def sure(trajectory, task):
    drawn = [s.behaviour_log_probs.mean() for s in trajectory.segments if s.sampled.any()]
    return float(np.exp(drawn[-1]))

  search = TreeSearch(TreeConfig(width=3, beam=2), sure)
  members = run(engine, search)
  assert len(members) == 12
  np.testing.assert_equal(content(run(engine, search, concurrency=1)), content(members))
  aepo = BranchSampler(dataclasses.replace(ARPO.config, budget="entropy", rule="threshold"))
  np.testing.assert_equal(content(run(engine, aepo, concurrency=1)), content(run(engine, aepo)))
