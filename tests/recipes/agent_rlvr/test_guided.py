"""Guided retry: who plays again, what is recorded, and that a failed group teaches then."""

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives import ObjectiveConfig, prepare
from agentjax.recipes.agent_rlvr.guided import GUIDED, Guided, GuidedConfig, hints_of
from agentjax.trajectory.packing import pack, to_sequences
from agentjax.trajectory.record import Message, Task, ToolCall
from tests.rollout.conftest import REWARDS, make_task
from tests.rollout.scripted_engine import TOKENIZER, ScriptedEngine, say

SIZE = 4


def play(run, said, *, finished=None, retries=2, shown=None, **metadata):
  """A group whose sample i says ``said[i]``; retries are samples 4 and 5.

  The texts of the prompts that the policy read are added to ``shown``.
  """
  engine = ScriptedEngine(lambda address, turn: say(f"#### {said[address[2]]}"))
  members = run(
    engine,
    [make_task(1, **{"hints": ["It is even.", "It is 4."]} | metadata)],
    samples=SIZE,
    sampler=Guided(GuidedConfig(retries=retries), REWARDS),
    finished=finished,
  )
  assert engine.live_contexts == engine.live_prefixes == 0
  if shown is not None:
    shown += [TOKENIZER.decode(list(ids)) for ids in engine.prefills]
  return members


def prompt_of(episode):
  first = next(i for i, s in enumerate(episode.segments) if s.sampled.any())
  return [int(t) for s in episode.segments[:first] for t in s.token_ids]


def advantages(members):
  batch = pack(to_sequences(members), row_length=256, pad_id=0)
  found = np.asarray(prepare(batch, ObjectiveConfig())[0].advantages)
  ids = np.asarray(batch.segment_ids)
  return [float(np.abs(found[ids == i + 1]).max()) for i in range(len(members))]


def test_a_failed_group_gets_retries_without_their_hints(run):
  shown = []
  members = play(run, {0: 1, 1: 2, 2: 3, 3: 5, 4: 6, 5: 4}, shown=shown)
  hinted = [text for text in shown if "Hint: It is even." in text or "Hint: It is 4." in text]
  assert len(shown) == 3 and len(hinted) == 2
  assert [one.sample for one in members] == [0, 1, 4, 5]
  assert [one.reward.value for one in members] == [0.0, 0.0, 0.0, 1.0]
  assert len({tuple(prompt_of(one)) for one in members}) == 1
  assert [one.metadata.get(GUIDED) for one in members] == [None, None, "It is even.", "It is 4."]
  assert "Hint" not in TOKENIZER.decode([int(t) for s in members[3].segments for t in s.token_ids])
  assert members[3].columns["replayed"] and not members[0].columns
  for one in members[2:]:
    assert [s.parent for s in one.segments] == [s.parent for s in members[0].segments]
    assert all(len(v) == len(one.segments) for v in one.turn_rewards.values())
  assert min(advantages(members)) > 0


def test_plain_grpo_learns_nothing_from_such_a_group(run):
  members = play(run, {0: 1, 1: 2, 2: 3, 3: 5}, hints=[])
  assert [one.sample for one in members] == [0, 1, 2, 3] and advantages(members) == [0.0] * 4


def test_a_group_with_a_success_is_left_alone(run):
  members = play(run, {0: 1, 1: 4, 2: 3, 3: 5})
  assert [one.sample for one in members] == [0, 1, 2, 3]
  assert not any(GUIDED in one.metadata for one in members)


def test_a_known_group_is_not_played_again(run):
  members = play(run, {0: 1, 1: 2, 2: 3, 3: 5, 4: 6, 5: 4})
  known = {one.address: one for one in members}
  again = play(run, {}, finished=known)
  assert all(a is b for a, b in zip(again, members, strict=True))


def test_hints_are_the_calls_of_the_worked_solution_without_others():
  call = ToolCall("calculator", {"expression": "2+2"})
  worked = (Message("assistant", "", (call,)), Message("tool", "4"), Message("assistant", "4"))
  task = Task(1, (), "4", "sums", demonstration=worked)
  assert hints_of(task, "hints") == ['calculator({"expression": "2+2"})']
  assert hints_of(Task(1, (), "4", "sums"), "hints") == []


def test_not_all_members_may_be_replaced():
  with pytest.raises(ConfigError, match=r"sampler\.retries=4.*group_size=4"):
    GuidedConfig(retries=4).check_group(4, "config.rollout")
