r"""Answers graded aspect by aspect in a judge's critique.

  python -m agentjax.train --config=configs/rational_rewards_judged.py --workdir=runs/critiques \
      --config.pretrained=FOLDER --config.data.path=DIR

``DIR/train.jsonl`` and ``DIR/test.jsonl`` hold a question a row: {"question": "Why is the sky
blue?"}. The judge of RationalRewards (2604.11626) sees pictures; here it reads answers, so the
aspects are ours (--config.reward.settings.critique.aspects=correctness,clarity). FOLDER is that of
a model, as in qwen3_gsm8k_python.py, whose lengths and rates these are.
"""

import pathlib

from agentjax.adapters.chat_endpoint.judge import HttpJudgeConfig
from agentjax.recipes.rational_rewards import RationalRewardsConfig
from agentjax.rewards import RewardConfig
from agentjax.training import Experiment, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("rubric_judged.py"))
  experiment.name = "rational_rewards_judged"
  critique = RationalRewardsConfig(judge=HttpJudgeConfig("http://localhost:8000/v1", "judge"))
  experiment.reward = RewardConfig(parts=("critique",), settings={"critique": critique})
  experiment.evaluation.success_part = "critique"
  return experiment
