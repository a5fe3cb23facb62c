"""The supervised stage weighs demonstrations by the rules that reinforcement learning has."""

import types

import numpy as np
import pytest

from agentjax.objectives.preparation import prepare_supervised
from agentjax.text import ByteTokenizer
from agentjax.text.chat import MarkedChat
from agentjax.training.demonstrations import demonstration_trajectory
from agentjax.training.experiment import SupervisedStage
from agentjax.trajectory.packing import pack, to_sequences
from agentjax.trajectory.record import Flag, Message, Task, ToolCall
from agentjax.trajectory.weights import WeightConfig

CHAT = MarkedChat(ByteTokenizer())
CALL = ToolCall("calculator", {"expression": "3+4"})
TASK = Task(
  0,
  (Message("user", "3+4?"),),
  "7",
  "made",
  (
    Message("assistant", "bad", (CALL,)),
    Message("tool", "error", flags=frozenset({Flag.TOOL_ERROR})),
    Message("assistant", "again", (CALL,), flags=frozenset({Flag.REFLECTION})),
    Message("tool", "error too", flags=frozenset({Flag.TOOL_ERROR})),
    Message("assistant", "aside", weight=0.0),
    Message("user", "So?"),
    Message("assistant", "good"),
  ),
)


def learnt(*rules, **settings):
  """The texts of the segments that have weight in the loss, after their markup is taken off."""
  stage = SupervisedStage(weights=WeightConfig(rules=rules, **settings))
  stage.validate()
  parts = types.SimpleNamespace(
    chat=CHAT, tools=(), experiment=types.SimpleNamespace(supervised=stage)
  )
  made = demonstration_trajectory(TASK, parts)
  words = ("bad", "error too", "error", "again", "aside", "good", "So?", "3+4?")
  texts = [CHAT.tokenizer.decode(s.token_ids) for s in made.segments if s.weights.all()]
  return [next(w for w in words if w in text) for text in texts if any(w in text for w in words)]


@pytest.mark.parametrize(
  ("rules", "expected"),
  [
    (("role",), ["bad", "again", "good"]),
    (("observations",), ["bad", "error", "again", "error too", "good"]),
    (("role", "error_masked"), ["good"]),
    (("role", "partial"), ["again", "good"]),
    (("none", "partial"), ["3+4?", "error", "again", "error too", "aside", "So?", "good"]),
  ],
)
def test_the_rules_of_the_stage_choose_what_is_learnt(rules, expected):
  assert learnt(*rules) == expected


def test_a_masked_turn_stays_in_the_context_and_has_no_gradient():
  """Its tokens are in the batch; the loss has the coefficient 0 on them."""
  stage = SupervisedStage(weights=WeightConfig(rules=("role", "error_masked")))
  parts = types.SimpleNamespace(
    chat=CHAT, tools=(), experiment=types.SimpleNamespace(supervised=stage)
  )
  made = demonstration_trajectory(TASK, parts)
  batch = pack(to_sequences([made]), row_length=256, pad_id=0)
  prepared = prepare_supervised(batch)
  text = CHAT.tokenizer.decode(np.asarray(batch.token_ids)[0])
  assert "bad" in text and "again" in text
  taught = np.asarray(batch.token_ids)[0][np.asarray(prepared.coefficients)[0] > 0]
  assert CHAT.tokenizer.decode(taught) == "good<|end|>"
