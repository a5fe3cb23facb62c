"""Splices bad and good trajectories of one task at the first error (Agent-R).

A row has ``task``, ``messages`` in OpenAI's form and ``reward``. Two rows of a task that begin with
the same messages are branches of one tree, and part at the first message that differs. A message
may have ``verdict``: "good", "uncertain" or "bad", by which an actor judged its own action.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.config import Config, NonNegativeFloat, PositiveInt
from agentjax.data.conversations import check_turns, openai_messages

Row = Mapping[str, Any]
_JUDGED = ("verdict", "weight")  # fields that are not part of what was said


@dataclasses.dataclass(unsafe_hash=True)
class SpliceConfig(Config):
  """Which pairs are spliced, and how. All defaults are ours.

  Attributes:
    above: alpha, a good trajectory has more reward; it rises from one iteration to the next.
    gap: beta, and it has so much more than the bad one.
    most: pairs of a task, those with the largest gap first.
    thought: what the policy writes when it sees the error, before the good action.
  """

  above: float = 0.5
  gap: NonNegativeFloat = 0.2
  most: PositiveInt = 4
  thought: str = "My last step was a mistake. I go back and do it another way."


def splice(rows: Sequence[Row], config: SpliceConfig) -> list[dict[str, Any]]:
  """Good trajectories as they are, and a revised one for each pair.

  Raises:
    ValueError: a row without task, reward or conversation.
  """
  tasks: dict[Any, list[Row]] = collections.defaultdict(list)
  for number, row in enumerate(rows):
    if not {"task", "reward", "messages"} <= row.keys():
      raise ValueError(f"row {number} has {sorted(row)}; allowed: task, reward and messages")
    check_turns(tuple(openai_messages(row["messages"], keep=True)))
    tasks[row["task"]].append(row)
  made: list[dict[str, Any]] = []
  for task, members in tasks.items():
    good = [row for row in members if row["reward"] > config.above]
    made += [{"task": task, "messages": _bare(row["messages"])} for row in good]
    pairs = [
      (float(one["reward"]) - float(other["reward"]), i, j)
      for i, one in enumerate(good)
      for j, other in enumerate(members)
      if one["reward"] - other["reward"] > config.gap
    ]
    pairs.sort(key=lambda pair: (-pair[0], pair[1:]))
    revised = (revise(members[j]["messages"], good[i]["messages"], config) for _, i, j in pairs)
    found = [messages for messages in revised if messages is not None]
    made += [{"task": task, "messages": messages} for messages in found[: config.most]]
  return made


def revise(
  bad: Sequence[Row], good: Sequence[Row], config: SpliceConfig
) -> list[dict[str, Any]] | None:
  """The bad one up to its first error and what answered it, the thought, the good rest.

  None if they share no action, or no later message of the assistant differs.
  """
  ours, theirs = _bare(bad), _bare(good)
  shared = 0
  while shared < min(len(ours), len(theirs)) and ours[shared] == theirs[shared]:
    shared += 1
  begun = any(message["role"] == "assistant" for message in ours[:shared])
  # Where they part, each must have an action of its own.
  parted = [list(m[shared : shared + 1]) for m in (ours, theirs)]
  if not begun or not all(m and m[0]["role"] == "assistant" for m in parted):
    return None
  error = _first_error(bad, shared)
  end = error + 1
  while end < len(ours) and ours[end]["role"] != "assistant":
    end += 1
  if end == error + 1:
    return None  # the episode ended with the error: nothing answered it
  first, *rest = theirs[shared:]
  text = first.get("content") or ""
  seen = {**first, "content": f"{config.thought}\n{text}" if text else config.thought}
  context = [{**m, "weight": 0} if m["role"] == "assistant" else m for m in ours[:end]]
  return [*context, seen, *rest]


def _first_error(bad: Sequence[Row], shared: int) -> int:
  """The first action after the branch that was judged bad; the branch itself without verdicts."""
  judged = [i for i in range(shared, len(bad)) if bad[i].get("verdict") == "bad"]
  return judged[0] if judged else shared


def _bare(messages: Sequence[Row]) -> list[dict[str, Any]]:
  return [{k: v for k, v in message.items() if k not in _JUDGED} for message in messages]
