r"""PRIME on word problems at toy size: outcomes, and implicit process rewards on every token.

  python -m agentjax.train --config=configs/prime_word_problems.py --workdir=runs/prime

2502.01456: a token earns ``beta (log pi_phi - log pi_ref)`` less the mean of the other episodes of
its task, the last one besides the outcome less that of the others; advantages are sums of what is
still to come, in PPO's loss. pi_phi starts as the policy does, and at every step learns the
outcomes of the policy's episodes before it rewards them. With --config.rl.process.per=turn turns
are rewarded. beta and the learning rate of pi_phi are ours.

A pi_phi that is trained beforehand and stays as it is:

  python -m agentjax.train --config=configs/implicit_prm_word_problems.py --workdir=runs/prm
  python -m agentjax.train --config=configs/prime_word_problems.py --workdir=runs/frozen \
    --config.rl.process.online=none \
    --config.rl.process.model=build --config.rl.process.model.path=runs/prm

With --config.rl.process.online=none alone pi_phi is the policy itself, and what is paid its
progress since the warm start (2606.26080).
"""

import pathlib

from agentjax.objectives import preset
from agentjax.recipes.prime import OnlineConfig, ProcessConfig
from agentjax.training import Experiment, OptimizerConfig, load_experiment


def change(experiment: Experiment) -> Experiment:
  """Gives it process rewards of a model that learns beside the policy."""
  experiment.rl.objective = preset("prime")
  experiment.rl.process = ProcessConfig(
    centre="leave_one_out", online=OnlineConfig(OptimizerConfig(learning_rate=1e-4))
  )
  return experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "prime_word_problems"
  return change(experiment)
