"""Recorded turns as messages again, for rows of demonstrations.

What the record holds are ids. Messages are guessed from them and written again: only those that
give the recorded ids back are used, so that a row shows what the policy saw.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from agentjax.text.chat import Chat, Span
from agentjax.text.tool_calls import DescribedTool
from agentjax.trajectory.messages import ROLES
from agentjax.trajectory.record import Message, Segment, Task

_STAND_IN = "stand in"


class ConversationReader:
  """Reads the conversations of one chat format.

  Args:
    chat: of the policy that played.
  """

  def __init__(self, chat: Chat):
    self._chat = chat
    self._frame = functools.lru_cache(maxsize=None)(self._frame_of)

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
        so_far = (
          task.prompt if self._wrote(segments, self._chat.prompt(task.prompt, tools)) else None
        )
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
    spoken = [s for s in segments if s.owner in ROLES and s.owner != "assistant"]
    try:
      messages = tuple(Message(s.owner, self._content(s)) for s in spoken)
      return (
        messages if self._wrote(segments, self._chat.observation(messages, turn, tools)) else None
      )
    except ValueError:  # the chat format has no such message there
      return None

  def _content(self, segment: Segment) -> str:
    before, after = self._frame(segment.owner)
    text = self._chat.tokenizer.decode(segment.token_ids.tolist())
    for begin in (before, before.lstrip()):  # of the first message after a turn, or of a later one
      if text.startswith(begin):
        return text[len(begin) :].removesuffix(after)
    return text

  def _frame_of(self, role: str) -> tuple[str, str]:
    """What the format writes before and after the content of a message that follows a turn."""
    spans = self._chat.observation([Message(role, _STAND_IN)], self._chat.stop_ids[:1])
    ids = list(itertools.chain.from_iterable(s.ids for s in spans if s.owner == role))
    before, _, after = self._chat.tokenizer.decode(ids).partition(_STAND_IN)
    return before, after

  def _wrote(self, segments: Sequence[Segment], spans: Sequence[Span]) -> bool:
    recorded = itertools.chain.from_iterable(s.token_ids.tolist() for s in segments)
    return list(recorded) == list(itertools.chain.from_iterable(s.ids for s in spans))
