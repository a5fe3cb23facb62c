"""Stored episodes as transitions in words."""

import dataclasses
import json

import pytest

from agentjax.adapters.huggingface_text.chat import TemplateChat
from agentjax.config import ConfigError
from agentjax.recipes.digi_q import RecordConfig
from agentjax.recipes.digi_q.transitions import Transition, TransitionReader, representation_rows
from agentjax.trajectory.record import Message, Outcome, Reward, Status
from tests.recipes.digi_q.episodes import CHAT, IN_TWO, TASK, played
from tests.text.folders import JSON_TEMPLATE, write_vocabulary


def _read(episode, task=TASK, first_id=0, **settings):
  return TransitionReader(CHAT, RecordConfig(**settings)).read(episode, task, (), first_id)


def test_a_turn_has_what_was_seen_done_paid_and_seen_then():
  first, second, third = _read(played(["a", "b", "a"], ["room 1", IN_TWO], 0.75), first_id=7)
  assert [one.id for one in (first, second, third)] == [7, 8, 9]
  assert (first.state, first.action, first.next_state) == ("room 1", "a", "room 1\n> a\nroom 1")
  assert second.state == first.next_state and third.state == second.next_state
  assert third.state == "room 1\n> a\nroom 1\n> b\nroom 2"
  assert [one.reward for one in (first, second, third)] == [0, 0, 0.75]
  assert [one.done for one in (first, second, third)] == [False, False, True]
  # Nothing changes in the first turn, the room does in the second, the third is not answered.
  assert [one.changed for one in (first, second, third)] == [False, True, None]


def test_what_is_heard_after_the_last_turn_begins_no_state():
  (only,) = _read(played(["a"], [IN_TWO], 1.0))
  assert only.done and only.reward == 1.0 and only.changed is None


def test_a_state_is_the_tokens_that_the_policy_had():
  episode = played(["a", "b"], [IN_TWO], 1.0)
  first, second = _read(episode)
  flat = [i for s in episode.segments for i in s.token_ids.tolist()]
  assert list(second.ids) == flat[: len(second.ids)]
  assert flat[len(first.ids) :][:1] == CHAT.tokenizer.encode("a")
  assert flat[len(second.ids) :][:1] == CHAT.tokenizer.encode("b")


def test_histories_are_messages_without_loss_that_give_the_ids_back():
  episode = played(["a", "b", "a"], ["room 1", IN_TWO], 1.0)
  last = _read(episode)[-1]
  assert [m["role"] for m in last.messages] == ["user", "assistant", "user", "assistant", "user"]
  assert [m.get("weight") for m in last.messages] == [None, 0.0, None, 0.0, None]
  messages = [Message(m["role"], m["content"]) for m in last.messages]
  written = CHAT.conversation(messages[:1], [*messages[1:], Message("assistant", "a")])
  flat = [i for span in written for i in span.ids]
  assert tuple(flat[: len(last.ids)]) == last.ids


def test_a_history_that_messages_cannot_give_back_is_kept_for_the_critic_alone():
  other = dataclasses.replace(TASK, prompt=(Message("user", "another room"),))
  first, second = _read(played(["a", "b"], [IN_TWO], 1.0), task=other)
  assert first.messages is None and second.messages is None and first.state == "room 1"
  # A turn that says nothing is no demonstration, so no later turn has a history either.
  first, second, third = _read(played(["a", "", "a"], [IN_TWO, IN_TWO], 1.0))
  assert first.messages is not None and second.messages is not None and third.messages is None


def test_several_messages_and_a_turn_without_an_end_are_histories_too():
  answers = [[Message("tool", "seven"), Message("user", IN_TWO)]]
  first, second = _read(played(["a", "b"], answers, 1.0, ends=False))
  assert second.state == "room 1\n> a\nseven\nroom 2"
  assert [m["content"] for m in second.messages] == ["room 1", "a", "seven", "room 2"]


@pytest.mark.parametrize("roles", [("user",), ("tool",), ("tool", "tool"), ("tool", "user")])
def test_histories_of_a_chat_template_are_messages(tmp_path, roles):
  """Its frames differ with the place and the number of the messages."""
  write_vocabulary(tmp_path, template=JSON_TEMPLATE)
  chat = TemplateChat.from_folder(tmp_path)
  answers = [[Message(role, f"room {number}") for number, role in enumerate(roles)]]
  episode = played(["a", "b"], answers, 1.0, chat=chat)
  first, second = TransitionReader(chat, RecordConfig()).read(episode, TASK, (), 0)
  assert [m["content"] for m in first.messages] == ["room 1"]
  rooms = [f"room {number}" for number in range(len(roles))]
  assert [m["content"] for m in second.messages] == ["room 1", "a", *rooms]
  assert [m["role"] for m in second.messages] == ["user", "assistant", *roles]


def test_observations_are_compared_by_the_last_match():
  episode = played(["a", "b", "b"], ["turn 2: room 1", "turn 3: room 2"], 1.0)
  assert [one.changed for one in _read(episode)] == [True, True, None]
  by_room = _read(episode, compare=r"room \d")
  assert [one.changed for one in by_room] == [False, True, None]


def test_a_state_may_show_the_newest_turns_alone():
  episode = played(["a", "b", "a"], ["room 1", IN_TWO], 1.0)
  assert [one.state for one in _read(episode, shown_turns=1)] == [
    "room 1",
    "room 1\n> a\nroom 1",
    "room 1\n> b\nroom 2",
  ]
  assert {one.state for one in _read(episode, shown_turns=0)} == {"room 1"}


def test_the_backbone_is_asked_about_every_action_but_the_last():
  rows = representation_rows(_read(played(["a", "b", "a"], ["room 1", IN_TWO], 1.0)))
  assert [row["answer"] for row in rows] == ["no", "yes"]
  asked, answer = rows[1]["messages"]
  assert asked["content"].startswith("room 1\n> a\nroom 1\n\nAction: b\n")
  assert (answer["role"], answer["content"]) == ("assistant", "yes")


def test_a_row_gives_its_transition_back():
  for one in _read(played(["a", "b"], [IN_TWO], 1.0)):
    assert Transition.from_row(json.loads(json.dumps(one.to_row()))) == one


def _with(**changes):
  return dataclasses.replace(played(["a"], [], 1.0), **changes)


def _rewritten():
  episode = played(["a", "b"], [IN_TWO], 1.0)
  last = dataclasses.replace(episode.segments[-1], parent=None)
  return dataclasses.replace(episode, segments=[*episode.segments[:-1], last])


@pytest.mark.parametrize(
  "episode, reason",
  [
    (_with(reward=Reward.invalid("busy")), "no valid reward"),
    (_with(status=Status.ENV_ERROR), "no valid reward"),
    (_with(agents={"left": Outcome(True, Reward(1.0))}), "several agents"),
    (_rewritten(), "a history that was rewritten"),
    (played([], [], 0.0), "no turn"),
  ],
  ids=lambda value: value if isinstance(value, str) else "",
)
def test_episodes_that_are_no_chain_of_turns_are_refused(episode, reason):
  reader = TransitionReader(CHAT, RecordConfig())
  assert reader.refusal(episode) == reason and reader.read(episode, TASK, (), 0) == []


def test_a_wrong_expression_is_refused():
  with pytest.raises(ConfigError, match=r"record\.compare='\('; allowed: a regular expression"):
    RecordConfig(compare="(").validate()


def test_calls_of_tools_are_part_of_a_history():
  call = [CHAT.tokenizer.special.call, *CHAT.tokenizer.encode("open door")]
  answered = [Message("tool", "opened")]
  second = _read(played([call, "b"], [answered], 1.0))[1]
  assert second.messages[1]["tool_calls"] == [{"name": "open", "arguments": {"input": "door"}}]
  assert second.state == "room 1\n> <|call|>open door\nopened"
