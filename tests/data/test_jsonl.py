import gzip
import json
import os

import pytest

from agentjax.data.errors import DataError
from agentjax.data.jsonl import load_jsonl, read_jsonl
from agentjax.trajectory.record import Message

DATA = os.environ.get("AGENTJAX_DATA")


def write(tmp_path, content: bytes, name="rows.jsonl"):
  path = tmp_path / name
  path.write_bytes(content)
  return path


def test_rows_come_with_their_line_numbers(tmp_path):
  path = write(tmp_path, b'{"a": 1}\n{"a": "\xc3\xa9"}\r\n\n \n')
  assert list(read_jsonl(path)) == [(1, {"a": 1}), (2, {"a": "é"})]


def test_compressed_files_read_the_same(tmp_path):
  path = tmp_path / "rows.jsonl.gz"
  path.write_bytes(gzip.compress(b'{"a": 1}\n{"a": 2}'))
  assert list(read_jsonl(path)) == [(1, {"a": 1}), (2, {"a": 2})]


@pytest.mark.parametrize(
  ("content", "line", "reason"),
  [
    (b"", None, "no rows"),
    (b"\n\n", None, "no rows"),
    (b'{"a": 1}\n{"a": ', 2, "not JSON"),
    (b'{"a": 1}\n{"a": 1} {"a": 2}\n', 2, "not JSON: Extra data at column 10"),
    (b'{"a": 1}\n[1]\n', 2, "a JSON list"),
    (b'{"a": 1}\n\n{"a": 2}\n', 2, "blank line"),
    (b'{"a": 1}\n{"a": "\xff"}\n', 2, "not UTF-8 at byte 7"),
    (b'{"a": NaN}\n', 1, "NaN is not part of JSON"),
    (b'{"a": 1}\n' + b"[" * 100_000, 2, "not JSON"),
    (b'{"a": 1}\n{"a": ' + b"9" * 5000 + b"}", 2, "not JSON"),
    (b'{"a": 1}\n\x00\x00\x00\n', 2, "not JSON"),
  ],
)
def test_a_damaged_file_is_refused_with_path_line_and_reason(tmp_path, content, line, reason):
  path = write(tmp_path, content)
  with pytest.raises(DataError, match=reason) as caught:
    list(read_jsonl(path))
  assert caught.value.line == line
  place = f"{path}:" if line is None else f"{path}:{line}:"
  assert str(caught.value).startswith(place)


def test_a_missing_file_or_a_folder_is_refused_by_path(tmp_path):
  with pytest.raises(DataError, match="nothing.jsonl: no such file"):
    list(read_jsonl(tmp_path / "nothing.jsonl"))
  with pytest.raises(DataError, match="cannot be opened"):
    list(read_jsonl(tmp_path))


@pytest.mark.parametrize("damage", ["cut", "flip", "plain"])
def test_damaged_compression_is_refused(tmp_path, damage):
  rows = "".join(json.dumps({"a": i * 7919}) + "\n" for i in range(2000)).encode()
  packed = bytearray(gzip.compress(rows))
  if damage == "cut":
    del packed[len(packed) // 2 :]
  elif damage == "flip":
    packed[-6] ^= 0xFF  # the checksum
  path = write(tmp_path, rows if damage == "plain" else bytes(packed), "rows.jsonl.gz")
  with pytest.raises(DataError, match="cannot be read past here") as caught:
    list(read_jsonl(path))
  assert caught.value.line is not None


def test_tasks_take_the_named_fields_and_the_line_as_id(tmp_path):
  path = write(tmp_path, b'{"input": "1+1?", "target": 2.0}\n{"input": "x?", "target": " y "}\n')
  first, second = load_jsonl(
    path, source="made", question_field="input", answer_field="target", first_id=100
  )
  assert (first.id, first.prompt, first.answer) == (100, (Message("user", "1+1?"),), "2")
  assert (second.id, second.answer, second.source) == (101, "y", "made")
  assert (
    len(load_jsonl(path, source="made", question_field="input", answer_field="target", limit=1))
    == 1
  )


@pytest.mark.parametrize(
  ("row", "reason"),
  [
    ({"question": "?"}, "no 'answer'; its fields: question"),
    ({"question": "", "answer": "1"}, "'question' is empty"),
    ({"question": "?", "answer": "  "}, "'answer' is empty"),
    ({"question": "?", "answer": None}, "'answer' is a NoneType"),
    ({"question": "?", "answer": ["1"]}, "'answer' is a list"),
    ({"question": "?", "answer": True}, "'answer' is a bool"),
  ],
)
def test_a_row_without_question_or_answer_is_refused_with_its_line(tmp_path, row, reason):
  good = json.dumps({"question": "?", "answer": "1"})
  path = write(tmp_path, f"{good}\n{json.dumps(row)}\n".encode())
  with pytest.raises(DataError, match=reason) as caught:
    load_jsonl(path, source="made")
  assert caught.value.line == 2


@pytest.mark.skipif(DATA is None, reason="AGENTJAX_DATA is not set")
@pytest.mark.parametrize(
  ("name", "rows"),
  [
    ("mawps_multiarith", 600),
    ("mawps_singleeq", 508),
    ("mawps_addsub", 395),
    ("mawps_singleop", 562),
  ],
)
def test_public_collections_of_word_problems_read_whole(name, rows):
  path = os.path.join(DATA, "math_words", f"{name}.jsonl")
  tasks = load_jsonl(path, source=name, question_field="input", answer_field="target")
  assert len(tasks) == rows
