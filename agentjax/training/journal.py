"""The journal: what a run did, appended as it happens, enough to do it again without a sandbox.

Records, in one record log (trajectory.recordlog):

  trajectory   one finished episode with its address, ids, log-probs, tool calls, results, reward
  step         a finished training step: stage, episodes used, hash of the parameters after it

A step is synced to disk when its ``step`` record is written, before anything later begins. What a
crash tore off the end is found by checksum and dropped.
"""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from agentjax.trajectory.record import Trajectory
from agentjax.trajectory.recordlog import RecordReader, RecordWriter
from agentjax.trajectory.store import from_record, to_record

MAGIC = b"AJXJRNL\0"
VERSION = 5

Address = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class StepRecord:
  """A finished step.

  Attributes:
    step: its number, from 1.
    stage: "supervised" or "rl".
    episodes: addresses of the trajectories the update used, in batch order; empty in a supervised
      step.
    fingerprint: hash of the networks after the step (training.fingerprint).
  """

  step: int
  stage: str
  episodes: tuple[Address, ...]
  fingerprint: str


class JournalReader:
  """Index of a journal as it was when this was made.

  Attributes:
    steps: finished steps by number.

  Raises:
    StoreError: damage before the tail; the message names the byte offset.
  """

  def __init__(self, path: str | pathlib.Path):
    self._path = pathlib.Path(path)
    self.steps: dict[int, StepRecord] = {}
    self._written: set[Address] = set()
    for kind, value in read_journal(self._path) if self._path.exists() else ():
      if kind == "step":
        self.steps[value.step] = value
      else:
        self._written.add(value.address)

  def trajectories(self, wanted: Callable[[Address], bool]) -> dict[Address, Trajectory]:
    """The finished episodes whose address is ``wanted``, by address."""
    if not any(map(wanted, self._written)):
      return {}  # the usual case, without reading the file
    return {
      value.address: value
      for kind, value in read_journal(self._path)
      if kind == "trajectory" and wanted(value.address)
    }


class Journal(JournalReader):
  """Appends to a run's journal; one process at a time, from any of its threads.

  Args:
    path: file; created when missing. A torn tail is dropped; ``torn`` then describes it.
  """

  def __init__(self, path: str | pathlib.Path):
    self._writer = RecordWriter(path, MAGIC, VERSION)
    self.torn = self._writer.torn
    self._lock = threading.Lock()
    super().__init__(path)

  def add_trajectory(self, trajectory: Trajectory) -> None:
    """Appends a finished episode; one that is there already is left alone."""
    with self._lock:
      if trajectory.address in self._written:
        return
      self._writer.append({"kind": "trajectory", "trajectory": to_record(trajectory)})
      self._written.add(trajectory.address)

  def finish_step(self, record: StepRecord) -> None:
    """Appends the step and syncs; a step that is there already is left alone."""
    with self._lock:
      if record.step not in self.steps:
        self._writer.append({"kind": "step", **dataclasses.asdict(record)})
        self.steps[record.step] = record
    self.sync()

  def sync(self) -> None:
    """Returns when everything appended is on the disk."""
    self._writer.flush()

  def close(self) -> None:
    self._writer.close()


def read_journal(path: str | pathlib.Path) -> Iterator[tuple[str, Any]]:
  """("step", StepRecord) and ("trajectory", Trajectory) pairs in the order they were written."""
  for record in RecordReader(path, MAGIC, VERSION, recover_tail=True):
    if record["kind"] == "trajectory":
      yield "trajectory", from_record(record["trajectory"])
    else:
      yield (
        "step",
        StepRecord(
          step=record["step"],
          stage=record["stage"],
          episodes=tuple(tuple(a) for a in record["episodes"]),
          fingerprint=record["fingerprint"],
        ),
      )
