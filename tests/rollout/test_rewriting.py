"""A program rewrites the history: a new branch, and every sampled token is trained once."""

import functools

import numpy as np
import pytest

from agentjax.rollout.program import tool_episode
from agentjax.trajectory.builder import check_trajectory, leaves, token_paths
from agentjax.trajectory.packing import to_sequences
from agentjax.trajectory.record import Message, Status
from agentjax.world.environment import Observation
from tests.rollout.conftest import make_task
from tests.rollout.scripted_engine import TOKENIZER, ScriptedEngine, say

TURNS = [say("", call="calculator 1+2"), say("", call="calculator 3+4"), say("#### 4")]


def summarising(after):
  """The tool loop, which keeps a summary alone after so many turns."""

  async def program(episode):
    await episode.open(await episode.reset())
    while True:
      step = await episode.step(await episode.act())
      if episode.turn == after:
        notes = Message("user", f"So far: {step.observation.messages[-1].content}.")
        await episode.rewrite(Observation((*episode.task.prompt, notes)))
      else:
        await episode.observe(step.observation)

  return program


def play(run, after, turns=TURNS, **settings):
  engine = ScriptedEngine(lambda address, turn: turns[turn])
  (episode,) = run(engine, [make_task(1)], program=summarising(after), **settings)
  check_trajectory(episode)
  assert engine.live_contexts == engine.live_prefixes == 0
  return engine, episode


def text(ids):
  return TOKENIZER.decode(np.asarray(ids).tolist())


@pytest.mark.parametrize("after", [1, 2])
def test_the_new_history_is_a_branch_and_every_sampled_token_is_trained_once(run, after):
  engine, episode = play(run, after)
  assert episode.status is Status.OK and episode.reward.value == 1.0
  assert len(leaves(episode)) == 2
  before, later = token_paths(episode)
  drawn = [t for turn in TURNS for t in turn]
  assert [*before.token_ids[before.sampled], *later.token_ids[later.sampled]] == drawn
  sequences = to_sequences([episode])
  assert sum(float(s.weights.sum()) for s in sequences) == len(drawn)
  assert [s.reward for s in sequences] == [1.0, 1.0] and len({s.group for s in sequences}) == 1
  assert "So far" not in text(before.token_ids)
  assert "So far: " + ("3" if after == 1 else "7") in text(later.token_ids)
  # What the policy saw last is the later branch, up to its own turn.
  assert engine.seen[5, 1, 0] == later.token_ids[: -len(TURNS[-1])].tolist()


def test_turns_are_counted_on(run):
  _, episode = play(run, 2)
  assert [s.turn for s in episode.segments if s.sampled.any()] == [0, 1, 2]
  assert np.unique(token_paths(episode)[1].turns).tolist() == [1, 2]


def test_text_of_an_earlier_turn_that_is_repeated_has_no_loss(run):
  turns = [say("2 and 2 is 4", call="calculator 2+2"), say("#### 4")]

  async def recalling(episode):
    await episode.open(await episode.reset())
    action = await episode.act()
    step = await episode.step(action)
    said = Message("assistant", action.text, action.tool_calls)
    history = (*episode.task.prompt, said, *step.observation.messages)
    await episode.rewrite(Observation(history))
    await episode.step(await episode.act())

  engine = ScriptedEngine(lambda address, turn: turns[turn])
  (episode,) = run(engine, [make_task(1)], program=recalling)
  before, later = token_paths(episode)
  assert "2 and 2 is 4" in text(later.token_ids)
  assert later.weights.sum() == len(turns[1]) and before.weights.sum() == len(turns[0])


def test_no_history_is_rewritten_for_a_turn_that_is_not_left(run):
  _, episode = play(run, 2, max_turns=2)
  assert episode.status is Status.TRUNCATED and "max_turns=2" in episode.metadata["reason"]
  assert len(leaves(episode)) == 1


def test_a_rewritten_history_that_is_too_long_truncates(run):
  async def flooding(episode):
    await episode.open(await episode.reset())
    await episode.step(await episode.act())
    await episode.rewrite(Observation((Message("user", "x" * 500),)))

  engine = ScriptedEngine(lambda address, turn: TURNS[turn])
  (episode,) = run(engine, [make_task(1)], program=flooding)
  assert episode.status is Status.TRUNCATED and engine.live_contexts == 0


def test_a_context_manager_rewrites_what_the_tool_loop_shows(run):
  async def second_only(episode, observation):
    if episode.turn == 2:
      return Observation((*episode.task.prompt, *observation.messages))
    return None

  engine = ScriptedEngine(lambda address, turn: TURNS[turn])
  program = functools.partial(tool_episode, context=second_only)
  (episode,) = run(engine, [make_task(1)], program=program)
  check_trajectory(episode)
  before, later = token_paths(episode)
  assert episode.status is Status.OK and len(leaves(episode)) == 2
  assert later.weights.sum() == len(TURNS[2])
  assert before.weights.sum() == len(TURNS[0]) + len(TURNS[1])
