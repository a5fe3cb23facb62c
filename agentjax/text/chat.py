"""Conversations as append-only token ids.

A ``Chat`` writes conversations over one vocabulary and reads the policy's turns back. With any
markup, the ids of a longer conversation start with the ids of the shorter one, also if the policy
drew tokens that encoding its text would not give: what comes after a turn is encoded separately and
appended.

``MarkedChat`` is for our own vocabularies; ``build.FolderKind`` is for others, such as the chat
template of a Hugging Face folder.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from agentjax.config import Config
from agentjax.text.language import Language
from agentjax.text.tokenizer import MarkedTokenizer, Tokenizer
from agentjax.text.tool_calls import (
  DescribedTool,
  ParsedTurn,
  Schemas,
  ToolCallFormat,
  format_call,
  parse_turn,
  tool_schemas,
  turn_language,
)
from agentjax.trajectory.messages import ROLES
from agentjax.trajectory.record import Flag, Message

MARKUP_OWNER = "environment"  # owns the end of a turn that a cut-off one lacks


@dataclasses.dataclass(unsafe_hash=True)
class ChatConfig(Config):
  """How conversations are written.

  Attributes:
    tool_call_format: "auto" is "compact" for our own vocabularies, and the format of the chat
      template for a Hugging Face folder. Ours: "compact", ``<|call|>NAME TEXT``; "json",
      ``<|call|>{"name": NAME, "arguments": {...}}``. Templates: "hermes", ``<tool_call>{"name":
      NAME, "arguments": {...}}</tool_call>``; "xml",
      ``<tool_call><function=NAME><parameter=P>VALUE</parameter></function></tool_call>``.
    system_prompt: system message before every conversation that has none of its own; "" adds none.
    thinking: given to a chat template as ``enable_thinking``; None leaves it to the template.
  """

  tool_call_format: Literal["auto", "compact", "json", "hermes", "xml"] = "auto"
  system_prompt: str = ""
  thinking: bool | None = None


class Span(NamedTuple):
  """A run of ids with one owner: "system", "user", "assistant", "tool" or "environment"."""

  owner: str
  ids: list[int]


class TargetSpan(NamedTuple):
  """A run of ids of a demonstration; ``weight`` is above 0 if the policy should learn to write
  them. Flags are marks for weight rules."""

  owner: str
  ids: list[int]
  weight: float = 0.0
  flags: frozenset[Flag] = frozenset()


class PrefixError(AssertionError):
  """Ids of a later turn do not extend the ids seen so far."""


class Chat(abc.ABC):
  """How a run writes conversations as ids, and reads the policy's turns.

  Attributes:
    tokenizer: the vocabulary.
    stop_ids: ids that end a turn of the policy.
    reserved_ids: ids that only the conversation itself may contain. A policy that draws one within
      its turn forges the words of others.
  """

  tokenizer: Tokenizer
  stop_ids: tuple[int, ...]
  reserved_ids: frozenset[int]

  def __init__(self, system_prompt: str = ""):
    self._system = (Message("system", system_prompt),) if system_prompt else ()

  @abc.abstractmethod
  def fingerprint(self) -> str:
    """SHA-256 hex; equal if conversations have the same ids and ids the same meaning."""

  def prompt(self, messages: Sequence[Message], tools: Sequence[DescribedTool] = ()) -> list[Span]:
    """Ids of a conversation's beginning, up to the policy's turn.

    The last span, of owner "assistant", asks the policy for its turn.

    Args:
      messages: of the conversation; the chat's system prompt comes first if they have none.
      tools: what the policy may call.

    Raises:
      ValueError: no message, a role that is not in ``ROLES``, or calls outside an assistant's.
    """
    if not messages:
      raise ValueError("a prompt needs at least one message, got none.")
    _check_messages(messages)
    before = () if messages[0].role == "system" else self._system
    return self._prompt([*before, *messages], tools)

  def observation(
    self, messages: Sequence[Message], turn: Sequence[int], tools: Sequence[DescribedTool] = ()
  ) -> list[Span]:
    """Ids to append after a turn of the policy: the messages, then the request for a turn.

    Args:
      messages: tool results, or words of a user; the policy's own turns stand as sampled.
      turn: ids that the policy drew; if they lack the end of a turn, it is added first.
      tools: those of the conversation's prompt.

    Raises:
      ValueError: an assistant message, or a role that is not in ``ROLES``.
      PrefixError: the chat template would change earlier text.
    """
    _check_messages(messages)
    for message in messages:
      if message.role == "assistant":
        raise ValueError(
          "an observation holds what others say; the policy's turn is appended as sampled, never "
          f"encoded again. Got the assistant message {message.content[:80]!r}."
        )
    return self._observation(messages, turn, tools)

  @abc.abstractmethod
  def assistant(self, message: Message, tools: Sequence[DescribedTool] = ()) -> list[int]:
    """Ids of a turn as the policy would sample it, its end included."""

  def begun(self, text: str) -> list[int]:
    """Ids of a turn that starts with ``text`` and is not over; they follow a prompt's."""
    return self.tokenizer.encode(text)

  @abc.abstractmethod
  def parse(self, turn: Sequence[int], tools: Sequence[DescribedTool] = ()) -> ParsedTurn:
    """Reads the ids the policy sampled in one turn.

    Text that cannot be read as a call becomes a ``ToolCall`` with ``error`` set, which the
    environment answers. A tool that is not in ``tools`` is no error here.

    Raises:
      ValueError: ids follow one of ``stop_ids``.
    """

  @abc.abstractmethod
  def turn_language(self, tools: Sequence[DescribedTool] = ()) -> Language:
    """Turns that ``parse`` accepts without error: free text, and calls whose arguments fit their
    tool.

    Over bytes and control tokens, without the id of ``stop_ids`` that ends a turn.

    Raises:
      LanguageError: the schema of a tool has no automaton.
    """

  def conversation(
    self,
    prompt: Sequence[Message],
    demonstration: Sequence[Message],
    tools: Sequence[DescribedTool] = (),
  ) -> list[TargetSpan]:
    """A worked solution for supervised learning, in the same ids as an episode.

    Assistant turns with their calls and end are targets; the prompt, tool results and the start of
    a turn are not. A turn has the flags of its tool results too.

    Raises:
      ValueError: the demonstration does not start and end with an assistant message.
    """
    roles = [message.role for message in demonstration]
    if not roles or roles[0] != "assistant" or roles[-1] != "assistant":
      raise ValueError(
        f"a demonstration starts and ends with an assistant message, got the roles {roles}."
      )
    spans = [TargetSpan(owner, ids) for owner, ids in self.prompt(prompt, tools)]
    heard: list[Message] = []
    turn: list[int] = []
    for message in demonstration:
      if message.role != "assistant":
        heard.append(message)
        continue
      if turn:
        between = self.observation(heard, turn, tools)
        flags = spans[-1].flags.union(*(message.flags for message in heard))
        spans[-1] = spans[-1]._replace(flags=flags)
        spans.extend(TargetSpan(owner, ids) for owner, ids in between)
        heard = []
      turn = self.assistant(message, tools)
      spans.append(TargetSpan("assistant", turn, message.weight, message.flags))
    return spans

  @abc.abstractmethod
  def _prompt(self, messages: Sequence[Message], tools: Sequence[DescribedTool]) -> list[Span]: ...

  @abc.abstractmethod
  def _observation(
    self, messages: Sequence[Message], turn: Sequence[int], tools: Sequence[DescribedTool]
  ) -> list[Span]: ...


class MarkedChat(Chat):
  """``<|bos|>``, then ``<|role|> content <|end|>`` a message, then ``<|assistant|>``.

  Contents are encoded one by one between special ids, so no merge crosses a border.

  Args:
    tokenizer: one whose first ids are the markup.
    tool_call_format: how calls are written.
    system_prompt: as in ``ChatConfig``.
  """

  tokenizer: MarkedTokenizer

  def __init__(
    self,
    tokenizer: MarkedTokenizer,
    tool_call_format: ToolCallFormat = "compact",
    system_prompt: str = "",
  ):
    super().__init__(system_prompt)
    self.tokenizer = tokenizer
    self.stop_ids = (tokenizer.special.end,)
    # A policy that may write <|tool|> could make up its tools' answers.
    special = tokenizer.special
    self.reserved_ids = frozenset(dataclasses.astuple(special)) - {special.call, special.end}
    self._format = tool_call_format

  def fingerprint(self) -> str:
    return self.tokenizer.fingerprint()  # the markup is the same for every vocabulary

  def assistant(self, message: Message, tools: Sequence[DescribedTool] = ()) -> list[int]:
    return self._turn(message, tool_schemas(tools))

  def parse(self, turn: Sequence[int], tools: Sequence[DescribedTool] = ()) -> ParsedTurn:
    return parse_turn(self.tokenizer, turn, tool_schemas(tools), self._format)

  def turn_language(self, tools: Sequence[DescribedTool] = ()) -> Language:
    return turn_language(tool_schemas(tools), self._format, self.tokenizer.special.call)

  def _prompt(self, messages: Sequence[Message], tools: Sequence[DescribedTool]) -> list[Span]:
    schemas = tool_schemas(tools)
    spans = [self._message(m, schemas) for m in messages]
    spans[0].ids.insert(0, self.tokenizer.special.bos)
    return [*spans, Span("assistant", [self.tokenizer.special.assistant])]

  def _observation(
    self, messages: Sequence[Message], turn: Sequence[int], tools: Sequence[DescribedTool]
  ) -> list[Span]:
    special = self.tokenizer.special
    closed = len(turn) > 0 and turn[-1] == special.end
    spans = [] if closed else [Span(MARKUP_OWNER, [special.end])]
    spans += [self._message(m, {}) for m in messages]
    return [*spans, Span("assistant", [special.assistant])]

  def _message(self, message: Message, schemas: Schemas) -> Span:
    role_id = getattr(self.tokenizer.special, message.role)
    if message.role == "assistant":
      return Span("assistant", [role_id, *self._turn(message, schemas)])
    content = self.tokenizer.encode(message.content)
    return Span(message.role, [role_id, *content, self.tokenizer.special.end])

  def _turn(self, message: Message, schemas: Schemas) -> list[int]:
    if message.role != "assistant":
      raise ValueError(f"an assistant turn needs role 'assistant', got {message.role!r}.")
    ids = self.tokenizer.encode(message.content)
    for call in message.tool_calls:
      ids.append(self.tokenizer.special.call)
      ids.extend(self.tokenizer.encode(format_call(call, self._format, schemas)))
    ids.append(self.tokenizer.special.end)
    return ids


def conversation_texts(
  messages: Sequence[Message],
  *,
  tool_call_format: ToolCallFormat = "compact",
  schemas: Schemas | None = None,
) -> Iterator[str]:
  """Every text that ``MarkedChat`` encodes for ``messages``, on which a tokenizer is trained."""
  for message in messages:
    yield message.content
    for call in message.tool_calls:
      yield format_call(call, tool_call_format, schemas)


def _check_messages(messages: Sequence[Message]) -> None:
  for message in messages:
    if message.role not in ROLES:
      raise ValueError(f"message role {message.role!r}; allowed: {', '.join(ROLES)}.")
    if message.images:
      raise ValueError(
        f"a {message.role!r} message holds the image {message.images[0].sha256[:12]} "
        f"({message.images[0].media_type}), and this vocabulary writes text alone; allowed: "
        "messages without images (ToolResult.shown=(), Message without parts)."
      )
    if message.tool_calls and message.role != "assistant":
      raise ValueError(
        f"only an assistant message calls tools, got calls in a {message.role!r} one."
      )
