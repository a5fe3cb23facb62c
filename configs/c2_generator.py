r"""C2, the rubric generator: DPO on rubrics that helped a judge against rubrics that misled it.

1. python -m agentjax.recipes.c2.synthesise --config=configs/c2_generator.py \
       --config.pretrained=FOLDER --pairs=pairs.jsonl --generator.path=FOLDER --judge.path=FOLDER \
       --output=runs/c2
2. python -m agentjax.train --config=configs/c2_generator.py --workdir=runs/c2_generator \
       --config.pretrained=FOLDER
3. python -m agentjax.train --config=configs/c2_verifier.py --workdir=runs/c2_verifier \
       --config.pretrained=FOLDER

The first writes runs/c2/episodes and runs/c2/generator, which 2 reads, and runs/c2/verifier, which
3 reads; its last line has the number of steps.

2604.13618: beta .1, learning rate 5e-7, a warm-up of a tenth, three passes in batches of 8, 4096
tokens. ``config.rl.steps`` are three passes over the pairs: 3/8 of those that were kept.
"""

import pathlib

from agentjax.data import DataConfig
from agentjax.data.config import JsonlConfig
from agentjax.recipes.c2.runs import c2_generator
from agentjax.training import Experiment, load_experiment
from agentjax.training.preferences import SOURCE


def get_config() -> Experiment:
  base = load_experiment(pathlib.Path(__file__).with_name("qwen3_gsm8k_python.py"))
  base.name = "c2_generator"
  base.chat.system_prompt = ""
  base.data = DataConfig(
    path="runs/c2/generator",
    train_size=None,
    source=JsonlConfig(name=SOURCE, messages_field="messages", test_file=""),
  )
  base.tools.names = ()
  base.engine.max_length = base.rollout.max_total_tokens = base.rl.row_length = 4096
  base.rollout.group_size = 2
  base.evaluation.tasks = 0
  base.rl.steps = 300
  base.rl.tasks_per_step = 8
  return c2_generator(base, "runs/c2/episodes", warmup=0.1)
