r"""PivotRL: GRPO on those turns of experts' trajectories that the policy gets right now and then.

Three commands: profile the turns with the policy, train on those that are kept, profile again when
they are stale.

  python -m agentjax.recipes.pivotrl.mine --config=configs/pivotrl_tool_calls.py \
      --config.pretrained=Qwen3-4B-Instruct --trajectories=trajectories.jsonl --form=openai \
      --output=pivots
  python -m agentjax.train --config=configs/pivotrl_tool_calls.py \
      --config.pretrained=Qwen3-4B-Instruct --workdir=runs/pivots
  python -m agentjax.recipes.pivotrl.mine --config=runs/pivots/config.json \
      --checkpoint=runs/pivots --rows=pivots/candidates.jsonl --if_stale=runs/pivots \
      --output=pivots_2

With r(s, a) = 1 where action a does what the expert did at history s, and K samples of the policy
pi_0 (2603.21383, sections 3.1 and 3.2):

  mean(s) = 1/K sum_k r(s, a_k)          variance(s) = 1/K sum_k (r(s, a_k) - mean(s))^2
  pivots  = {s : variance(s) > 0 and mean(s) < lambda}
  A_i     = (r_i - mean_j r_j) / std_j r_j,   then the clipped surrogate; no environment is stepped

From the published guide for conversational tool use (NVIDIA-NeMo): 64 turns x 16 samples a step,
clipping at 0.2, loss averaged over tokens, no KL term, learning rate 1e-6 constant, 360 steps; and
from its verifier, words of arguments that overlap by 0.1. The guide subtracts the mean of the other
samples (--config.rl.objective.advantage.centre=leave_one_out --config.rl.objective.advantage.scale=
none); here stands the paper's A. Lambda and K are in no source: ``--max_mean`` and ``--samples`` of
the first command are ours, as are the lengths here and when profiles count as stale.

Turns that are held out, in test.jsonl of the same folder, are measured where ``evaluation.tasks``
says how many.
"""

from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.text import TokenizerConfig
from agentjax.tools import ToolsConfig
from agentjax.training import Experiment, HeldOutConfig, OptimizerConfig, RLStage
from agentjax.worlds.pivot import PivotWorldConfig
from agentjax.worlds.pivot.tool_match import ArgumentMatchConfig
from agentjax.worlds.pivot.verifier import PivotVerifierConfig


def get_config() -> Experiment:
  return Experiment(
    name="pivotrl_tool_calls",
    data=DataConfig(path="pivots", train_size=None, test_size=None),
    world=PivotWorldConfig(
      PivotVerifierConfig(
        kind="arguments",
        # As released: it pays for the same words in any order, which the default does not.
        arguments=ArgumentMatchConfig(string_similarity="overlap", string_threshold=0.1),
      )
    ),
    tokenizer=TokenizerConfig(kind="huggingface"),
    tools=ToolsConfig(names=()),  # every turn declares its own, and none is run
    reward=RewardConfig(parts=("pivot",)),
    engine=EngineConfig(
      slots=64,
      max_length=16_384,
      extend_buckets=(128, 1024),
      extend_rows=(16, 4),
      prefill_tokens=16_384,
    ),
    rollout=RolloutConfig(
      group_size=16,
      max_turns=1,
      max_tokens_per_turn=1024,
      max_total_tokens=16_384,
      concurrency=256,
    ),
    rl=RLStage(
      steps=360,
      tasks_per_step=64,
      row_length=16_384,
      microbatch_rows=1,
      objective=ObjectiveConfig(AdvantageConfig(), PolicyLossConfig(clip_low=0.2, clip_high=0.2)),
      sampling=SamplingConfig(temperature=1.0),
      optimizer=OptimizerConfig(learning_rate=1e-6, schedule="constant"),
    ),
    evaluation=HeldOutConfig(tasks=0, success_part="pivot"),
  )
