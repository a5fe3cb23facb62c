"""Traces of many tasks: never written twice, the same in any order, refused where mixed."""

import asyncio
import json

import pytest

from agentjax.config import ConfigError
from agentjax.data import DataConfig, DataError, load_tasks
from agentjax.data.config import JsonlConfig
from agentjax.recipes.tessy.flow import Continuation, TessyConfig, read_spans
from agentjax.recipes.tessy.folder import write_traces
from agentjax.trajectory.record import Message, Task

_TASKS = [
  Task(i, (Message("user", f"{i} + 1?"),), str(i + 1), "sums", metadata={"level": 1})
  for i in range(6)
]
_CONFIG = TessyConfig(student_tokens=3, teacher_tokens=3, retries=1)


class _Writer:
  """Thinks a word or two and answers; ends too early for task 4; later tasks are quicker."""

  def __init__(self, says, fails_at=None):
    self._says, self._fails_at = says, fails_at
    self.tasks = []

  async def extend(self, prompt, text, tokens, key):
    number = key[1]
    if number == self._fails_at:
      raise OSError("the endpoint is gone")
    self.tasks.append(number)
    await asyncio.sleep(0.002 * (len(_TASKS) - number))
    if "</think>" in text:
      return Continuation(f" {number + 1}", 2, ended=True)
    if number == 4:
      return Continuation("", 0, ended=True)
    return Continuation(self._says(text), 3)


class _Capitals:
  def style(self, context, chunk):
    return [(chunk.index(word), not word.isupper()) for word in chunk.split()]


def _write(folder, *, concurrency=3, tasks=_TASKS, fails_at=None, seed=5, made_with=None):
  writers = {
    "student": _Writer(lambda text: "</think> " if "ONE" in text else "so PLUS ", fails_at),
    "teacher": _Writer(lambda text: "PLUS ONE so "),
  }
  call = write_traces(
    folder,
    tasks,
    writers,
    {"student": _Capitals(), "teacher": _Capitals()},
    _CONFIG,
    seed=seed,
    concurrency=concurrency,
    made_with={"student": "a", "teacher": "b"} if made_with is None else made_with,
  )
  return asyncio.run(call), writers


def _files(folder):
  return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_files_do_not_depend_on_how_many_tasks_are_under_way(tmp_path):
  one, _ = _write(tmp_path / "one", concurrency=1)
  many, _ = _write(tmp_path / "many", concurrency=4)
  assert _files(tmp_path / "one") == _files(tmp_path / "many")
  assert one == many and (one.traces, one.given_up, one.kept) == (5, 1, 0)
  (lost,) = map(json.loads, (tmp_path / "one/given_up.jsonl").read_text().splitlines())
  assert lost["id"] == 4 and "ended its text before" in lost["reasons"][1]
  assert 0 < one.teacher_share < 1


def test_what_was_written_is_not_written_again(tmp_path):
  _write(tmp_path / "whole")
  cut = tmp_path / "cut"
  with pytest.raises(OSError, match="gone"):
    _write(cut, concurrency=2, fails_at=3)
  begun = (cut / "train.jsonl").read_text().splitlines()
  done = {json.loads(row)["id"] for row in begun}
  assert 1 <= len(done) < 5
  with (cut / "train.jsonl").open("ab") as file:
    file.write(b'{"id": 5, "mess')  # as the process died
  again, writers = _write(cut)
  assert again.kept == len(begun) and not done & set(writers["student"].tasks)
  assert _files(cut) == _files(tmp_path / "whole")
  third, writers = _write(cut)
  assert third.kept == 6 and not writers["student"].tasks


def test_a_task_with_half_an_emoji_is_known_again(tmp_path):
  task = Task(1, (Message("user", "1 \ud83d?"),), "1", "x")
  for known in (0, 1):
    again, _ = _write(tmp_path, tasks=[task])
    assert again.kept == known


def test_the_jsonl_source_reads_the_demonstrations(tmp_path):
  _write(tmp_path)
  files = JsonlConfig(messages_field="messages", test_file="")
  tasks = load_tasks(DataConfig(path=str(tmp_path), source=files)).train
  assert [task.answer for task in tasks] == ["1", "2", "3", "4", "6"]
  first = tasks[0]
  assert first.prompt == _TASKS[0].prompt and first.metadata["level"] == 1
  assert first.demonstration == (Message("assistant", "so PLUS ONE </think> 1"),)
  authors = [author for author, _ in first.metadata["tessy"]["parts"]]
  assert authors == ["student", "teacher", "student"]


@pytest.mark.parametrize(
  ("changes", "named"),
  [
    ({"seed": 6}, "settings.seed is 6 here and 5 there"),
    ({"made_with": {"student": "a", "teacher": "c"}}, "settings.teacher is 'c' here"),
    ({"tasks": [Task(0, (Message("user", "Other?"),), "", "sums")]}, "task 0 had another prompt"),
  ],
)
def test_a_folder_holds_traces_of_one_setting(tmp_path, changes, named):
  _write(tmp_path)
  with pytest.raises(ConfigError, match=named):
    _write(tmp_path, **changes)


def test_what_would_be_lost_is_refused(tmp_path):
  (tmp_path / "train.jsonl").write_text("{}\n")
  with pytest.raises(ConfigError, match="holds other files"):
    _write(tmp_path)
  spoken = Task(0, (Message("user", "?"), Message("assistant", "!")), "", "sums")
  with pytest.raises(ConfigError, match="assistant's message"):
    _write(tmp_path / "new", tasks=[spoken])


def test_labelled_texts_are_read_in_both_forms(tmp_path):
  file = tmp_path / "labels.jsonl"
  rows = [{"text": "so x is 3", "spans": [[0, 2]]}, {"text": "ok go", "phrases": ["ok", "none"]}]
  file.write_text("".join(json.dumps(row) + "\n" for row in rows))
  assert read_spans(file) == (["so x is 3", "ok go"], [[(0, 2)], [(0, 2)]])
  file.write_text('{"text": "\\ud83d so", "phrases": ["\\ud83d so"]}\n')
  assert read_spans(file) == (["? so"], [[(0, 4)]])  # half an emoji is no character


@pytest.mark.parametrize(
  ("row", "reason"),
  [
    ({"spans": []}, "no 'text'"),
    ({"text": "a"}, "no list 'spans' and no list 'phrases'"),
    ({"text": "a", "phrases": [1]}, "'phrases' holds more than texts"),
    ({"text": "abc", "spans": [[0, 1], [1, 4]]}, r"'spans'\[1\] is \[1, 4\]; .* the 3 characters"),
    ({"text": "abc", "spans": [[2, 2]]}, r"'spans'\[0\]"),
    ({"text": "abc", "spans": [[False, 2]]}, r"'spans'\[0\]"),
  ],
)
def test_a_label_that_does_not_fit_is_refused_with_line_and_field(tmp_path, row, reason):
  file = tmp_path / "labels.jsonl"
  file.write_text('{"text": "a b", "spans": []}\n' + json.dumps(row) + "\n")
  with pytest.raises(DataError, match=reason) as caught:
    read_spans(file)
  assert caught.value.line == 2
