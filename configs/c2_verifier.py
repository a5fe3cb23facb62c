r"""C2, the verifier: GRPO on pairs without a rubric, with one that helps, with one that misleads.

  python -m agentjax.train --config=configs/c2_verifier.py --workdir=runs/c2_verifier \
      --config.pretrained=FOLDER

after the synthesis of configs/c2_generator.py. 2604.13618: the reward is .6 preference + .3 word on
the rubric + .1 format, groups of 8 at temperature 1, learning rate 5e-7, KL .01, prompts of up to
8192 tokens and replies of 2048, one pass. Batches of 16 tasks are ours.
"""

import pathlib

from agentjax.data import DataConfig
from agentjax.data.config import JsonlConfig
from agentjax.recipes.c2.runs import c2_verifier
from agentjax.training import Experiment, load_experiment


def get_config() -> Experiment:
  base = load_experiment(pathlib.Path(__file__).with_name("qwen3_gsm8k_python.py"))
  base.name = "c2_verifier"
  base.chat.system_prompt = ""
  base.data = DataConfig(
    path="runs/c2/verifier",
    train_size=None,
    source=JsonlConfig(name="c2", messages_field="messages", test_file=""),
  )
  base.engine.max_length = base.rollout.max_total_tokens = base.rl.row_length = 10240
  base.rollout.max_tokens_per_turn = 2048
  base.evaluation.tasks = 0
  base.rl.tasks_per_step = 16
  return c2_verifier(base)
