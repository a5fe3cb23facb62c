"""Function-writing tasks with unit tests: MBPP (Austin et al., 2108.07732) and QuixBugs.

``task.metadata`` holds

  unit_tests     {"source", "modules"}: what the scorer "unit_tests" runs (adapters.unit_tests)
  entry_points   names the code must define
  buggy          QuixBugs: the program with its one wrong line

``task.answer`` is the reference program, and the demonstration shows it as an answer.
"""

from __future__ import annotations

import ast
import builtins
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from agentjax.data.errors import DataError
from agentjax.data.jsonl import read_jsonl, require_text
from agentjax.data.splits import FIRST_TEST_ID, TaskSplits
from agentjax.trajectory.record import Message, Task
from agentjax.worlds.code.code_block import mark_code

_log = logging.getLogger(__name__)

_MBPP_TEST = range(11, 511)  # the split of 2108.07732, section 2.1
_INSTRUCTION = (
  "Answer with Python code in one ```python block; use the standard library only. "
  "It is run against further tests."
)
# JSON has lists only, and some programs give tuples or generators.
_AS_LISTS = """
def as_lists(value):
  if isinstance(value, (str, bytes, dict)) or not hasattr(type(value), "__iter__"):
    return value
  return [as_lists(item) for item in value]
"""


def code_task(
  *,
  id: int,
  source: str,
  text: str,
  reference: str,
  tests: Sequence[str],
  prelude: str = "",
  shown: int,
  metadata: Mapping[str, Any] | None = None,
) -> Task:
  """A task to write the functions of ``reference`` that ``tests`` use.

  Args:
    id, source: as in Task.
    text: what the code must do.
    reference: a program that does it.
    tests: asserts, one a text; at least two.
    prelude: what the tests need before them.
    shown: tests that are shown in the prompt, from the start; one at least is kept back.
    metadata: added to the task's.

  Raises:
    ValueError: a program or test that is no Python, or tests that use what nobody defines.
  """
  program = _parse(reference)
  defined = {
    node.name: node for node in program.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
  }
  script = _parse("\n".join([prelude, *tests]))
  free = _free_names(script)
  imports = "".join(f"import {n}\n" for n in sorted(free) if n in sys.stdlib_module_names)
  used = sorted(n for n in free if n in defined)  # also where a built-in function has that name
  unknown = free - set(used) - sys.stdlib_module_names - set(dir(builtins))
  if unknown or not used:
    raise ValueError(
      f"the tests use {', '.join(sorted(unknown))}, which the program does not define"
      if unknown
      else "the tests use nothing that the program defines"
    )
  lines = [text.strip(), "", "Define " + ", ".join(_signature(defined[n]) for n in used) + "."]
  if shown := min(shown, len(tests) - 1):
    lines += ["", "Examples:", *tests[:shown]]
  lines += ["", _INSTRUCTION]
  return Task(
    id=id,
    prompt=(Message("user", "\n".join(lines)),),
    answer=reference,
    source=source,
    demonstration=(Message("assistant", mark_code(reference)),),
    metadata={
      "unit_tests": {
        "source": "\n".join([imports + prelude, *tests]),
        "modules": {"solution": used},
      },
      "entry_points": used,
      **(metadata or {}),
    },
  )


def load_mbpp(
  path: str | os.PathLike[str],
  *,
  shown_tests: int = 1,
  train_limit: int | None = None,
  test_limit: int | None = None,
) -> TaskSplits:
  """MBPP's JSONL file. Test tasks are 11 to 510, as in the paper; all others are for training.

  Tasks whose tests use what nobody defines are left out and logged; the published file has none.

  Args:
    path: ``mbpp.jsonl``; one row a task with text, code, test_list, task_id.
    shown_tests: tests in the prompt; one at least is kept back.
    train_limit, test_limit: at most this many tasks, from the start.

  Raises:
    DataError: as ``read_jsonl``, or a row that lacks a field.
  """
  train: list[Task] = []
  test: list[Task] = []
  for line, row in read_jsonl(path):
    number = row.get("task_id")
    tests = [*(row.get("test_list") or ()), *(row.get("challenge_test_list") or ())]
    if not isinstance(number, int) or len(tests) < 2:
      raise DataError("a row needs a task_id and at least two tests", path, line)
    split = test if number in _MBPP_TEST else train
    try:
      split.append(
        code_task(
          id=number if split is train else FIRST_TEST_ID + number,
          source="mbpp",
          text=require_text(row, "text", path, line),
          reference=_plain_lines(require_text(row, "code", path, line)),
          tests=[_plain_lines(t).strip() for t in tests],
          prelude=_plain_lines(row.get("test_setup_code") or ""),
          shown=shown_tests,
        )
      )
    except (SyntaxError, ValueError) as error:
      if isinstance(error, DataError):
        raise
      _log.warning("%s:%d: task %d is left out: %s", path, line, number, error)
  return TaskSplits(train[:train_limit], test[:test_limit])


def load_quixbugs(
  path: str | os.PathLike[str], *, shown_tests: int = 1, limit: int | None = None
) -> TaskSplits:
  """QuixBugs (Lin et al., 2017) as tasks to write the described function; test tasks only.

  Programs over linked nodes are left out and logged: their tests compare objects of the code, which
  the verifier does not. "sqrt" is held to the accuracy it is asked for.

  Args:
    path: ``quixbugs.jsonl``; a row has name, description, buggy, fixed, and cases or pytest.
    shown_tests: tests in the prompt; one at least is kept back.
    limit: at most this many tasks.

  Raises:
    DataError: as ``read_jsonl``, or a row that lacks a field.
  """
  tasks: list[Task] = []
  for line, row in read_jsonl(path):
    name = require_text(row, "name", path, line)
    if row.get("needs_node"):
      _log.warning("%s:%d: %s is left out: its tests compare objects", path, line, name)
      continue
    fixed = require_text(row, "fixed", path, line)
    if row.get("cases"):
      tests, prelude = [_quixbugs_test(name, *case) for case in row["cases"]], _AS_LISTS
    else:
      tests, prelude = _functions_as_asserts(require_text(row, "pytest", path, line))
    try:
      tasks.append(
        code_task(
          id=FIRST_TEST_ID + line,
          source="quixbugs",
          text=require_text(row, "description", path, line),
          reference=fixed,
          tests=tests,
          prelude=prelude,
          shown=shown_tests,
          metadata={"buggy": require_text(row, "buggy", path, line)},
        )
      )
    except (SyntaxError, ValueError) as error:
      raise DataError(f"{name}: {error}", path, line) from error
  return TaskSplits([], tasks[:limit])


def _quixbugs_test(name: str, arguments: Any, expected: Any) -> str:
  arguments = arguments if isinstance(arguments, list) else [arguments]
  call = f"{name}({', '.join(map(repr, arguments))})"
  if name == "sqrt":
    return f"assert abs({call} - {expected!r}) <= {arguments[1]!r}"
  return f"assert as_lists({call}) == {expected!r}"


def _functions_as_asserts(source: str) -> tuple[list[str], str]:
  """Test functions as asserts that call them, and their definitions, without the imports."""
  functions = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
  renamed = []
  for number, node in enumerate(functions):
    node.name = f"check_{number}"
    renamed.append(ast.unparse(node))
  return [f"assert check_{n}() is None" for n in range(len(functions))], "\n".join(renamed)


def _signature(node: ast.FunctionDef | ast.ClassDef) -> str:
  if isinstance(node, ast.FunctionDef):
    return f"`{node.name}({ast.unparse(node.args)})`"
  for method in node.body:
    if isinstance(method, ast.FunctionDef) and method.name == "__init__":
      method.args.args = method.args.args[1:]
      return f"class `{node.name}({ast.unparse(method.args)})`"
  return f"class `{node.name}`"


def _parse(source: str) -> ast.Module:
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # MBPP writes its regular expressions with loose backslashes
    return ast.parse(source)


def _free_names(tree: ast.AST) -> set[str]:
  """Names a script reads and never binds."""
  bound: set[str] = set()
  read: set[str] = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Name):
      (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
      bound.add(node.name)
    elif isinstance(node, ast.arg):
      bound.add(node.arg)
    elif isinstance(node, ast.alias):
      bound.add((node.asname or node.name).partition(".")[0])
  return read - bound


def _plain_lines(text: str) -> str:
  return text.replace("\r\n", "\n")
