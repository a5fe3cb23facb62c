"""GAE over turns (VL-DAC, ERA, meow-tea-taro), from the config itself, against plain GRPO."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.objectives import ObjectiveConfig, prepare
from agentjax.training import load_experiment
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.packing import pack, to_sequences
from agentjax.trajectory.record import Reward

_CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "turn_gae_sokoban.py"


def objective(**advantage):
  config = load_experiment(_CONFIG).rl.objective
  for name, value in advantage.items():
    setattr(config.advantage, name, value)
  return config


def advantages(config, rewards, tokens=1, values=None, samples=1):
  """[turn, token] of the first episode, whose turns of so many tokens earned ``rewards``."""
  made = []
  for sample in range(samples):
    builder = TrajectoryBuilder(step=1, task_id=0, sample=sample, source="x")
    builder.append("user", [1])
    for _ in rewards:
      builder.append_sampled([2] * tokens, [-1.0] * tokens, [0.5] * tokens, 0)
      builder.append("tool", [3])
    made.append(builder.build(reward=Reward(sum(rewards) if sample == 0 else 0.0)))
  batch = pack(to_sequences(made), row_length=128, pad_id=0)
  inside = np.asarray(batch.weights) > 0
  first = inside & (np.asarray(batch.segment_ids) == 1)
  paid = np.zeros(inside.shape, np.float32)
  places = np.argwhere(first)[tokens - 1 :: tokens]
  paid[tuple(places.T)] = rewards
  columns = {"reference_log_probs": batch.behaviour_log_probs}
  if config.needs_values:
    columns["values"] = jnp.zeros(inside.shape) if values is None else values(first)
  if config.advantage.turn_rewards:
    columns["turn_rewards"] = jnp.asarray(paid)
  prepared, _ = prepare(batch, config, **columns)
  return np.asarray(prepared.advantages)[first].reshape(len(rewards), tokens)


@pytest.mark.parametrize("tokens", [1, 10, 50])
def test_credit_does_not_fade_with_the_tokens_of_a_turn(tokens):
  """gamma lambda = .855 a turn; over tokens it would be .855^50 = 4e-4."""
  found = advantages(objective(), [0.0, 1.0], tokens)
  np.testing.assert_allclose(found, np.repeat([[0.855], [1.0]], tokens, axis=1), rtol=1e-5)


def test_over_tokens_it_fades():
  found = advantages(objective(index_set="token", turn_rewards=()), [0.0, 1.0], 10)
  np.testing.assert_allclose(found[0, 0], 0.855**19, rtol=1e-4)


def test_a_value_counts_where_a_turn_begins_alone():
  def values(first, inner):
    found = np.full(first.shape, inner, np.float32)
    places = np.argwhere(first)[::5]
    found[tuple(places.T)] = [0.2, 0.6]
    return jnp.asarray(found)

  for inner in (0.0, 99.0):
    found = advantages(objective(), [0.0, 1.0], 5, lambda first, inner=inner: values(first, inner))
    np.testing.assert_allclose(found[:, 0], [0.9 * 0.6 - 0.2 + 0.855 * 0.4, 0.4], rtol=1e-5)


def test_where_rewards_fall_changes_gae_and_leaves_grpo_as_it_is():
  early, late = [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]
  config = objective(gamma=1.0)
  np.testing.assert_allclose(advantages(config, early)[:, 0], [1, 0, 0], atol=1e-6)
  np.testing.assert_allclose(advantages(config, late)[:, 0], [0.95**2, 0.95, 1], rtol=1e-5)
  plain = ObjectiveConfig()
  ours, theirs = (advantages(plain, rewards, samples=4) for rewards in (early, late))
  np.testing.assert_array_equal(ours, theirs)
  assert (ours > 0).all()


def test_paid_at_the_end_gae_does_not_know_where_rewards_fell():
  config = objective(gamma=1.0, turn_rewards=())
  ours, theirs = (advantages(config, rewards) for rewards in ([1.0, 0.0, 0.0], [0.0, 0.0, 1.0]))
  np.testing.assert_array_equal(ours, theirs)
