r"""GRPO on Nemotron 3 Super 120B-A12B at 64k tokens, planned for v5p:8x8x8 and tpu7x:4x4x4.

  python -m agentjax.plan --config=configs/models/nemotron3_super_120b_a12b.py --topology=v5p:8x8x8
  python -m agentjax.plan --config=configs/models/nemotron3_super_120b_a12b.py \
      --topology=tpu7x:4x4x4 --config.mesh.fsdp=1 --config.mesh.context=16 \
      --config.rl.microbatch_rows=8 --config.engine.mesh.tensor=8 --config.engine.slots=16
  python -m agentjax.train --config=configs/models/nemotron3_super_120b_a12b.py \
      --workdir=RUN --config.pretrained=FOLDER

FOLDER is the model's Hugging Face folder. Loss, advantage, penalties of messages and the router are
those of the published stage of verifiable rewards (``agentjax.recipes.nemotron3``), and so are the
group of 16, the length and the learning rate. Ours: 64 tasks a step, where it has 256, and no
sampling ahead.
"""

import dataclasses

from agentjax.engine import EngineConfig
from agentjax.models import MtpConfig, model_preset
from agentjax.recipes.nemotron3 import change
from agentjax.rollout import RolloutConfig
from agentjax.sharding import MeshConfig
from agentjax.text import TokenizerConfig
from agentjax.tools import ToolsConfig
from agentjax.training import Experiment, OptimizerConfig, RLStage


def get_config() -> Experiment:
  experiment = Experiment(
    name="nemotron3_super_120b_a12b",
    model=dataclasses.replace(
      model_preset("nemotron3_super_120b_a12b"),
      param_dtype="bfloat16",
      remat="block",
      attention_block=512,
      expert_capacity=2.0,
      mtp=MtpConfig(depths=2),
    ),
    tokenizer=TokenizerConfig(kind="huggingface"),
    tools=ToolsConfig(names=("python",)),
    mesh=MeshConfig(fsdp=8, expert=8, context=8),
    engine=EngineConfig(
      slots=8,
      max_length=65536,
      mesh=MeshConfig(fsdp=1, tensor=4),
      extend_buckets=(256,),
      extend_rows=(4,),
    ),
    rollout=RolloutConfig(group_size=16, max_total_tokens=65536),
    rl=RLStage(
      steps=200,
      tasks_per_step=64,
      row_length=65536,
      microbatch_rows=64,
      replay_experts=True,
      optimizer=OptimizerConfig(learning_rate=3e-6, warmup_steps=10),
    ),
  )
  return change(experiment, "rlvr")
