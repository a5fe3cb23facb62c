r"""Sequence-level PPO on word problems at toy size: a critic reads prompts, one episode a task.

  python -m agentjax.train --config=configs/sppo_word_problems.py --workdir=runs/sppo

2604.08865: an episode is one action. Its advantage is its reward less the chance of success that a
critic of its own network gives the prompt, so a task needs no group. Critic and policy learn in the
same step, two updates a batch as in the script for 1.5B parameters. --config.rl.critic=none trains
a head on the policy instead. World, model, warm start and learning rates are those of
configs/quickstart.py; the critic's learning rate is ours.
"""

import pathlib

from agentjax.objectives import preset
from agentjax.recipes.sppo import PromptCriticConfig
from agentjax.training import Experiment, OptimizerConfig, load_experiment


def change(experiment: Experiment) -> Experiment:
  """Gives it single episodes and a critic that reads prompts."""
  experiment.rollout.group_size = 1
  experiment.rl.objective, experiment.rl.minibatches = preset("sppo"), 2
  experiment.rl.critic = PromptCriticConfig(optimizer=OptimizerConfig(learning_rate=1e-3))
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "sppo_word_problems"
  experiment.rl.tasks_per_step = 128
  return change(experiment)
