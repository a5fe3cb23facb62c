"""Revised trajectories, by hand, on a tree of four steps."""

import pytest

from agentjax.recipes.agent_r import SpliceConfig, splice
from agentjax.trajectory.messages import with_marks
from agentjax.trajectory.record import Message


def act(text, **fields):
  return {"role": "assistant", "content": text, **fields}


def see(text):
  return {"role": "user", "content": text}


ROOT = [see("Open the box."), act("look"), see("A box, a key.")]
GOOD = [*ROOT, act("take key"), see("Taken."), act("open box"), see("Open.")]
BAD = [*ROOT, act("go north"), see("A wall."), act("go south"), see("Here."), act("wait"), see(".")]
THOUGHT = SpliceConfig().thought


def row(messages, reward, task=1):
  return {"task": task, "messages": messages, "reward": reward}


def texts(messages):
  return [(m["content"], m.get("weight", 1)) for m in messages if m["role"] == "assistant"]


def test_the_bad_beginning_is_context_and_the_good_rest_is_learnt():
  """The good rest begins with a child of the message that both share."""
  good, revised = splice([row(GOOD, 1.0), row(BAD, 0.0)], SpliceConfig())
  assert good["messages"] == GOOD
  assert texts(revised["messages"]) == [
    ("look", 0),
    ("go north", 0),
    (f"{THOUGHT}\ntake key", 1),
    ("open box", 1),
  ]
  assert [m["content"] for m in revised["messages"]][4] == "A wall."
  assert with_marks(Message("assistant", ""), revised["messages"][3]).weight == 0


def test_it_is_cut_at_the_first_action_that_was_judged_bad():
  judged = [dict(m) for m in BAD]
  judged[3]["verdict"], judged[5]["verdict"], judged[7]["verdict"] = "uncertain", "bad", "bad"
  revised = splice([row(GOOD, 1.0), row(judged, 0.0)], SpliceConfig())[1]["messages"]
  assert [text for text, _ in texts(revised)][:3] == ["look", "go north", "go south"]
  assert "wait" not in str(revised) and "verdict" not in str(revised)


@pytest.mark.parametrize(
  "rows",
  [
    [row(GOOD, 1.0), row(BAD, 0.9)],  # the gap is small
    [row(GOOD, 1.0), row(BAD, 0.0, task=2)],  # another task
    [row(GOOD, 1.0), row([ROOT[0], act("shout"), see("Shh.")], 0.0)],  # no action in common
    [row(GOOD, 1.0), row([*ROOT, act("leave")], 0.0)],  # nothing answered the error
  ],
)
def test_other_pairs_are_not_spliced(rows):
  assert splice(rows, SpliceConfig(above=0.95)) == [{"task": 1, "messages": GOOD}]


def test_no_good_trajectory_teaches_nothing():
  assert splice([row(BAD, 0.0), row(GOOD, 0.4)], SpliceConfig()) == []


def test_pairs_with_the_largest_gap_come_first():
  worse = [*ROOT, act("break box"), see("Broken.")]
  rows = [row(BAD, 0.3), row(GOOD, 1.0), row(worse, 0.0)]
  revised = splice(rows, SpliceConfig(most=1))[1]["messages"]
  assert texts(revised)[1] == ("break box", 0)


def test_a_row_that_lacks_its_reward_is_refused():
  with pytest.raises(ValueError, match="row 1 has .*allowed: task, reward"):
    splice([row(GOOD, 1.0), {"task": 1, "messages": GOOD}], SpliceConfig())
