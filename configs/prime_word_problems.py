r"""PRIME on word problems at toy size: outcomes, and implicit process rewards on every token.

  python -m agentjax.train --config=configs/implicit_prm_word_problems.py --workdir=runs/prm
  python -m agentjax.train --config=configs/prime_word_problems.py --workdir=runs/prime

2502.01456: a token earns ``beta (log pi_phi - log pi_ref)`` less the mean of the other episodes of
its task, the last one besides the outcome less that of the others; advantages are sums of what is
still to come, in PPO's loss. pi_phi is the reward model of the first command and stays as it is.
With --config.rl.process.per=turn turns are rewarded. With --config.rl.process.model=none pi_phi is
the policy itself, and what is paid its progress since the warm start (2606.26080). beta is ours.
"""

import pathlib

from agentjax.objectives import preset
from agentjax.training import Experiment, load_experiment
from agentjax.training.process_rewards import ProcessConfig
from agentjax.training.teacher import TeacherConfig


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("quickstart.py"))
  experiment.name = "prime_word_problems"
  experiment.rl.objective = preset("prime")
  experiment.rl.process = ProcessConfig(
    model=TeacherConfig("runs/implicit_prm"), centre="leave_one_out"
  )
  return experiment
