"""Losses of one's own in whole runs: by name, with faults told, and noticed when they change."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from agentjax.config import ConfigError
from agentjax.objectives import preset
from agentjax.objectives.advantages import check_outcomes
from agentjax.objectives.objective import ObjectiveConfig
from agentjax.objectives.preparation import abstract_inputs
from agentjax.training import Run
from agentjax.training.flags import define_config_flag
from agentjax.training.nonfinite import count_nonfinite, describe_nonfinite
from agentjax.training.run import TrainingError
from agentjax.training.workdir import keep_sources
from tests.training.smoke import quiet, smoke_experiment

LOSS = """
import jax.numpy as jnp

def capped(inputs):
  ratio = jnp.exp(inputs.log_probs - inputs.old_log_probs)
  return -jnp.minimum(ratio, 2.0) * inputs.advantages, {"capped": (ratio > 2.0).astype(jnp.float32)}
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
  """Name of an importable module with a loss ``capped``, and its file."""
  name = f"loss_{tmp_path.name}".replace("-", "_")
  file = tmp_path / f"{name}.py"
  file.write_text(LOSS)
  monkeypatch.syspath_prepend(str(tmp_path))
  return name, file


def only_rl(**changes):
  experiment = smoke_experiment()
  experiment.supervised.steps = 0
  experiment.rl.steps = 2
  experiment.evaluation.tasks = 0
  for name, value in changes.items():
    setattr(experiment.rl.objective, name, value)
  return experiment


def rows(directory):
  return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_the_function_is_a_flag():
  values = flags.FlagValues()
  argv = ["train", "--config=configs/smoke.py", "--config.rl.objective.function=my_losses:capped"]
  config = define_config_flag(flag_values=values, argv=argv)
  values(argv)
  assert config.value.rl.objective.function == "my_losses:capped"
  with pytest.raises(ConfigError, match="no module 'my_losses' on the import path"):
    Run(config.value, "nowhere")


def test_sequence_level_ppo_is_four_flags_from_any_config():
  values = flags.FlagValues()
  argv = [
    "train",
    "--config=configs/smoke.py",
    "--config.rl.objective.advantage.centre=prompt_value",
    "--config.rl.objective.advantage.scale=none",
    "--config.rl.objective.value_loss.kind=bernoulli",
    "--config.rollout.group_size=1",
  ]
  config = define_config_flag(flag_values=values, argv=argv)
  values(argv)
  config.value.validate()
  assert config.value.rl.objective == preset("sppo")


def test_a_loss_that_cannot_be_traced_stops_the_run_before_anything_is_compiled(tmp_path):
  def transposed(inputs):
    return (inputs.log_probs * inputs.advantages).T

  with pytest.raises(ConfigError, match=r"returned float32\[256, 4\] for inputs \[4, 256\]"):
    Run(only_rl(), tmp_path / "run", objective=transposed, console=quiet()).train()
  assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_a_named_loss_trains_resumes_and_is_noticed_when_it_changes(tmp_path, module, caplog):
  name, file = module
  experiment = only_rl(function=f"{name}:capped")
  directory = tmp_path / "run"
  Run(experiment, directory, console=quiet()).train()
  assert all(np.isfinite(r["policy/capped"]) and "policy/entropy" in r for r in rows(directory))
  assert not any(k.startswith("nonfinite") for r in rows(directory) for k in r)
  assert (directory / "functions" / f"{name}.py").read_text() == LOSS
  assert Run(experiment, directory, console=quiet()).replay(2).identical
  assert json.loads((directory / "config.json").read_text())["rl"]["objective"]["function"] == (
    f"{name}:capped"
  )


def test_a_change_of_the_functions_code_is_noticed(tmp_path, module, caplog):
  import importlib

  name, file = module
  importlib.import_module(name)
  directory = tmp_path / "run"
  for _ in range(2):
    keep_sources(directory, [f"{name}:capped", "agentjax.objectives.preference:x"])
  assert not caplog.records
  file.write_text(LOSS.replace("2.0", "3.0"))
  keep_sources(directory, [f"{name}:capped"])
  assert f"{name}:capped, has changed since this run began" in caplog.text
  assert (directory / "functions" / f"{name}.py").read_text() == LOSS
  assert len(list((directory / "functions").iterdir())) == 1


@pytest.mark.slow
def test_the_array_that_went_bad_first_is_named(tmp_path):
  experiment = only_rl()
  experiment.rl.optimizer.max_bad_steps = 1

  def broken(inputs):
    return inputs.log_probs * jnp.nan

  with pytest.raises(TrainingError, match="the loss function's result is the first array"):
    Run(experiment, tmp_path / "run", objective=broken, console=quiet()).train()


def inputs_with(**bad):
  shapes = abstract_inputs(ObjectiveConfig(with_reference=True), 2, 3)
  inputs = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), shapes)
  spoilt = {name: getattr(inputs, name).at[0, 1:].set(value) for name, value in bad.items()}
  return dataclasses.replace(inputs, **spoilt)


@pytest.mark.parametrize(
  ("bad", "loss", "message"),
  [
    ({}, 0.0, ""),
    ({}, np.inf, "the loss is not finite, though every input"),
    ({"log_probs": np.nan, "reference_log_probs": -np.inf}, np.nan, "input reference_log_probs is"),
    ({"entropies": np.nan}, np.nan, "input entropies is the first array"),
    ({"weights": 0.0, "log_probs": np.nan}, 0.0, ""),  # without weight it may be anything
  ],
)
def test_inputs_come_before_what_is_computed_from_them(bad, loss, message):
  counts = {k: float(v) for k, v in count_nonfinite(inputs_with(**bad), jnp.float32(loss)).items()}
  found = describe_nonfinite(counts)
  assert message in found and bool(message) == bool(found)


def test_rewards_outside_0_to_1_are_refused_with_the_flag_to_change():
  valid = np.array([True, True, False, True])
  words = "config.kind='bernoulli'", "set --config.kind=squared"
  check_outcomes(np.array([0.0, 1.0, -7.0, 0.5]), valid, *words)
  with pytest.raises(ConfigError, match=r"\[-1.0\] \(1 of 3\).*set --config\.kind=squared"):
    check_outcomes(np.array([-1.0, 1.0, -7.0, 0.5]), valid, *words)


@pytest.mark.slow
def test_sequence_level_ppo_trains_its_value_with_one_rollout_a_task(tmp_path):
  experiment = only_rl()
  experiment.rl.objective = preset("sppo")
  experiment.rollout.group_size = 1
  experiment.reward.parts, experiment.reward.weights = ("turns",), (1.0,)
  experiment.rollout.max_turns = 1  # every episode succeeds
  directory = tmp_path / "run"
  Run(experiment, directory, console=quiet()).train()
  losses = [r["policy/value_loss"] for r in rows(directory)]
  assert losses[0] == pytest.approx(np.log(2), abs=1e-5)  # the head starts at 0: a chance of 1/2
  assert losses[1] < losses[0] - 1e-4  # far beyond rounding
  assert Run(experiment, directory, console=quiet()).replay(2).identical


@pytest.mark.slow
def test_sequence_level_ppo_refuses_rewards_that_are_no_outcomes(tmp_path):
  experiment = only_rl()
  experiment.rl.objective = preset("sppo")
  experiment.rollout.group_size = 1
  experiment.reward.parts, experiment.reward.weights = ("turns",), (3.0,)
  with pytest.raises(ConfigError, match=r"--config\.rl\.objective\.value_loss\.kind=squared"):
    Run(experiment, tmp_path / "run", console=quiet()).train()
