"""Single turns of experts' trajectories as rows of a file, and the tasks made from them.

A row keeps the expert's turn and the history separately; a task shows only the history. A row may
have a profile: the rewards of a policy's samples at this turn.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.files import write_atomically
from agentjax.tools.declared import DECLARED_TOOLS, DeclaredTool, read_tools
from agentjax.trajectory.messages import message_from_json, message_to_json
from agentjax.trajectory.record import Message, Task

_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Profile:
  """Rewards of K samples of one turn.

  Attributes:
    mean, variance: of the K valid rewards; the variance is the population's.
    samples: K.
    version: of the policy: the training step whose weights sampled.
  """

  mean: float
  variance: float
  samples: int
  version: int

  @classmethod
  def of(cls, rewards: Sequence[float], version: int) -> Profile:
    """The profile of at least one reward."""
    if not rewards:
      raise ValueError("a profile needs at least one reward, got none")
    mean = sum(rewards) / len(rewards)
    # Equal rewards have variance 0, even if the mean is rounded.
    variance = (
      sum((r - mean) ** 2 for r in rewards) / len(rewards) if len(set(rewards)) > 1 else 0.0
    )
    return cls(mean, variance, len(rewards), version)


@dataclasses.dataclass(frozen=True)
class PivotRow:
  """One turn of one trajectory.

  Attributes:
    id: unique in its file, below ``splits.FIRST_TEST_ID``.
    source: name of the data set.
    trajectory: name of the trajectory.
    turn: which of its assistant turns, from 0.
    history: all messages before the turn.
    expected: the expert's turn, an assistant message.
    tools: declared to the policy.
    profile: None before it is profiled.
  """

  id: int
  source: str
  trajectory: str
  turn: int
  history: tuple[Message, ...]
  expected: Message
  tools: tuple[DeclaredTool, ...]
  profile: Profile | None = None

  def task(self, first_id: int = 0) -> Task:
    """The turn as a task of one turn: the history is the prompt, the expert's turn its solution."""
    metadata: dict[str, Any] = {
      DECLARED_TOOLS: [tool.to_dict() for tool in self.tools],
      "trajectory": self.trajectory,
      "turn": self.turn,
    }
    return Task(
      id=first_id + self.id,
      prompt=self.history,
      answer=action_text(self.expected),
      source=self.source,
      demonstration=(self.expected,),
      metadata=metadata,
    )


def pivot_tasks(
  path: str | os.PathLike[str],
  *,
  first_id: int = 0,
  limit: int | None = None,
) -> list[Task]:
  """The tasks of a file of rows.

  Args:
    path: as ``write_pivots`` wrote it.
    first_id: added to the ids of the rows.
    limit: at most this many, from the start; None takes all.

  Raises:
    DataError: as ``read_pivots``.
  """
  return [row.task(first_id) for row in read_pivots(path)[:limit]]


def write_pivots(path: str | os.PathLike[str], rows: Iterable[PivotRow]) -> None:
  """One JSON row a line, beside the file first and then renamed."""
  write_atomically(path, b"".join(_line(row) for row in rows))


def read_pivots(path: str | os.PathLike[str]) -> list[PivotRow]:
  """The rows of a file.

  Raises:
    DataError: a file that cannot be read, a row that is none, an id out of range or given twice.
  """
  rows: list[PivotRow] = []
  seen: set[int] = set()
  for line, values in read_jsonl(path):
    try:
      row = _from_json(values)
    except (KeyError, TypeError, ValueError) as error:
      reason = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
      raise DataError(f"not a pivot row: {reason}", path, line) from error
    if row.id in seen or not 0 <= row.id < FIRST_TEST_ID:
      raise DataError(f"id {row.id} is given twice or not in 0..{FIRST_TEST_ID - 1}", path, line)
    seen.add(row.id)
    rows.append(row)
  return rows


def action_text(message: Message) -> str:
  """An action in one readable line or more: the text, then each call with its arguments."""
  calls = (
    f"{c.name}({json.dumps(dict(c.arguments), ensure_ascii=False)})" for c in message.tool_calls
  )
  return "\n".join(part for part in (message.content, *calls) if part)


def _line(row: PivotRow) -> bytes:
  values = _to_json(row)
  try:
    return json.dumps(values, ensure_ascii=False).encode() + b"\n"
  except UnicodeEncodeError:  # half of a pair, where a recording was cut
    return json.dumps(values).encode() + b"\n"


def _to_json(row: PivotRow) -> dict[str, Any]:
  return {
    "format": _FORMAT,
    "id": row.id,
    "source": row.source,
    "trajectory": row.trajectory,
    "turn": row.turn,
    "profile": None if row.profile is None else dataclasses.asdict(row.profile),
    "expected": message_to_json(row.expected),
    "tools": [tool.to_dict() for tool in row.tools],
    "history": [message_to_json(message) for message in row.history],
  }


def _from_json(values: dict[str, Any]) -> PivotRow:
  if values["format"] != _FORMAT:
    raise ValueError(f"format {values['format']!r}; this version reads {_FORMAT}")
  history = tuple(message_from_json(m) for m in values["history"])
  expected = message_from_json(values["expected"])
  if not history or expected.role != "assistant":
    raise ValueError("a history and an expected message of the assistant are needed")
  profile = values["profile"]
  return PivotRow(
    id=_number(values["id"]),
    source=str(values["source"]),
    trajectory=str(values["trajectory"]),
    turn=_number(values["turn"]),
    history=history,
    expected=expected,
    tools=read_tools(values["tools"]),
    profile=None if profile is None else Profile(**profile),
  )


def _number(value: Any) -> int:
  if not isinstance(value, int) or isinstance(value, bool):
    raise ValueError(f"{value!r} is no integer")
  return value
