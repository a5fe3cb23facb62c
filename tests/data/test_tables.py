import json
import sys

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from agentjax.config import ConfigError
from agentjax.data.config import DataConfig, JsonlConfig, load_tasks
from agentjax.data.errors import DataError
from agentjax.data.jsonl_tasks import load_jsonl
from agentjax.data.tables import read_rows

ROWS = [
  {
    "question": f"{i}+1?",
    "answer": str(i + 1),
    "messages": [
      {"role": "user", "content": f"{i}+1?"},
      {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "function": {"name": "add", "arguments": {"left": i}}}],
      },
      {"role": "tool", "content": str(i + 1), "tool_call_id": "a"},
      {"role": "assistant", "content": str(i + 1)},
    ],
  }
  for i in range(5)
]


def _parquet(path, rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def _arrow(path, rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  table = pyarrow.Table.from_pylist(rows)
  with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as to:
    to.write_table(table, max_chunksize=2)


def _jsonl(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write(folder, form):
  if form == "jsonl":
    _jsonl(folder / "train.jsonl", ROWS)
    return "train.jsonl"
  if form == "parquet":
    _parquet(folder / "train.parquet", ROWS)
    return "train.parquet"
  if form == "save_to_disk":
    (folder / "train").mkdir(exist_ok=True)
    (folder / "train" / "state.json").write_text("{}")
    _arrow(folder / "train" / "data-00000-of-00002.arrow", ROWS[:3])
    _arrow(folder / "train" / "data-00001-of-00002.arrow", ROWS[3:])
    return "train"
  _parquet(folder / "data" / "train-00000-of-00002.parquet", ROWS[:3])
  _parquet(folder / "data" / "train-00001-of-00002.parquet", ROWS[3:])
  _parquet(folder / "data" / "test-00000-of-00001.parquet", ROWS[:1])
  return "train"


@pytest.mark.parametrize("form", ["parquet", "save_to_disk", "hub"])
@pytest.mark.parametrize("fields", [{}, {"messages_field": "messages"}])
def test_every_form_gives_the_tasks_of_jsonl(tmp_path, form, fields):
  expected = load_jsonl(tmp_path / _write(tmp_path, "jsonl"), source="s", **fields)
  found = load_jsonl(tmp_path / _write(tmp_path, form), source="s", **fields)
  assert found == expected and [task.id for task in found] == [0, 1, 2, 3, 4]
  limited = load_jsonl(tmp_path / _write(tmp_path, form), source="s", limit=4, **fields)
  assert limited == expected[:4]


def test_a_config_names_a_split_of_a_folder(tmp_path):
  _write(tmp_path, "hub")
  files = JsonlConfig(train_file="train", test_file="test")
  splits = load_tasks(DataConfig(path=str(tmp_path), source=files))
  assert [t.answer for t in splits.train] == ["1", "2", "3", "4", "5"]
  assert [t.answer for t in splits.test] == ["1"]


def test_damaged_and_empty_tables_are_refused(tmp_path):
  _parquet(tmp_path / "whole.parquet", ROWS)
  whole = (tmp_path / "whole.parquet").read_bytes()
  (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
  _parquet(tmp_path / "none.parquet", [])
  (tmp_path / "folder").mkdir()
  for name, reason in (
    ("cut.parquet", "cannot be read past row 0"),
    ("none.parquet", "no rows"),
    ("folder", "no [*].parquet"),
    ("nothing", "no such file"),
  ):
    with pytest.raises(DataError, match=reason):
      list(read_rows(tmp_path / name))


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
  _parquet(tmp_path / "a.parquet", ROWS)
  monkeypatch.setitem(sys.modules, "pyarrow", None)
  with pytest.raises(ConfigError, match=r"agentjax\[parquet\]"):
    list(read_rows(tmp_path / "a.parquet"))
