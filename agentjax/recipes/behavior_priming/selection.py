"""Which trajectories a warm start learns: those that show every behaviour, right or wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.data.conversations import check_turns, openai_messages
from agentjax.rewards.judges import (
  Judge,
  ask,
  delimit,
  last_json_object,
  material_notice,
  nonce,
  question_key,
  question_text,
)
from agentjax.trajectory.record import Message

BEHAVIOURS: Mapping[str, str] = {
  "information_verification": "checks what a source says against another source",
  "authority_evaluation": "weighs how far a source can be trusted, and prefers the better one",
  "adaptive_search": "changes a search after what it found",
  "error_recovery": "notices a mistake of its own and corrects it",
}

Row = Mapping[str, Any]


async def select(
  rows: Sequence[Row],
  judge: Judge | None = None,
  *,
  wanted: Sequence[str] = tuple(BEHAVIOURS),
  concurrency: int = 16,
) -> list[dict[str, Any]]:
  """The rows that show every wanted behaviour, in their order; each keeps ``behaviours``.

  Args:
    rows: with ``messages`` in OpenAI's form. One with ``behaviours``, a list of names, is not
      judged.
    judge: reads the others.
    wanted: names in ``BEHAVIOURS``.
    concurrency: questions at once.

  Raises:
    ValueError: a row that is no conversation, an unknown behaviour, or a row without behaviours and
      no judge.
  """
  places = asyncio.Semaphore(concurrency)

  async def shown(number: int, row: Row) -> list[str]:
    messages = tuple(openai_messages(row.get("messages") or (), keep=True))
    check_turns(messages)
    if "behaviours" in row:
      return list(row["behaviours"])
    if judge is None:
      raise ValueError(f"row {number} has no 'behaviours', and there is no judge to name them")
    async with places:
      key = question_key("behaviours", number)
      return read_behaviours(await ask(judge, behaviour_question(messages, key=key), key=key))

  known = await asyncio.gather(*(shown(i, row) for i, row in enumerate(rows)))
  if strange := sorted({name for own in known for name in own} - set(BEHAVIOURS)):
    raise ValueError(f"behaviours {strange}; allowed: {', '.join(BEHAVIOURS)}")
  return [
    {**row, "behaviours": own}
    for row, own in zip(rows, known, strict=True)
    if set(wanted) <= set(own)
  ]


def behaviour_question(messages: Sequence[Message], *, key: int) -> tuple[Message, ...]:
  """Asks which behaviours a conversation shows."""
  shown = question_text([m for m in messages if m.role != "system"])
  mark = nonce(key, shown)
  listed = "\n".join(f"{name}: it {text}" for name, text in BEHAVIOURS.items())
  return (
    Message("system", "You read what agents did. " + material_notice(mark)),
    Message(
      "user",
      f"{delimit('conversation', shown, mark)}\n\nWhich of these does the assistant do?\n{listed}"
      '\n\nSay why, whether its answer is right or wrong does not matter. Close with {"shown": '
      "[names]}.",
    ),
  )


def read_behaviours(reply: str) -> list[str]:
  """The names in the last JSON object of a reply that are behaviours; others are left out."""
  names = (last_json_object(reply) or {}).get("shown")
  return [name for name in names if name in BEHAVIOURS] if isinstance(names, list) else []
