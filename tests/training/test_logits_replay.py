"""Logits Replay in a run: the first policy's sets, the loss over them, and their return."""

import dataclasses

import pytest

from agentjax.config import ConfigError
from agentjax.models import ModelConfig
from agentjax.training import Extensions, RLStage
from agentjax.training.learner import Learner
from agentjax.training.logits_replay import LogitsReplayConfig
from agentjax.training.parts import build_parts
from tests.training.smoke import smoke_experiment


def _learner(directory, replay):
  model = ModelConfig(d_model=16, pattern="*-", num_heads=2, num_kv_heads=2, head_dim=8, d_mlp=16)
  experiment = smoke_experiment(rl=RLStage(), model=model)
  experiment.supervised = dataclasses.replace(
    experiment.supervised, logits_replay=replay, steps=2, mtp_coefficient=0.0, router_bias_rate=0.0
  )
  experiment.validate()
  parts = build_parts(experiment.freeze(), directory, Extensions())
  return Learner(parts, lambda inputs: (0.0, {})), parts


def _losses(directory, replay, skip=0):
  """Loss of two steps; ``skip`` of them by a learner that is then replaced, as in a resume."""
  learner, parts = _learner(directory, replay)
  tasks = [task for task in parts.tasks.train if task.demonstration][:8]
  state, losses = learner.initial_state("supervised"), []
  for i in range(2):
    if skip and i == skip:
      learner, _ = _learner(directory, replay)
    state, values = learner.supervised_step(state, tasks[4 * i : 4 * i + 4])
    losses.append(values["loss"])
  return losses


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  return tmp_path_factory.mktemp("replay")


def test_few_tokens_give_a_smaller_loss_and_a_resumed_run_the_same_one(directory):
  plain = _losses(directory, None)
  few = _losses(directory, LogitsReplayConfig(mass=0.5, most=8))
  # A softmax over fewer tokens leaves more for the right one.
  assert all(ours < theirs - 0.1 for ours, theirs in zip(few, plain, strict=True))
  resumed = _losses(directory, LogitsReplayConfig(mass=0.5, most=8), skip=1)
  assert resumed == few


def test_what_cannot_be_made_again_is_refused():
  experiment = smoke_experiment(start_from="earlier")
  experiment.supervised.logits_replay = LogitsReplayConfig()
  with pytest.raises(ConfigError, match=r"config\.start_from"):
    experiment.validate()
  experiment = smoke_experiment()
  experiment.supervised.logits_replay = LogitsReplayConfig()
  experiment.supervised.z_loss_coefficient = 0.1
  with pytest.raises(ConfigError, match="z_loss_coefficient"):
    experiment.validate()
