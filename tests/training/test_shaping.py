"""A shaper of your own: chosen by a config, asked once a step, and part of a run's state."""

import dataclasses

import pytest

from agentjax.config import ConfigError, check
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.training import Experiment
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.metrics import read_metrics
from agentjax.training.shaping import ShapingConfig
from agentjax.trajectory.record import Reward
from tests.training.stages import run, staged_experiment


@dataclasses.dataclass(unsafe_hash=True)
class RisingConfig(ShapingConfig):
  """Adds ``by`` more to the first reward of every step than the step before."""

  by: float = 1.0

  def check_model(self, model, path):
    check(model.d_mlp < 999, f"{path}.by", self.by, "another model")

  def build(self, tools):
    assert tools.pack is not None and len(tools.token_bytes) == tools.model.vocab_size
    return Rising(self.by)


class Rising:
  def __init__(self, by):
    self.by, self.steps = by, 0

  def shape(self, policy, trajectories):
    self.steps += 1
    first, *others = trajectories
    raised = Reward(first.reward.value + self.by * self.steps)
    metrics = {"rising/steps": float(self.steps)}
    return [dataclasses.replace(first, reward=raised), *others], metrics

  def get_state(self):
    return {"steps": self.steps}

  def set_state(self, state):
    self.steps = state["steps"]


def shaped_experiment():
  experiment = staged_experiment(ScheduleConfig())
  experiment.rl.shaping = RisingConfig(2.0)
  return experiment


def test_a_choice_of_shaper_survives_the_saved_config_and_is_asked_about_the_model():
  experiment = shaped_experiment()
  assert Experiment.from_dict(experiment.to_dict()).rl.shaping == RisingConfig(2.0)
  experiment.validate()
  experiment.model.d_mlp = 999
  with pytest.raises(ConfigError, match=r"config\.rl\.shaping\.by=2\.0"):
    experiment.validate()


def test_rewards_are_shaped_once_a_step_and_a_replay_knows_the_state(tmp_path, monkeypatch):
  schedule = ScheduleConfig()
  rl = dataclasses.replace(shaped_experiment().rl, steps=3)

  def make():
    return run(tmp_path / "run", schedule, rl=rl, checkpoint=CheckpointConfig(every=2))

  assert make().train().finished
  rows = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "rising/steps" in r]
  assert [row["rising/steps"] for row in rows] == [1.0, 2.0, 3.0]
  assert make().replay(3).identical
  monkeypatch.setattr(Rising, "set_state", lambda shaper, state: None)
  assert not make().replay(3).identical
