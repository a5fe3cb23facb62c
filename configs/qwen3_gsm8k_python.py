r"""GRPO with a Python tool on GSM8K, from the Hugging Face folder of any Qwen3 model (0.6B to 8B).

  python -m agentjax.train --config=configs/qwen3_gsm8k_python.py --workdir=runs/qwen3 \
      --config.pretrained=FOLDER --config.data.path=DIR

FOLDER holds config.json, *.safetensors, tokenizer.json and a chat template; DIR holds GSM8K's
train.jsonl and test.jsonl. The architecture, the vocabulary and the way tools are called come from
FOLDER; other families that agentjax.models.huggingface reads work too if their chat template shows
tool calls. Weights and moments are float32 and split over all devices (mesh.fsdp), products are
bfloat16.

Thinking is off: a turn is short, and Python does the sums. To train with it, give it room:
--config.chat.thinking=True --config.rollout.max_tokens_per_turn=4096
--config.rollout.max_total_tokens=8192 --config.engine.max_length=8192 --config.rl.row_length=8192.
On a CPU, with a small model: --config.model.compute_dtype=float32.
"""

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.models import ModelConfig
from agentjax.objectives import AdvantageConfig, MismatchConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.text import ChatConfig, TokenizerConfig
from agentjax.tools import ToolsConfig
from agentjax.training import Experiment, HeldOutConfig, OptimizerConfig, RLStage
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.worlds.question.gsm8k import Gsm8kConfig

_SYSTEM_PROMPT = (
  "Solve the problem step by step. Do all arithmetic by calling the python function; print what "
  "you want to see. When you know the answer, call nothing and end with a line that holds only "
  "#### and the number, for example:\n#### 42"
)


def get_config() -> Experiment:
  return Experiment(
    name="qwen3_gsm8k_python",
    model=ModelConfig(compute_dtype="bfloat16", param_dtype="float32", remat="block"),
    tokenizer=TokenizerConfig(kind="huggingface"),
    chat=ChatConfig(system_prompt=_SYSTEM_PROMPT, thinking=False),
    data=DataConfig(source=Gsm8kConfig(), train_size=None, test_size=None),
    tools=ToolsConfig(names=("python",)),
    reward=RewardConfig(parts=("exact_match", "format", "tool_used"), weights=(1.0, 0.0, 0.0)),
    engine=EngineConfig(
      slots=64, max_length=2048, extend_buckets=(64, 256, 1024), extend_rows=(16, 8, 2)
    ),
    rollout=RolloutConfig(
      group_size=8, max_turns=6, max_tokens_per_turn=512, max_total_tokens=2048, concurrency=128
    ),
    rl=RLStage(
      steps=200,
      tasks_per_step=32,
      row_length=2048,
      microbatch_rows=8,
      # In bfloat16 sampler and trainer differ; the ratio between them is truncated (TIS).
      old_log_probs="recomputed",
      objective=ObjectiveConfig(
        AdvantageConfig(),
        PolicyLossConfig(clip_high=0.28, mismatch=MismatchConfig(weight_level="token")),
      ),
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=5),
    ),
    evaluation=HeldOutConfig(tasks=256, every=20, samples=0, pass_at=()),
    checkpoint=CheckpointConfig(every=20),
  )
