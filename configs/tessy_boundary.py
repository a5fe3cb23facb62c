r"""TESSY's boundary predictor (2604.14164): a model that says whether the next token is style.

1. python -m agentjax.recipes.tessy.label --config=configs/tessy_boundary.py --texts=texts.jsonl \
       --labeller.http.base_url=URL --labeller.http.model=NAME --output=runs/labels
2. python -m agentjax.recipes.tessy.boundary --config=configs/tessy_boundary.py \
       --spans=runs/labels/labels.jsonl --output=runs/boundary_data
3. python -m agentjax.train --config=configs/tessy_boundary.py --workdir=runs/boundary
4. python -m agentjax.recipes.tessy.synthesise --predictor=runs/boundary ... as in
   configs/tessy_word_problems.py

The network starts as a copy of the policy of runs/student (configs/tessy_word_problems.py says how
it is made), whose vocabulary it reads texts with. With --config.pretrained=FOLDER
--config.tokenizer.kind=huggingface --config.tokenizer.path=none --config.start_from=none it is the
model of a folder, as the paper's Qwen3-0.6B. The paper has 10 000 samples at most, three passes in
batches of 32, rate 1e-5; here rate and steps are ours, for a policy of a toy. Step 2 prints the
number of steps of three passes.
"""

import pathlib

from agentjax.data import DataConfig
from agentjax.data.config import JsonlConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.recipes.tessy.boundaries import BOUNDARY, BoundaryConfig
from agentjax.text import TokenizerConfig
from agentjax.training import Experiment, OptimizerConfig, RLStage, load_experiment


def get_config() -> Experiment:
  experiment = load_experiment(pathlib.Path(__file__).with_name("opd_word_problems.py"))
  experiment.name = "tessy_boundary"
  experiment.data = DataConfig(
    path="runs/boundary_data",
    train_size=None,
    source=JsonlConfig(name=BOUNDARY, messages_field="messages", test_file=""),
  )
  experiment.tokenizer = TokenizerConfig(kind="sentencepiece", path="runs/student/tokenizer.model")
  experiment.start_from = "runs/student"
  experiment.evaluation.tasks = 0
  experiment.supervised.steps = 0
  experiment.rollout.group_size = 2  # of episodes that are sampled, and none is
  experiment.rl = RLStage(
    steps=300,
    tasks_per_step=32,
    row_length=256,
    microbatch_rows=8,
    rollouts="runs/boundary_data/episodes",
    old_log_probs="recomputed",
    mismatch_alarm=1e6,  # labelled texts were not sampled by the policy
    objective=ObjectiveConfig(AdvantageConfig(), PolicyLossConfig()),
    signals=(BoundaryConfig(optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=5)),),
  )
  return experiment
