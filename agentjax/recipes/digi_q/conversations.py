"""Recorded turns as messages again, for rows of demonstrations.

What the record holds are ids. Messages are guessed from them and written again: only those that
give the recorded ids back are used, so that a row shows what the policy saw.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentjax.text.chat import Chat, PrefixError, Span
from agentjax.text.tool_calls import DescribedTool
from agentjax.trajectory.messages import ROLES
from agentjax.trajectory.record import Message, Segment, Task


class ConversationReader:
  """Reads the conversations of one chat format.

  Args:
    chat: of the policy that played.
  """

  def __init__(self, chat: Chat):
    self._chat = chat

  def histories(
    self,
    heard: Sequence[Sequence[Segment]],
    drawn: Sequence[Sequence[int]],
    task: Task,
    tools: Sequence[DescribedTool],
  ) -> list[tuple[Message, ...] | None]:
    """The messages before each turn; None where they cannot be written.

    Args:
      heard: what the policy was shown before each of its turns.
      drawn: ids of these turns.
      task: whose prompt the first part must be.
      tools: that were offered.
    """
    found: list[tuple[Message, ...] | None] = []
    so_far: tuple[Message, ...] | None = None
    for number, segments in enumerate(heard):
      if number == 0:
        begun = self._wrote(segments, self._chat.prompt(task.prompt, tools))
        so_far = task.prompt if begun else None
      elif so_far is not None:
        said = self.turn(drawn[number - 1], tools)
        more = self._observed(segments, drawn[number - 1], tools)
        so_far = None if said is None or more is None else (*so_far, said, *more)
      found.append(so_far)
    return found

  def turn(self, ids: Sequence[int], tools: Sequence[DescribedTool]) -> Message | None:
    """A turn of the policy; None if it says nothing, or has a call that cannot be read."""
    try:
      text, calls = self._chat.parse(ids, tools)
    except ValueError:
      return None
    if any(call.error is not None for call in calls) or not (text or calls):
      return None
    return Message("assistant", text, calls)

  def _observed(
    self, segments: Sequence[Segment], turn: Sequence[int], tools: Sequence[DescribedTool]
  ) -> tuple[Message, ...] | None:
    roles = [s.owner for s in segments if s.owner in ROLES and s.owner != "assistant"]
    text = self._chat.tokenizer.decode([i for s in segments for i in s.token_ids.tolist()])
    try:
      contents = _between(text, self._frame(roles, turn, tools))
      messages = tuple(Message(r, content) for r, content in zip(roles, contents, strict=True))
      written = self._chat.observation(messages, turn, tools)
    except (ValueError, PrefixError):  # the chat format has no such messages there
      return None
    return messages if self._wrote(segments, written) else None

  def _frame(
    self, roles: Sequence[str], turn: Sequence[int], tools: Sequence[DescribedTool]
  ) -> list[str]:
    """What the format writes before, between and after messages of these roles."""
    names = [f"stand-in {number:04}" for number in range(len(roles))]
    messages = [Message(role, name) for role, name in zip(roles, names, strict=True)]
    spans = self._chat.observation(messages, turn, tools)
    rest = self._chat.tokenizer.decode([i for s in spans for i in s.ids])
    parts = []
    for name in names:
      part, _, rest = rest.partition(name)
      parts.append(part)
    return [*parts, rest]

  def _wrote(self, segments: Sequence[Segment], spans: Sequence[Span]) -> bool:
    recorded = [i for s in segments for i in s.token_ids.tolist()]
    return recorded == [i for s in spans for i in s.ids]


def _between(text: str, parts: Sequence[str]) -> list[str]:
  """The texts between the parts, each up to the next one; the last part ends the text.

  Raises:
    ValueError: the text does not have these parts.
  """
  if not text.startswith(parts[0]) or not text.endswith(parts[-1]):
    raise ValueError(f"{text[:80]!r} does not stand between {parts[0]!r} and {parts[-1]!r}")
  inner = text[len(parts[0]) : len(text) - len(parts[-1])]
  found = []
  for part in parts[1:-1]:
    own, _, inner = inner.partition(part)
    found.append(own)
  return [*found, inner]
