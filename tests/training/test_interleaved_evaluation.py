"""Held-out tasks beside training episodes: nothing that is trained changes, results arrive."""

import pytest

from agentjax.training import Run
from agentjax.training.metrics import read_metrics
from tests.training.figures import without_times
from tests.training.smoke import quiet, smoke_experiment
from tests.training.stages import fingerprints, train_until_killed


def interleaved():
  experiment = smoke_experiment()
  experiment.evaluation.interleaved = True
  return experiment


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
  """Directory and report of a run whose evaluations stop nothing."""
  directory = tmp_path_factory.mktemp("interleaved") / "run"
  return directory, Run(interleaved(), directory, console=quiet()).train()


def evaluations(rows, step):
  """What was measured of the policy after ``step``."""
  row = next(r for r in rows if r.get("eval/step", r["step"]) == step and "eval/greedy" in r)
  return {k: v for k, v in row.items() if k.startswith("eval/") and k != "eval/step"}


@pytest.mark.slow
def test_training_has_the_same_bits_and_evaluations_the_same_results(finished_run, beside):
  straight, expected, _ = finished_run
  directory, report = beside
  assert fingerprints(directory) == fingerprints(straight)
  assert (report.before, report.after) == (expected.before, expected.after)
  here, there = (without_times(read_metrics(d / "metrics.jsonl")) for d in (directory, straight))
  assert [r.get("eval/step") for r in here] == [None, None, 2, 3, None]
  for step in (2, 3, 5):
    assert evaluations(here, step) == evaluations(there, step)
  for row, other in zip(here, there, strict=True):
    assert {k: v for k, v in row.items() if "eval/" not in k} == {
      k: v for k, v in other.items() if "eval/" not in k
    }


@pytest.mark.slow
def test_killed_while_held_out_episodes_are_under_way_it_gives_the_same_rows(beside, tmp_path):
  straight, expected = beside
  train_until_killed(Run(interleaved(), tmp_path / "run", console=quiet()), 4)
  report = Run(interleaved(), tmp_path / "run", console=quiet()).train()
  assert (report.before, report.after) == (expected.before, expected.after)
  here, there = (read_metrics(d / "metrics.jsonl") for d in (tmp_path / "run", straight))
  assert without_times(here) == without_times(there)
