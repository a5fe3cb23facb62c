"""Wrong programs of a task are counted by the tests that find them."""

import asyncio
import dataclasses

from agentjax.adapters.unit_tests.scorer import UnitTests
from agentjax.data.synthesis_folder import RowFile
from agentjax.recipes.grandcode.pool import PoolConfig
from agentjax.recipes.grandcode.separation import ROWS, report_of, separate, separate_tasks
from agentjax.recipes.grandcode.wrong import Wrong, wrong_candidates
from agentjax.worlds.code.tasks import code_task
from tests.recipes.grandcode.local import LocalRunner, problem
from tests.training.smoke import quiet

_RIGHT = "def f(xs):\n  return max(xs, default=0)\n"
_WRONG = [
  Wrong("first", "def f(xs):\n  return xs[0] if xs else 0"),
  Wrong("refused", "def f(xs):\n  return 0"),
  Wrong("equal", "def f(xs):\n  return sorted([0, *xs])[-1] if xs else 0"),
  Wrong("hidden", "def f(xs):\n  return max(xs, default=0) if len(xs) != 2 else xs[0]"),
  Wrong(
    "slow", "def f(xs):\n  if len(xs) > 150: raise Hangs\n  return max(xs, default=0)", slow=True
  ),
]
_PROBLEM = problem((([3, 1, 2],), 3), (([9],), 9))
_OWN = UnitTests("assert f([3, 1, 2]) == 3\nassert f([1, 2]) == 2", {"solution": ("f",)})


def _found(reference=_RIGHT):
  config = PoolConfig(proposals=40, sizes=(50, 200))
  return asyncio.run(separate(_PROBLEM, reference, _WRONG, _OWN, LocalRunner(), config))


def test_accepted_programs_are_counted_by_kind_and_beside_the_own_tests():
  found = _found()
  assert found.refused == 1 and found.slow == "slow"
  assert found.own == ["first", "hidden"]
  assert found.caught["equal"] == [] and found.caught["slow"] == ["size"]
  assert "difference" in found.caught["first"] and "attack" in found.caught["first"]
  report = report_of([{"id": 1, **dataclasses.asdict(found)}])
  assert report["mutants"]["candidates"] == 3 and report["mutants"]["any"] == 2
  assert report["slow"]["by_kind"] == {"difference": 0, "attack": 0, "size": 1}
  assert (report["own_tests"], report["missed_by_own_tests"]) == (2, 0)


def test_a_task_whose_reference_fails_its_own_tests_is_left_out():
  assert _found("def f(xs):\n  return 3") is None


def test_wrong_programs_are_drawn_by_the_seed():
  source = "def f(a, b):\n  if a < b:\n    return a + b\n  return a - b\n"
  one, again, other = (wrong_candidates(source, "f", most=3, seed=s) for s in (0, 0, 1))
  assert one == again != other and len(one) == 4
  assert all(w.code != source for w in one)


def test_a_row_is_made_once_for_every_task_with_a_problem(tmp_path):
  tasks = [
    code_task(
      id=i, source="x", text="Largest.", reference=_RIGHT.replace("f(", "top("),
      tests=["assert top([3, 1]) == 3", "assert top([1, 2]) == 2"], shown=shown,
    )
    for i, shown in ((2, 1), (1, 1), (0, 0))  # the last shows nothing, so it is no problem
  ]  # fmt: skip
  rows = RowFile(tmp_path / ROWS, {})

  def make():
    made = separate_tasks(
      tasks, rows, LocalRunner(), PoolConfig(proposals=5, sizes=(50,)),
      mutants=2, concurrency=2, console=quiet(),
    )  # fmt: skip
    asyncio.run(made)
    return (tmp_path / ROWS).read_text()

  first = make()
  assert list(rows.rows) == [1, 2] and make() == first
