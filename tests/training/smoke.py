"""The experiment that tests of whole runs share."""

import dataclasses
import io
import pathlib

from rich.console import Console

from agentjax.training import Experiment, load_experiment

_CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "smoke.py"


def smoke_experiment(**changes) -> Experiment:
  """configs/smoke.py: two supervised and three RL steps of a hybrid with every kind of block."""
  return dataclasses.replace(load_experiment(_CONFIG), **changes)


def quiet() -> Console:
  return Console(file=io.StringIO(), width=120)
