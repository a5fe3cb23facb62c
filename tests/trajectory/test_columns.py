"""One table of columns: a new one travels, a file keeps what a program does not know."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from agentjax.trajectory import columns as table
from agentjax.trajectory.batch import Batch, abstract_batch, filled_batch, token_columns
from agentjax.trajectory.builder import (
  TokenPath,
  TrajectoryBuilder,
  TrajectoryError,
  check_trajectory,
  token_paths,
)
from agentjax.trajectory.columns import (
  Column,
  ColumnError,
  core_fields,
  find_column,
  get_column,
  register_column,
)
from agentjax.trajectory.packing import PackedSequence, pack, to_sequences, unpack, without_prompt
from agentjax.trajectory.record import Reward, Segment
from agentjax.trajectory.recordlog import RecordReader, RecordWriter, StoreError
from agentjax.trajectory.store import (
  MAGIC,
  VERSION,
  StoreWriter,
  from_record,
  read_store,
  to_record,
)

SURPRISE = Column("surprise", "float32", "How little the token was expected, nats.")
EFFORT = Column("effort", "int32", "Calls of the solver.", fill=-1, level="turn")
MOOD = Column("mood", "float32", "Of the user.", shape=(2,), fill=0.5, level="sequence")


@pytest.fixture
def new_columns(monkeypatch):
  monkeypatch.setattr(table, "_REGISTRY", dict(table._REGISTRY))
  for column in (SURPRISE, EFFORT, MOOD):
    register_column(column)


def episode(sample=0, known=True):
  """A prompt, a turn, an observation and another turn; 3 + 2 + 1 + 2 tokens."""
  builder = TrajectoryBuilder(step=1, task_id=2, sample=sample, source="s")
  of_turn, of_token, whole = [{"effort": 7}, {"effort": 9}], {"surprise": [1.5, 2.5]}, {}
  if known:
    whole = {"mood": [0.25, 0.75]}
  else:
    of_turn, of_token = [{}, {}], {}
  builder.append("user", [1, 2, 3])
  builder.append_sampled([4, 5], [-1.0, -2.0], [0.5, 0.5], 3, columns={**of_turn[0], **of_token})
  builder.append("tool", [6])
  last = builder.append_sampled([7, 8], [-1.0, -2.0], [0.5, 0.5], 3)
  builder.set_columns(last, of_turn[1])
  return builder.build(reward=Reward(1.0), columns=whole)


def test_a_new_column_goes_from_the_episode_through_a_file_into_the_rows(new_columns, tmp_path):
  with StoreWriter(tmp_path / "log") as writer:
    writer.append_trajectory(episode())
    writer.append_trajectory(episode(1, known=False))
  again = list(read_store(tmp_path / "log"))
  batch = pack(to_sequences(again), row_length=20, pad_id=0, max_sequences=3)
  surprise, effort = batch.columns["surprise"], batch.columns["effort"]
  assert (surprise.dtype, effort.dtype) == (np.float32, np.int32)
  first, second, _ = unpack(surprise, batch.segment_ids, 3)
  np.testing.assert_array_equal(first, [0, 0, 0, 1.5, 2.5, 0, 0, 0])
  np.testing.assert_array_equal(second, np.zeros(8))
  first, second, _ = unpack(effort, batch.segment_ids, 3)
  np.testing.assert_array_equal(first, [-1, -1, -1, 7, 7, -1, 9, 9])
  assert (second == -1).all() and (effort[batch.segment_ids == 0] == -1).all()
  np.testing.assert_array_equal(batch.columns["mood"], [[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]])

  laid = token_columns(batch)
  assert laid.keys() == {"surprise", "effort", "mood"}
  np.testing.assert_array_equal(laid["mood"][batch.segment_ids == 1], [[0.25, 0.75]] * 8)
  assert (np.asarray(laid["mood"])[batch.segment_ids != 1] == 0.5).all()


def test_what_no_segment_has_is_the_fill(new_columns):
  trajectory = episode(known=False)
  (path,) = token_paths(trajectory)
  (sequence,) = to_sequences([trajectory])
  batch = pack([sequence], row_length=8, pad_id=0)
  assert not batch.columns
  assert trajectory.segments[1].column("surprise").tolist() == [0, 0]
  assert trajectory.segments[1].column("effort") == -1
  for holder, shape in ((path, (8,)), (sequence, (8,)), (batch, (1, 8))):
    found = np.asarray(holder.column("effort"))
    assert found.shape == shape and found.dtype == np.int32 and (found == -1).all()
  assert np.asarray(sequence.column("mood")).tolist() == [0.5, 0.5]
  assert np.asarray(batch.column("mood")).tolist() == [[0.5, 0.5]]
  with pytest.raises(ColumnError, match="'experts' is not recorded here, and routers, choices"):
    batch.column("experts")
  assert batch.column("weights") is batch.weights
  for holder in (path, sequence, trajectory.segments[0]):
    with pytest.raises(ColumnError, match="weights is a field.*read the attribute weights"):
      holder.column("weights")


def test_columns_that_saw_the_prompt_go_with_it(new_columns):
  register_column(Column("seen", "float32", "Of the whole context.", conditional=True))
  trajectory = episode()
  trajectory.segments[1] = trajectory.segments[1].with_columns({"seen": np.ones(2, np.float32)})
  cut = without_prompt(to_sequences([trajectory])[0])
  assert cut.columns.keys() == {"surprise", "effort", "mood"}
  np.testing.assert_array_equal(cut.columns["surprise"], [0, 1.5, 2.5, 0, 0, 0])
  assert cut.columns["mood"].tolist() == [0.25, 0.75]


def test_a_program_without_a_column_keeps_it_and_writes_it_back(monkeypatch, tmp_path):
  with monkeypatch.context() as other:
    other.setattr(table, "_REGISTRY", dict(table._REGISTRY))
    for column in (SURPRISE, EFFORT, MOOD):
      register_column(column)
    written = to_record(episode())
    with RecordWriter(tmp_path / "one", MAGIC, VERSION) as writer:
      writer.append(written)
  assert find_column("surprise") is None
  (trajectory,) = read_store(tmp_path / "one")
  check_trajectory(trajectory)
  assert not pack(to_sequences([trajectory]), row_length=8, pad_id=0).columns
  with StoreWriter(tmp_path / "two") as writer:
    writer.append_trajectory(trajectory)
  (kept,) = RecordReader(tmp_path / "two", MAGIC, VERSION)
  np.testing.assert_equal(kept, written)
  assert kept["segments"][1]["columns"]["surprise"].dtype == np.float32


def test_a_file_that_lacks_a_column_is_filled_or_refused_by_name():
  record = to_record(episode(known=False))
  for segment in record["segments"]:
    del segment["columns"]["entropies"]
  restored = from_record(record)
  check_trajectory(restored)
  assert restored.segments[1].entropies.tolist() == [0, 0]
  for name in ("token_ids", "sampled", "weights", "behaviour_log_probs", "versions"):
    record = to_record(episode(known=False))
    del record["segments"][1]["columns"][name]
    with pytest.raises(ValueError, match=rf"a segment has no {name}|'{name}'"):
      from_record(record)


def test_a_file_of_the_version_before_columns_is_refused_with_what_to_do(tmp_path):
  RecordWriter(tmp_path / "log", MAGIC, 5).close()
  with pytest.raises(StoreError, match="version 5.*version 6"):
    list(read_store(tmp_path / "log"))


@pytest.mark.parametrize(
  ("columns", "message"),
  [
    ({"surprise": [1.0]}, r"segment 0: surprise is float32\[1\]; allowed: float32\[2\]"),
    ({"effort": [1, 2]}, r"effort is int32\[2\]; allowed: int32\[\]"),
    ({"mood": [1.0, 2.0]}, "mood is a column of a sequence"),
    ({"weights": [1.0, 2.0]}, "weights is a field"),
    ({"surprize": [1.0, 2.0]}, "no column 'surprize'; allowed: .*surprise"),
  ],
)
def test_what_a_column_cannot_hold_is_refused(new_columns, columns, message):
  builder = TrajectoryBuilder(step=0, task_id=0, sample=0, source="s")
  with pytest.raises((TrajectoryError, ColumnError), match=message):
    builder.append("user", [1, 2], columns=columns)


def test_a_branch_keeps_its_columns_when_the_other_gets_more(new_columns):
  builder = TrajectoryBuilder(step=0, task_id=0, sample=0, source="s")
  builder.append("user", [1, 2], columns={"effort": 1})
  other = builder.branch(1)
  other.set_columns(0, {"effort": 2})
  assert [int(b.segments[0].column("effort")) for b in (builder, other)] == [1, 2]


def test_one_name_is_one_column(new_columns):
  register_column(dataclasses.replace(SURPRISE))
  with pytest.raises(ColumnError, match="'surprise' is registered as .*float32.*int32"):
    register_column(dataclasses.replace(SURPRISE, dtype="int32"))
  with pytest.raises(ColumnError, match="core=True of 'mine'"):
    register_column(Column("mine", "int32", "Of no field.", core=True))
  for wrong in (
    {"name": "a b"},
    {"dtype": "U3"},
    {"dtype": "float32", "fill": None},
    {"device_only": True, "level": "turn"},
  ):
    with pytest.raises(ColumnError, match=r"allowed:"):
      dataclasses.replace(SURPRISE, **wrong)


def test_the_fields_of_records_and_batches_are_the_core_columns():
  core = {c.name for c in table.registered_columns(core=True)}
  assert {f.name for f in dataclasses.fields(Batch)} == (core - {"sampled"}) | {"columns"}
  for holder in (Segment, TokenPath, PackedSequence):
    arrays = {f.name for f in dataclasses.fields(holder) if f.type == "np.ndarray"}
    assert arrays - {"segment_of"} == {c.name for c in core_fields(holder, "token")}
  batch, shapes = filled_batch(2, 3, 4), abstract_batch(2, 3, 4)
  for column in core_fields(Batch):
    value, shape = getattr(batch, column.name), getattr(shapes, column.name)
    assert value.shape == shape.shape == ((4,) if column.level == "sequence" else (2, 3))
    assert value.dtype == shape.dtype == column.dtypes[0]
    assert (value == get_column(column.name).fill_value()).all()


def test_the_table_imports_no_jax():
  code = "import sys, agentjax.trajectory.store; print('jax' in sys.modules)"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == "False"
