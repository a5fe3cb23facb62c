"""Logits Replay in a run: the first policy's sets, the loss over them, and their return."""

import dataclasses

import jax
import pytest

from agentjax.config import ConfigError
from agentjax.models import ModelConfig
from agentjax.recipes.logits_replay import LogitsReplayConfig
from agentjax.training import Extensions, RLStage
from agentjax.training.build import build_parts
from agentjax.training.checkpoint import CheckpointStore
from agentjax.training.learner import Learner
from agentjax.training.state import Network
from tests.training.smoke import smoke_experiment


def _learner(directory, replay, start_from=None):
  model = ModelConfig(d_model=16, pattern="*-", num_heads=2, num_kv_heads=2, head_dim=8, d_mlp=16)
  experiment = smoke_experiment(rl=RLStage(), model=model, start_from=start_from)
  experiment.supervised = dataclasses.replace(
    experiment.supervised, token_sets=replay, steps=2, mtp_coefficient=0.0, router_bias_rate=0.0
  )
  experiment.validate()
  parts = build_parts(experiment.freeze(), directory, Extensions())
  return Learner(parts, lambda inputs: (0.0, {})), parts


def _losses(directory, replay, steps=1, replaced_before=None):
  """Loss of each step; a learner of its own takes over before step ``replaced_before``."""
  learner, parts = _learner(directory, replay)
  tasks = [task for task in parts.tasks.train if task.demonstration]
  state, losses = learner.initial_state("supervised"), []
  for i in range(steps):
    if i == replaced_before:
      learner, _ = _learner(directory, replay)
    state, values = learner.supervised_step(state, tasks[4 * i : 4 * i + 4])
    losses.append(values["loss"])
  return losses


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  return tmp_path_factory.mktemp("replay")


def test_a_softmax_over_few_tokens_leaves_more_for_the_right_one(directory):
  (plain,) = _losses(directory, None)
  (few,) = _losses(directory, LogitsReplayConfig(mass=0.5, most=8))
  assert few < plain - 0.1


@pytest.mark.slow
def test_a_resumed_run_has_the_sets_of_the_first_policy(directory):
  replay = LogitsReplayConfig(mass=0.5, most=8)
  resumed = _losses(directory, replay, steps=3, replaced_before=2)
  assert resumed == _losses(directory, replay, steps=3)


@pytest.mark.slow
def test_the_sets_are_those_of_the_run_that_is_started_from(directory, tmp_path):
  parts = _learner(directory, None)[1]
  replay = LogitsReplayConfig(mass=0.5, most=8)
  earlier, _ = _learner(directory, None)
  state = earlier.initial_state("supervised")
  doubled = jax.tree.map(lambda x: 2 * x, state.weights)
  store = CheckpointStore(tmp_path, 1, parts.base_identity)
  store.save(
    7, state.with_network("policy", Network(doubled, state.networks["policy"].opt_state)), {}
  )
  learner, parts = _learner(directory, replay, str(tmp_path / "7"))
  tasks = [task for task in parts.tasks.train if task.demonstration][:4]
  _, found = learner.supervised_step(learner.first_state("supervised"), tasks)
  other, _ = _learner(directory, replay)
  _, chance = other.supervised_step(other.initial_state("supervised", doubled), tasks)
  # The same policy and data: only the sets that the loss runs over can differ.
  assert abs(found["loss"] - chance["loss"]) > 1e-3


def test_what_cannot_be_made_again_is_refused():
  experiment = smoke_experiment(start_from="runs/earlier")
  experiment.supervised.token_sets = LogitsReplayConfig()
  with pytest.raises(ConfigError, match=r"config\.start_from='runs/earlier'; allowed: RUN/check"):
    experiment.validate()
  experiment.start_from = "runs/earlier/checkpoints/3"
  experiment.validate()
  experiment = smoke_experiment()
  experiment.supervised.token_sets = LogitsReplayConfig()
  experiment.supervised.z_loss_coefficient = 0.1
  with pytest.raises(ConfigError, match="z_loss_coefficient"):
    experiment.validate()
