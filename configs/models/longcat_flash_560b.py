r"""GRPO on LongCat-Flash 560B, planned for v5p:8x16x16.

  python -m agentjax.plan --config=configs/models/longcat_flash_560b.py --topology=v5p:8x16x16
  python -m agentjax.train --config=configs/models/longcat_flash_560b.py \
      --workdir=RUN --config.pretrained=FOLDER

FOLDER is the model's Hugging Face folder.
"""

import dataclasses

from agentjax.engine import EngineConfig
from agentjax.models import model_preset
from agentjax.objectives import AdvantageConfig, MismatchConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.rollout import RolloutConfig
from agentjax.sharding import MeshConfig
from agentjax.text import TokenizerConfig
from agentjax.tools import ToolsConfig
from agentjax.training import Experiment, OptimizerConfig, RLStage


def get_config() -> Experiment:
  return Experiment(
    name="longcat_flash_560b",
    model=dataclasses.replace(
      model_preset("longcat_flash_560b"),
      param_dtype="bfloat16",
      remat="block",
      attention_block=512,
      expert_capacity=2.0,
    ),
    tokenizer=TokenizerConfig(kind="huggingface"),
    tools=ToolsConfig(names=("python",)),
    mesh=MeshConfig(fsdp=64, expert=32),
    engine=EngineConfig(slots=64, max_length=8192),
    rollout=RolloutConfig(group_size=16, max_total_tokens=8192),
    rl=RLStage(
      steps=200,
      tasks_per_step=64,
      row_length=8192,
      microbatch_rows=2048,
      # In bfloat16 sampler and trainer differ; the ratio between them is truncated (TIS).
      old_log_probs="recomputed",
      objective=ObjectiveConfig(
        AdvantageConfig(), PolicyLossConfig(mismatch=MismatchConfig(weight_level="token"))
      ),
      router_bias_rate=1e-3,
      replay_experts=True,
      optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
    ),
  )
