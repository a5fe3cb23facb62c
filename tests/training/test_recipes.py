"""Recipes whose mechanism is in the rollout or in turns train a little, and replay."""

import dataclasses
import pathlib

import pytest

from agentjax.models import ModelConfig
from agentjax.signals.teacher import TeacherConfig
from agentjax.text import TokenizerConfig
from agentjax.training import Experiment, Run, load_experiment
from agentjax.training.checkpoint import CheckpointConfig
from agentjax.training.diagnostics import DiagnosticsConfig
from agentjax.training.metrics import read_metrics
from agentjax.training.selectors import SelectionConfig
from tests.training.smoke import quiet

_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
_MODEL = ModelConfig(
  vocab_size=264, d_model=16, pattern="*-", num_heads=2, num_kv_heads=2, head_dim=8, d_mlp=16
)
# What shows that the method was at work.
_TELLS = {
  "ragen_sokoban": "reward/by_turn",
  "remax_word_problems": "baseline/reward",
  "implicit_prm_word_problems": "preference/accuracy",
  "prime_word_problems": "process/accuracy",
  "monte_carlo_sokoban": "reward/part_monte_carlo",
  "agentic_grpo_sokoban": "correction/grad_norm",
}


def little(name: str) -> Experiment:
  """The recipe with a policy of bytes, one step of a warm start and two of the method."""
  experiment = load_experiment(_CONFIGS / f"{name}.py")
  experiment.model, experiment.tokenizer = _MODEL, TokenizerConfig()
  experiment.data.train_size, experiment.data.test_size = 8, 2
  length = 640
  experiment.engine = dataclasses.replace(
    experiment.engine, slots=8, max_length=length, extend_buckets=(128,), extend_rows=(4,)
  )
  rollout = experiment.rollout
  rollout.group_size = min(rollout.group_size, 4)
  rollout.max_turns, rollout.max_tokens_per_turn, rollout.max_total_tokens = 2, 6, length
  rollout.concurrency = 16
  for stage in (experiment.supervised, experiment.rl):
    stage.tasks_per_step, stage.row_length, stage.microbatch_rows = 2, 2 * length, 4
  experiment.supervised.steps, experiment.rl.steps = 1, 2
  experiment.rl.selection, experiment.rl.diagnostics = SelectionConfig(), DiagnosticsConfig()
  experiment.evaluation.tasks = 0
  experiment.checkpoint = CheckpointConfig(every=10)
  return experiment


@pytest.mark.slow
@pytest.mark.parametrize("name", _TELLS)
def test_a_recipe_trains_a_little_and_replays(tmp_path, name):
  directory = tmp_path / "run"
  assert Run(little(name), directory, console=quiet()).train().finished
  assert _TELLS[name] in read_metrics(directory / "metrics.jsonl")[-1]
  assert Run(little(name), directory, console=quiet()).replay(3).identical


@pytest.mark.slow
def test_a_reward_model_that_was_trained_before_rewards_the_steps_of_prime(tmp_path):
  model = Run(little("implicit_prm_word_problems"), tmp_path / "model", console=quiet())
  assert model.train().finished
  experiment = little("prime_word_problems")
  experiment.rl.process.online = None
  experiment.rl.process.model = TeacherConfig(str(tmp_path / "model"))
  assert Run(experiment, tmp_path / "run", console=quiet()).train().finished
  assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["process/step"] != 0
