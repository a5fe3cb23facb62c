r"""GRPO on Parcae 1.3B.

  python -m agentjax.plan --config=configs/models/parcae_1_3b.py --topology=v5e:2x4
  python -m agentjax.train --config=configs/models/parcae_1_3b.py \
      --workdir=RUN --config.tokenizer.path=FOLDER

From random weights, with the tokenizer and the template of a Hugging Face folder: the published
weights cannot be read here. The looped core runs eight times where tokens are drawn and scored. The
plan says that a v5e:2x4 is too small: keys and values of all passes take 480 KiB a token, 60 GiB
for these slots. Fewer slots or engine.cache_tokens make it smaller; no such plan was tried.
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
    name="parcae_1_3b",
    model=dataclasses.replace(
      model_preset("parcae_1_3b"),
      param_dtype="bfloat16",
      remat="block",
      attention_block=512,
    ),
    tokenizer=TokenizerConfig(kind="huggingface"),
    tools=ToolsConfig(names=("python",)),
    mesh=MeshConfig(fsdp=-1),
    engine=EngineConfig(slots=64, max_length=2048),
    rollout=RolloutConfig(group_size=16, max_total_tokens=2048),
    rl=RLStage(
      steps=200,
      tasks_per_step=64,
      row_length=2048,
      microbatch_rows=8,
      # In bfloat16 sampler and trainer differ; the ratio between them is truncated (TIS).
      old_log_probs="recomputed",
      objective=ObjectiveConfig(
        AdvantageConfig(), PolicyLossConfig(mismatch=MismatchConfig(weight_level="token"))
      ),
      optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
    ),
  )
