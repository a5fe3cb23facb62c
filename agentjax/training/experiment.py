"""Experiment: the whole description of a run, as one typed tree of settings."""

from __future__ import annotations

import dataclasses
from typing import Literal

from agentjax.config import Config, ConfigError, check
from agentjax.data import DataConfig
from agentjax.engine import EngineConfig, SamplingConfig
from agentjax.models import ModelConfig
from agentjax.objectives import AdvantageConfig, PolicyLossConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.sharding import MeshConfig
from agentjax.text import ChatConfig, TokenizerConfig
from agentjax.tools import ToolsConfig
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.optimizer import OptimizerConfig
from agentjax.trajectory.weights import WeightConfig


@dataclasses.dataclass(unsafe_hash=True)
class SupervisedConfig(Config):
  """Warm start: next-token loss on the assistant's tokens of the tasks' demonstrations.

  Attributes:
    steps: optimiser steps; 0 skips the stage.
    tasks_per_step: demonstrations a step, packed into rows.
    row_length: tokens a row; a longer demonstration is an error.
    microbatch_rows: rows a forward pass.
    aggregation: how token losses become one number (objectives.token_coefficients).
  """

  steps: int = 0
  tasks_per_step: int = 64
  row_length: int = 512
  microbatch_rows: int = 8
  aggregation: Literal["token_mean", "sequence_mean_token_mean"] = "token_mean"
  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

  def validate(self, path: str = "config.supervised") -> None:
    super().validate(path)
    check(self.steps >= 0, f"{path}.steps", self.steps, ">= 0")
    for name in ("tasks_per_step", "row_length", "microbatch_rows"):
      check(getattr(self, name) >= 1, f"{path}.{name}", getattr(self, name), ">= 1")


@dataclasses.dataclass(unsafe_hash=True)
class RLConfig(Config):
  """Reinforcement learning: sample groups of episodes, score them, update.

  Attributes:
    steps: rollout-and-update rounds; 0 skips the stage.
    tasks_per_step: tasks a round; each is attempted ``rollout.group_size`` times.
    row_length: tokens a training row; must hold the longest episode.
    microbatch_rows: rows a forward pass.
    minibatches: optimiser steps a pass over the round's episodes.
    epochs: passes over the round's episodes.
    old_log_probs: "behaviour" trusts the sampler's log-probs as the ratio's denominator (one
      forward pass less); "recomputed" asks the trainer before the first update.
    advantage, policy_loss: the objective; presets stand in agentjax.objectives.presets.
    critic: "none", or "shared": a linear value head on the policy's hidden states.
    value_coefficient: weight of the value loss; value_clip: PPO's clip of it, None for none.
    gae_gamma, gae_lambda: used with a critic.
    router_bias_rate: step of the aux-loss-free expert bias (models.update_router_bias).
    balance_coefficient: weight of the router's balance loss.
    weights: rules whose product is the loss weight of a token.
    sampling: how episodes are drawn.
  """

  steps: int = 0
  tasks_per_step: int = 16
  row_length: int = 512
  microbatch_rows: int = 8
  minibatches: int = 1
  epochs: int = 1
  old_log_probs: Literal["behaviour", "recomputed"] = "behaviour"
  advantage: AdvantageConfig = dataclasses.field(default_factory=AdvantageConfig)
  policy_loss: PolicyLossConfig = dataclasses.field(default_factory=PolicyLossConfig)
  critic: Literal["none", "shared"] = "none"
  value_coefficient: float = 0.5
  value_clip: float | None = 0.2
  gae_gamma: float = 1.0
  gae_lambda: float = 1.0
  router_bias_rate: float = 0.0
  balance_coefficient: float = 0.0
  weights: WeightConfig = dataclasses.field(default_factory=WeightConfig)
  sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

  def validate(self, path: str = "config.rl") -> None:
    super().validate(path)
    check(self.steps >= 0, f"{path}.steps", self.steps, ">= 0")
    for name in ("tasks_per_step", "row_length", "microbatch_rows", "minibatches", "epochs"):
      check(getattr(self, name) >= 1, f"{path}.{name}", getattr(self, name), ">= 1")
    for name in ("value_coefficient", "router_bias_rate", "balance_coefficient"):
      check(getattr(self, name) >= 0, f"{path}.{name}", getattr(self, name), ">= 0")
    check(0 <= self.gae_gamma <= 1, f"{path}.gae_gamma", self.gae_gamma, "0 to 1")
    check(0 <= self.gae_lambda <= 1, f"{path}.gae_lambda", self.gae_lambda, "0 to 1")


@dataclasses.dataclass(unsafe_hash=True)
class EvaluationConfig(Config):
  """Held-out evaluation.

  Attributes:
    tasks: held-out tasks used (the first so many); 0 switches evaluation off.
    every: RL steps between greedy evaluations while training; 0 for before and after only.
    samples: attempts a task at ``temperature`` for pass@k and avg@k; 0 leaves only greedy.
    k: the k of pass@k, at most ``samples``.
    bootstrap: resamples behind the confidence intervals.
  """

  tasks: int = 64
  every: int = 0
  samples: int = 4
  k: int = 4
  temperature: float = 1.0
  bootstrap: int = 1000

  def validate(self, path: str = "config.evaluation") -> None:
    super().validate(path)
    for name in ("tasks", "every", "samples"):
      check(getattr(self, name) >= 0, f"{path}.{name}", getattr(self, name), ">= 0")
    check(self.temperature > 0, f"{path}.temperature", self.temperature, "> 0")
    check(self.bootstrap >= 1, f"{path}.bootstrap", self.bootstrap, ">= 1")
    if self.samples:
      check(1 <= self.k <= self.samples, f"{path}.k", self.k, f"1 to samples ({self.samples})")


@dataclasses.dataclass(unsafe_hash=True)
class Experiment(Config):
  """Everything a run needs. Field by field it is saved as ``config.json`` in the run's directory."""

  name: str = "run"
  seed: int = 0
  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
  chat: ChatConfig = dataclasses.field(default_factory=ChatConfig)
  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  tools: ToolsConfig = dataclasses.field(default_factory=ToolsConfig)
  reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
  engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
  rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
  supervised: SupervisedConfig = dataclasses.field(default_factory=SupervisedConfig)
  rl: RLConfig = dataclasses.field(default_factory=RLConfig)
  evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
  checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
  generation: Literal["device", "mesh"] = "device"
  """Where episodes are sampled: a whole copy of the policy on one local device, or sharded."""

  def validate(self, path: str = "config") -> None:
    """Checks every part, and the combinations between parts."""
    super().validate(path)
    check(self.seed >= 0, f"{path}.seed", self.seed, ">= 0")
    check(
        self.supervised.steps + self.rl.steps > 0, f"{path}.rl.steps", self.rl.steps,
        f"> 0 when {path}.supervised.steps is 0: there is nothing to train",
    )
    self._validate_groups(path)
    self._validate_lengths(path)
    self._validate_mesh(path)

  def _validate_groups(self, path: str) -> None:
    group = self.rollout.group_size
    centre = self.rl.advantage.centre
    if self.rl.steps and group < 2 and centre in ("group_mean", "group_median", "leave_one_out"):
      raise ConfigError(
          f"{path}.rollout.group_size={group} with {path}.rl.advantage.centre={centre!r} gives zero "
          "advantage everywhere; allowed: group_size >= 2, or another centre such as 'batch_mean'."
      )
    episodes = self.rl.tasks_per_step * group
    check(
        episodes % self.rl.minibatches == 0, f"{path}.rl.minibatches", self.rl.minibatches,
        f"a divisor of rl.tasks_per_step * rollout.group_size = {episodes}",
    )
    several = self.rl.minibatches * self.rl.epochs > 1
    if several and self.rl.policy_loss.clip == "none" and (
        self.rl.policy_loss.gradient_form == "ratio"
    ):
      raise ConfigError(
          f"{path}.rl.policy_loss.clip='none' with {self.rl.minibatches} minibatches x "
          f"{self.rl.epochs} epochs lets the ratio run away; allowed: clip='ppo', 'dual' or 'mask', "
          "or one optimiser step a round."
      )

  def _validate_lengths(self, path: str) -> None:
    longest = self.rollout.max_total_tokens
    check(
        longest <= self.engine.max_length, f"{path}.rollout.max_total_tokens", longest,
        f"at most engine.max_length ({self.engine.max_length})",
    )
    if self.rl.steps:
      check(
          self.rl.row_length >= longest, f"{path}.rl.row_length", self.rl.row_length,
          f"at least rollout.max_total_tokens ({longest}), so that no episode is cut",
      )

  def _validate_mesh(self, path: str) -> None:
    rows = self.mesh.data * self.mesh.fsdp
    for stage, settings in (("supervised", self.supervised), ("rl", self.rl)):
      if settings.steps and rows > 0:
        check(
            settings.microbatch_rows % rows == 0, f"{path}.{stage}.microbatch_rows",
            settings.microbatch_rows, f"a multiple of mesh.data * mesh.fsdp = {rows}",
        )
      if settings.steps and self.mesh.context > 0:
        check(
            settings.row_length % self.mesh.context == 0, f"{path}.{stage}.row_length",
            settings.row_length, f"a multiple of mesh.context ({self.mesh.context})",
        )
