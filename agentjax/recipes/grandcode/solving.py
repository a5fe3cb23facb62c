"""Trains on one problem and chooses among all that was drawn; command: ``grandcode.solve``."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib

from rich.console import Console

from agentjax.config import ConfigError
from agentjax.files import write_atomically
from agentjax.recipes.grandcode.one_problem import (
  Chosen,
  OneProblemConfig,
  choose_solution,
  digest,
  read_text,
)
from agentjax.recipes.grandcode.settings import SOLVER
from agentjax.recipes.grandcode.world import GrandCodeConfig, GrandCodeWorld
from agentjax.sandbox.config import Sandboxes
from agentjax.tools.registry import ToolRegistry
from agentjax.training import Experiment, Run
from agentjax.training.journal import JOURNAL_FILE, JournalReader
from agentjax.world.world import Site


def solve(experiment: Experiment, problem: str, workdir: str, console: Console | None = None
) -> Chosen:  # fmt: skip
  """Trains on a problem and chooses among all that was drawn.

  Raises:
    ConfigError: a world without these seats, one that knows right answers, or the run of another
      problem.
    DataError: a problem that cannot be read.
  """
  world = experiment.world
  if not isinstance(world, GrandCodeConfig) or world.judge != "shown" or SOLVER not in world.stages:
    raise ConfigError(
      "config.world must be 'agentjax.recipes.grandcode:GrandCodeConfig' with judge='shown' and a "
      "stage 'solver': nobody knows the right program of the problem."
    )
  world.tasks = OneProblemConfig(problem, digest(read_text(problem)))
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
