r"""Answers of a group compared by C2's trained generator of rubrics and its verifier (2604.13618).

  python -m agentjax.train --config=configs/c2_judged.py --workdir=runs/c2_policy \
      --config.pretrained=FOLDER --config.data.path=DIR

after configs/c2_generator.py and configs/c2_verifier.py have been trained to runs/c2_generator and
runs/c2_verifier, which this run loads and serves on the first device. Behind an endpoint:
--config.reward.settings.c2.judge.path= --config.reward.settings.c2.judge.http.base_url=URL
--config.reward.settings.c2.judge.http.model=NAME, and the same for the generator.

``DIR/train.jsonl`` and ``DIR/test.jsonl`` hold a question a row: {"question": "Why is the sky
blue?"}. Each answer is compared with the next of its group, in both orders: with groups of 8 up to
48 replies a task. FOLDER is that of a model, as in qwen3_gsm8k_python.py, whose lengths and rates
these are. A reward is relative to its group and says nothing of success, so nothing is evaluated
beside the training.
"""

import pathlib

from agentjax.recipes.c2.reward import C2RewardConfig
from agentjax.rewards import RewardConfig
from agentjax.training import Experiment, HeldOutConfig, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("rubric_judged.py"))
  experiment.name = "c2_judged"
  c2 = C2RewardConfig()
  c2.generator.path, c2.judge.path = "runs/c2_generator", "runs/c2_verifier"
  experiment.reward = RewardConfig(parts=("c2",), settings={"c2": c2})
  experiment.rollout.reward_timeout = 1200.0  # local models judge more slowly than a service
  experiment.evaluation = HeldOutConfig(tasks=0)
  return experiment
