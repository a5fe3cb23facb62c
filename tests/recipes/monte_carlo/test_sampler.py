"""Turns rewarded by completions: from which states, by how much, and at whose cost."""

import json

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.recipes.monte_carlo.sampler import (
  MonteCarlo,
  MonteCarloConfig,
  monte_carlo_part,
  turn_rewards,
)
from agentjax.rewards import Formula, RewardGraph
from agentjax.rewards.scorers import SCORERS
from agentjax.trajectory.record import MONTE_CARLO, Message, Reward, Status
from agentjax.world.environment import Environment, Observation, Step
from tests.rollout.conftest import make_task
from tests.rollout.scripted_engine import ScriptedEngine, say
from tests.rollout.test_loop import content

N = 2
REWARDS = RewardGraph(
  {"environment": SCORERS["environment"], MONTE_CARLO: monte_carlo_part},
  Formula(f"environment + {MONTE_CARLO}"),
)
# What the members say; a completion says one letter throughout.
SAID = {0: "aaa", 1: "aba", 2: "baa"}


class Letters(Environment):
  """Three turns; pays 1 at the end for nothing but "a"."""

  async def reset(self, task, key):
    self.said = []
    return Observation(task.prompt)

  async def step(self, action):
    self.said.append(action.text)
    if len(self.said) < 3:
      return Step(Observation((Message("user", "go on"),)))
    return Step(Observation(()), Reward(float(set(self.said) == {"a"})), terminated=True)

  def snapshot(self):
    return json.dumps(self.said).encode()

  def restore(self, state):
    self.said = json.loads(state)


def script(address, turn):
  sample = address[2]
  return say(SAID[sample][turn] if sample >= 0 else "ab"[(-2 - sample) % N])


def play(run, *, environment=Letters, seed=0, finished=None, **settings):
  engine = ScriptedEngine(
    script, delay=lambda a: np.random.default_rng([seed, abs(a[2])]).uniform(0, 0.004)
  )
  written = []
  members = run(
    engine,
    [make_task(1)],
    samples=3,
    rewards=REWARDS,
    sampler=MonteCarlo(MonteCarloConfig(completions=N, **settings), REWARDS),
    make_environment=lambda task: environment(),
    on_finish=written.append,
    finished=finished,
  )
  assert engine.live_contexts == engine.live_prefixes == 0
  return members, written, engine


def by_turn(trajectory):
  paid = trajectory.turn_rewards[MONTE_CARLO]
  return [p for p, s in zip(paid, trajectory.segments, strict=True) if s.sampled.any()]


def test_progress_blames_the_turn_that_lost_and_leaves_the_outcome_less_what_was_expected(run):
  members, written, _ = play(run)
  # One completion in two says "a": V is 1/2 until somebody has said "b".
  assert [by_turn(t) for t in members] == [[0, 0, -0.5], [0, -0.5, 0], [-0.5, 0, 0]]
  assert [t.reward.value for t in members] == [0.5, -0.5, -0.5]
  assert [t.address[2] for t in members] == [0, 1, 2]
  assert {id(t) for t in written} == {id(t) for t in members}  # completions leave no record


def test_labels_are_the_share_of_completions_that_succeed_behind_a_turn(run):
  members, _, engine = play(run, form="label", value="soft")
  assert [by_turn(t) for t in members] == [[0.5, 0.5, None], [0.5, 0, None], [0, 0, None]]
  assert by_turn(play(run, form="label", value="hard")[0][1]) == [1.0, 0.0, None]
  # N from behind the first turn of two turns each, N of one: nobody starts at the prompt.
  assert sum(address[2] < 0 for address, *_ in engine.requests) == 3 * N * (2 + 1)


def test_neither_time_nor_what_is_known_already_changes_a_group(run):
  first, *_ = play(run)
  again, *_ = play(run, seed=7)
  np.testing.assert_equal(content(again), content(first))
  some = {t.address: t for t in first[:2]}
  members, written, _ = play(run, finished=some)
  np.testing.assert_equal(content(members), content(first))
  assert [t.address[2] for t in written] == [2]


class Unmarked(Letters):
  """Cannot be copied in its second turn."""

  def snapshot(self):
    if len(self.said) == 1:
      raise OSError("busy")
    return super().snapshot()


def test_a_state_that_cannot_be_copied_leaves_the_turns_beside_it_without_a_reward(run):
  members, *_ = play(run, environment=Unmarked)
  assert by_turn(members[0]) == [None, None, -0.5]
  assert all(t.status is Status.OK for t in members)


def test_rewards_of_turns_from_values_by_hand():
  assert turn_rewards([0.25, 0.5, 1.0], "progress") == [0.25, 0.5, -1.0]
  assert turn_rewards([0.25, None, 1.0], "progress") == [None, None, -1.0]
  assert turn_rewards([0.25, 0.5, 1.0], "label") == [0.5, 1.0, None]
  assert turn_rewards([], "label") == turn_rewards([], "progress") == []


def test_rewards_that_compare_a_group_have_no_completions():
  compared = RewardGraph({}, Formula("best"), {"best": lambda members, task: [0.0] * len(members)})
  with pytest.raises(ConfigError, match="compare the members of a group"):
    MonteCarloConfig().build(compared)
