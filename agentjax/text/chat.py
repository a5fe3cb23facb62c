"""Conversations as token ids that only ever grow.

A conversation is ``<|bos|>`` followed by ``<|role|> content <|end|>`` a message. Contents are
encoded one by one between special ids, so no merge crosses a border: the ids of a longer
conversation start with the ids of the shorter one, also when the policy's own turn is spelled in
tokens that encoding its text would never give.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from agentjax.config import Config
from agentjax.text.tokenizer import Tokenizer
from agentjax.text.tool_calls import Schemas, ToolCallFormat, format_call
from agentjax.trajectory.record import Message

ROLES = ("system", "user", "assistant", "tool")
MARKUP_OWNER = "environment"  # owns the <|end|> that a cut-off turn lacks


@dataclasses.dataclass(unsafe_hash=True)
class ChatConfig(Config):
  """How conversations are written.

  Attributes:
    tool_call_format: "compact", ``<|call|>NAME TEXT``; "json",
      ``<|call|>{"name": NAME, "arguments": {...}}``.
  """

  tool_call_format: ToolCallFormat = "compact"


class Span(NamedTuple):
  """A run of ids with one owner: "system", "user", "assistant", "tool" or "environment"."""

  owner: str
  ids: list[int]


class TargetSpan(NamedTuple):
  """A run of ids of a demonstration; ``target`` where the policy should learn to write them."""

  owner: str
  ids: list[int]
  target: bool


class PrefixError(AssertionError):
  """Ids of a later turn do not extend the ids seen so far."""


def encode_prompt(
  tokenizer: Tokenizer,
  messages: Sequence[Message],
  *,
  tool_call_format: ToolCallFormat = "compact",
  schemas: Schemas | None = None,
) -> list[Span]:
  """``<|bos|>``, every message, then ``<|assistant|>`` for the policy to go on.

  One span a message (the first holds ``<|bos|>``) and one for the last id. ``tool_call_format``
  and ``schemas`` matter only for calls inside assistant messages (see ``format_call``).

  Raises:
    ValueError: no message, or a role that is not in ``ROLES``.
  """
  if not messages:
    raise ValueError("a prompt needs at least one message, got none.")
  spans = [_encode_message(tokenizer, m, tool_call_format, schemas) for m in messages]
  spans[0].ids.insert(0, tokenizer.special.bos)
  return [*spans, Span("assistant", [tokenizer.special.assistant])]


def encode_observation(
  tokenizer: Tokenizer, messages: Sequence[Message], *, closed: bool = True
) -> list[Span]:
  """What to append after a turn of the policy: the messages, then ``<|assistant|>``.

  Args:
    tokenizer: the run's.
    messages: tool results, or words of a user; the policy's own turns stand as sampled.
    closed: whether the sampled turn ended in ``<|end|>``; if not, one comes first.

  Raises:
    ValueError: an assistant message.
  """
  spans = [] if closed else [Span(MARKUP_OWNER, [tokenizer.special.end])]
  for message in messages:
    if message.role == "assistant":
      raise ValueError(
        "an observation holds what others say; the policy's turn is appended as sampled, never "
        f"encoded again. Got the assistant message {message.content[:80]!r}."
      )
    spans.append(_encode_message(tokenizer, message, "compact", None))
  return [*spans, Span("assistant", [tokenizer.special.assistant])]


def encode_assistant(
  tokenizer: Tokenizer,
  message: Message,
  *,
  tool_call_format: ToolCallFormat = "compact",
  schemas: Schemas | None = None,
) -> list[int]:
  """Ids of a turn as the policy would sample it after ``<|assistant|>``, ``<|end|>`` included."""
  if message.role != "assistant":
    raise ValueError(f"an assistant turn needs role 'assistant', got {message.role!r}.")
  ids = tokenizer.encode(message.content)
  for call in message.tool_calls:
    ids.append(tokenizer.special.call)
    ids.extend(tokenizer.encode(format_call(call, tool_call_format, schemas)))
  ids.append(tokenizer.special.end)
  return ids


def encode_conversation(
  tokenizer: Tokenizer,
  prompt: Sequence[Message],
  demonstration: Sequence[Message],
  *,
  tool_call_format: ToolCallFormat = "compact",
  schemas: Schemas | None = None,
) -> list[TargetSpan]:
  """A worked solution for supervised learning, in the very ids an episode would have.

  Assistant turns are targets with their ``<|call|>`` and ``<|end|>``; the prompt, tool results and
  the ``<|assistant|>`` before a turn are not.

  Raises:
    ValueError: the demonstration does not start and end with an assistant message.
  """
  roles = [message.role for message in demonstration]
  if not roles or roles[0] != "assistant" or roles[-1] != "assistant":
    raise ValueError(
      f"a demonstration starts and ends with an assistant message, got the roles {roles}."
    )
  context = encode_prompt(tokenizer, prompt, tool_call_format=tool_call_format, schemas=schemas)
  spans = [TargetSpan(owner, ids, False) for owner, ids in context]
  heard: list[Message] = []
  for i, message in enumerate(demonstration):
    if message.role != "assistant":
      heard.append(message)
      continue
    if i:
      between = encode_observation(tokenizer, heard)
      spans.extend(TargetSpan(owner, ids, False) for owner, ids in between)
      heard = []
    turn = encode_assistant(tokenizer, message, tool_call_format=tool_call_format, schemas=schemas)
    spans.append(TargetSpan("assistant", turn, True))
  return spans


def conversation_texts(
  messages: Sequence[Message],
  *,
  tool_call_format: ToolCallFormat = "compact",
  schemas: Schemas | None = None,
) -> Iterator[str]:
  """Every text that rendering ``messages`` encodes: what a tokenizer is trained on."""
  for message in messages:
    yield message.content
    for call in message.tool_calls:
      yield format_call(call, tool_call_format, schemas)


def assert_extends(
  old_ids: Sequence[int] | np.ndarray, new_ids: Sequence[int] | np.ndarray
) -> None:
  """Raises PrefixError unless ``new_ids`` starts with all of ``old_ids``."""
  old, new = np.asarray(old_ids), np.asarray(new_ids)
  common = min(len(old), len(new))
  differing = np.flatnonzero(old[:common] != new[:common])
  if differing.size:
    at = int(differing[0])
    raise PrefixError(
      f"ids differ at index {at}: {int(old[at])} was seen there, now it is {int(new[at])}. "
      "Append to the ids sampled so far, or start a new branch."
    )
  if len(new) < len(old):
    raise PrefixError(
      f"{len(old)} ids were seen and only {len(new)} are left. Append to the ids sampled so far, "
      "or start a new branch."
    )


def _encode_message(
  tokenizer: Tokenizer,
  message: Message,
  tool_call_format: ToolCallFormat,
  schemas: Schemas | None,
) -> Span:
  if message.role not in ROLES:
    raise ValueError(f"message role {message.role!r}; allowed: {', '.join(ROLES)}.")
  role_id = getattr(tokenizer.special, message.role)
  if message.role == "assistant":
    turn = encode_assistant(tokenizer, message, tool_call_format=tool_call_format, schemas=schemas)
    return Span("assistant", [role_id, *turn])
  if message.tool_calls:
    raise ValueError(f"only an assistant message calls tools, got calls in a {message.role!r} one.")
  return Span(message.role, [role_id, *tokenizer.encode(message.content), tokenizer.special.end])
