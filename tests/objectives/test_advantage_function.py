"""Advantages of one's own: in the place of the named ones, checked, and refused by name."""

import dataclasses
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives import preset
from agentjax.objectives.advantage_function import (
  AdvantageChoice,
  AdvantageInputs,
  OwnAdvantage,
  abstract_advantage_inputs,
  check_advantages,
)
from agentjax.objectives.advantages import AdvantageConfig, sequence_advantages
from agentjax.objectives.objective import ObjectiveConfig
from agentjax.objectives.preparation import prepare
from agentjax.objectives.segments import broadcast_to_tokens
from agentjax.testing import check_advantage
from agentjax.trajectory.batch import abstract_batch


def centred(inputs):
  """Reward less the mean of the group's valid members."""
  groups = jnp.where(inputs.valid, inputs.groups, inputs.rewards.size)
  known = inputs.valid.astype(jnp.float32)
  total = jax.ops.segment_sum(known * inputs.rewards, groups, inputs.rewards.size + 1)
  count = jax.ops.segment_sum(known, groups, inputs.rewards.size + 1)
  return broadcast_to_tokens(
    inputs.rewards - (total / jnp.maximum(count, 1))[groups], inputs.segment_ids
  )


def with_turns(inputs):
  """The same, and what each token was paid at once."""
  return centred(inputs) + 0.5 * inputs.turn_rewards + inputs.token_rewards


def counts_masked_members(inputs):
  mean = jax.ops.segment_sum(inputs.rewards, inputs.groups, inputs.rewards.size)
  size = jax.ops.segment_sum(jnp.ones_like(inputs.rewards), inputs.groups, inputs.rewards.size)
  own = inputs.rewards - (mean / jnp.maximum(size, 1))[inputs.groups]
  return broadcast_to_tokens(own, inputs.segment_ids)


def over_all_places(inputs):
  return broadcast_to_tokens(inputs.rewards - inputs.rewards.mean(), inputs.segment_ids)


def by_row(inputs):
  own = broadcast_to_tokens(inputs.rewards, inputs.segment_ids)
  return own - own.mean(axis=1, keepdims=True)


def by_number(inputs):
  return centred(inputs) * inputs.segment_ids


def whole_grid(inputs):
  return centred(inputs) / inputs.weights.size


def not_finite(inputs):
  return centred(inputs) / jnp.abs(broadcast_to_tokens(inputs.rewards, inputs.segment_ids))


@pytest.mark.parametrize("function", [centred, with_turns])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_right_function_passes(function, seed):
  check_advantage(function, seed=seed)


@pytest.mark.parametrize(
  ("function", "broken"),
  [
    (counts_masked_members, "sibling exclusion"),
    (over_all_places, "padding"),
    (by_row, "padding"),
    (by_number, "permutation"),
    (whole_grid, "padding"),
    (not_finite, "finite"),
  ],
)
def test_a_wrong_function_fails_with_the_property_that_it_breaks(function, broken):
  with pytest.raises(AssertionError, match=f"^{broken}: "):
    check_advantage(function, seed=0)


@pytest.mark.parametrize(
  ("function", "message"),
  [
    (lambda inputs: inputs.rewards, r"returned float32\[8\] for tokens \[4, 20\]"),
    (lambda inputs: inputs.turns, r"returned int32\[4, 20\]"),
    (lambda inputs: (inputs.weights, {}), "returned .*allowed: a float array"),
    (lambda inputs: inputs.reward, "raised AttributeError"),
  ],
)
def test_what_cannot_be_an_advantage_is_told_without_computing(function, message):
  with pytest.raises(ConfigError, match=f"(?s){message}"):
    check_advantage(function, seed=0)


def test_a_missing_input_is_named():
  inputs = abstract_advantage_inputs(abstract_batch(2, 5, 3))
  with pytest.raises(ConfigError, match="(?s)None are reference_log_probs, token_rewards, turn_re"):
    check_advantages(with_turns, inputs)
  check_advantages(centred, inputs)


def test_what_signals_add_is_given_by_name_and_what_none_adds_is_no_zero(packer):
  def over_values(inputs):
    return centred(inputs) - inputs.column("values")

  with pytest.raises(ConfigError, match="no signal of this run adds values"):
    check_advantages(over_values, abstract_advantage_inputs(abstract_batch(2, 5, 3)))
  batch, _ = example(packer(4, 3, per_row=2, gap=1))
  values = 0.25 * jnp.ones_like(batch.weights)
  plain, _ = prepare(batch, ObjectiveConfig(), advantage=centred)
  found, _ = prepare(batch, ObjectiveConfig(), advantage=over_values, values=values)
  inside = np.asarray(plain.weights) > 0
  np.testing.assert_allclose(
    np.asarray(found.advantages - plain.advantages)[inside], -0.25, atol=1e-6
  )


def example(pack):
  random = np.random.default_rng(0)
  weights = np.ones((4, 3), np.float32)
  weights[:, 0] = 0
  rewards = np.array([1.0, 0.0, np.nan, 0.5], np.float32)
  batch = pack.batch(
    weights,
    random.normal(-1, 0.3, (4, 3)).astype(np.float32),
    rewards,
    valid=np.array([1, 1, 0, 1], bool),
  )
  return batch, weights


def test_it_stands_in_the_place_of_centre_scale_and_credit(packer):
  pack = packer(4, 3, per_row=2, gap=1)
  batch, weights = example(pack)
  named = ObjectiveConfig(AdvantageConfig(scale="none", clip=0.4, multiplier=2.0))
  own, _ = prepare(batch, named, advantage=centred)
  wanted, _ = prepare(batch, named)
  np.testing.assert_allclose(own.advantages, wanted.advantages, atol=1e-6)
  assert np.abs(np.asarray(own.advantages)).max() == pytest.approx(0.8)  # clip, then multiplier
  expected = sequence_advantages(batch.rewards, batch.valid, batch.groups, named.advantage)
  assert np.isfinite(expected).all()


def test_masked_sequences_and_tokens_without_weight_are_zero_to_it_and_from_it(packer):
  pack = packer(4, 3, per_row=2, gap=1)
  batch, weights = example(pack)
  seen = {}

  def ones(inputs: AdvantageInputs):
    jax.debug.callback(
      lambda r, w: seen.update(rewards=r, weights=w), inputs.rewards, inputs.weights
    )
    return jnp.ones_like(inputs.weights)

  prepared, metrics = prepare(batch, ObjectiveConfig(), advantage=ones)
  live = weights * np.array([1, 1, 0, 1])[:, None]
  np.testing.assert_array_equal(pack.unpack(prepared.advantages), live)
  np.testing.assert_array_equal(seen["rewards"], [1, 0, 0, 0.5])
  np.testing.assert_array_equal(pack.unpack(seen["weights"]), live)
  assert float(metrics["advantage/learning_share"]) == 1.0


def test_it_is_found_by_its_name_and_refused_by_it(monkeypatch, packer):
  module = types.ModuleType("my_advantages")
  module.centred, module.number = centred, 3
  monkeypatch.setitem(sys.modules, "my_advantages", module)
  path = "objective.advantage.function"
  config = AdvantageConfig(function=AdvantageChoice.from_name("my_advantages:centred", path))
  config.validate("config.rl.objective.advantage")
  assert not config.needs_group
  assert config.function.found is centred and config.function.chosen == "my_advantages:centred"
  batch, _ = example(packer(4, 3, per_row=2, gap=1))
  named, _ = prepare(batch, ObjectiveConfig(config))
  passed, _ = prepare(batch, ObjectiveConfig(), advantage=centred)
  np.testing.assert_array_equal(named.advantages, passed.advantages)
  for name, said in (("number", "is int"), ("missing", "has no 'missing'")):
    with pytest.raises(ConfigError, match=f"advantage.function='my_advantages:{name}'.*{said}"):
      AdvantageChoice.from_name(f"my_advantages:{name}", path)
  with pytest.raises(ConfigError, match="function='centred'; allowed: .*'module:attribute'"):
    AdvantageChoice.from_name("centred", path)


@pytest.mark.parametrize(
  ("objective", "named"),
  [
    (ObjectiveConfig(AdvantageConfig(credit="gae", centre="none", scale="none")), "credit"),
    (ObjectiveConfig(AdvantageConfig(centre="baseline", scale="none")), "centre"),
    (ObjectiveConfig(AdvantageConfig(learn_from="negative")), "learn_from"),
    (preset("reinforce_pp"), "kl_in_reward"),
    (preset("dpo"), "preference"),
  ],
)
def test_settings_that_need_more_than_an_advantage_are_refused(objective, named):
  own = dataclasses.replace(objective.advantage, function=OwnAdvantage("a:b"))
  with pytest.raises(ConfigError, match=rf"\.{named}="):
    dataclasses.replace(objective, advantage=own).validate()


def test_the_example_of_the_documentation_passes():
  page = (pathlib.Path(__file__).parents[2] / "docs" / "custom_loss.md").read_text()
  code = page.split("# my_advantages.py\n")[1].split("```")[0]
  scope: dict = {}
  exec(code, scope)
  check_advantage(scope["early"], seed=0)
  check_advantages(scope["early"], abstract_advantage_inputs(abstract_batch(1, 4, 2)))
  assert sum(bool(line) for line in code.splitlines()) <= 5
