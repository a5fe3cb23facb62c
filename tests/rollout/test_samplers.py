"""Oversampling: who makes the group, who is abandoned, what is freed."""

import asyncio

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.recipes.arpo import BranchConfig, BranchSampler
from agentjax.rollout.config import RolloutConfig, SamplerConfig
from agentjax.rollout.samplers import Oversample, OversampleConfig
from agentjax.trajectory.record import Message, Status
from agentjax.world.environment import Observation, Step
from tests.recipes.arpo.test_branching import Ladder
from tests.rollout.conftest import REWARDS, make_task
from tests.rollout.scripted_engine import ScriptedEngine, say
from tests.rollout.test_loop import content

MORE = {"max_total_tokens": 100_000, "max_turns": 20}


def lengths(address, turn):
  """Sample s takes a number of turns that is not in the order of the samples."""
  turns = (5, 3, 9, 1, 7, 2, 8, 4)[address[2] % 8]
  return say("#### 4") if turn + 1 >= turns else say("", call="calculator 2+2")


def oversample(run, rule, *, seed=0, size=4, **options):
  engine = ScriptedEngine(
    lengths, delay=lambda a: np.random.default_rng([seed, *a]).uniform(0.0, 0.004)
  )
  options.setdefault("make_environment", lambda task: Ladder([], rungs=20))
  members = run(
    engine,
    [make_task(1), make_task(2)],
    samples=size,
    sampler=Oversample(OversampleConfig(factor=2.0, rule=rule)),
    **MORE,
    **options,
  )
  assert engine.live_contexts == engine.live_prefixes == 0
  return members, engine


class Answering(Ladder):
  """Ends with the first turn that holds an answer."""

  async def step(self, action):
    if "####" in action.text:
      return Step(Observation(()), terminated=True, answer="4")
    return Step(Observation((Message("tool", "4"),)))


def answering(task):
  return Answering([])


def test_the_shortest_make_the_group_and_time_decides_nothing(run):
  members, engine = oversample(run, "shortest", make_environment=answering)
  assert [t.sample for t in members] == [1, 3, 5, 7] * 2
  assert all(t.status is Status.OK for t in members)
  for seed, concurrency in ((1, 16), (2, 3), (3, 1)):
    again, _ = oversample(
      run, "shortest", seed=seed, concurrency=concurrency, make_environment=answering
    )
    np.testing.assert_equal(content(again), content(members))
  asked = [turn for a, turn, _ in engine.requests if a == (5, 1, 2)]
  assert max(asked) < 8  # abandoned before its ninth turn


def test_the_first_to_end_make_the_group_and_the_rest_is_abandoned_at_once(run):
  closed = []

  class Endless(Answering):
    async def step(self, action):
      if self.sample % 2:
        await asyncio.sleep(60)
      return await super().step(action)

    async def reset(self, task, key):
      self.sample = len(closed_or_open)
      closed_or_open.append(self)
      return await super().reset(task, key)

    async def close(self):
      closed.append(self)

  closed_or_open = []
  members, _ = oversample(run, "first", make_environment=lambda task: Endless([]), size=4)
  assert len(members) == 8 and all(t.status is Status.OK for t in members)
  assert len(closed) == len(closed_or_open) == 16


def test_a_spare_takes_the_place_of_a_fault(run):
  made = []

  def make(task):
    made.append(task)

    class Broken(Answering):
      async def step(self, action):
        raise OSError("the disk is on fire")

    return (Broken if len(made) in (4, 6) else Answering)([])

  members, _ = oversample(run, "shortest", make_environment=make, concurrency=1)
  assert [t.sample for t in members if t.task_id == 1] == [0, 1, 4, 7]
  assert all(t.status is Status.OK for t in members)


def test_faults_fill_a_group_only_where_nobody_else_is_left(run):
  class Broken(Answering):
    async def step(self, action):
      raise OSError("the disk is on fire")

  members, _ = oversample(run, "shortest", make_environment=lambda task: Broken([]))
  assert len(members) == 8 and {t.status for t in members} == {Status.ENV_ERROR}


def test_a_complete_group_is_not_run_again(run):
  members, _ = oversample(run, "shortest", make_environment=answering)
  again, engine = oversample(
    run, "shortest", make_environment=answering, finished={t.address: t for t in members}
  )
  assert not engine.requests and all(a is b for a, b in zip(again, members, strict=True))


# By name.


def test_a_config_names_its_sampler():
  def named(name):
    return SamplerConfig.from_name(name, "config.rollout.sampler")

  assert RolloutConfig().sampler.build(REWARDS) is None
  assert named("branch").build(REWARDS) == BranchSampler(BranchConfig())
  assert named("oversample").build(REWARDS) == Oversample(OversampleConfig())
  with pytest.raises(ConfigError, match="config.rollout.sampler='chess'; allowed: 'independent'"):
    named("chess")


def test_impossible_settings_are_refused():
  with pytest.raises(ConfigError, match="rollout.sampler.factor=0.5; allowed: >= 1"):
    RolloutConfig(sampler=OversampleConfig(factor=0.5)).validate("rollout")
