"""Every config under configs/models is valid, and its model divides over its mesh."""

from __future__ import annotations

import math
import pathlib

import jax
import pytest

from agentjax.config import ConfigError
from agentjax.models import model_presets, param_specs
from agentjax.recipes.nemotron3 import LeaveOneOut
from agentjax.sharding import MESH_AXES, partition_spec
from agentjax.training import load_experiment

CONFIGS = sorted((pathlib.Path(__file__).parents[1] / "configs" / "models").glob("*.py"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda f: f.stem)
def test_a_model_config_is_valid_and_fits_its_mesh(file):
  experiment = load_experiment(file)
  for name in ("model", "mesh", "engine", "rl", "rollout"):
    getattr(experiment, name).validate(f"config.{name}")
  with pytest.raises(ConfigError, match="set --config.pretrained=DIR"):
    experiment.validate()
  assert experiment.name == file.stem
  command = file.read_text()
  devices = math.prod(map(int, command.split("--topology=")[1].split()[0].split(":")[1].split("x")))
  sizes = experiment.mesh.sizes(devices)
  mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), MESH_AXES)
  for path, spec in jax.tree_util.tree_leaves_with_path(
    param_specs(experiment.model), is_leaf=lambda v: hasattr(v, "axes")
  ):
    partition_spec(spec.axes, spec.shape, mesh, name=jax.tree_util.keystr(path))


def test_nemotron_3_super_is_trained_with_the_published_loss():
  (file,) = (f for f in CONFIGS if f.stem == "nemotron3_super_120b_a12b")
  experiment = load_experiment(file)
  loss, credit = experiment.rl.objective.policy_loss, experiment.rl.objective.advantage
  assert (loss.clip_low, loss.clip_high, loss.mismatch.weight_cap) == (0.2, 0.28, 5.0)
  assert loss.mismatch.filter_high == 2.0 and loss.aggregation == "token_mean"
  assert isinstance(credit.function, LeaveOneOut) and credit.clip == 50.0
  assert experiment.model.frozen_router and experiment.rl.router_bias_rate == 1e-3
  assert (experiment.rollout.group_size, experiment.rl.row_length) == (16, 65_536)


def test_every_published_architecture_of_note_has_a_config():
  assert {f.stem for f in CONFIGS} <= set(model_presets())
  assert len(CONFIGS) >= 12
