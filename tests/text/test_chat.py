import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.config import ConfigError
from agentjax.text.build import build_chat
from agentjax.text.chat import (
  ChatConfig,
  MarkedChat,
  PrefixError,
  conversation_texts,
)
from agentjax.text.tokenizer import (
  ByteTokenizer,
  SentencePieceTokenizer,
  TokenizerConfig,
  train_sentencepiece,
)
from agentjax.trajectory.record import Flag, Message, ToolCall
from tests.text.extends import assert_extends

TEXTS = st.one_of(
  st.text(max_size=12),
  st.sampled_from(["", " ", "add 3 apples", "<|end|>", "<|call|>x", "add", " apples\n", "12 34"]),
)
CALL = ToolCall("calculator", {"expression": "3+4"})


@pytest.fixture(scope="module", params=["byte", "sentencepiece"])
def tokenizer(request, tmp_path_factory):
  if request.param == "byte":
    return ByteTokenizer()
  path = tmp_path_factory.mktemp("model") / "tokenizer.model"
  train_sentencepiece(["add 3 apples to 4 apples and add them all"] * 20, path, 330)
  return SentencePieceTokenizer(path)


def _ids(spans) -> list[int]:
  return [i for span in spans for i in span.ids]


@st.composite
def conversations(draw):
  prompt = [
    Message(draw(st.sampled_from(["system", "user"])), draw(TEXTS))
    for _ in range(draw(st.integers(1, 3)))
  ]
  rounds = []
  for _ in range(draw(st.integers(1, 4))):
    calls = draw(st.lists(st.builds(lambda t: ToolCall("tool_x", {"text": t}), TEXTS), max_size=2))
    answers = [
      Message(draw(st.sampled_from(["tool", "user"])), draw(TEXTS))
      for _ in range(draw(st.integers(0, 2)))
    ]
    rounds.append((Message("assistant", draw(TEXTS), tuple(calls)), answers))
  return prompt, rounds


@settings(max_examples=200, deadline=None)
@given(conversation=conversations())
def test_turn_by_turn_gives_the_ids_of_the_whole_conversation(tokenizer, conversation):
  chat = MarkedChat(tokenizer)
  prompt, rounds = conversation
  context, messages = _ids(chat.prompt(prompt)), list(prompt)
  for turn, answers in rounds:
    drawn = chat.assistant(turn)
    longer = context + drawn + _ids(chat.observation(answers, drawn))
    messages += [turn, *answers]
    assert_extends(context, longer)
    assert longer == _ids(chat.prompt(messages))
    context = longer


@settings(max_examples=200, deadline=None)
@given(conversation=conversations(), data=st.data())
def test_turns_spelled_in_strange_tokens_stay_as_sampled(tokenizer, conversation, data):
  chat, special = MarkedChat(tokenizer), tokenizer.special
  prompt, rounds = conversation
  context = _ids(chat.prompt(prompt))
  bounds = []
  for _, answers in rounds:
    drawn = data.draw(
      st.lists(
        st.integers(0, tokenizer.vocab_size - 1).filter(lambda i: i != special.end), max_size=8
      )
    )
    closed = data.draw(st.booleans())
    sampled = [*drawn, special.end] if closed else drawn
    longer = [*context, *sampled, *_ids(chat.observation(answers, sampled))]
    assert_extends(context, longer)
    bounds.append((len(context), sampled))
    assert longer[len(context) + len(drawn)] == special.end  # closed by the policy or for it
    context = longer
  for start, sampled in bounds:
    assert context[start : start + len(sampled)] == sampled


def test_encoding_a_sampled_turn_again_is_caught():
  tokenizer = ByteTokenizer()
  chat = MarkedChat(tokenizer)
  broken_utf8 = [8 + 0xFF, tokenizer.special.end]
  context = [*_ids(chat.prompt([Message("user", "hi")])), *broken_utf8]
  text = tokenizer.decode(broken_utf8[:-1])
  again = _ids(chat.prompt([Message("user", "hi"), Message("assistant", text)]))
  with pytest.raises(PrefixError, match=f"differ at index {len(context) - 2}"):
    assert_extends(context, again)


def test_extending_means_keeping_every_id():
  assert_extends([], [])
  assert_extends([1, 2], np.array([1, 2, 3]))
  with pytest.raises(PrefixError, match="index 1: 2 was seen there, now it is 9"):
    assert_extends([1, 2], [1, 9, 3])
  with pytest.raises(PrefixError, match="2 ids were seen and only 1"):
    assert_extends([1, 2], [1])


def test_a_prompt_reads_as_documented():
  tokenizer = ByteTokenizer()
  spans = MarkedChat(tokenizer).prompt([Message("system", "Be brief."), Message("user", "3+4?")])
  assert [(s.owner, tokenizer.decode(s.ids)) for s in spans] == [
    ("system", "<|bos|><|system|>Be brief.<|end|>"),
    ("user", "<|user|>3+4?<|end|>"),
    ("assistant", "<|assistant|>"),
  ]


def test_an_observation_closes_a_turn_that_was_cut_off():
  tokenizer = ByteTokenizer()
  spans = MarkedChat(tokenizer).observation([Message("tool", "7")], tokenizer.encode("cut"))
  assert [(s.owner, tokenizer.decode(s.ids)) for s in spans] == [
    ("environment", "<|end|>"),
    ("tool", "<|tool|>7<|end|>"),
    ("assistant", "<|assistant|>"),
  ]


def test_a_demonstration_teaches_turns_with_their_markup_and_nothing_else(tokenizer):
  demonstration = [
    Message("assistant", "Add.", (CALL,)),
    Message("tool", "7"),
    Message("assistant", "#### 7"),
  ]
  spans = MarkedChat(tokenizer).conversation([Message("user", "3+4?")], demonstration)
  taught = [tokenizer.decode(s.ids) for s in spans if s.weight]
  assert taught == ["Add.<|call|>calculator 3+4<|end|>", "#### 7<|end|>"]
  rest = [tokenizer.decode(s.ids) for s in spans if not s.weight]
  assert rest == [
    "<|bos|><|user|>3+4?<|end|>",
    "<|assistant|>",
    "<|tool|>7<|end|>",
    "<|assistant|>",
  ]


def test_a_turn_has_its_own_weight_and_the_marks_of_its_tool_results(tokenizer):
  demonstration = [
    Message("assistant", "Add.", (CALL,), weight=0.5),
    Message("tool", "no such tool", flags=frozenset({Flag.TOOL_ERROR})),
    Message("assistant", "Again.", (CALL,), flags=frozenset({Flag.REFLECTION})),
    Message("tool", "7"),
    Message("assistant", "#### 7", weight=0.0),
  ]
  spans = MarkedChat(tokenizer).conversation([Message("user", "3+4?")], demonstration)
  turns = [s for s in spans if s.owner == "assistant" and len(s.ids) > 1]
  assert [s.weight for s in turns] == [0.5, 1.0, 0.0]
  assert [set(s.flags) for s in turns] == [{Flag.TOOL_ERROR}, {Flag.REFLECTION}, set()]


@settings(max_examples=100, deadline=None)
@given(conversation=conversations())
def test_a_demonstration_has_the_ids_an_episode_would_have(tokenizer, conversation):
  chat = MarkedChat(tokenizer)
  prompt, rounds = conversation
  episode = _ids(chat.prompt(prompt))
  demonstration = []
  for k, (turn, answers) in enumerate(rounds):
    drawn = chat.assistant(turn)
    episode += drawn
    demonstration.append(turn)
    if k < len(rounds) - 1:
      episode += _ids(chat.observation(answers, drawn))
      demonstration += answers
  assert _ids(chat.conversation(prompt, demonstration)) == episode


def test_texts_to_train_on_are_those_that_rendering_encodes():
  asked: list[str] = []

  class Spy(ByteTokenizer):
    def encode(self, text):
      asked.append(text)
      return super().encode(text)

  messages = [Message("user", "3+4?"), Message("assistant", "Add.", (CALL, CALL))]
  MarkedChat(Spy()).prompt(messages)
  assert list(conversation_texts(messages)) == asked


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda c: c.prompt([]), "at least one message"),
    (lambda c: c.prompt([Message("root", "x")]), "role 'root'; allowed: system, user"),
    (lambda c: c.prompt([Message("user", "x", (CALL,))]), "only an assistant message"),
    (lambda c: c.observation([Message("assistant", "x")], []), "never encoded again"),
    (lambda c: c.assistant(Message("tool", "x")), "got 'tool'"),
    (
      lambda c: c.conversation([Message("user", "x")], [Message("tool", "y")]),
      "starts and ends with an assistant",
    ),
    (lambda c: c.conversation([Message("user", "x")], []), "starts and ends with"),
  ],
)
def test_a_conversation_that_cannot_be_is_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make(MarkedChat(ByteTokenizer()))


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, argument=TEXTS, tool_call_format=st.sampled_from(["compact", "json"]))
def test_a_turn_reads_back_as_it_was_written(tokenizer, text, argument, tool_call_format):
  class Run:
    name, description = "run", "Runs code."
    parameters = {"properties": {"code": {"type": "string"}}, "required": ["code"]}

  chat = MarkedChat(tokenizer, tool_call_format)
  call = ToolCall("run", {"code": argument})
  message = Message("assistant", text, (call, call))
  assert chat.parse(chat.assistant(message, [Run()]), [Run()]) == (text, (call, call))


def test_a_system_prompt_stands_before_conversations_without_one():
  tokenizer = ByteTokenizer()
  chat = MarkedChat(tokenizer, system_prompt="Be brief.")
  own = [Message("system", "Be long."), Message("user", "3+4?")]
  assert tokenizer.decode(_ids(chat.prompt(own[1:]))) == (
    "<|bos|><|system|>Be brief.<|end|><|user|>3+4?<|end|><|assistant|>"
  )
  assert _ids(chat.prompt(own)) == _ids(MarkedChat(tokenizer).prompt(own))


OWN_FOLDERS = """
from agentjax.text import ByteTokenizer, FolderKind, MarkedChat


def read(folder, *, tool_call_format="auto", system_prompt="", thinking=None):
  chat = MarkedChat(ByteTokenizer(), system_prompt=system_prompt)
  chat.folder = folder
  return chat


FOLDERS = FolderKind(formats=("own",), read=read)
"""


def test_an_own_kind_of_folder_is_a_name(tmp_path, monkeypatch):
  (tmp_path / "own_folders.py").write_text(OWN_FOLDERS)
  monkeypatch.syspath_prepend(tmp_path)
  tokenizer = TokenizerConfig(kind="own_folders:FOLDERS", path="somewhere")
  chat = build_chat(ChatConfig(system_prompt="Be brief."), tokenizer)
  assert chat.folder == "somewhere"
  assert len(chat.prompt([Message("user", "Hi")])) == 3  # the system prompt, the user, the request
  with pytest.raises(ConfigError, match="tool_call_format='xml'; allowed: auto, own"):
    build_chat(ChatConfig(tool_call_format="xml"), tokenizer)
  with pytest.raises(ConfigError, match="tokenizer.path=None; allowed: a folder"):
    build_chat(ChatConfig(), TokenizerConfig(kind="own_folders:FOLDERS"))
  with pytest.raises(ConfigError, match="kind='own_folders'; allowed: byte, .*huggingface"):
    build_chat(ChatConfig(), TokenizerConfig(kind="own_folders"))
  with pytest.raises(ConfigError, match="is function; allowed: a FolderKind"):
    build_chat(ChatConfig(), TokenizerConfig(kind="own_folders:read", path="somewhere"))
