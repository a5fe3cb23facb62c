"""Code tasks from files: what the prompt shows, what is kept back, what is refused."""

import ast
import json

import pytest

from agentjax.adapters.unit_tests.scorer import UnitTests
from agentjax.data import DataError
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.worlds.code.tasks import code_task, load_mbpp, load_quixbugs

ROW = {
  "text": "Write a function to square.",
  "code": "import math\r\ndef square(x):\r\n  return x * x",
  "task_id": 3,
  "test_setup_code": "",
  "test_list": ["assert square(2) == 4", "assert square(3) == 9", "assert square(4) == 16"],
  "challenge_test_list": [],
}


def write(tmp_path, *rows):
  path = tmp_path / "rows.jsonl"
  path.write_text("".join(json.dumps(r) + "\n" for r in rows))
  return path


def test_mbpp_rows_become_tasks_of_the_papers_splits(tmp_path):
  rows = [{**ROW, "task_id": n} for n in (10, 11, 510, 511)]
  splits = load_mbpp(write(tmp_path, *rows))
  assert [t.id for t in splits.train] == [10, 511]
  assert [t.id - FIRST_TEST_ID for t in splits.test] == [11, 510]
  task = splits.train[0]
  assert UnitTests.from_metadata(task.metadata["unit_tests"]).modules == {"solution": ("square",)}
  assert task.answer in task.demonstration[0].content and "\r" not in task.answer


@pytest.mark.parametrize(("shown", "seen"), [(0, 0), (1, 1), (3, 2), (9, 2)])
def test_shown_tests_stand_in_the_prompt_and_one_at_least_is_kept_back(tmp_path, shown, seen):
  (task,) = load_mbpp(write(tmp_path, ROW), shown_tests=shown).train
  prompt = task.prompt[0].content
  assert "`square(x)`" in prompt
  assert [t in prompt for t in ROW["test_list"]] == [n < seen for n in range(3)]
  assert all(t in task.metadata["unit_tests"]["source"] for t in ROW["test_list"])


def test_tests_get_the_modules_that_only_the_program_imported(tmp_path):
  tests = ["assert square(2) == math.pow(2, 2)", "assert square(1) == 1"]
  (task,) = load_mbpp(write(tmp_path, {**ROW, "test_list": tests})).train
  assert task.metadata["unit_tests"]["source"].startswith("import math\n")


def test_names_that_nobody_defines_leave_a_task_out(tmp_path, caplog):
  bad = {**ROW, "test_list": ["assert square(Node(1)) == 1", "assert square(1) == 1"]}
  splits = load_mbpp(write(tmp_path, ROW, bad))
  assert len(splits.train) == 1 and "Node" in caplog.text


def test_a_function_named_like_a_built_in_one_is_tested(tmp_path):
  row = {**ROW, "code": "def sum(a, b): return a + b", "test_list": ["assert sum(1, 2) == 3"] * 2}
  (task,) = load_mbpp(write(tmp_path, row)).train
  assert task.metadata["entry_points"] == ["sum"]


@pytest.mark.parametrize(
  "change", [{"task_id": None}, {"test_list": []}, {"text": ""}, {"code": 1.5}]
)
def test_rows_that_cannot_be_are_refused_with_their_line(tmp_path, change):
  path = write(tmp_path, ROW, {**ROW, **change})
  if change == {"code": 1.5}:  # a number is text, but no program that defines anything
    assert len(load_mbpp(path).train) == 1
    return
  with pytest.raises(DataError, match=":2:"):
    load_mbpp(path)


def test_quixbugs_cases_and_test_functions_become_asserts(tmp_path):
  base = {"name": "double", "description": "Doubles.", "buggy": "def double(x): return x",
          "fixed": "def double(x): return [x, x]", "needs_node": False}  # fmt: skip
  cases = {**base, "cases": [[[1], [1, 1]], [2, [2, 2]]], "pytest": None}
  functions = {**base, "cases": None, "pytest":
               "import pytest\nif pytest.use_correct:\n  from a import double\n"
               "def test1():\n  assert double(1) == [1, 1]\n"
               "def test2():\n  assert double(2) == [2, 2]"}  # fmt: skip
  nodes = {**base, "needs_node": True}
  tasks = load_quixbugs(write(tmp_path, cases, functions, nodes)).test
  assert len(tasks) == 2
  for task in tasks:
    asserts = [
      n for n in ast.parse(task.metadata["unit_tests"]["source"]).body if type(n) is ast.Assert
    ]
    assert len(asserts) == 2 and task.metadata["buggy"] == base["buggy"]
  assert "pytest" not in tasks[1].metadata["unit_tests"]["source"]


def test_tests_that_use_nothing_of_the_program_are_refused():
  with pytest.raises(ValueError, match="nothing"):
    code_task(id=1, source="s", text="t", reference="def f(): pass", tests=["assert 1", "assert 2"],
              shown=0)  # fmt: skip
