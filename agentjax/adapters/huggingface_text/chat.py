"""Conversations as the chat template of a Hugging Face folder writes them.

A template renders a whole conversation as text. Here it is asked only for what nobody has seen yet:

* a prompt is rendered once, with the request for the policy's turn;
* what comes after a turn of the policy is rendered behind a stand-in for that turn, in a
  conversation of one question, and the text after the stand-in is appended. The turn itself stays
  as sampled, its thinking included: templates that drop earlier thinking from the history (Qwen3,
  Nemotron) or write a call's arguments in other words cannot change what was sampled.

A template that would change what others said before, for example one that moves the tools to the
latest user message, raises PrefixError. One that leaves out a content, a call or a tool raises
TemplateRefusal: a policy must not be taught by, or answer, a conversation with holes.

Contents never become markup. Before rendering, every place in a content where the spelling of an
added token could begin or end is marked with a character that Unicode keeps for such internal use;
the rendered text is cut at the spellings that are left, the template's own, and the marks go.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, get_args

from agentjax.adapters.huggingface_text.calls import (
  END_THINK,
  THINK,
  TemplateCallFormat,
  parse_text,
  turn_language,
)
from agentjax.adapters.huggingface_text.tokenizer import (
  HuggingFaceTokenizer,
  read_chat_template,
  read_stop_ids,
)
from agentjax.config import check
from agentjax.faults import Fault, Owner
from agentjax.text.build import FolderKind
from agentjax.text.chat import MARKUP_OWNER, Chat, PrefixError, Span
from agentjax.text.language import Language
from agentjax.text.tokenizer import TokenizerError, valid_text
from agentjax.text.tool_calls import DescribedTool, ParsedTurn, tool_schemas
from agentjax.trajectory.record import Message, ToolCall

_MARK, _STAND_IN = "\ufdd0", "\ufdd1"  # noncharacters: no text for interchange holds them
_QUESTION = Message("user", "Question")
_TURN = Message("assistant", _STAND_IN)
# Of tools: what templates cut, wrap, escape or take for something else.
_ANSWERS = ("Answer", "42", f'if A < b & c: \n\n\tsay("it\'s  {{x}}")\n</b> {"long " * 200}end')
_WORD = "zqword"  # with a number behind it: a content that no template and no tool spells


class TemplateRefusal(ValueError):
  """The template cannot write this conversation, or would leave a part of it out."""

  def __init__(self, message: str, fault: Fault | None = None):
    super().__init__(message)
    self.fault = fault


class TemplateChat(Chat):
  """Writes and reads conversations in the manner of one model family.

  Args:
    tokenizer: vocabulary of the folder.
    template: jinja source; runs in a sandbox, with what Hugging Face gives templates.
    stop_ids: ids that end a generation, beside the one the template ends a turn with.
    tool_call_format: how the policy writes calls; "auto" takes what the template shows.
    system_prompt, thinking: as in ``ChatConfig``.

  Raises:
    TokenizerError: the package jinja2 is not installed, the template cannot be used, or it does not
      end an assistant's turn with an added token.
  """

  tokenizer: HuggingFaceTokenizer

  def __init__(
    self,
    tokenizer: HuggingFaceTokenizer,
    template: str,
    *,
    stop_ids: Sequence[int] = (),
    tool_call_format: Literal["auto"] | TemplateCallFormat = "auto",
    system_prompt: str = "",
    thinking: bool | None = None,
  ):
    super().__init__(system_prompt)
    self.tokenizer = tokenizer
    self._template = _compile(template)
    self._source = template
    self._format = _detected_format(template) if tool_call_format == "auto" else tool_call_format
    self._settings: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    spellings = sorted(tokenizer.controls, key=len, reverse=True)
    if not spellings:
      raise TokenizerError(f"{tokenizer.name} has no added tokens that could mark turns.")
    self._controls = re.compile("(" + "|".join(map(re.escape, spellings)) + ")")
    # What stands between markup comes again and again: tools, system prompts, the words of a group.
    self._encode_text = functools.lru_cache(maxsize=1024)(tokenizer.encode)
    self._spellings = {i: spelling for spelling, i in tokenizer.controls.items()}
    borders = ({s[0] for s in spellings}, {s[-1] for s in spellings})
    begins, ends = ("".join(map(re.escape, sorted(side))) for side in borders)
    self._guards = re.compile(f"(?<=[{begins}])|(?=[{ends}])")
    self._complete: set[tuple[Any, ...]] = set()  # shapes of conversations that lose nothing
    self._arguments_as_text = self._takes_arguments_as_text()
    asked = self._render([_QUESTION], (), ask=False)
    request = self._render([_QUESTION], (), ask=True).removeprefix(asked)
    self._opens_thinking = request.rfind(THINK) > request.rfind(END_THINK)
    closing = self._controls.match(
      self._render([_QUESTION, _TURN], (), ask=False).split(_STAND_IN)[-1]
    )
    if closing is None:
      raise TokenizerError(
        f"the chat template of {tokenizer.name} ends no assistant turn with an added token; "
        "without one a turn has no end."
      )
    self._end = closing.group()
    self._end_id = tokenizer.controls[self._end]
    self.stop_ids = tuple(dict.fromkeys([self._end_id, *stop_ids]))
    # Whoever may write what others' words are wrapped in could make up what its tools answered.
    said = asked + self._after_turn([_heard(self._renders_tools())], (), ask=False)
    marks = {tokenizer.controls[spelling] for spelling in self._controls.findall(said)}
    self.reserved_ids = frozenset(marks.difference(self.stop_ids))

  @classmethod
  def from_folder(cls, directory: str | os.PathLike[str], **settings: Any) -> TemplateChat:
    """Vocabulary, template and stop ids of a folder; ``settings`` as in the constructor."""
    tokenizer = HuggingFaceTokenizer(directory)
    return cls(
      tokenizer,
      read_chat_template(directory),
      stop_ids=read_stop_ids(directory, tokenizer),
      **settings,
    )

  def fingerprint(self) -> str:
    parts = (self.tokenizer.fingerprint(), self._source)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

  def assistant(self, message: Message, tools: Sequence[DescribedTool] = ()) -> list[int]:
    """As in ``Chat``; ``<think>...</think>`` in the content is thinking.

    Raises:
      ValueError: the template would not write this message after its request for a turn, for
        example one without thinking where the request opens it.
      TemplateRefusal: it leaves out a part of the message, or writes its calls in a way that
        ``parse`` does not read, so that the policy would learn not to call.
    """
    if message.role != "assistant":
      raise ValueError(f"an assistant turn needs role 'assistant', got {message.role!r}.")
    asked = self._render([_QUESTION], tools, ask=True)
    whole = self._render([_QUESTION, message], tools, ask=False)
    if not whole.startswith(asked):
      raise ValueError(
        f"the chat template asks for a turn with {asked[-60:]!r} but writes the demonstration "
        f"{message.content[:60]!r} otherwise; set chat.thinking, or give it <think>...</think>."
      )
    self._check_complete([message], tools, self._after_question, whole[len(asked) :], own=True)
    turn, end, _ = whole[len(asked) :].rpartition(self._end)
    ids = self._encode(turn + end)
    read = self.parse(ids, tools).calls
    if [_call_shape(call) for call in read] != [_call_shape(call) for call in message.tool_calls]:
      raise TemplateRefusal(
        f"the chat template of {self.tokenizer.name} writes the calls of the demonstration "
        f"{[call.name for call in message.tool_calls]} as {_unmarked(turn)[-200:]!r}, which does "
        f"not read as these calls with chat.tool_call_format={self._format!r}. Use the format "
        "that the template writes ('hermes' or 'xml'), or another chat template."
      )
    return ids

  def begun(self, text: str) -> list[int]:
    """As in ``Chat``; ``<think>`` and ``</think>`` are thinking where the vocabulary has them."""
    return self._encode(self._own_words(text))

  def parse(self, turn: Sequence[int], tools: Sequence[DescribedTool] = ()) -> ParsedTurn:
    """As in ``Chat``; thinking is neither text nor does a call in it count.

    Where the vocabulary has a token for a tag, only that token counts: code that spells
    ``</tool_call>`` in other tokens is code.
    """
    ids = [int(i) for i in turn]
    closed = not set(self.stop_ids).isdisjoint(ids)
    if closed:
      end = next(at for at, i in enumerate(ids) if i in self.stop_ids)
      if end != len(ids) - 1:
        raise ValueError(
          f"{len(ids) - 1 - end} ids follow {self.tokenizer.decode([ids[end]])} at index {end}; a "
          "turn stops at its first one."
        )
      ids = ids[:end]
    said = self._without_thinking(self._read(ids))
    if self._format is None:
      return ParsedTurn(_unmarked(said), ())
    text, calls = parse_text(said, tool_schemas(tools), self._format)
    return ParsedTurn(
      _unmarked(text),
      tuple(ToolCall(_unmarked(c.name), _unmarked(c.arguments), _unmarked(c.error)) for c in calls),
    )

  def turn_language(self, tools: Sequence[DescribedTool] = ()) -> Language:
    controls = self.tokenizer.controls
    return turn_language(
      tool_schemas(tools),
      self._format,
      controls=controls,
      free_ids=frozenset(controls.values()).difference(self.reserved_ids, self.stop_ids),
      opens_thinking=self._opens_thinking,
    )

  def _prompt(self, messages: Sequence[Message], tools: Sequence[DescribedTool]) -> list[Span]:
    if tools:
      check(
        self._format is not None,
        "config.chat.tool_call_format",
        "auto",
        "'hermes' or 'xml' for this chat template, which shows no format of tool calls",
      )
    whole = self._render(messages, tools, ask=True)
    self._check_complete(messages, tools, self._whole, whole)
    if tools:
      self._check_answers(tools)
    return self._spans(whole, messages, lambda n: self._render(messages[:n], tools, ask=False))

  def _check_answers(self, tools: Sequence[DescribedTool]) -> None:
    """Looks at what tools may answer now, not in the middle of an episode: a policy has a say in
    it, and could end its episodes by an answer that the template cannot hold."""
    key = (self._check_answers.__name__, tuple(tool.name for tool in tools))
    if key not in self._complete:
      for answer in _ANSWERS:
        self._written_behind_turn([Message("tool", answer)], tools)
      self._complete.add(key)

  def _observation(
    self, messages: Sequence[Message], turn: Sequence[int], tools: Sequence[DescribedTool]
  ) -> list[Span]:
    whole = self._written_behind_turn(messages, tools)
    spans = self._spans(whole, messages, lambda n: self._after_turn(messages[:n], tools, ask=False))
    owner, ids = spans[0]
    spans[0] = Span(owner, ids[1:])
    if not len(turn) or turn[-1] != self._end_id:
      spans.insert(0, Span(MARKUP_OWNER, ids[:1]))
    return [span for span in spans if span.ids]

  def _written_behind_turn(
    self, messages: Sequence[Message], tools: Sequence[DescribedTool]
  ) -> str:
    """``_behind_turn`` with nothing left out.

    How many tools answer is the policy's doing: where each answer can be written alone, it is to
    blame that all of them cannot.
    """
    try:
      whole = self._behind_turn(messages, tools)
      self._check_complete(messages, tools, self._behind_turn, whole)
    except (TemplateRefusal, PrefixError) as error:
      if len(messages) < 2 or any(message.role != "tool" for message in messages):
        raise
      for message in messages:
        self._written_behind_turn([message], tools)
      raise TemplateRefusal(str(error), Fault(Owner.POLICY, "data", str(error))) from error
    return whole

  def _after_turn(
    self, messages: Sequence[Message], tools: Sequence[DescribedTool], *, ask: bool
  ) -> str:
    """What the template writes behind a turn, its end included.

    Raises:
      PrefixError: the template changes what stands before the turn.
    """
    before = self._render([_QUESTION], tools, ask=False)
    whole = self._render([_QUESTION, _TURN, *messages], tools, ask=ask)
    parts = whole.split(_STAND_IN)
    if len(parts) != 2 or not whole.startswith(before) or not parts[1].startswith(self._end):
      raise PrefixError(
        "the chat template writes what was said before otherwise once "
        f"{', '.join(m.role for m in messages) or 'nothing'} follows: {before[-80:]!r} became "
        f"{whole[: len(before)][-80:]!r}. Use a template that only appends."
      )
    return parts[1]

  def _whole(self, messages: Sequence[Message], tools: Sequence[DescribedTool]) -> str:
    return self._render(messages, tools, ask=True)

  def _behind_turn(self, messages: Sequence[Message], tools: Sequence[DescribedTool]) -> str:
    return self._after_turn(messages, tools, ask=True)

  def _after_question(self, messages: Sequence[Message], tools: Sequence[DescribedTool]) -> str:
    return self._render([_QUESTION, *messages], tools, ask=False)

  def _check_complete(
    self,
    messages: Sequence[Message],
    tools: Sequence[DescribedTool],
    render: Callable[[Sequence[Message], Sequence[DescribedTool]], str],
    rendered: str,
    *,
    own: bool = False,
  ) -> None:
    """Raises TemplateRefusal unless every content, call and tool of a conversation is rendered.

    Each text must stand in ``rendered``, as it is or as JSON spells it, but for blanks around it,
    and as often as it was said. A short text may stand there by chance, so that each new shape of a
    conversation is rendered once more with a word of its own in each place.

    Args:
      messages: the conversation, or its part behind a turn.
      tools: what is offered in it.
      render: how its text is made.
      rendered: that text.
      own: whether earlier thinking, which templates may drop, must stand there too.
    """
    seen = _unmarked(rendered)
    said: collections.Counter[str] = collections.Counter()
    for at, message in enumerate(messages):
      for text in _texts(message, own):
        said[text] += 1
        if _times_in(_unmarked(self._guarded(text)), seen) < said[text]:
          self._refuse_hole(at, message, text)
    if render == self._whole:
      missing = [tool.name for tool in tools if not _times_in(tool.name, seen)]
      if missing:
        raise TemplateRefusal(
          f"the chat template of {self.tokenizer.name} does not tell the policy of the tools "
          f"{missing}. Use a template that writes its tools, or describe them in "
          "config.chat.system_prompt."
        )
    shape = (render.__name__, tuple(map(_shape, messages)), tuple(tool.name for tool in tools))
    if shape in self._complete:
      return
    words = itertools.count()
    marked = [_with_words(message, words) for message in messages]
    shown = render(marked, tools)
    for at, (message, twin) in enumerate(zip(messages, marked, strict=True)):
      for text, word in zip(_texts(message, own), _texts(twin, own), strict=True):
        if word not in shown:
          self._refuse_hole(at, message, text)
    self._complete.add(shape)

  def _refuse_hole(self, at: int, message: Message, text: str) -> None:
    calls = f" with calls of {[c.name for c in message.tool_calls]}" if message.tool_calls else ""
    raise TemplateRefusal(
      f"the chat template of {self.tokenizer.name} leaves out or changes {text[:80]!r} of message "
      f"{at} (role {message.role!r}{calls}). Allowed: a template that writes every content and "
      "every call; change the folder's chat_template, or do without such messages."
    )

  def _takes_arguments_as_text(self) -> bool:
    """Whether the template fails on arguments that are objects and takes them as JSON text."""
    self._arguments_as_text = False
    call = Message("assistant", "Words", (ToolCall("name", {"key": "value"}),))
    try:
      self._render([_QUESTION, call], (), ask=False)
    except TemplateRefusal:
      self._arguments_as_text = True
      try:
        self._render([_QUESTION, call], (), ask=False)
      except TemplateRefusal:  # it takes neither: such a conversation is refused when it comes
        return False
    return self._arguments_as_text

  def _spans(
    self, whole: str, messages: Sequence[Message], shorter: Callable[[int], str]
  ) -> list[Span]:
    """``whole`` in ids, cut where the rendering of its first n messages begins to differ."""
    ids, spans, start = self._encode(whole), [], 0
    for n, message in enumerate(messages, start=1):
      try:
        part = self._encode(shorter(n))
      except TemplateRefusal:  # such a beginning cannot stand alone: it goes with what follows
        continue
      end = max(start, _common_length(part, ids))
      spans.append(Span(message.role, ids[start:end]))
      start = end
    return [*spans, Span("assistant", ids[start:])]

  def _render(
    self, messages: Sequence[Message], tools: Sequence[DescribedTool], *, ask: bool
  ) -> str:
    described = [
      {
        "type": "function",
        "function": {
          "name": tool.name,
          "description": tool.description,
          "parameters": tool.parameters,
        },
      }
      for tool in tools
    ]
    try:
      return self._template.render(
        messages=[self._message(m) for m in messages],
        tools=self._guarded(described) or None,
        documents=None,
        add_generation_prompt=ask,
        **self.tokenizer.special_tokens,
        **self._settings,
      )
    except Exception as error:  # a template is a program: it may fail in any way
      raise TemplateRefusal(
        f"the chat template of {self.tokenizer.name} refuses a conversation of "
        f"{', '.join(m.role for m in messages)}: {type(error).__name__}: {error}"
      ) from error

  def _message(self, message: Message) -> dict[str, Any]:
    if message is _TURN:
      return {"role": message.role, "content": message.content}
    if message.role != "assistant":
      return {"role": message.role, "content": self._guarded(message.content)}
    values: dict[str, Any] = {"role": message.role, "content": self._own_words(message.content)}
    if message.tool_calls:
      values["tool_calls"] = [self._call(call) for call in message.tool_calls]
    return values

  def _own_words(self, text: str) -> str:
    """What the policy says: its thinking is markup, and nothing else."""
    parts = re.split(f"({THINK}|{END_THINK})", text)
    parts[::2] = map(self._guarded, parts[::2])
    return "".join(parts)

  def _call(self, call: ToolCall) -> dict[str, Any]:
    if call.error is not None:
      raise ValueError(f"a malformed call ({call.error}) has no text to render.")
    arguments = self._guarded(call.arguments)
    if self._arguments_as_text:
      arguments = _to_json(arguments)
    return {"type": "function", "function": {"name": call.name, "arguments": arguments}}

  def _guarded(self, value: Any) -> Any:
    """``value`` with marks in all its text, so that none of it reads as an added token."""
    if isinstance(value, str):
      text = valid_text(value).replace(_MARK, "\ufffd").replace(_STAND_IN, "\ufffd")
      return self._guards.sub(_MARK, text)
    if isinstance(value, Mapping):
      return {self._guarded(k): self._guarded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
      return [self._guarded(v) for v in value]
    return value

  def _encode(self, rendered: str) -> list[int]:
    ids: list[int] = []
    for i, part in enumerate(self._controls.split(rendered)):
      if i % 2:
        ids.append(self.tokenizer.controls[part])
      elif part:
        ids.extend(self._encode_text(part.replace(_MARK, "")))
    return ids

  def _read(self, ids: Sequence[int]) -> str:
    """The text of a turn, with a mark in what spells an added token but is none."""
    parts: list[str] = []
    for is_control, run in itertools.groupby(ids, key=self._spellings.__contains__):
      if is_control:
        parts.extend(self._spellings[i] for i in run)
      else:
        text = self.tokenizer.decode(list(run)).replace(_MARK, "\ufffd")
        parts.append(self._controls.sub(lambda m: m[0][0] + _MARK + m[0][1:], text))
    return "".join(parts)

  def _without_thinking(self, text: str) -> str:
    _, closed, said = text.rpartition(END_THINK)
    if not closed and self._opens_thinking:
      return ""
    return said.partition(THINK)[0].lstrip("\n") if closed else said.partition(THINK)[0]

  def _renders_tools(self) -> bool:
    """Whether the template knows the role "tool"."""
    try:
      self._after_turn([_heard(tool=True)], (), ask=False)
    except TemplateRefusal:
      return False
    return True


def _heard(tool: bool) -> Message:
  return Message("tool" if tool else "user", "Answer")


def _unmarked(value: Any) -> Any:
  """``value`` with the marks gone from all its text."""
  if isinstance(value, str):
    return value.replace(_MARK, "")
  if isinstance(value, Mapping):
    return {_unmarked(k): _unmarked(v) for k, v in value.items()}
  if isinstance(value, list):
    return [_unmarked(v) for v in value]
  return value


def _texts(message: Message, own: bool) -> list[str]:
  """What must be seen of a message: its content, and the names and texts of its calls."""
  content = [message.content]
  if message.role == "assistant":
    content = re.split(f"{THINK}|{END_THINK}", message.content)[0 if own else -1 :]
  found = [text.strip() for text in content if text.strip()]
  for call in message.tool_calls:
    found += [call.name, *call.arguments, *_leaves(call.arguments)]
  return found


def _leaves(value: Any) -> list[str]:
  """The texts in a call's arguments; numbers and the like have more than one spelling."""
  if isinstance(value, str):
    return [value.strip()] if value.strip() else []
  values = value.values() if isinstance(value, Mapping) else value
  return [text for v in values for text in _leaves(v)] if _is_nested(value) else []


def _is_nested(value: Any) -> bool:
  return isinstance(value, Mapping | list | tuple)


def _with_words(message: Message, words: Iterator[int]) -> Message:
  """``message`` with a word of its own in the place of each text that ``_texts`` names."""

  def word(text: str) -> str:
    return f"{_WORD}{next(words)}z" if text.strip() else text

  def replaced(value: Any) -> Any:
    if isinstance(value, str):
      return word(value)
    if isinstance(value, Mapping):
      return {k: replaced(v) for k, v in value.items()}
    return [replaced(v) for v in value] if _is_nested(value) else value

  parts = [message.content]
  if message.role == "assistant":
    parts = re.split(f"({THINK}|{END_THINK})", message.content)
  parts[::2] = map(word, parts[::2])
  calls = [dataclasses.replace(c, arguments=replaced(c.arguments)) for c in message.tool_calls]
  return Message(message.role, "".join(parts), tuple(calls))


def _shape(message: Message) -> tuple[Any, ...]:
  """Equal for messages that a template treats alike, whatever their texts are."""
  tags = re.findall(f"{THINK}|{END_THINK}", message.content)
  calls = tuple((c.name, json.dumps(_blank(c.arguments))) for c in message.tool_calls)
  return message.role, bool(message.content.strip()), tuple(tags), calls


def _blank(value: Any) -> Any:
  """The form of a call's arguments: which of their texts are empty, what nests where."""
  if isinstance(value, Mapping):
    return {k: _blank(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [_blank(v) for v in value]
  return bool(value.strip()) if isinstance(value, str) else None


def _times_in(text: str, rendered: str) -> int:
  """How often a text stands in another, as it is or as JSON spells it."""
  escaped = {json.dumps(text, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True)}
  return sum(map(rendered.count, {text, *escaped}))


def _call_shape(call: ToolCall) -> tuple[Any, ...]:
  """What a call that is read back shares with the one that was written."""
  return call.name, sorted(call.arguments), call.error


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
  pairs = enumerate(zip(left, right, strict=False))
  return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _detected_format(template: str) -> TemplateCallFormat | None:
  if "<function=" in template:
    return "xml"
  return "hermes" if "<tool_call>" in template else None


@functools.cache
def _jinja2() -> ModuleType:
  try:
    import jinja2.ext
    import jinja2.sandbox
  except ImportError as error:
    raise TokenizerError(
      'chat templates need the package jinja2: pip install "agentjax[hf]".'
    ) from error
  return jinja2


def _compile(source: str) -> Any:
  """The template in a sandbox, with the blank rules, filters and functions of Hugging Face."""
  jinja2 = _jinja2()

  class Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what an assistant wrote; the text is the same without it."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
      next(parser.stream)
      return parser.parse_statements(("name:endgeneration",), drop_needle=True)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
  )
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _raise_exception
  environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
  try:
    return environment.from_string(source)
  except jinja2.TemplateError as error:
    raise TokenizerError(f"the chat template is not valid jinja: {error}.") from error


def _to_json(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  return json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
  )


def _raise_exception(message: str) -> None:
  raise _jinja2().TemplateError(message)


FOLDERS = FolderKind(formats=get_args(TemplateCallFormat), read=TemplateChat.from_folder)
