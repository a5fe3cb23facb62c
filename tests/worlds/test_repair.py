"""Repair: faults, tasks, what is handed in, branching."""

from __future__ import annotations

import ast
import asyncio
import json

import pytest

from agentjax.config import ConfigError
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.tools.build import ToolsConfig, build_tools
from agentjax.trajectory.record import ToolCall
from agentjax.world.environment import Action
from agentjax.world.world import Site
from agentjax.worlds.repair.environment import (
  RepairWorld,
  RepairWorldConfig,
  counts,
  hand_in_repair,
)
from agentjax.worlds.repair.mutations import OPERATORS, mutations
from agentjax.worlds.repair.tasks import LIBRARIES, RepairTaskConfig, _library, repair_tasks

SOURCE = '''"""Has 1 and 2 in its text."""


def f(a, b):  # a < b
  """Not a = 3."""
  if a < b and not b:
    return min(a + 1, b)
  for x in range(2):
    break
  return f"{a + b}" if a else True
'''


@pytest.fixture(scope="module")
def tasks():
  config = RepairTaskConfig(libraries=("ledger",), test_libraries=("ledger",))
  return repair_tasks(config, train_size=4, test_size=2, seed=1)


def test_every_operator_changes_one_node_and_nothing_else():
  found = mutations(SOURCE)
  assert {m.operator for m in found} == set(OPERATORS)
  lines = SOURCE.splitlines()
  for mutation in found:
    ast.parse(mutation.source)
    changed = [
      n
      for n, (a, b) in enumerate(zip(lines, mutation.source.splitlines(), strict=True), 1)
      if a != b
    ]
    assert changed == [mutation.line]
    assert "# a < b" in mutation.source and '"""Not a = 3."""' in mutation.source
  assert len({m.source for m in found}) == len(found)
  assert [m for m in mutations(SOURCE, ("loop",)) if m.operator != "loop"] == []
  comparisons = [m.source.splitlines()[5] for m in mutations(SOURCE, ("comparison",))]
  assert comparisons == ["  if a <= b and not b:", "  if a > b and not b:"]


def test_a_change_that_binds_less_tightly_gets_parentheses():
  (product,) = mutations("y = a * b * c\n", ("arithmetic",))[:1]
  assert {m.source for m in mutations("y = a * b * c\n", ("arithmetic",))} == {
    "y = (a + b) * c\n",
    "y = a * b + c\n",
  }
  assert product.line == 1


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_libraries_have_faults_to_offer_and_tests_of_their_own_behind_the_scenes(name):
  library = _library(name)
  package = {p: t for p, t in library.files.items() if p.startswith(f"{name}/")}
  assert 3 <= len(package) <= 6 and len(library.sites) >= 50
  assert f"{name}/__init__.py" in package and f"tests/test_{name}.py" in library.files
  visible = "".join(t for p, t in library.files.items() if p.startswith("tests/"))
  hidden = [n for n in ast.parse(library.hidden).body if isinstance(n, ast.FunctionDef)]
  assert len(hidden) >= 10
  assert all(ast.unparse(node) not in visible for node in hidden)


def test_tasks_are_repeatable_noticed_and_without_their_solution(tasks):
  config = RepairTaskConfig(libraries=("ledger",), test_libraries=("ledger",))
  again = repair_tasks(config, train_size=4, test_size=2, seed=1)
  assert again == tasks
  assert [t.id for t in tasks.train] == [0, 1, 2, 3]
  assert [t.id for t in tasks.test] == [FIRST_TEST_ID, FIRST_TEST_ID + 1]
  for task in tasks.train:
    files, library = task.metadata["files"], _library("ledger")
    different = {p for p, text in files.items() if text != library.files[p]}
    assert different == {fault["path"] for fault in task.metadata["faults"]}
    assert "hidden_tests.py" not in files
    assert 0 < task.metadata["passing"] < library.hidden.count("def test_")


def test_two_faults_and_hints():
  config = RepairTaskConfig(libraries=("intervals",), faults=2, hint="test")
  (task,) = repair_tasks(config, train_size=1, test_size=0, seed=0).train
  paths = [fault["path"] for fault in task.metadata["faults"]]
  assert len(set(paths)) == 2
  assert "This test fails:\ndef test_" in task.prompt[0].content
  assert "2 faults" in task.prompt[0].content


def test_more_tasks_than_there_are_is_refused():
  config = RepairTaskConfig(libraries=("ledger",), operators=("logic",))
  with pytest.raises(ConfigError, match=r"config\.world\.tasks\.libraries=\('ledger',\) give"):
    repair_tasks(config, train_size=50, test_size=0, seed=0)
  with pytest.raises(ConfigError, match=r"config\.world\.tasks\.libraries=\('none',\)"):
    RepairTaskConfig(libraries=("none",)).validate()


@pytest.mark.parametrize(
  ("path", "part"),
  [
    ("ledger/money.py", True),
    ("ledger/new/more.py", True),
    ("ledger.py", False),
    ("tests/test_ledger.py", False),
    ("ledger/tests/x.py", False),
    ("ledger/test_x.py", False),
    ("ledger/conftest.py", False),
    ("ledger/../x.py", False),
    ("conftest.py", False),
    ("json.py", False),
    ("ledger/data.json", False),
  ],
)
def test_only_python_files_of_the_package_count(path, part):
  assert counts(path, "ledger") is part


def test_only_changes_are_handed_in(tasks):
  task = tasks.train[0]
  files = {p: t.encode() for p, t in task.metadata["files"].items()}
  assert hand_in_repair(task, files, 10_000) is None
  files["tests/test_ledger.py"] = b""
  files["conftest.py"] = b"raise SystemExit"
  assert hand_in_repair(task, files, 10_000) is None
  files["ledger/money.py"] = b"x = 1\n"
  assert json.loads(hand_in_repair(task, files, 10_000)) == {"ledger/money.py": "x = 1\n"}
  assert hand_in_repair(task, files, 20) is None
  del files["ledger/account.py"]  # stays as it was
  assert list(json.loads(hand_in_repair(task, files, 10_000))) == ["ledger/money.py"]


def _world(work):
  """``await work(world)`` with tools and verifier of its own."""
  registry = build_tools(ToolsConfig(names=("files", "shell")))
  site = Site(registry, max_turns=8, tool_timeout=29.0)
  world = RepairWorld(RepairWorldConfig(), site)

  async def run():
    try:
      return await work(world)
    finally:
      await world.close()
      await registry.close()

  return asyncio.run(run())


def test_an_episode_goes_on_from_a_snapshot_with_the_files_of_that_moment(tasks):
  task = tasks.train[0]

  async def work(world):
    first, second = world.environment(task), world.environment(task)
    read = Action("", (ToolCall("shell", {"command": "cat note; ls"}),))
    try:
      await first.reset(task, 0)
      await first.step(Action("", (ToolCall("shell", {"command": "echo one > note"}),)))
      state = await first.snapshot()
      await first.step(Action("", (ToolCall("shell", {"command": "echo two > note"}),)))
      await second.reset(task, 0)
      second.restore(state)
      seen = [(await e.step(read)).observation.messages[0].content for e in (first, second)]
      return seen, (await second.step(Action("done"))).answer
    finally:
      await first.close()
      await second.close()

  (first, second), answer = _world(work)
  assert first.startswith("two\n") and second.startswith("one\n")
  assert answer is None  # nothing of the package changed


def test_folders_are_saved_for_those_who_branch_alone_and_deleted_after_them(tasks):
  task = tasks.train[0]
  write = [Action("", (ToolCall("shell", {"command": f"echo {i} > note"}),)) for i in range(3)]

  def trees(environment):
    root = environment._workspaces.store._root / "trees"
    return sum(path.is_file() for path in root.rglob("*"))

  async def work(world):
    first, second = world.environment(task), world.environment(task)
    try:
      await first.reset(task, 0)
      for action in write:
        await first.step(action)
      counts = [trees(first)]  # what the task gave alone
      state = await first.snapshot()
      counts.append(trees(first))
      await second.resume(task, 0, state)
      first.discard(state)
      counts.append(trees(first))  # the second began with it
    finally:
      await first.close()
      await second.close()
    return [*counts, trees(first)]

  assert _world(work) == [1, 2, 2, 0]
