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
from agentjax.recipes import Recipe
from agentjax.text import TokenizerConfig
from agentjax.tools import ToolsConfig
from agentjax.training import Experiment, HeldOutConfig, OptimizerConfig, SupervisedStage
from agentjax.training.checkpoint import CheckpointConfig

_RUN = (
  "python -m agentjax.train --config=configs/supervised.py --config.pretrained=FOLDER \\\n"
  "  --config.data.path=DIR"
)
_DATA = "DIR/train.jsonl, a conversation with calls of tools a row"
RECIPES = (
  Recipe(
    name="LIMI",
    paper="its code: data and scripts",
    changes="Few, long trajectories (78 in the paper, up to 128k tokens) of whole tasks with "
    "tools; only the assistant's tokens are learnt.",
    commands=(
      f"{_RUN} --workdir=runs/limi \\\n"
      "  --config.supervised.row_length=131072 --config.supervised.microbatch_rows=1 \\\n"
      "  --config.supervised.tasks_per_step=8",
    ),
    tests=("tests/training/test_demonstrations.py", "tests/trajectory/test_weights.py"),
    data=_DATA,
    ours="rate, batch and steps",
    page="supervised.md",
  ),
  Recipe(
    name="KAT-Coder (error-masked learning)",
    paper="2510.18779; the mask in 2512.24873",
    changes="A turn whose call failed has no loss; it stays in the context.",
    commands=(
      f"{_RUN} --workdir=runs/error_masked \\\n"
      "  --config.supervised.weights.rules=role,error_masked",
    ),
    tests=("tests/training/test_demonstrations.py", "tests/trajectory/test_weights.py"),
    data=f'{_DATA}; answers of failed calls with the flag "tool_error"',
    ours="rate, batch and steps",
    missing="Rewards from several true answers, and the early stop of a rollout that deviates",
    page="supervised.md",
  ),
  Recipe(
    name="STeP",
    paper="2505.20023, a copy",
    changes="Trajectories in which a teacher has put a reflection and a corrected action after "
    "an error: the error stays in the context without loss, the reflection is learnt.",
    commands=(f"{_RUN} --workdir=runs/partial --config.supervised.weights.rules=role,partial",),
    tests=("tests/training/test_demonstrations.py", "tests/trajectory/test_weights.py"),
    data=f'{_DATA}; flags "tool_error" and "reflection"',
    ours="rate, batch and steps. How the teacher is asked is yours",
    page="supervised.md",
  ),
)


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
