r"""GRPO on Qwen3-8B, planned for v5e:4x4 and v6e:2x4.

  python -m agentjax.plan --config=configs/models/qwen3_8b.py --topology=v5e:4x4
  python -m agentjax.plan --config=configs/models/qwen3_8b.py --topology=v6e:2x4 \
      --config.mesh.context=1 --config.engine.slots=64
  python -m agentjax.train --config=configs/models/qwen3_8b.py \
      --workdir=RUN --config.pretrained=FOLDER

FOLDER is the model's Hugging Face folder. A dense transformer.
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
    name="qwen3_8b",
    model=dataclasses.replace(
      model_preset("qwen3_8b"),
      param_dtype="bfloat16",
      remat="block",
      attention_block=512,
    ),
    tokenizer=TokenizerConfig(kind="huggingface"),
    tools=ToolsConfig(names=("python",)),
    mesh=MeshConfig(fsdp=2, context=2, tensor=4),
    engine=EngineConfig(
      slots=32,
      max_length=2048,
      mesh=MeshConfig(fsdp=1, tensor=4),
      extend_buckets=(256,),
      extend_rows=(4,),
      device_store_mb=64,
    ),
    rollout=RolloutConfig(group_size=16, max_total_tokens=2048),
    rl=RLStage(
      steps=200,
      tasks_per_step=64,
      row_length=2048,
      microbatch_rows=2,
      # In bfloat16 sampler and trainer differ; the ratio between them is truncated (TIS).
      old_log_probs="recomputed",
      objective=ObjectiveConfig(
        AdvantageConfig(), PolicyLossConfig(mismatch=MismatchConfig(weight_level="token"))
      ),
      optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
    ),
  )
