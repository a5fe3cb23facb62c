r"""Supervised learning alone, from a Hugging Face folder, on conversations in files.

  python -m agentjax.train --config=configs/supervised.py --workdir=runs/sft \
      --config.pretrained=FOLDER --config.data.path=DIR
  python -m agentjax.convert --input=runs/sft --output=trained --dtype=bfloat16

DIR holds train.jsonl, a row a conversation: {"messages": [{"role": "user", "content": ...}, ...]}
in OpenAI's form, calls of tools and their answers too. Parquet and Arrow files, other names and
rows of question and response: docs/supervised.md. The loss is on the assistant's tokens alone. Rate
and sizes are ours. On a CPU, with a small model: --config.model.compute_dtype=float32.
"""

from agentjax.data import DataConfig
from agentjax.data.config import JsonlConfig
from agentjax.models import ModelConfig
from agentjax.text import TokenizerConfig
from agentjax.tools import ToolsConfig
from agentjax.training import Experiment, HeldOutConfig, OptimizerConfig, SupervisedStage
from agentjax.training.checkpoint import CheckpointConfig


def get_config() -> Experiment:
  return Experiment(
    name="supervised",
    model=ModelConfig(compute_dtype="bfloat16", param_dtype="float32", remat="block"),
    tokenizer=TokenizerConfig(kind="huggingface"),
    data=DataConfig(
      train_size=None,
      source=JsonlConfig(messages_field="messages", answer_field="", test_file=""),
    ),
    tools=ToolsConfig(names=()),
    supervised=SupervisedStage(
      steps=200,
      tasks_per_step=64,
      row_length=2048,
      microbatch_rows=8,
      optimizer=OptimizerConfig(learning_rate=1e-5, schedule="cosine", warmup_steps=10),
    ),
    evaluation=HeldOutConfig(tasks=0, samples=0, pass_at=()),
    checkpoint=CheckpointConfig(every=50),
  )
