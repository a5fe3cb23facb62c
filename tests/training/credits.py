"""Runs with rewards of turns, stages, baselines and process rewards, for tests of how they combine.

Run as a program this module trains one of them in a process of its own.
"""

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np

from agentjax.models.lora import LoraConfig
from agentjax.objectives import AdvantageConfig, ObjectiveConfig, PolicyLossConfig, preset
from agentjax.recipes.agentic_grpo import StagedConfig
from agentjax.recipes.monte_carlo import MonteCarloConfig
from agentjax.recipes.prime import ProcessConfig
from agentjax.rewards import RewardConfig, TurnScores
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.signals.teacher import TeacherConfig
from agentjax.training.checkpoint import CheckpointConfig
from tests.training.stages import PaidDigits, run, staged_experiment
from tests.training.teachers import save_policy

_TO_GO = AdvantageConfig(
  centre="none",
  scale="none",
  credit="reward_to_go",
  index_set="turn",
  turn_rewards=("environment",),
)
_LOSS = PolicyLossConfig(clip="none")
_STEPS = AdvantageConfig(
  centre="none", scale="none", credit="reward_to_go", index_set="turn", turn_rewards=("steps",)
)
FEATURES = (
  "turn_rewards",  # paid by the environment
  "scored_turns",  # paid by a scorer
  "ragen",  # with a critic
  "staged",
  "greedy",
  "progress",
  "prime",
  "completions",
)


def _even_bytes(trajectory, task):
  drawn = [s.token_ids for s in trajectory.segments if s.sampled.any()]
  return TurnScores.of_turns(trajectory, [float(np.mean(ids % 2 == 0)) for ids in drawn])


def prepare(folder):
  """Writes what the runs read."""
  save_policy(folder / "model", staged_experiment(ScheduleConfig()).model, seed=3)


def credit_run(directory, feature, folder, *, lora=False, schedule=("sync",), mesh=None):
  """A run of three steps with the credit that ``feature`` names."""
  schedule = ScheduleConfig(*schedule)
  rl = dataclasses.replace(staged_experiment(schedule).rl, steps=3)
  changes = {"world": PaidDigits}
  if feature == "turn_rewards":
    rl.objective = ObjectiveConfig(_TO_GO, _LOSS)
  elif feature == "ragen":
    rl.objective = preset("ragen")
    rl.objective.advantage.turn_rewards = ("environment",)
  elif feature == "staged":
    rl.objective, rl.passes = ObjectiveConfig(), StagedConfig()
  elif feature == "greedy":
    rl.objective = preset("remax")
  elif feature == "scored_turns":
    rl.objective = ObjectiveConfig(_STEPS, _LOSS)
    changes["reward"] = RewardConfig(parts=("environment", "steps"), weights=(1.0, 0.5))
    changes["scorers"] = {"steps": _even_bytes}
  elif feature == "progress":
    rl.objective = ObjectiveConfig(dataclasses.replace(_TO_GO, index_set="token"), _LOSS)
    rl.process = ProcessConfig(beta=2.0, per="turn")
  elif feature == "prime":
    rl.objective = preset("prime")
    rl.process = ProcessConfig(
      model=TeacherConfig(str(folder / "model")), beta=0.5, centre="leave_one_out"
    )
  elif feature == "completions":
    rl.objective = ObjectiveConfig(
      dataclasses.replace(_TO_GO, turn_rewards=("monte_carlo",)), _LOSS
    )
    changes["reward"] = RewardConfig(parts=("environment", "monte_carlo"), weights=(1.0, 1.0))
    changes["rollout"] = dataclasses.replace(
      staged_experiment(schedule).rollout,
      sampler=MonteCarloConfig(completions=2),
    )
  if lora:
    changes["lora"] = LoraConfig(rank=2, alpha=4.0)
  experiment = staged_experiment(schedule)
  for axis, size in (mesh or {}).items():
    setattr(experiment.mesh, axis, size)
  return run(
    directory,
    schedule,
    rl=rl,
    mesh=experiment.mesh,
    checkpoint=CheckpointConfig(every=2),
    **changes,
  )


if __name__ == "__main__":
  settings = json.loads(sys.argv[1])
  if settings["address"]:
    jax.distributed.initialize(settings["address"], 2, settings["index"])
  made = credit_run(
    pathlib.Path(settings["directory"]), settings["feature"], pathlib.Path(settings["folder"]),
    lora=settings["lora"], mesh=settings["mesh"], schedule=settings["schedule"],
  )  # fmt: skip
  assert made.train().finished
