r"""Test-time reinforcement learning on one problem with GrandCode's stages.

  python -m agentjax.recipes.grandcode.solve --config=configs/grandcode_problem.py \
      --problem=problem.txt --workdir=runs/problem --config.pretrained=FOLDER

Only the asserts of the problem are known. Solutions are held to them and, from the second round
on, to tests that separate the solutions so far, with the answers of most of them. A round is a
stage "hypothesis", "tester" and "solver"; after two failed tries the solver goes on from a summary.
FOLDER is that of a Qwen3 model. Figures are ours, and none has been measured.
"""

import pathlib

from agentjax.recipes.agentic_grpo import LiveStagesConfig
from agentjax.recipes.grandcode import GrandCodeConfig, OneProblemConfig, SeatsConfig
from agentjax.recipes.grandcode.settings import HYPOTHESIS, SOLVER, TESTER
from agentjax.training import Experiment, HeldOutConfig, load_experiment

STAGES = (HYPOTHESIS, TESTER, SOLVER)


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("grandcode_code.py"))
  experiment.name = "grandcode_problem"
  experiment.world = GrandCodeConfig(
    tasks=OneProblemConfig(file="problem.txt"),  # --problem takes its place
    stages=STAGES,
    judge="shown",
    seats=SeatsConfig(summarise_after=2),
  )
  experiment.rollout.group_size = 32
  experiment.rl.tasks_per_step = 1
  experiment.rl.steps = 30
  experiment.rl.passes = LiveStagesConfig(stages=STAGES)
  experiment.data.train_size = experiment.data.test_size = 1
  experiment.evaluation = HeldOutConfig(tasks=0)
  return experiment
