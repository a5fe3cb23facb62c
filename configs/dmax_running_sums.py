r"""A block-diffusion policy that adds up numbers, and decides many tokens a forward pass (DMax).

  python -m agentjax.train --config=configs/dmax_running_sums.py --workdir=runs/dmax
  python -m agentjax.recipes.dmax.decode --config=configs/dmax_running_sums.py \
      --checkpoint=runs/dmax --modes=soft,threshold --thresholds=0.5,0.7,0.9,1

2604.08302: on-policy uniform training, soft parallel decoding. Model, data, block and rates are
ours. --config.likelihood.training=bound trains the same policy as block diffusion usually is.
Seen: 24% of held-out sums right after 1000 steps; docs/dmax.md has the figures of decoding.
"""

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig
from agentjax.models import ModelConfig
from agentjax.recipes.dmax import DMaxConfig
from agentjax.recipes.dmax.tasks import RunningSumConfig
from agentjax.rollout import RolloutConfig
from agentjax.tools import ToolsConfig
from agentjax.training import Experiment, HeldOutConfig, OptimizerConfig, SupervisedStage
from agentjax.training.checkpoint import CheckpointConfig


def get_config() -> Experiment:
  return Experiment(
    name="dmax_running_sums",
    model=ModelConfig(
      vocab_size=265,
      d_model=64,
      pattern="*-*-*-",
      num_heads=4,
      num_kv_heads=4,
      head_dim=16,
      rope_theta=1e4,
      qk_norm=True,
      d_mlp=192,
      mlp_activation="swiglu",
      attention_block=256,
    ),
    data=DataConfig(source=RunningSumConfig(), train_size=20_000, test_size=256),
    tools=ToolsConfig(names=()),
    likelihood=DMaxConfig(block=16),
    engine=EngineConfig(slots=64, max_length=96),
    rollout=RolloutConfig(max_turns=1, max_tokens_per_turn=64, max_total_tokens=96),
    supervised=SupervisedStage(
      steps=1000,
      tasks_per_step=32,
      row_length=64,
      microbatch_rows=32,
      optimizer=OptimizerConfig(
        learning_rate=2e-3, schedule="cosine", warmup_steps=100, weight_decay=0.01
      ),
    ),
    evaluation=HeldOutConfig(tasks=256, samples=0, pass_at=()),
    checkpoint=CheckpointConfig(every=500),
  )
