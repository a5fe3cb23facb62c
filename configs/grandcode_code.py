r"""GrandCode's stages on function-writing tasks: conjecture, then solve; each is trained at once.

  python -m agentjax.train --config=configs/grandcode_code.py --workdir=runs/grandcode \
      --config.pretrained=FOLDER --config.data.path=DIR

FOLDER is that of a Qwen3 model, DIR holds mbpp.jsonl. A step plays the next stage of its tasks and
trains on it; the last stage also corrects the earlier ones (2604.02721, second-hand). There are as
many tasks as a step takes, so that the stages of a task follow each other. --config.world.stages
and --config.rl.passes.stages choose others: hypothesis, tester, solver. The source trains a model
for each seat, of 27 to 397 billion parameters; here one policy plays all. Figures are ours, and
none has been measured.
"""

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.models import ModelConfig
from agentjax.objectives import ObjectiveConfig
from agentjax.recipes.agentic_grpo import LiveStagesConfig
from agentjax.recipes.grandcode import AdaptiveLengthConfig, ChainConfig, GrandCodeConfig, restarts
from agentjax.recipes.grandcode.settings import HYPOTHESIS, SOLVER
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.rollout.config import OwnContext, ToolLoopConfig
from agentjax.text import ChatConfig, TokenizerConfig
from agentjax.training import Experiment, HeldOutConfig, OptimizerConfig, RLStage
from agentjax.worlds.code.sources import CodeTasksConfig

STAGES = (HYPOTHESIS, SOLVER)
CONTEXT = OwnContext("agentjax.recipes.grandcode:restarts", restarts)


def get_config() -> Experiment:
  return Experiment(
    name="grandcode_code",
    model=ModelConfig(compute_dtype="bfloat16", param_dtype="float32", remat="block"),
    tokenizer=TokenizerConfig(kind="huggingface"),
    chat=ChatConfig(thinking=False),
    data=DataConfig(train_size=32, test_size=64),
    world=GrandCodeConfig(tasks=CodeTasksConfig(shown_tests=1), stages=STAGES),
    reward=RewardConfig(
      parts=("environment", "length"),
      weights=(1.0, -1.0),
      settings={"length": AdaptiveLengthConfig()},
    ),
    engine=EngineConfig(
      slots=64, max_length=4096, extend_buckets=(64, 256, 1024), extend_rows=(16, 8, 2)
    ),
    rollout=RolloutConfig(
      group_size=8,
      max_turns=4,
      max_tokens_per_turn=1024,
      max_total_tokens=4096,
      concurrency=128,
      sampler=ChainConfig(),
      program=ToolLoopConfig(context=CONTEXT),
    ),
    rl=RLStage(
      steps=200,
      tasks_per_step=32,
      row_length=4096,
      microbatch_rows=8,
      objective=ObjectiveConfig(),
      passes=LiveStagesConfig(stages=STAGES),
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=5),
    ),
    evaluation=HeldOutConfig(tasks=64, every=20, samples=0, pass_at=(), success_part="environment"),
  )
