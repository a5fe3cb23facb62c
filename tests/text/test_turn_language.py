"""What a grammar of tool calls lets through is read back by the parser, with valid arguments."""

import json
import random

import jsonschema
import numpy as np
import pytest

from agentjax.adapters.huggingface_text.chat import TemplateChat
from agentjax.text.chat import MarkedChat
from agentjax.text.language import LanguageError, compile_language, lifted
from agentjax.text.tokenizer import ByteTokenizer, SentencePieceTokenizer, train_sentencepiece
from agentjax.trajectory.record import Message, ToolCall
from tests.text.folders import JSON_TEMPLATE, XML_TEMPLATE, write_vocabulary


class Tool:
  description = "A tool."

  def __init__(self, name, required=(), **properties):
    self.name = name
    self.parameters = {"type": "object", "properties": properties, "required": list(required)}


TOOLS = [
  Tool("calculator", ["expression"], expression={"type": "string"}),
  Tool(
    "search",
    ["query"],
    query={"type": "string", "minLength": 1},
    limit={"type": "integer", "minimum": 1, "maximum": 20},
    kind={"enum": ["web", "news"]},
    strict={"anyOf": [{"type": "boolean"}, {"type": "null"}]},
  ),
  Tool("pick", ["colour"], colour={"type": "string", "enum": ["red", "deep blue"]}),
  Tool("now"),
]
DEMONSTRATIONS = [
  Message("assistant", "I see."),
  Message("assistant", "", tool_calls=(ToolCall("calculator", {"expression": "1 + 2"}),)),
  Message("assistant", "Text", tool_calls=(ToolCall("pick", {"colour": "deep blue"}),)),
  Message("assistant", "", tool_calls=(ToolCall("now", {}), ToolCall("now", {}))),
]
VALIDATORS = {t.name: jsonschema.Draft202012Validator(t.parameters) for t in TOOLS}


def marked(tool_call_format, tmp_path_factory):
  lines = [json.dumps({"name": t.name, "arguments": {"expression": "1 + 2"}}) for t in TOOLS] * 5
  path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.model"
  train_sentencepiece(lines, path, 340)
  return MarkedChat(SentencePieceTokenizer(path), tool_call_format)


@pytest.fixture(scope="module", params=["compact", "json", "bytes", "hermes", "xml"])
def chat(request, tmp_path_factory):
  if request.param in ("compact", "json"):
    return marked(request.param, tmp_path_factory)
  if request.param == "bytes":
    return MarkedChat(ByteTokenizer(), "json")
  folder = tmp_path_factory.mktemp(request.param)
  template = XML_TEMPLATE if request.param == "xml" else JSON_TEMPLATE
  write_vocabulary(folder, template=template)
  return TemplateChat.from_folder(folder, thinking=False)


@pytest.fixture(scope="module")
def table(chat):
  automaton = compile_language(chat.turn_language(TOOLS))
  return (*lifted(automaton, chat.tokenizer.token_bytes()), automaton.accepting)


@pytest.fixture(scope="module")
def distance(table):
  """Tokens from every state to the nearest in which a turn may end."""
  next_state, _, accepting = table
  distance = np.where(accepting, 0, 10**6)
  while True:
    through = np.where(next_state >= 0, distance[next_state], 10**6).min(axis=1) + 1
    if (through >= distance).all():
      return distance
    distance = np.minimum(distance, through)


def turn(table, distance, rng, length):
  """A random turn in tokens; beyond ``length`` the shortest way to where it may end."""
  next_state, classes, accepting = table
  rare = set(np.flatnonzero(np.bincount(classes) == 1).tolist())
  state, ids = 0, []
  while len(ids) < length or not accepting[state]:
    allowed = np.flatnonzero(next_state[state, classes] >= 0)
    targets = next_state[state, classes[allowed]]
    if len(ids) >= length:
      allowed = allowed[distance[targets] < distance[state]]
    elif rng.random() < 0.2:  # tokens that steer, which a random choice would hardly meet
      steering = [i for i in allowed if int(classes[i]) in rare]
      allowed = steering or allowed
    ids.append(int(rng.choice(list(allowed))))
    state = int(next_state[state, classes[ids[-1]]])
  return ids


def test_every_call_of_a_complete_turn_is_read_and_fits_its_tool(chat, table, distance):
  rng = random.Random(0)
  called = set()
  for _ in range(120):
    ids = turn(table, distance, rng, rng.randrange(60))
    assert chat.reserved_ids.isdisjoint(ids)
    for call in chat.parse([*ids, chat.stop_ids[0]], TOOLS).calls:
      assert call.error is None, (call, chat.tokenizer.decode(ids))
      VALIDATORS[call.name].validate(dict(call.arguments))
      called.add(call.name)
  assert len(called) >= 3


def test_what_the_chat_renders_is_allowed(chat, table):
  next_state, classes, accepting = table
  for message in DEMONSTRATIONS:
    *ids, stop = chat.assistant(message, TOOLS)
    assert stop in chat.stop_ids
    state = 0
    for token in ids:
      state = next_state[state, classes[token]]
      assert state >= 0, (message, chat.tokenizer.decode(ids))
    assert accepting[state]


def test_calls_that_do_not_fit_are_not_allowed(chat, table):
  next_state, classes, accepting = table
  wrong = [
    ToolCall("pick", {"colour": "green"}),
    ToolCall("search", {"query": "x", "limit": 21}),
    ToolCall("other", {"expression": "1"}),
  ]
  for call in wrong:
    if call.name == "search" and isinstance(chat, MarkedChat) and chat._format == "compact":
      continue  # a compact call of it is its query alone
    ids = chat.assistant(Message("assistant", "", tool_calls=(call,)), TOOLS)[:-1]
    state = 0
    for token in ids:
      state = next_state[state, classes[token]] if state >= 0 else -1
    assert state < 0 or not accepting[state], call


def test_without_tools_text_is_free_and_calls_are_not(chat):
  automaton = compile_language(chat.turn_language())
  next_state, classes = lifted(automaton, chat.tokenizer.token_bytes())
  ids = chat.tokenizer.encode("Free {text}\n é")
  assert (next_state[0, classes[ids]] >= 0).all()
  call = chat.assistant(DEMONSTRATIONS[1], TOOLS)
  state = 0
  for token in call[:-1]:
    state = next_state[state, classes[token]] if state >= 0 else -1
  assert state < 0


def test_a_schema_without_automaton_names_the_tool():
  odd = Tool("odd", x={"type": "integer", "multipleOf": 2})
  with pytest.raises(LanguageError, match="odd.*multipleOf"):
    MarkedChat(ByteTokenizer(), "json").turn_language([odd])
