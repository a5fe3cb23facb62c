"""Test-time reinforcement learning on one problem, from the command's function to its files."""

import json
import sys

import pytest

from agentjax.config import ConfigError
from agentjax.objectives import ObjectiveConfig
from agentjax.recipes.agentic_grpo import LiveStagesConfig
from agentjax.recipes.grandcode import (
  ChainConfig,
  GrandCodeConfig,
  OneProblemConfig,
  SeatsConfig,
)
from agentjax.recipes.grandcode.settings import HYPOTHESIS, SOLVER
from agentjax.recipes.grandcode.solving import solve
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.training.metrics import read_metrics
from tests.training.smoke import quiet
from tests.training.stages import staged_experiment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

_PROBLEM = "Largest.\nassert top([3, 1]) == 3\nassert top([1, 9]) == 9\n"


def _experiment(judge="shown"):
  experiment = staged_experiment(ScheduleConfig())
  stages = (HYPOTHESIS, SOLVER)
  experiment.world = GrandCodeConfig(
    tasks=OneProblemConfig("later"),
    stages=stages,
    judge=judge,
    seats=SeatsConfig(solutions=1, conjectures=1),
  )
  experiment.data.train_size = experiment.data.test_size = 1
  experiment.engine.max_length = experiment.rl.row_length = 1024
  experiment.rollout.max_total_tokens, experiment.rollout.sampler = 1024, ChainConfig()
  experiment.rl.steps, experiment.rl.tasks_per_step = 2, 1
  experiment.rl.objective = ObjectiveConfig()
  experiment.rl.passes = LiveStagesConfig(stages=stages)
  return experiment


def test_a_world_that_knows_the_answer_is_refused(tmp_path):
  with pytest.raises(ConfigError, match="judge='shown'"):
    solve(_experiment("tests"), "problem.txt", str(tmp_path / "run"))


@pytest.mark.slow
def test_a_policy_that_cannot_write_code_finds_no_solution_and_says_so(tmp_path):
  (tmp_path / "problem.txt").write_text(_PROBLEM)
  run = tmp_path / "run"
  chosen = solve(_experiment(), str(tmp_path / "problem.txt"), str(run), quiet())
  assert (chosen.code, chosen.accepted) == (None, 0) and not (run / "solution.py").exists()
  assert json.loads((run / "solution.json").read_text())["accepted"] == 0
  rows = read_metrics(run / "metrics.jsonl")
  assert [row["stages/kept"] for row in rows] == [4, 0]
  assert [row["stages/corrected"] for row in rows] == [0, 4]
