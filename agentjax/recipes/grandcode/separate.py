r"""Counts how many wrong programs the kinds of generated tests separate from the right one.

  python -m agentjax.recipes.grandcode.separate --tasks=code_tasks --limit=40 --output=runs/separate

``--tasks`` is a folder with ``mbpp.jsonl`` or ``quixbugs.jsonl``. Of every task the reference
program is changed at one place (mutants), and made slow (quadratic work before its answer);
QuixBugs has a wrong program of its own. Those that fail the examples which a generator sees are set
aside. The others, which the examples accept, are what generated tests have to find; the task's own
tests are counted beside them. ``tests.jsonl`` holds a row a task, ``report.json`` the counts. The
same command goes on where it was stopped. 2604.02721.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.data.synthesis_folder import RowFile, claim
from agentjax.files import write_atomically
from agentjax.recipes.grandcode.pool import PoolConfig
from agentjax.recipes.grandcode.runner import open_runner
from agentjax.recipes.grandcode.separation import ROWS, report_of, separate_tasks
from agentjax.training.flags import define_settings_flag, require_paths
from agentjax.trajectory.record import Task
from agentjax.worlds.code.tasks import load_mbpp, load_quixbugs

_POOL = define_settings_flag("pool", PoolConfig(), "How many inputs are tried and kept.")
_TASKS = flags.DEFINE_string("tasks", None, "Folder of mbpp.jsonl, quixbugs.jsonl.", required=True)
_SOURCE = flags.DEFINE_enum("source", "mbpp", ["mbpp", "quixbugs"], "Which of them.")
_SHOWN = flags.DEFINE_integer("shown_tests", 2, "Asserts that a generator sees.", lower_bound=1)
_LIMIT = flags.DEFINE_integer("limit", 40, "Tasks, from the first on.", lower_bound=1)
_MUTANTS = flags.DEFINE_integer("mutants", 8, "Wrong programs of a task.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of what is made.", required=True)
_CONCURRENCY = flags.DEFINE_integer("concurrency", 2, "Tasks at once.", lower_bound=1)


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  require_paths(_TASKS, _OUTPUT)
  config: PoolConfig = _POOL.value
  config.validate("pool")
  path = os.path.join(_TASKS.value, f"{_SOURCE.value}.jsonl")
  if _SOURCE.value == "mbpp":
    tasks = load_mbpp(path, shown_tests=_SHOWN.value, test_limit=_LIMIT.value).test
  else:
    tasks = load_quixbugs(path, shown_tests=_SHOWN.value, limit=_LIMIT.value).test
  settings = {
    "pool": config.to_dict(),
    "source": _SOURCE.value,
    "shown_tests": _SHOWN.value,
    "mutants": _MUTANTS.value,
  }
  folder = claim(_OUTPUT.value, settings, (ROWS,))
  rows = RowFile(folder / ROWS, {"refused": int, "own": list, "caught": dict, "tests": dict})
  console = Console()
  asyncio.run(_run(tasks, rows, config, console))
  report = report_of([rows.rows[t.id] for t in tasks if t.id in rows.rows])
  write_atomically(folder / "report.json", json.dumps(report, indent=2) + "\n")
  console.print_json(json.dumps(report))


async def _run(tasks: Sequence[Task], rows: RowFile, config: PoolConfig, console: Console) -> None:
  runner = open_runner(concurrency=_CONCURRENCY.value)
  try:
    await separate_tasks(
      tasks, rows, runner, config,
      mutants=_MUTANTS.value, concurrency=_CONCURRENCY.value, console=console,
    )  # fmt: skip
  finally:
    await runner.close()


if __name__ == "__main__":
  main(run, needs_config=False)
