"""The journal: what a run did, appended as it happens, enough to do it again without a sandbox.

Records, in one record log (trajectory.recordlog):

  trajectory   one finished episode with its address, ids, log-probs, tool calls, results, reward
  step         a finished training step: stage, episodes used, hash of the parameters after it

A step is synced to disk when its ``step`` record is written, before anything later begins. What a
crash tore off the end is found by checksum and dropped. A file that is damaged elsewhere is kept
under another name, and its whole records are written anew.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from agentjax.trajectory.record import Trajectory
from agentjax.trajectory.recordlog import RecordReader, RecordWriter, StoreError, salvage
from agentjax.trajectory.store import from_record, to_record

MAGIC = b"AJXJRNL\0"
VERSION = 6

Address = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class StepRecord:
  """A finished step.

  Attributes:
    step: its number, from 1.
    stage: "supervised" or "rl".
    episodes: addresses of the trajectories the update used, in batch order; empty in a supervised
      step.
    fingerprint: hash of the networks after the step (sharding.fingerprint).
  """

  step: int
  stage: str
  episodes: tuple[Address, ...]
  fingerprint: str


class JournalReader:
  """Index of a journal as it was when this was made.

  Attributes:
    steps: finished steps by number; of a step that was executed again with another result, the
      later one.

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

  def lost_steps(self, done: int) -> list[int]:
    """Steps of 1 ... ``done`` that cannot be executed again: a record of theirs is missing."""
    known = self.steps
    return [
      step
      for step in range(1, done + 1)
      if step not in known or not self._written.issuperset(known[step].episodes)
    ]

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
    path: file; created when missing. A torn tail is dropped; ``torn`` then describes it. One that
      is damaged elsewhere becomes PATH.damaged, and what is whole of it is written anew.

  Attributes:
    faults: what was wrong with a damaged file, in words.

  Raises:
    StoreError: it is no journal, or of another version.
  """

  def __init__(self, path: str | pathlib.Path):
    self.faults: list[str] = []
    try:
      self._writer = RecordWriter(path, MAGIC, VERSION)
    except StoreError:
      self.faults = _mend(pathlib.Path(path))
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
    """Appends the step and syncs; one that is there already with this result is left alone."""
    with self._lock:
      known = self.steps.get(record.step)
      if known is None or known.fingerprint != record.fingerprint:
        self._writer.append({"kind": "step", **dataclasses.asdict(record)})
        self.steps[record.step] = record
    self.sync()

  def sync(self) -> None:
    """Returns when everything appended is on the disk."""
    self._writer.flush()

  def close(self) -> None:
    self._writer.close()


def _mend(path: pathlib.Path) -> list[str]:
  """Writes the whole records of a damaged journal anew; what was wrong with it."""
  faults: list[StoreError] = []
  beside = path.with_name(f"{path.name}.new")
  beside.unlink(missing_ok=True)
  try:
    with RecordWriter(beside, MAGIC, VERSION) as writer:
      for record in salvage(path, MAGIC, VERSION, faults):
        writer.append(record)
    os.replace(path, path.with_name(f"{path.name}.damaged"))
    os.replace(beside, path)
  finally:
    beside.unlink(missing_ok=True)
  return [f"byte {fault.offset}: {fault.reason}" for fault in faults]


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
