"""The whole experiment at a size at which nothing is learned, and what its steps promise."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.models.spec import init_params
from agentjax.recipes.diffusion_nft import training
from agentjax.recipes.diffusion_nft.experiment import run_experiment
from agentjax.recipes.diffusion_nft.generator import generator_spec
from agentjax.recipes.diffusion_nft.settings import DrawingsConfig, NetConfig, TuneConfig


def _small(**changes):
  net = NetConfig(layers=1, width=16, heads=2, steps=4, batch=8)
  return dataclasses.replace(
    DrawingsConfig(
      generator=net,
      critic=net,
      drawings=32,
      draw_steps=2,
      pairs=(24,),
      held_out_pairs=30,
      checks=2,
      held_out_prompts=6,
      measured_images=2,
      tune=TuneConfig(steps=2, prompts=2, images=4, updates=1, every=1),
    ),
    **changes,
  )


@pytest.mark.slow
def test_the_experiment_writes_its_numbers_and_a_figure(tmp_path):
  said = []
  results = run_experiment(_small(), tmp_path, said.append)
  assert json.loads((tmp_path / "results.json").read_text()) == results
  assert (tmp_path / "drawings.png").read_bytes().startswith(b"\x89PNG")
  assert [row["pairs"] for row in results["pairs"]] == [24]
  for row in results["pairs"]:
    mean, low, high = row["difference"]
    assert low <= mean <= high
    assert mean == pytest.approx(row["rational"][0] - row["scalar"][0])
    assert 0 < row["kept"] < 1 and row["annotator"][0] > 0.8
  assert [row["step"] for row in results["curves"]["rational"]] == [0, 1, 2]
  assert results["curves"]["rational"][0]["right"] == results["generators"]["before"]["right"][0]
  assert set(results["refinement"]) == {
    "criticised", "once", "again", "refined", "again_best", "refined_best",
  }  # fmt: skip
  assert any("tuning" in text for text in said)


def _uneven_generator():
  """Draws patches of one grey each, which the noise decides."""
  fresh = init_params(generator_spec(1, 16, 2), jax.random.key(0))
  greys = 0.3 * jax.random.normal(jax.random.key(1), (16, 1))
  return fresh.replace(patch_out=jnp.broadcast_to(greys, fresh.patch_out.shape))


def _darkness(images, prompts):
  return (1 - images.mean(axis=(1, 2, 3))) / 2


@pytest.mark.parametrize("sign", [1, -1])
def test_tuning_raises_a_reward_that_is_plain_to_see(sign):
  """Reward: how dark an image is, or how light. No network judges: this is the loss at work."""
  settings = TuneConfig(steps=8, prompts=4, images=8, updates=2, every=8, learning_rate=3e-3)
  config = _small(tune=settings)
  config.tune.loss.least_std = 0.0
  _, rows = training.tune(
    config,
    _uneven_generator(),
    lambda images, prompts: 0.5 + sign * (_darkness(images, prompts) - 0.5),
    lambda text: None,
  )
  assert rows[-1]["reward"] > rows[0]["reward"] + 0.03


def test_groups_that_are_all_left_out_change_nothing():
  config = _small()
  generator = _uneven_generator()
  tuned, _ = training.tune(
    config, generator, lambda images, prompts: np.full(len(images), 0.5), lambda text: None
  )
  jax.tree.map(np.testing.assert_array_equal, tuned, generator)


def test_held_out_prompts_are_never_trained_on():
  held, others = training.held_out_prompts(_small())
  assert len(held) == 6 and len(np.unique(np.concatenate([held, others]), axis=0)) == 288


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"pairs": (40, 20)}, "pairs"),
    ({"pairs": ()}, "pairs"),
    ({"checks": 3}, "checks"),
    ({"held_out_prompts": 280}, "held_out_prompts"),
    ({"generator": NetConfig(width=10, heads=4)}, "generator.heads"),
    ({"tune": TuneConfig(images=1)}, "tune.images"),
    ({"tune": TuneConfig(steps=5, every=2)}, "tune.every"),
  ],
)
def test_settings_that_cannot_be_are_refused(changes, field):
  with pytest.raises(ConfigError, match=field):
    _small(**changes).validate("drawings")
