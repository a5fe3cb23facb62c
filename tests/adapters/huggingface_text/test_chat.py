import itertools
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.adapters.huggingface_text.chat import TemplateChat, TemplateRefusal, _jinja2
from agentjax.config import ConfigError
from agentjax.faults import Boundary, Owner
from agentjax.rollout.program import EpisodeEnd, _encoding
from agentjax.text.build import build_chat
from agentjax.text.chat import ChatConfig, PrefixError
from agentjax.text.tokenizer import TokenizerConfig, TokenizerError
from agentjax.trajectory.record import Message, ToolCall
from tests.text.extends import assert_extends
from tests.text.folders import CONTROLS, JSON_TEMPLATE, XML_TEMPLATE, write_vocabulary

TEMPLATES = {"json": JSON_TEMPLATE, "xml": XML_TEMPLATE}
WORDS = st.text(max_size=12)
SPELLED = st.lists(
  st.one_of(
    WORDS, st.sampled_from([*CONTROLS, "<|im_end|", "|im_end|>", "<", ">", "\ufdd0\ufdd1"])
  ),
  max_size=5,
).map("".join)


class Python:
  name = "python"
  description = "Runs code."
  parameters = {
    "type": "object",
    "properties": {"code": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["code"],
  }


TOOLS = [Python()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  made = {}
  for name, template in TEMPLATES.items():
    made[name] = tmp_path_factory.mktemp(name)
    write_vocabulary(made[name], template=template)
  return made


@pytest.fixture(scope="module", params=list(TEMPLATES))
def chat(request, folders):
  return TemplateChat.from_folder(folders[request.param])


@pytest.fixture(scope="module", params=[("json", None), ("xml", False)])
def unthinking(request, folders):
  """Chats that request a turn with the very words that stand before it in the history."""
  name, thinking = request.param
  return TemplateChat.from_folder(folders[name], thinking=thinking)


@pytest.fixture
def json_chat(folders):
  return TemplateChat.from_folder(folders["json"])


@pytest.fixture
def xml_chat(folders):
  return TemplateChat.from_folder(folders["xml"])


def _ids(spans):
  return [i for span in spans for i in span.ids]


def _texts(chat, spans):
  return [(s.owner, chat.tokenizer.decode(s.ids)) for s in spans]


def _with_template(folders, template, **options):
  tokenizer = TemplateChat.from_folder(folders["json"]).tokenizer
  return TemplateChat(tokenizer, template, **options)


def test_a_conversation_reads_as_the_template_writes_it(json_chat):
  messages = [Message("system", "Be brief."), Message("user", "3+4?")]
  system, user, request = _texts(json_chat, json_chat.prompt(messages, TOOLS))
  tool = {"name": "python", "description": "Runs code.", "parameters": Python.parameters}
  described = json.dumps({"type": "function", "function": tool})
  assert system[0] == "system" and system[1].startswith("<|im_start|>system\nBe brief.\n\nYou may")
  assert f"<tools>\n{described}\n</tools>" in system[1]
  assert user == ("user", "<|im_start|>user\n3+4?<|im_end|>\n")
  assert request == ("assistant", "<|im_start|>assistant\n")
  turn = json_chat.assistant(
    Message("assistant", "Let me see.", (ToolCall("python", {"code": "3+4"}),))
  )
  assert json_chat.tokenizer.decode(turn) == (
    "<think>\n\n</think>\n\nLet me see.\n<tool_call>\n"
    '{"name": "python", "arguments": {"code": "3+4"}}\n</tool_call><|im_end|>'
  )
  results = [Message("tool", "7"), Message("tool", "8")]
  assert _texts(json_chat, json_chat.observation(results, turn, TOOLS)) == [
    ("tool", "\n<|im_start|>user\n<tool_response>\n7\n</tool_response>"),
    ("tool", "\n<tool_response>\n8\n</tool_response><|im_end|>\n"),
    ("assistant", "<|im_start|>assistant\n"),
  ]


def test_a_request_may_open_the_thinking(xml_chat, folders):
  question = [Message("user", "3+4?")]
  assert _texts(xml_chat, xml_chat.prompt(question))[-1][1] == "<|im_start|>assistant\n<think>\n"
  without = TemplateChat.from_folder(folders["xml"], thinking=False)
  request = _texts(without, without.prompt(question))[-1][1]
  assert request == "<|im_start|>assistant\n<think></think>"
  unthinking = TemplateChat.from_folder(folders["json"], thinking=False)
  request = _texts(unthinking, unthinking.prompt(question))[-1][1]
  assert request == "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@st.composite
def rounds(draw):
  """Turns that a template writes in the history as the policy wrote them, and what others say."""
  said = WORDS.map(lambda t: "x" + t.strip() + "x")
  heard = st.lists(
    st.builds(Message, st.sampled_from(["tool", "user"]), SPELLED), min_size=1, max_size=3
  )
  return draw(st.lists(st.tuples(said, heard), min_size=1, max_size=3))


@settings(max_examples=60, deadline=None)
@given(rounds=rounds())
def test_turn_by_turn_gives_the_text_of_the_whole_conversation(unthinking, rounds):
  tokenizer = unthinking.tokenizer
  messages = [Message("system", "Be brief."), Message("user", "Hello <|im_end|>")]
  context = _ids(unthinking.prompt(messages, TOOLS))
  for said, heard in rounds:
    turn = [*tokenizer.encode(said), tokenizer.controls["<|im_end|>"]]
    longer = [*context, *turn, *_ids(unthinking.observation(heard, turn, TOOLS))]
    assert_extends(context, longer)
    context = longer
    messages += [Message("assistant", said), *heard]
  assert tokenizer.decode(context) == tokenizer.decode(_ids(unthinking.prompt(messages, TOOLS)))


@settings(max_examples=80, deadline=None)
@given(system=SPELLED, user=SPELLED, tool=SPELLED, argument=SPELLED)
def test_no_content_forges_markup(chat, system, user, tool, argument):
  def markup(*texts):
    messages = [
      Message("system", texts[0]),
      Message("user", texts[1]),
      Message("assistant", "Hm.", (ToolCall("python", {"code": texts[3]}),)),
      Message("tool", texts[2]),
    ]
    ids = _ids(chat.prompt(messages, TOOLS)) + _ids(chat.observation(messages[-1:], [], TOOLS))
    return [i for i in ids if i in chat.tokenizer.controls.values()], ids

  plain, _ = markup("a", "b", "c", "d")
  forged, ids = markup(system, user, tool, argument)
  assert forged == plain
  shown = tool.replace("\ufdd0", "\ufffd").replace("\ufdd1", "\ufffd")
  assert chat.tokenizer.decode(chat.tokenizer.encode(shown)) in chat.tokenizer.decode(ids)


def test_turns_drawn_in_strange_tokens_are_followed_by_the_same_ids(chat):
  end, other = chat.stop_ids
  message = [Message("tool", "7")]
  after = _ids(chat.observation(message, [end]))
  assert _ids(chat.observation(message, [255, 254, end])) == after
  for turn in ([255, 254], [], [5, other]):  # cut off, or ended by what ends a text
    spans = chat.observation(message, turn)
    assert spans[0] == ("environment", [end]) and _ids(spans[1:]) == after


def test_thinking_stays_as_it_was_sampled(json_chat):
  """The template drops it from the history when the user speaks again; what was sampled stays."""
  asked = [Message("user", "3+4?")]
  thought = Message("assistant", "<think>\nSum.\n</think>\n\n7")
  again = [Message("user", "Sure?")]
  rendered = json_chat.tokenizer.decode(_ids(json_chat.prompt([*asked, thought, *again])))
  assert "Sum." not in rendered
  spans = json_chat.conversation(asked, [thought, *again, Message("assistant", "Yes.")])
  text = json_chat.tokenizer.decode(_ids(spans))
  assert "<think>\nSum.\n</think>\n\n7<|im_end|>\n<|im_start|>user\nSure?<|im_end|>" in text
  assert [json_chat.tokenizer.decode(s.ids) for s in spans if s.weight] == [
    "<think>\nSum.\n</think>\n\n7<|im_end|>",
    "<think>\n\n</think>\n\nYes.<|im_end|>",
  ]


_PLAIN = (
  "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}CHANGE"
  "{{ '<|im_end|>\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BUDGET = "{% if m.role == 'user' and loop.last %}{{ ' Be quick.' }}{% endif %}"


def test_a_template_that_changes_what_was_said_is_refused(folders):
  assert _with_template(folders, _PLAIN.replace("CHANGE", ""))
  with pytest.raises(PrefixError, match="otherwise once tool follows"):
    _with_template(folders, _PLAIN.replace("CHANGE", _BUDGET))


def test_thinking_is_neither_text_nor_does_it_call(chat):
  tokenizer = chat.tokenizer
  call = Message("assistant", "", (ToolCall("python", {"code": "1"}),))
  written = tokenizer.decode(
    chat.assistant(Message("assistant", "<think>\na\n</think>\n\nb", call.tool_calls), TOOLS)
  )
  inner = written[written.index("<tool_call>") : written.index("<|im_end|>")]

  def parse(text):
    ids = []
    for part in chat._controls.split(text):
      ids += [tokenizer.controls[part]] if part in tokenizer.controls else tokenizer.encode(part)
    return chat.parse(ids, TOOLS)

  opening = "" if chat._opens_thinking else "<think>"
  assert parse(f"{opening}I could {inner}</think>\n\nNo.<|im_end|>") == ("No.", ())
  assert parse(f"{opening}I could {inner}<|im_end|>") == ("", ())
  assert parse(f"{opening}Hm.</think>So.{inner}") == ("So.", call.tool_calls)
  assert parse(f"{opening}Hm.</think>So.<think>No. {inner}") == ("So.", ())


@settings(max_examples=100, deadline=None)
@given(code=SPELLED, n=st.integers(), second=SPELLED)
def test_a_call_reads_back_as_it_was_written(chat, code, n, second):
  code, second = (t.replace("\ufdd0", "").replace("\ufdd1", "") for t in (code, second))
  calls = (ToolCall("python", {"code": code, "n": n}), ToolCall("python", {"code": second}))
  ids = chat.assistant(Message("assistant", "<think>\nHm.\n</think>\n\nSo.", calls), TOOLS)
  normal = [chat.tokenizer.decode(chat.tokenizer.encode(t)) for t in (code, second)]
  text, parsed = chat.parse(ids, TOOLS)
  assert text.strip() == "So."
  assert [c.arguments["code"] for c in parsed] == normal and parsed[0].arguments["n"] == n


def test_only_tokens_are_tags_where_the_vocabulary_has_them(chat):
  spelled = chat.tokenizer.encode('<tool_call>{"name": "python", "arguments": {}}</tool_call>')
  end_thinking = chat.tokenizer.controls["</think>"]
  text, calls = chat.parse([end_thinking, *spelled], TOOLS)
  assert text == '<tool_call>{"name": "python", "arguments": {}}</tool_call>' and calls == ()


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 329), max_size=30))
def test_whatever_a_policy_samples_is_read(chat, ids):
  ids = [i for i in ids if i not in chat.stop_ids]
  for turn in (ids, [*ids, chat.stop_ids[0]]):
    for call in chat.parse(turn, TOOLS).calls:
      assert call.error is None or not call.arguments


@pytest.mark.parametrize("levels", [50, 600, 100_000])
@pytest.mark.parametrize(("opening", "closing"), ["[]", ('{"a":', "}")])
def test_arguments_nested_deep_are_an_error_of_their_call(chat, levels, opening, closing):
  value = opening * levels + "1" + closing * levels
  call = {
    "hermes": f'{{"name": "python", "arguments": {{"n": {value}}}}}',
    "xml": f"<function=python>\n<parameter=n>\n{value}\n</parameter>\n</function>",
  }[chat._format]
  ids = chat.begun("</think>") + chat._encode(f"<tool_call>\n{call}\n</tool_call>")
  (read,) = chat.parse([*ids, chat.stop_ids[0]], TOOLS).calls
  assert (read.error is None) == (levels == 50), read.error


def test_nothing_may_follow_the_end_of_a_turn(json_chat):
  with pytest.raises(ValueError, match=r"1 ids follow <\|im_end\|> at index 1"):
    json_chat.parse([5, json_chat.stop_ids[0], 5])


def test_what_wraps_the_words_of_others_is_reserved(chat):
  reserved = {chat.tokenizer.decode([i]) for i in chat.reserved_ids}
  assert reserved == {"<|im_start|>", "<tool_response>", "</tool_response>"}
  assert [chat.tokenizer.decode([i]) for i in chat.stop_ids] == ["<|im_end|>", "<|endoftext|>"]


def test_a_demonstration_the_request_does_not_lead_to_is_refused(xml_chat, folders):
  plain = Message("assistant", "#### 7")
  with pytest.raises(ValueError, match=r"chat.thinking, or give it <think>"):
    xml_chat.assistant(plain)
  without = TemplateChat.from_folder(folders["xml"], thinking=False)
  assert without.tokenizer.decode(without.assistant(plain)) == "#### 7<|im_end|>"


def test_the_format_of_calls_follows_the_template_or_the_config(folders):
  call = Message("assistant", "", (ToolCall("python", {"code": "1"}),))
  chat = TemplateChat.from_folder(folders["json"])
  xml = TemplateChat.from_folder(folders["json"], tool_call_format="xml")
  (parsed,) = xml.parse(chat.assistant(call, TOOLS), TOOLS).calls
  assert parsed.error is not None and "<function=NAME>" in parsed.error
  silent = _with_template(folders, _PLAIN.replace("CHANGE", ""))
  with pytest.raises(ConfigError, match="chat.tool_call_format='auto'; allowed: 'hermes' or 'xml'"):
    silent.prompt([Message("user", "x")], TOOLS)


# Each leaves something out: what others say, calls, tools, or the end of a long text.
_TURN_BY_TURN = """\
{%- for tool in tools or [] %}{{- tool.function.name }}{% endfor %}
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
  {%- for call in message.tool_calls or [] %}
    {{- '<tool_call>' + CALL + '</tool_call>' }}
  {%- endfor %}
  {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
_OBJECT = """'{"name": "' + call.function.name + '", "arguments": ' + ARGUMENTS + '}'"""
_WHOLE = _TURN_BY_TURN.replace("CALL", _OBJECT)
_WITH_OBJECTS = _WHOLE.replace("ARGUMENTS", "(call.function.arguments | tojson)")
_WITH_TEXT = _WHOLE.replace("ARGUMENTS", "call.function.arguments")
# Writes what a tool said where the call stands, as it finds it further on: without a call, never.
_LOOKS_AHEAD = _WITH_OBJECTS.replace(
  "{%- for message in messages %}\n",
  "{%- for message in messages if message.role != 'tool' %}\n",
)
_NO_CALLS = (
  _TURN_BY_TURN.replace("CALL", "''").replace("<tool_call>", "").replace("</tool_call>", "")
)
_CUTS = _WITH_OBJECTS.replace("(message.content or '')", "(message.content or '')[:40]")
_NO_TOOLS = _WITH_OBJECTS.replace("tool.function.name", "''")
_CALLING = Message("assistant", "I compute.", (ToolCall("python", {"code": 'print("3")', "n": 3}),))


@pytest.mark.parametrize("template", [_WITH_OBJECTS, _WITH_TEXT])
def test_arguments_may_be_objects_or_text(folders, template):
  chat = _with_template(folders, template)
  (call,) = chat.parse(chat.assistant(_CALLING, TOOLS), TOOLS).calls
  assert call == _CALLING.tool_calls[0]


@pytest.mark.parametrize(
  ("template", "lost"),
  [
    (_LOOKS_AHEAD, ["'Answer'", "'tool'"]),
    (_NO_TOOLS, ["['python']", "config.chat.system_prompt"]),
    (_CUTS, ["message 0", "'user'"]),
  ],
)
def test_a_template_that_leaves_out_what_others_say_is_refused_before_an_episode(
  folders, template, lost
):
  chat = _with_template(folders, template, tool_call_format="hermes")
  with pytest.raises(TemplateRefusal) as caught:
    chat.prompt([Message("user", "A question of more than forty characters, all of it.")], TOOLS)
  assert all(part in str(caught.value) for part in lost)


_ONE_ANSWER = _WITH_OBJECTS.replace(
  "{%- for message in messages %}\n",
  "{%- for message in messages if message.role != 'tool' or message == messages[-1] %}\n",
)


def test_answers_that_cannot_stand_together_are_the_fault_of_who_called_so_often(folders):
  """The template writes the last of several answers alone; how many there are a policy chooses."""
  chat = _with_template(folders, _ONE_ANSWER, tool_call_format="hermes")
  chat.prompt([Message("user", "A question")], TOOLS)
  turn = chat.assistant(_CALLING, TOOLS)
  assert chat.observation([Message("tool", "7")], turn, TOOLS)
  for others, owner in (([], Owner.POLICY), ([Message("user", "And now?")], Owner.INFRASTRUCTURE)):
    with pytest.raises(TemplateRefusal) as caught:
      chat.observation([Message("tool", "7"), Message("tool", "8"), *others], turn, TOOLS)
    with pytest.raises(EpisodeEnd) as ended, _encoding(Boundary.STEP):
      raise caught.value
    assert ended.value.fault.owner is owner


@pytest.mark.parametrize(
  "changed",
  [
    "{0} | e",
    "{0} | lower",
    "{0} | wordwrap(20)",
    "{0} | replace('\\t', '    ')",
    "{0}.split() | join(' ')",
    "{0}.split('\\n')[0]",
    "{0}[:200]",
    "({0} if {0} | int(-1) == -1 else '')",
  ],
)
def test_a_template_that_some_answer_of_a_tool_breaks_is_refused_before_an_episode(
  folders, changed
):
  content = "(message.content or '')"
  chat = _with_template(
    folders,
    _WITH_OBJECTS.replace(
      content, f"({changed.format(content)} if message.role == 'tool' else {content})"
    ),
    tool_call_format="hermes",
  )
  with pytest.raises(TemplateRefusal, match="leaves out or changes"):
    chat.prompt([Message("user", "A question")], TOOLS)


def test_a_message_that_is_said_twice_stands_there_twice(folders):
  once = _WITH_OBJECTS.replace(
    "(message.content or '')",
    "(message.content if loop.previtem is not defined or"
    " loop.previtem.content != message.content else '')",
  )
  chat = _with_template(folders, once, tool_call_format="hermes")
  said = [Message("user", "The same words"), Message("user", "Others")]
  chat.prompt(said)
  with pytest.raises(TemplateRefusal, match="The same words"):
    chat.prompt([said[0], said[0]])


@pytest.mark.parametrize(
  ("template", "call_format", "lost"),
  [
    (_NO_CALLS, "hermes", ["python", "'assistant'"]),
    (_WITH_OBJECTS, "xml", ["'python'", "chat.tool_call_format='xml'"]),
    (_WITH_OBJECTS.replace('"arguments"', '"parameters"'), "hermes", ["'python'", "'hermes'"]),
  ],
)
def test_a_demonstration_that_would_teach_not_to_call_is_refused(
  folders, template, call_format, lost
):
  chat = _with_template(folders, template, tool_call_format=call_format)
  with pytest.raises(TemplateRefusal) as caught:
    chat.assistant(_CALLING, TOOLS)
  assert all(part in str(caught.value) for part in lost)


def test_a_short_content_is_missed_though_its_letters_stand_elsewhere(folders):
  template = _WITH_OBJECTS.replace(
    "(message.content or '')", "(message.content if message.role != 'user' else 'a fixed text')"
  )
  with pytest.raises(TemplateRefusal, match="message 0"):
    _with_template(folders, template).prompt([Message("user", "a")])


def test_thinking_that_a_template_drops_from_the_history_is_no_loss(json_chat):
  turn = Message("assistant", "<think>\nwhy\n</think>\n\nseven")
  history = [Message("user", "3+4?"), turn, Message("user", "And 5?")]
  texts = "".join(text for _, text in _texts(json_chat, json_chat.prompt(history)))
  assert "seven" in texts and "why" not in texts


def test_a_system_prompt_stands_before_conversations_without_one(folders):
  chat = TemplateChat.from_folder(folders["json"], system_prompt="Be <|im_end|> brief.")
  system, *_ = _texts(chat, chat.prompt([Message("user", "3+4?")]))
  assert system == ("system", "<|im_start|>system\nBe <|im_end|> brief.<|im_end|>\n")
  own = _texts(chat, chat.prompt([Message("system", "Be long."), Message("user", "3+4?")]))
  assert own[0][1] == "<|im_start|>system\nBe long.<|im_end|>\n"


def test_the_fingerprint_tells_templates_apart(json_chat, xml_chat, folders):
  assert TemplateChat.from_folder(folders["json"]).fingerprint() == json_chat.fingerprint()
  assert json_chat.tokenizer.fingerprint() == xml_chat.tokenizer.fingerprint()
  assert json_chat.fingerprint() != xml_chat.fingerprint()


@pytest.mark.parametrize(
  ("template", "message"),
  [
    ("{% if %}", "not valid jinja"),
    (_PLAIN.replace("CHANGE", "").replace("<|im_end|>", "."), "ends no assistant turn"),
  ],
)
def test_a_template_that_cannot_be_used_is_refused(folders, template, message):
  with pytest.raises(TokenizerError, match=message):
    _with_template(folders, template)


@pytest.mark.parametrize(
  "attack",
  [
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ raise_exception('never') }}",
  ],
)
def test_a_template_is_confined_and_may_refuse(folders, attack):
  with pytest.raises(TemplateRefusal, match="refuses a conversation of user"):
    _with_template(folders, attack + _PLAIN.replace("CHANGE", ""))


def test_a_missing_package_is_named_with_its_extra(folders, monkeypatch):
  monkeypatch.setitem(sys.modules, "jinja2", None)
  monkeypatch.setitem(sys.modules, "jinja2.ext", None)
  _jinja2.cache_clear()
  try:
    with pytest.raises(TokenizerError, match=r"agentjax\[hf\]"):
      TemplateChat.from_folder(folders["json"])
  finally:
    _jinja2.cache_clear()


@pytest.mark.parametrize(
  ("chat", "tokenizer", "message"),
  [
    ({"tool_call_format": "hermes"}, {"kind": "byte"}, "allowed: auto, compact, json with"),
    ({"thinking": True}, {"kind": "byte"}, "config.chat.thinking=True; allowed: None"),
    ({"tool_call_format": "json"}, {"kind": "huggingface"}, "allowed: auto, hermes, xml with"),
    ({}, {"kind": "huggingface"}, "tokenizer.path=None; allowed: a folder when kind is 'hugging"),
  ],
)
def test_settings_that_do_not_fit_the_vocabulary_are_named(chat, tokenizer, message):
  with pytest.raises(ConfigError) as caught:
    build_chat(ChatConfig(**chat), TokenizerConfig(**tokenizer))
  assert message in str(caught.value)


def test_one_interface_holds_for_both_kinds(folders):
  kinds = (
    build_chat(ChatConfig(), TokenizerConfig()),
    build_chat(ChatConfig(), TokenizerConfig(kind="huggingface"), pretrained=folders["json"]),
    build_chat(ChatConfig(), TokenizerConfig(kind="huggingface", path=str(folders["xml"]))),
  )
  for chat in kinds:
    call = Message("assistant", "<think>\na\n</think>So", (ToolCall("python", {"code": "1"}),))
    turn = chat.assistant(call, TOOLS)
    assert turn[-1] in chat.stop_ids and not chat.reserved_ids.intersection(turn)
    assert chat.parse(turn, TOOLS).calls == call.tool_calls
    owners = [s.owner for s in itertools.chain(chat.observation([Message("tool", "1")], turn))]
    assert owners == ["tool", "assistant"]


def test_a_turn_that_was_begun_reads_as_its_text_and_only_thinking_is_markup(chat):
  text = "so 3 + 4 </think>\n\n<|im_end|> is 7"
  ids = chat.begun(text)
  assert chat.tokenizer.decode(ids) == text
  controls = chat.tokenizer.controls
  assert controls["</think>"] in ids and controls["<|im_end|>"] not in ids
  assert chat.begun("") == []
