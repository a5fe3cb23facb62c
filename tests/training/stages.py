"""A tiny run whose rewards vary and whose tools take a while, for tests of schedules."""

import asyncio
import dataclasses
import json
import pathlib
import sys
import time

import numpy as np
import pytest

from agentjax.data import TaskSplits
from agentjax.engine import EngineConfig
from agentjax.models import ModelConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.training import (
  Experiment,
  Extensions,
  HeldOutConfig,
  OptimizerConfig,
  RLStage,
  Run,
)
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.journal import JournalReader
from agentjax.trajectory.record import Message, Reward, Task
from agentjax.world.environment import Environment, Observation, Step
from tests.training.smoke import quiet

STEPS, SIZE, GROUP = 6, 2, 4


class Digits(Environment):
  """Two turns; pays the share of even bytes. Each step takes up to ``SECONDS``, at random."""

  SECONDS = 0.03

  async def reset(self, task, key):
    self._paid = []
    return Observation((Message("user", f"Task {task.id}."),))

  async def step(self, action):
    await asyncio.sleep(float(np.random.default_rng().uniform(0, self.SECONDS)))
    drawn = action.text.encode()
    self._paid.append(sum(b % 2 == 0 for b in drawn) / max(len(drawn), 1))
    if len(self._paid) == 2:
      return Step(Observation(()), Reward(float(np.mean(self._paid))), terminated=True)
    return Step(Observation((Message("user", "Again."),)))

  def snapshot(self):
    return json.dumps(self._paid).encode()

  def restore(self, state):
    self._paid = json.loads(state)


class PaidDigits(Digits):
  """Each turn is paid for its own bytes."""

  async def step(self, action):
    step = await super().step(action)
    return dataclasses.replace(step, reward=Reward(self._paid[-1]))


def staged_experiment(schedule: ScheduleConfig, **changes) -> Experiment:
  """Six RL steps of two groups of four."""
  experiment = Experiment(
    name="stages",
    model=ModelConfig(
      vocab_size=264, d_model=16, pattern="*-", num_heads=2, num_kv_heads=2, head_dim=8, d_mlp=16
    ),
    engine=EngineConfig(
      slots=8, max_length=128, chunk_tokens=4, extend_buckets=(32,), extend_rows=(4,), host_turns=4
    ),
    rollout=RolloutConfig(
      group_size=GROUP, max_turns=2, max_tokens_per_turn=12, max_total_tokens=128, concurrency=64
    ),
    reward=RewardConfig(parts=("environment",)),
    rl=RLStage(
      steps=STEPS,
      tasks_per_step=SIZE,
      row_length=128,
      microbatch_rows=8,
      schedule=schedule,
      optimizer=OptimizerConfig(learning_rate=1e-2),
    ),
    evaluation=HeldOutConfig(tasks=0),
    checkpoint=CheckpointConfig(every=4),
  )
  for name, value in changes.items():
    setattr(experiment, name, value)
  return experiment


def extensions(world: type[Digits] = Digits, **more) -> Extensions:
  tasks = [Task(id=i, prompt=(), answer="", source="digits") for i in range(6)]
  splits = TaskSplits(tasks, tasks[:2])
  return Extensions(tasks=splits, make_environment=lambda task: world(), **more)


def run(
  directory, schedule: ScheduleConfig, *, world: type[Digits] = Digits, scorers=None, **changes
) -> Run:
  return Run(
    staged_experiment(schedule, **changes),
    directory,
    extensions=extensions(world, scorers=scorers or {}),
    console=quiet(),
  )


class Crash(Exception):
  """Stands for a death in the middle of a run."""


def train_until_killed(made: Run, step: int) -> None:
  """Dies before the updates of ``step``, whose episodes are in the journal by then."""
  with pytest.raises(Crash), made._session() as session:
    update = session.learner.rl_step

    def dies(state, trajectories, number):
      if number == step:
        time.sleep(0.05)  # others go on under way
        raise Crash
      return update(state, trajectories, number)

    session.learner.rl_step = dies
    session.train()


def fingerprints(directory: pathlib.Path) -> list[str]:
  """Of what was trained, after every step."""
  steps = JournalReader(directory / "journal.log").steps
  return [steps[i].fingerprint for i in sorted(steps)]


if __name__ == "__main__":
  run(sys.argv[1], ScheduleConfig(**json.loads(sys.argv[2]))).train()
