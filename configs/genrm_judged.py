r"""Answers of a group compared in pairs by a generative reward model behind an endpoint.

  python -m agentjax.train --config=configs/genrm_judged.py --workdir=runs/genrm \
      --config.pretrained=FOLDER --config.data.path=DIR

``DIR/train.jsonl`` and ``DIR/test.jsonl`` hold a question a row: {"question": "Why is the sky
blue?"}. Each answer is compared with the next of its group, the last with the first, as NeMo Gym
does for Nemotron 3. Rewards of long answers are lowered against the mean of the group
(--config.reward.settings.genrm.answer_length=0 is without; the weight is ours). FOLDER is that of a
model, as in qwen3_gsm8k_python.py, whose lengths and rates these are. A reward is relative to its
group and says nothing of success, so nothing is evaluated beside the training.
"""

import pathlib

from agentjax.adapters.chat_endpoint.judge import HttpJudgeConfig
from agentjax.recipes.genrm.cohort import GenRMConfig
from agentjax.rewards import RewardConfig
from agentjax.training import Experiment, HeldOutConfig, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("rubric_judged.py"))
  experiment.name = "genrm_judged"
  comparer = HttpJudgeConfig("http://localhost:8000/v1", "judge")
  experiment.reward = RewardConfig(
    parts=("genrm",), settings={"genrm": GenRMConfig(answer_length=0.5, comparer=comparer)}
  )
  experiment.evaluation = HeldOutConfig(tasks=0)
  return experiment
