"""The journal: what a run did, appended as it happens, enough to do it again without a sandbox.

Records, in record logs (trajectory.recordlog), one a process: ``journal.log`` of the first one,
``journal.1.log`` and so on:

  trajectory   one finished episode with its address, ids, log-probs, tool calls, results, reward
  step         a finished training step: stage, episodes used, hash of the parameters after it

Steps stand in the first file, episodes in that of the process that played them. A step is synced to
disk when its ``step`` record is written, after its episodes, before anything later begins. What a
crash tore off the end is found by checksum and dropped. A file that is damaged elsewhere is kept
under another name, and its whole records are written anew.

Opening a journal compares checksums, decodes steps, and notes where each episode stands; an episode
is decoded when it is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from agentjax.files import written_beside
from agentjax.training import processes
from agentjax.trajectory.record import Trajectory
from agentjax.trajectory.recordlog import (
  RecordReader,
  RecordWriter,
  StoreError,
  TornTail,
  decode_record,
  first_items,
  salvage,
)
from agentjax.trajectory.store import from_record, to_record

MAGIC = b"AJXJRNL\0"
VERSION = 6
JOURNAL_FILE = "journal.log"  # of the first process, in the run's directory

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
    schedules: states after the step of the schedules that read a metric, by dotted name.
  """

  step: int
  stage: str
  episodes: tuple[Address, ...]
  fingerprint: str
  schedules: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Index:
  """What stands where: the steps, and of each episode the number of its file and its offset."""

  steps: dict[int, StepRecord] = dataclasses.field(default_factory=dict)
  places: dict[Address, tuple[int, int]] = dataclasses.field(default_factory=dict)

  def note(self, file: int, offset: int, data: bytes) -> None:
    """Adds a record, as it is on disk."""
    if first_items(data, 1) == {"kind": "step"}:
      step = _step(decode_record(data))
      self.steps[step.step] = step
    else:
      found = first_items(data, 4, inside="trajectory")
      self.places[found["step"], found["task_id"], found["sample"]] = (file, offset)

  def add(self, other: _Index) -> None:
    self.steps |= other.steps
    self.places |= other.places

  def exchange(self) -> _Index:
    """Those of all processes together."""
    steps = [dataclasses.asdict(step) for step in self.steps.values()]
    rows = np.array([(*a, *at) for a, at in self.places.items()], np.int64).reshape(-1, 5)
    whole = _Index()
    for part in processes.exchange({"steps": steps, "places": rows}):
      found = {(s, t, n): (file, at) for s, t, n, file, at in part["places"].tolist()}
      whole.add(_Index({s["step"]: _step(s) for s in part["steps"]}, found))
    return whole


class JournalReader:
  """Index of a journal as it was when this was made.

  Args:
    path: its first file.

  Attributes:
    steps: finished steps by number; of a step that was executed again with another result, the
      later one.

  Raises:
    StoreError: damage before the tail; the message names the byte offset.
  """

  def __init__(self, path: str | pathlib.Path):
    self._path = pathlib.Path(path)
    self._index = self._scan()

  def _scan(self) -> _Index:
    index = _Index()
    for number, file in journal_files(self._path).items():
      for offset, data in RecordReader(file, MAGIC, VERSION, recover_tail=True).payloads():
        index.note(number, offset, data)
    return index

  @property
  def steps(self) -> dict[int, StepRecord]:
    return self._index.steps

  def lost_steps(self, done: int) -> list[int]:
    """Steps of 1 ... ``done`` that cannot be executed again: a record of theirs is missing."""
    known, episodes = self.steps, self._index.places.keys()
    return [
      step
      for step in range(1, done + 1)
      if step not in known or not episodes >= set(known[step].episodes)
    ]

  def trajectories(self, wanted: Callable[[Address], bool]) -> dict[Address, Trajectory]:
    """The finished episodes whose address is ``wanted``, by address; only they are read."""
    places = sorted((at, address) for address, at in self._index.places.items() if wanted(address))
    readers = {
      number: RecordReader(_file(self._path, number), MAGIC, VERSION)
      for number in {number for (number, _), _ in places}
    }
    return {
      address: from_record(readers[number].at(offset)["trajectory"])
      for (number, offset), address in places
    }


class Journal(JournalReader):
  """Appends to a run's journal; each process to its own file, from any of its threads.

  All processes make one together, and each knows the index of all files.

  Args:
    path: the first file; created when missing. A torn tail is dropped; ``torn`` then describes it.
      A file F that is damaged elsewhere becomes F.damaged, and what is whole of it is written anew.

  Attributes:
    faults: what was wrong with damaged files, in words, by their names; of those that this process
      has opened: its own, and of processes that are no more.

  Raises:
    StoreError: it is no journal, or of another version.
  """

  def __init__(self, path: str | pathlib.Path):
    self.faults: dict[str, str] = {}
    self.torn: TornTail | None = None
    self._lock = threading.Lock()
    super().__init__(path)

  def _scan(self) -> _Index:
    self._number, count = jax.process_index(), jax.process_count()
    index = _Index()
    for number in sorted({*journal_files(self._path), self._number}, reverse=True):
      if number % count == self._number:  # the own one comes last
        writer, found = self._open(number)
        index.add(found)
        if number != self._number:
          writer.close()
    self._writer = writer
    return index if count == 1 else index.exchange()

  def _open(self, number: int) -> tuple[RecordWriter, _Index]:
    file, index = _file(self._path, number), _Index()
    note = functools.partial(index.note, number)
    try:
      writer = RecordWriter(file, MAGIC, VERSION, note)
    except StoreError:
      self.faults[file.name] = "; ".join(_mend(file))
      index.steps.clear()
      index.places.clear()
      writer = RecordWriter(file, MAGIC, VERSION, note)
    self.torn = self.torn or writer.torn
    return writer, index

  def add_trajectory(self, trajectory: Trajectory) -> None:
    """Appends a finished episode; one that is there already is left alone."""
    with self._lock:
      if trajectory.address in self._index.places:
        return
      offset = self._writer.append({"kind": "trajectory", "trajectory": to_record(trajectory)})
      self._index.places[trajectory.address] = (self._number, offset)

  def finish_step(self, record: StepRecord) -> None:
    """Appends the step and syncs; one that is there already with this result is left alone.

    The first process writes it: by then all others must have called ``sync``.
    """
    with self._lock:
      known = self.steps.get(record.step)
      if known is None or known.fingerprint != record.fingerprint:
        if self._number == 0:
          self._writer.append({"kind": "step", **dataclasses.asdict(record)})
        self.steps[record.step] = record
    self.sync()

  def sync(self) -> None:
    """Returns when everything appended here is on the disk."""
    self._writer.flush()

  def close(self) -> None:
    self._writer.close()


def journal_files(path: str | pathlib.Path) -> dict[int, pathlib.Path]:
  """The files of a journal that are there, by the number of the process that wrote them.

  Args:
    path: of the first one.
  """
  path = pathlib.Path(path)
  numbers = [p.stem.rpartition(".")[2] for p in path.parent.glob(f"{path.stem}.*{path.suffix}")]
  files = {n: _file(path, n) for n in (0, *sorted(int(n) for n in numbers if n.isdigit()))}
  return {number: file for number, file in files.items() if file.exists()}


def _file(path: pathlib.Path, number: int) -> pathlib.Path:
  return path.with_name(f"{path.stem}.{number}{path.suffix}") if number else path


def _mend(path: pathlib.Path) -> list[str]:
  """Writes the whole records of a damaged journal anew; what was wrong with it."""
  faults: list[StoreError] = []
  with written_beside(path) as beside:
    with RecordWriter(beside, MAGIC, VERSION) as writer:
      for record in salvage(path, MAGIC, VERSION, faults):
        writer.append(record)
    # A copy, not the file itself: whatever kills this process, a journal is there.
    with written_beside(path.with_name(f"{path.name}.damaged")) as copy:
      shutil.copyfile(path, copy)
  return [f"byte {fault.offset}: {fault.reason}" for fault in faults]


def read_journal(path: str | pathlib.Path) -> Iterator[tuple[str, Any]]:
  """("step", StepRecord) and ("trajectory", Trajectory) pairs, a step after its episodes.

  Args:
    path: of the first file; those of other processes beside it are read first.
  """
  path = pathlib.Path(path)
  for file in reversed([path, *(f for number, f in journal_files(path).items() if number)]):
    for record in RecordReader(file, MAGIC, VERSION, recover_tail=True):
      if record["kind"] == "trajectory":
        yield "trajectory", from_record(record["trajectory"])
      else:
        yield "step", _step(record)


def _step(record: Mapping[str, Any]) -> StepRecord:
  return StepRecord(
    step=record["step"],
    stage=record["stage"],
    episodes=tuple(tuple(a) for a in record["episodes"]),
    fingerprint=record["fingerprint"],
    schedules=record.get("schedules", {}),
  )
