r"""Test-time reinforcement learning on one problem: trains on it alone, then votes (GrandCode).

  python -m agentjax.recipes.grandcode.solve --config=configs/grandcode_problem.py \
      --problem=problem.txt --workdir=runs/problem --config.pretrained=FOLDER

The problem is a text with lines ``assert FUNCTION(ARGUMENTS) == RESULT``, the only answers that are
known. ``--config.rl.steps`` stages are played and trained on, one after the other. Of all solutions
that were drawn, ``solution.py`` in ``--workdir`` is the one on whose answers most of those that
pass the asserts agree; ``solution.json`` has the counts. The same command goes on where it was
stopped. Ends with 1 if no solution passes the asserts. 2604.02721.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import sys

from absl import flags
from rich.console import Console

from agentjax.command import main
from agentjax.config import ConfigError
from agentjax.files import write_atomically
from agentjax.recipes.grandcode.one_problem import Chosen, OneProblemConfig, choose_solution
from agentjax.recipes.grandcode.settings import SOLVER
from agentjax.recipes.grandcode.world import GrandCodeConfig, GrandCodeWorld
from agentjax.sandbox.config import Sandboxes
from agentjax.tools.registry import ToolRegistry
from agentjax.training import Experiment, Run
from agentjax.training.flags import define_config_flag
from agentjax.training.journal import JOURNAL_FILE, JournalReader
from agentjax.world.world import Site

_CONFIG = define_config_flag()
_PROBLEM = flags.DEFINE_string("problem", None, "Text file with the problem.", required=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run.", required=True)


def solve(experiment: Experiment, problem: str, workdir: str, console: Console | None = None
) -> Chosen:  # fmt: skip
  """Trains on a problem and chooses among all that was drawn.

  Raises:
    ConfigError: a world without these seats, or one that knows right answers.
  """
  world = experiment.world
  if not isinstance(world, GrandCodeConfig) or world.judge != "shown" or SOLVER not in world.stages:
    raise ConfigError(
      "config.world must be 'agentjax.recipes.grandcode:GrandCodeConfig' with judge='shown' and a "
      "stage 'solver': nobody knows the right program of the problem."
    )
  world.tasks = OneProblemConfig(problem)
  Run(experiment, workdir, console=console).train()
  return asyncio.run(_choose(experiment, world, pathlib.Path(workdir)))


async def _choose(experiment: Experiment, config: GrandCodeConfig, workdir: pathlib.Path) -> Chosen:
  sandboxes = Sandboxes(experiment.sandboxes)
  world = config.build(Site(ToolRegistry(()), sandboxes))
  assert isinstance(world, GrandCodeWorld)
  episodes = JournalReader(workdir / JOURNAL_FILE).trajectories(lambda _: True)
  drawn = [one.answer for _, one in sorted(episodes.items()) if one.answer and SOLVER in one.agents]
  try:
    (task,) = world.tasks(experiment.data).train
    chosen = await choose_solution(world, task, drawn)
  finally:
    await world.close()
  if chosen.code is not None:
    write_atomically(workdir / "solution.py", chosen.code)
  counts = {k: v for k, v in dataclasses.asdict(chosen).items() if k != "code"}
  write_atomically(workdir / "solution.json", json.dumps(counts | {"drawn": len(drawn)}, indent=2))
  return chosen


def run(argv: list[str]) -> None:
  """Entry point; see the module's docstring."""
  del argv
  for flag in (_PROBLEM, _WORKDIR):
    if not flag.value:
      raise ConfigError(f"--{flag.name}={flag.value!r}; allowed: a path.")
  console = Console()
  chosen = solve(_CONFIG.value, _PROBLEM.value, _WORKDIR.value, console)
  if chosen.code is None:
    console.print("no solution passes the examples", highlight=False)
    sys.exit(1)
  console.print(
    f"{_WORKDIR.value}/solution.py: {chosen.votes} of {chosen.accepted} solutions that pass the "
    f"examples agree on {sum(chosen.tests.values())} tests",
    highlight=False,
    soft_wrap=True,
  )


if __name__ == "__main__":
  main(run)
