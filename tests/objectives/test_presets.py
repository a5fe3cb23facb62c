"""Published methods: valid, distinct from GRPO, and keeping the house's promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives import preset
from agentjax.objectives.objective import policy_objective
from agentjax.objectives.preparation import abstract_inputs, prepare
from agentjax.recipes.presets import PRESETS
from agentjax.testing import check_objective
from agentjax.trajectory.batch import Batch

FAST = ("ppo", "ipa")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_comes_as_an_open_copy(name):
  config = preset(name)
  config.validate(name)
  assert config == PRESETS[name]
  config.policy_loss.entropy_coefficient = 0.5  # open to change, and only here
  assert PRESETS[name].policy_loss.entropy_coefficient == 0.0
  with pytest.raises(ConfigError, match="frozen"):
    PRESETS[name].policy_loss.entropy_coefficient = 0.5


def test_an_unknown_preset_lists_the_known_ones():
  with pytest.raises(ConfigError, match="dapo, decoupled_ppo, dpo, dr_grpo"):
    preset("grpo2")


def example():
  """Six sequences of unequal length and reward, off policy enough for every bound to act."""
  random = np.random.default_rng(5)
  lengths, rows, time = (4, 9, 6, 3, 7, 5), 3, 18
  segment_ids, turns = np.zeros((rows, time), np.int32), np.full((rows, time), -1, np.int32)
  for i, length in enumerate(lengths):
    span = slice(9 * (i % 2), 9 * (i % 2) + length)
    segment_ids[i // 2, span] = i + 1
    turns[i // 2, span] = np.arange(length) >= length // 2
  inside = segment_ids > 0
  now = np.where(inside, random.normal(-1.5, 0.4, inside.shape), 0).astype(np.float32)

  def near(scale):
    drift = scale * random.normal(size=inside.shape)
    return jnp.asarray(np.where(inside, now + drift, 0), jnp.float32)

  old, behaviour, reference = near(0.4), near(0.4), near(0.4)
  # In the first group sampler and trainer agree: what rejects by their ratio keeps it.
  behaviour = jnp.where(segment_ids <= 3, old, behaviour)
  batch = Batch(
    token_ids=jnp.zeros(inside.shape, jnp.int32),
    segment_ids=jnp.asarray(segment_ids),
    positions=jnp.zeros(inside.shape, jnp.int32),
    weights=jnp.asarray(inside, jnp.float32),
    behaviour_log_probs=behaviour,
    entropies=jnp.ones(inside.shape),
    versions=jnp.zeros(inside.shape, jnp.int32),
    turns=jnp.asarray(turns),
    rewards=jnp.array([1.0, 0.0, 0.4, 1.0, 0.7, 0.7]),
    valid=jnp.ones(6, bool),
    groups=jnp.array([0, 0, 0, 1, 1, 1]),
  )
  values = jnp.asarray(0.1 * random.normal(size=inside.shape), jnp.float32)
  return batch, jnp.asarray(now), old, reference, values


def direction(name):
  """The unit gradient of a preset on the common example."""
  config = preset(name)
  batch, now, old, reference, values = example()

  @jax.jit
  def gradient(now, divergences):
    prepared, _ = prepare(
      batch,
      config,
      old_log_probs=old,
      reference_log_probs=reference,
      teacher_log_probs=reference,
      values=values,
      baselines=jnp.full(6, 0.5),
      part_advantage=batch.rewards - 0.5 + 0.5 * (batch.rewards**2 - 0.4),
      agreement=jnp.array([0.4, 0.4, 0.4, 0.9, 0.9, 0.9]),
    )
    loss = policy_objective(config)
    return jax.grad(
      lambda x, d: loss(prepared.with_scores(x, jnp.ones_like(x), values, d))[0], (0, 1)
    )(now, divergences)

  result = np.concatenate([np.ravel(g) for g in gradient(now, jnp.ones_like(now))])
  return result / np.linalg.norm(result)


@pytest.fixture(scope="module")
def grpo_direction():
  return direction("grpo")


@pytest.mark.parametrize("name", PRESETS)
def test_the_shapes_that_a_preset_prepares_are_known_without_data(name):
  """The planner and the check of a loss at the start of a run take them."""
  config = preset(name)
  inputs = abstract_inputs(config, 2, 8)
  assert (inputs.reference_log_probs is None) == (not config.needs_reference)
  assert (inputs.returns is None) == (not config.needs_values)
  assert (inputs.clip_high_bonus is None) == (not config.advantage.terms)
  assert {x.shape for x in jax.tree.leaves(inputs)} == {(2, 8)}
  loss, metrics = jax.eval_shape(policy_objective(config), inputs)
  assert loss.shape == () and {m.shape for m in metrics.values()} == {()}


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"grpo"}))
def test_a_preset_moves_parameters_another_way_than_grpo(name, grpo_direction):
  """Compared after normalising: a method is more than another learning rate."""
  ours = direction(name)
  assert np.isfinite(ours).all()
  assert np.dot(ours, grpo_direction) < 0.999


@pytest.mark.parametrize(
  "name",
  [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in PRESETS if name not in FAST)],
)
def test_a_preset_keeps_the_promises_of_an_objective(name):
  config = preset(name)
  check_objective(policy_objective(config), config, seed=3)
