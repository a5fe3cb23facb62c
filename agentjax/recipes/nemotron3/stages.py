"""Loss, rules and constants of Nemotron 3 Super's stages, on any model and world.

From the paper and its public configs (NVIDIA-NeMo/RL, ``examples/nemo_gym/nemotron-3-super``):
reinforcement learning with verifiable rewards, single turns of experts (pivots), whole software
tasks, comparison by a generative reward model, then the prediction heads are trained again.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from agentjax.config import ConfigError
from agentjax.objectives import (
  AdvantageConfig,
  MismatchConfig,
  ObjectiveConfig,
  PolicyLossConfig,
)
from agentjax.recipes.nemotron3.credit import LeaveOneOut, MessageFaultsConfig, MessageTerm
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.training.experiment import Experiment
from agentjax.training.optimizer import OptimizerConfig
from agentjax.trajectory.weights import WeightConfig

StageName = Literal["rlvr", "pivot", "swe", "rlhf"]


@dataclasses.dataclass(frozen=True)
class Published:
  """What the public config of a stage says.

  Attributes:
    tasks, group: prompts a step, and samples of each; one update a step.
    length: tokens of an episode, at most.
    learning_rate: of Adam (.9, .999, 1e-8), constant after 10 steps of warm-up, no decay.
    kl: coefficient of the k3 estimate towards the policy that the stage begins with.
    masks_overlong: whether an episode that was cut off teaches nothing.
    clip: of advantages, both ways.
  """

  tasks: int
  group: int
  length: int
  learning_rate: float
  kl: float
  masks_overlong: bool
  clip: float


PUBLISHED: dict[StageName, Published] = {
  "rlvr": Published(256, 16, 65_536, 3e-6, 0.0, False, 50.0),
  "pivot": Published(64, 16, 131_072, 1e-6, 0.0, True, 100.0),
  "swe": Published(16, 32, 196_608, 1e-6, 0.0, True, 100.0),
  "rlhf": Published(128, 16, 49_152, 1e-6, 1e-4, False, 50.0),
}


def change(experiment: Experiment, stage: StageName, *, sizes: bool = False) -> Experiment:
  """Gives an experiment the loss and the rules of a stage; world, data and rewards stay its own.

  One update a step; ratio 1 by the trainer's own log-probs (``force_on_policy_ratio``), so that the
  bounds .2 and .28 are never reached; weights ``min(pi_train / pi_sampler, 5)`` a token; a sequence
  is left out where the mean of ``exp|log pi_sampler - log pi_train|`` is above 2; mean over tokens;
  a frozen router whose bias moves by 1e-3; prediction heads detached, .3.

  Args:
    experiment: changed in place.
    stage: whose rules.
    sizes: also its prompts, samples, lengths, learning rate, and sampling up to one update ahead.
      Else these are the experiment's: a small model needs others.
  """
  if stage not in PUBLISHED:
    raise ConfigError(f"stage={stage!r}; allowed: {', '.join(PUBLISHED)}.")
  found, rl, model = PUBLISHED[stage], experiment.rl, experiment.model
  rl.objective = ObjectiveConfig(
    AdvantageConfig(function=LeaveOneOut(), clip=found.clip, terms=(MessageTerm(),)),
    PolicyLossConfig(
      clip_low=0.2,
      clip_high=0.28,
      aggregation="token_mean",
      kl_coefficient=found.kl,
      mismatch=MismatchConfig(
        weight_level="token",
        weight_cap=5.0,
        filter_level="sequence",
        filter_statistic="multiplicative_error",
        filter_high=2.0,
        dropped="exclude",
      ),
    ),
  )
  rl.minibatches, rl.epochs, rl.old_log_probs = 1, 1, "recomputed"
  rl.weights = WeightConfig(rules=("role", "incomplete") if found.masks_overlong else ("role",))
  others = tuple(s for s in rl.signals if not isinstance(s, MessageFaultsConfig))
  rl.signals = (*others, MessageFaultsConfig())
  if model.num_experts:
    model.frozen_router, rl.router_bias_rate, rl.balance_coefficient = True, 1e-3, 0.0
  if model.mtp is not None:
    model.mtp.detach, rl.mtp_coefficient = True, 0.3
  if sizes:
    rl.tasks_per_step, experiment.rollout.group_size = found.tasks, found.group
    experiment.rollout.max_total_tokens = rl.row_length = found.length
    experiment.engine.max_length = found.length
    rl.optimizer = OptimizerConfig(learning_rate=found.learning_rate, warmup_steps=10)
    rl.schedule = ScheduleConfig("async", staleness=1)
  return experiment


def heal_prediction_heads(experiment: Experiment) -> Experiment:
  """Trains the prediction heads alone, on what the policy answers now ("MTP healing").

  Advantages are 0 and the heads are detached, so nothing else has a gradient; a fresh Adam without
  weight decay moves what has none by nothing. Coefficient, rate and length of this stage are not
  published.

  Raises:
    ConfigError: the model has no prediction heads.
  """
  model, rl = experiment.model, experiment.rl
  if model.mtp is None:
    raise ConfigError("config.model.mtp=None; allowed: prediction heads, which are to be trained.")
  model.mtp.detach = True
  rl.objective = ObjectiveConfig(AdvantageConfig("none", "none", multiplier=0.0))
  rl.minibatches, rl.epochs, rl.optimizer.weight_decay = 1, 1, 0.0
  rl.signals, rl.router_bias_rate, rl.balance_coefficient = (), 0.0, 0.0
  rl.mtp_coefficient = 1.0
  return experiment
