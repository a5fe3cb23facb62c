"""Who learns when: the buffer of rounds, and one turn of the generator for several of the other."""

import jax
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.recipes.rad2 import training
from tests.recipes.rad2.tiny import tiny_config


def _same(one, other):
  pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  return all(np.array_equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def lessons():
  config = tiny_config()
  return training.prepare_lessons(config, 0)


def _rounds(config, lessons, variant, count):
  generator, _ = training.initial_generator(config, 0)
  learner = training.begin(config, generator, lessons, 0, variant)
  found = [learner]
  for _ in range(count):
    learner, _ = training.play_and_learn(config, learner, lessons, 0, variant=variant)
    found.append(learner)
  return found


def test_one_turn_of_the_generator_for_several_of_the_discriminator(lessons):
  config = tiny_config()
  found = _rounds(config, lessons, "both", 4)
  assert not any(
    _same(a.discriminator, b.discriminator) for a, b in zip(found, found[1:], strict=False)
  )
  kept = [_same(a.generator, b.generator) for a, b in zip(found, found[1:], strict=False)]
  assert kept == [True, True, False, True]  # generator_every=3
  # The buffer holds 3 rounds: the fourth has taken the place of the first, and of it alone.
  for place, same in enumerate((False, True, True)):
    before, after = (
      jax.tree.map(lambda v, place=place: v[place], one.rounds) for one in (found[3], found[4])
    )
    assert _same(before, after) == same
  assert not np.asarray(found[1].rounds.edited)[1:].any()


def test_a_variant_trains_its_network_alone(lessons):
  config = tiny_config(generator_every=1)
  first, _, last = _rounds(config, lessons, "generator", 2)
  assert _same(first.discriminator, last.discriminator)
  assert not _same(first.generator, last.generator)
  assert last.rounds.decisions.candidates.shape[3] == 1  # nothing is chosen


def test_the_discriminator_begins_with_the_scene_of_the_generator(lessons):
  config = tiny_config()
  generator, _ = training.initial_generator(config, 0)
  learner = training.begin(config, generator, lessons, 0, "both")
  assert _same(learner.discriminator.scene, generator.scene)
  assert learner.discriminator.scene.ego[0].weight.any()


def test_imitation_lowers_its_loss(lessons):
  config = tiny_config(imitation_steps=600, imitation_batch=32)
  generator, state = training.initial_generator(config, 0)
  _, _, losses = training.imitate(config, generator, state, lessons, 0, 0, steps=600)
  assert np.mean(losses[-60:]) < 0.8 * np.mean(losses[:20])


def test_impossible_settings_are_refused():
  config = tiny_config(round_scenarios=9)
  with pytest.raises(ConfigError, match="rad2.training.round_scenarios=9; allowed: at most"):
    config.validate("rad2")
  config = tiny_config()
  config.traffic.plan_points = 20
  with pytest.raises(ConfigError, match="decisions x latch=40 steps"):
    config.validate("rad2")
  config = tiny_config()
  config.edit.slower = (0.5, 0.9)
  with pytest.raises(ConfigError, match="falling factors below 1"):
    config.validate("rad2")
