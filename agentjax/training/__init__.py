"""Training: experiments, runs, the update step, checkpoints, the journal."""

from agentjax.training.build import Extensions
from agentjax.training.experiment import (
  DeviceConfig,
  Experiment,
  HeldOutConfig,
  RLStage,
  SupervisedStage,
  load_experiment,
)
from agentjax.training.optimizer import OptimizerConfig
from agentjax.training.run import ReplayReport, Run, RunReport, TrainingError

__all__ = [
  "DeviceConfig",
  "Experiment",
  "Extensions",
  "HeldOutConfig",
  "OptimizerConfig",
  "RLStage",
  "ReplayReport",
  "Run",
  "RunReport",
  "SupervisedStage",
  "TrainingError",
  "load_experiment",
]
