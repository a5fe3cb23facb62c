"""Trajectories on disk, bit for bit: a record log with one trajectory a record. No jax.

A record holds columns by name, each with its dtype and shape. A reader keeps unknown columns and
writes them back, and fills missing ones. So a new column breaks no file and does not change the
version of the format.
"""

from __future__ import annotations

import base64
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from agentjax.files import written_beside
from agentjax.trajectory.columns import core_fields
from agentjax.trajectory.record import (
  AGENT,
  Flag,
  Outcome,
  Reward,
  Segment,
  Status,
  ToolRecord,
  Trajectory,
)
from agentjax.trajectory.recordlog import (
  RecordReader,
  RecordWriter,
  StoreError,
  decode_record,
  encode_record,
)

MAGIC = b"AJXTRAJ\0"
VERSION = 6  # raise it when a field changes that is no column; columns come and go without

_CORE = core_fields(Segment)
_SEGMENT_FIELDS = tuple(
  f.name
  for f in dataclasses.fields(Segment)
  if f.name != "columns" and f.name not in {column.name for column in _CORE}
)
_TOOL_FIELDS = tuple(f.name for f in dataclasses.fields(ToolRecord))


def to_record(trajectory: Trajectory) -> dict[str, Any]:
  """All fields of ``trajectory`` as plain values and numpy arrays, for ``RecordWriter.append``."""
  record = {
    "step": trajectory.step,
    "task_id": trajectory.task_id,
    "sample": trajectory.sample,
    "source": trajectory.source,
    "segments": [_segment_record(s) for s in trajectory.segments],
    "status": str(trajectory.status),
    "reward": _reward_record(trajectory.reward),
    "reward_parts": {k: _reward_record(v) for k, v in trajectory.reward_parts.items()},
    "turn_rewards": trajectory.turn_rewards,
    "tools": [_tool_record(t) for t in trajectory.tools],
    "answer": trajectory.answer,
    "group": trajectory.group,
    "metadata": trajectory.metadata,
    "columns": dict(trajectory.columns),
  }
  if trajectory.agents:  # without them as in files that were written before there were any
    record["agents"] = {k: _outcome_record(v) for k, v in trajectory.agents.items()}
  return record


def from_record(record: Mapping[str, Any]) -> Trajectory:
  """Inverse of ``to_record``.

  Raises:
    ValueError: a field is missing, unknown or impossible, or a column is missing that has no fill.
  """
  try:
    values = dict(record)
    values["segments"] = [_segment(s) for s in record["segments"]]
    values["status"] = Status(record["status"])
    values["reward"] = Reward(*record["reward"])
    values["reward_parts"] = {k: Reward(*v) for k, v in record["reward_parts"].items()}
    values["tools"] = [ToolRecord(**t) for t in record["tools"]]
    values["agents"] = {k: _outcome(v) for k, v in record.get("agents", {}).items()}
    return Trajectory(**values)
  except (KeyError, TypeError) as error:
    raise ValueError(f"not the record of a trajectory: {error}") from error


def to_texts(trajectories: Iterable[Trajectory]) -> list[str]:
  """Trajectories as texts, for states that are saved as JSON."""
  return [base64.b64encode(encode_record(to_record(one))).decode() for one in trajectories]


def from_texts(texts: Iterable[str]) -> list[Trajectory]:
  """Inverse of ``to_texts``."""
  return [from_record(decode_record(base64.b64decode(one))) for one in texts]


class StoreWriter(RecordWriter):
  """Appends trajectories to a file; see ``RecordWriter`` for what happens to an existing one."""

  def __init__(self, path: str | os.PathLike[str]) -> None:
    super().__init__(path, MAGIC, VERSION)

  def append_trajectory(self, trajectory: Trajectory) -> int:
    """Writes one trajectory; ``flush`` makes it durable. Returns its byte offset."""
    return self.append(to_record(trajectory))


def write_store(path: str | os.PathLike[str], trajectories: Iterable[Trajectory]) -> None:
  """Writes a store of ``trajectories`` at ``path``, completely or not at all; an old one is
  replaced."""
  with written_beside(path) as beside, StoreWriter(beside) as writer:
    for trajectory in trajectories:
      writer.append_trajectory(trajectory)


def read_store(path: str | os.PathLike[str], *, recover_tail: bool = False) -> Iterator[Trajectory]:
  """The trajectories in ``path``, in the order written.

  Args:
    path: the file.
    recover_tail: see ``RecordReader``.

  Raises:
    StoreError: a damaged file, with the offset.
  """
  records = RecordReader(path, MAGIC, VERSION, recover_tail=recover_tail)
  for offset, record in records.with_offsets():
    try:
      yield from_record(record)
    except ValueError as error:
      raise StoreError(path, offset, str(error)) from error


def _segment_record(segment: Segment) -> dict[str, Any]:
  record = {name: getattr(segment, name) for name in _SEGMENT_FIELDS}
  record["flags"] = sorted(str(f) for f in segment.flags)
  record["columns"] = {c.name: getattr(segment, c.name) for c in _CORE} | dict(segment.columns)
  return record


def _segment(record: Mapping[str, Any]) -> Segment:
  values = dict(record)
  columns = dict(values.pop("columns"))
  length = len(columns["token_ids"])
  for column in _CORE:
    if column.name in columns:
      values[column.name] = columns.pop(column.name)
    elif column.needed:
      raise ValueError(f"not the record of a trajectory: a segment has no {column.name}")
    else:
      values[column.name] = column.filled((length,))
  values["flags"] = frozenset(Flag(f) for f in values["flags"])
  return Segment(**values, columns=columns)


def _tool_record(tool: ToolRecord) -> dict[str, Any]:
  record = {name: _plain(getattr(tool, name)) for name in _TOOL_FIELDS}
  # As in files that were written before there were any.
  if not tool.artifacts:
    del record["artifacts"]
  if tool.agent == AGENT:
    del record["agent"]
  return record


def _outcome_record(outcome: Outcome) -> dict[str, Any]:
  return {
    "learns": outcome.learns,
    "reward": _reward_record(outcome.reward),
    "parts": {k: _reward_record(v) for k, v in outcome.parts.items()},
  }


def _outcome(record: Mapping[str, Any]) -> Outcome:
  parts = {k: Reward(*v) for k, v in record["parts"].items()}
  return Outcome(record["learns"], Reward(*record["reward"]), parts)


def _reward_record(reward: Reward) -> list[Any]:
  return [reward.value, reward.reason]


def _plain(value: Any) -> Any:
  return dict(value) if isinstance(value, Mapping) else value
