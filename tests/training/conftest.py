"""One uninterrupted run of configs/smoke.py, which many tests compare with."""

import pytest

from agentjax.training import Run
from tests.training.smoke import quiet, smoke_experiment


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
  """(directory, report, printed text) of one uninterrupted run."""
  directory = tmp_path_factory.mktemp("run") / "straight"
  console = quiet()
  report = Run(smoke_experiment(), directory, console=console).train()
  return directory, report, console.file.getvalue()
