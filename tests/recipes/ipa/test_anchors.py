"""Episodes that begin inside an expert's: where, what is trained on, and when that moves."""

import asyncio
import dataclasses
import json

import numpy as np

from agentjax.data.splits import FIRST_TEST_ID
from agentjax.recipes.ipa.anchors import AnchoredConfig, AnchoredWorld, is_anchored
from agentjax.trajectory.record import Message, ToolCall
from agentjax.world.world import World
from tests.rollout.conftest import REWARDS, make_task, question
from tests.rollout.scripted_engine import TOKENIZER, ScriptedEngine, say

CALL = ToolCall("calculator", {"expression": "2+2"})
EXPERT = (
  Message("assistant", "", (CALL,)),
  Message("tool", "4"),
  Message("assistant", "", (CALL,)),
  Message("tool", "4"),
  Message("assistant", "#### 4"),
)


class Questions(World):
  def environment(self, task):
    return question(task)


def task(number=1, **changes):
  return dataclasses.replace(make_task(number), demonstration=EXPERT, **changes)


def world(**settings):
  return AnchoredWorld(AnchoredConfig(**settings), Questions())


def play(run, made, said="#### 4", number=1, samples=2):
  engine = ScriptedEngine(lambda address, turn: say(said))
  return run(
    engine, [task(number)], samples=samples, make_environment=made.environment, rewards=REWARDS
  )


def test_the_policy_reads_the_experts_turns_and_learns_its_own_alone(run):
  """It has never called a tool, and goes on from two results."""
  (episode, other) = play(run, world())
  text = TOKENIZER.decode([int(t) for s in episode.segments for t in s.token_ids])
  assert text.count("2+2") == 2 and is_anchored(episode) and is_anchored(other)
  weights = np.concatenate([s.weights for s in episode.segments])
  sampled = np.concatenate([s.sampled for s in episode.segments])
  np.testing.assert_array_equal(weights > 0, sampled)
  assert TOKENIZER.decode([int(t) for s in episode.segments for t in s.token_ids[s.weights > 0]]
                          ).startswith("#### 4")  # fmt: skip
  assert episode.reward.value == 1 and not episode.tools


def test_the_anchor_moves_back_when_enough_succeed(run):
  made = world(threshold=0.5)
  assert [made.anchor(task()), made.depth] == [2, 1]
  asyncio.run(made.learn(play(run, made, said="#### 5")))
  assert made.depth == 1
  asyncio.run(made.learn(play(run, made)))
  assert [made.anchor(task()), made.depth] == [1, 2]
  again = world()
  again.set_state(json.loads(json.dumps(made.get_state().decode())).encode())
  assert again.depth == 2
  made.depth = 9
  assert made.anchor(task()) == 0 and not is_anchored(play(run, made)[0])
  asyncio.run(made.learn(play(run, made)))
  assert made.depth == 9  # nothing that could move was played


def test_held_out_and_short_tasks_begin_at_the_beginning():
  assert world().anchor(task(FIRST_TEST_ID)) == 0
  assert world().anchor(make_task(1)) == 0
  assert world(mode="parallel").anchor(make_task(1)) == 0


def test_parallel_anchors_are_everywhere_and_one_for_a_task():
  made = world(mode="parallel")
  found = [made.anchor(task(i)) for i in range(60)]
  assert set(found) == {0, 1, 2}
  assert found == [made.anchor(task(i)) for i in range(60)]


def learnt(made, seed, steps=60):
  """Steps until a policy that draws one of two keys a door opens all six without the expert.

  It raises a key that was in a success and lowers one that was in a failure, as REINFORCE would.
  """
  draw = np.random.default_rng(seed)
  keys = tuple(Message("assistant", f"key {i}") for i in range(6))
  corridor = dataclasses.replace(make_task(1), demonstration=keys)
  chance = np.full(6, 0.3)
  for _ in range(steps):
    rewards, begun = [], made.anchor(corridor) if made else 0
    for _ in range(8):
      right = draw.random(6) < chance
      won = bool(right[begun:].all())
      chance[begun:] += 0.1 * (won - np.mean(rewards or [0.0])) * (right[begun:] - chance[begun:])
      chance = np.clip(chance, 0.01, 0.99)
      rewards.append(float(won))
    if made and np.mean(rewards) >= 0.5:
      made.depth += 1
  return float(chance.prod())


def test_six_doors_are_learnt_from_the_last_and_not_from_the_first():
  """The chance of all six is .3^6 at the start: the same policy gradient from the beginning has
  nothing to learn from in as many episodes."""
  backwards = [learnt(world(), seed) for seed in range(5)]
  forwards = [learnt(None, seed) for seed in range(5)]
  assert min(backwards) > 5 * max(forwards)
