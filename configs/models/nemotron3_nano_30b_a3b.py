r"""GRPO on Nemotron 3 Nano 30B-A3B, planned for v6e:4x4.

  python -m agentjax.plan --config=configs/models/nemotron3_nano_30b_a3b.py --topology=v6e:4x4
  python -m agentjax.train --config=configs/models/nemotron3_nano_30b_a3b.py \
      --workdir=RUN --config.pretrained=FOLDER

FOLDER is the model's Hugging Face folder. Float32 masters and moments of all weights would take 23
of the 31 GiB of each chip beside the 16 that a lane samples with, so low-rank adapters are trained,
and routers stay as they are. A lane's weights make room for the update and are sent again after it.
"""

import dataclasses

from agentjax.engine import EngineConfig
from agentjax.models import model_preset
from agentjax.models.lora import LoraConfig
from agentjax.objectives import AdvantageConfig, MismatchConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.rollout import RolloutConfig
from agentjax.sharding import MeshConfig
from agentjax.text import TokenizerConfig
from agentjax.tools import ToolsConfig
from agentjax.training import Experiment, OptimizerConfig, RLStage


def get_config() -> Experiment:
  return Experiment(
    name="nemotron3_nano_30b_a3b",
    model=dataclasses.replace(
      model_preset("nemotron3_nano_30b_a3b"),
      param_dtype="bfloat16",
      remat="block",
      attention_block=512,
      frozen_router=True,
      expert_capacity=2.0,
    ),
    tokenizer=TokenizerConfig(kind="huggingface"),
    tools=ToolsConfig(names=("python",)),
    mesh=MeshConfig(fsdp=4, expert=4),
    engine=EngineConfig(
      slots=32,
      max_length=8192,
      mesh=MeshConfig(fsdp=1, tensor=4),
      extend_buckets=(256,),
      extend_rows=(4,),
      device_store_mb=256,
      keep_base=False,
    ),
    lora=LoraConfig(rank=16),
    rollout=RolloutConfig(group_size=16, max_total_tokens=8192),
    rl=RLStage(
      steps=200,
      tasks_per_step=64,
      row_length=8192,
      microbatch_rows=16,
      # In bfloat16 sampler and trainer differ; the ratio between them is truncated (TIS).
      old_log_probs="recomputed",
      objective=ObjectiveConfig(
        AdvantageConfig(), PolicyLossConfig(mismatch=MismatchConfig(weight_level="token"))
      ),
      replay_experts=True,
      optimizer=OptimizerConfig(learning_rate=3e-6, warmup_steps=10),
    ),
  )
