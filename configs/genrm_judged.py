r"""Answers of a group compared in pairs by a generative reward model behind an endpoint.

  python -m agentjax.train --config=configs/genrm_judged.py --workdir=runs/genrm \
      --config.pretrained=FOLDER --config.data.path=DIR

``DIR/train.jsonl`` and ``DIR/test.jsonl`` hold a question a row: {"question": "Why is the sky
blue?"}. Each answer is compared with the next of its group, the last with the first, as NeMo Gym
does for Nemotron 3. As there, the lengths of reasoning and answer and the style are controlled with
.1 each, and the shortest reasoning and the shortest answer of a group earn .5 if they are among the
best (--config.reward.settings.genrm.shortest_answer=0 is without). FOLDER is that of a model, as in
qwen3_gsm8k_python.py, whose lengths and rates these are. A reward is relative to its group and says
nothing of success, so nothing is evaluated beside the training.
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
  compared = GenRMConfig(
    reasoning_length=0.1,
    answer_length=0.1,
    style=0.1,
    shortest_reasoning=0.5,
    shortest_answer=0.5,
    comparer=comparer,
  )
  experiment.reward = RewardConfig(parts=("genrm",), settings={"genrm": compared})
  experiment.evaluation = HeldOutConfig(tasks=0)
  return experiment
