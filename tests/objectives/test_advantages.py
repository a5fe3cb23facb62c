"""Sequence advantages: golden numbers, group properties, refusal of sentinels and bad configs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.config import ConfigError
from agentjax.objectives.advantages import (
  AdvantageConfig,
  check_group_size,
  check_rewards,
  sequence_advantages,
)

REWARDS = jnp.array([1.0, 0.0, 0.0, 1.0, 0.0])
ONE_GROUP = jnp.zeros(5, jnp.int32)
ALL = jnp.ones(5, bool)

GROUP_CENTRES = [
  "group_mean",
  "group_median",
  "group_unique_mean",
  "leave_one_out",
  "length_weighted",
  "runner_up",
]


compiled = jax.jit(sequence_advantages, static_argnames="config")


def run(rewards, groups, config, valid=None, **kwargs):
  rewards = jnp.asarray(rewards)
  valid = jnp.ones(len(rewards), bool) if valid is None else jnp.asarray(valid)
  kwargs.setdefault("lengths", jnp.arange(1.0, len(rewards) + 1))
  kwargs.setdefault("baselines", jnp.zeros(len(rewards)))
  return np.asarray(compiled(rewards, valid, jnp.asarray(groups), config, **kwargs))


@pytest.mark.parametrize(
  "config, expected",
  [
    (AdvantageConfig(), [1.095443, -0.730295, -0.730295, 1.095443, -0.730295]),
    (AdvantageConfig(ddof=0), [1.224742, -0.816495, -0.816495, 1.224742, -0.816495]),
    (AdvantageConfig(scale="none"), [0.6, -0.4, -0.4, 0.6, -0.4]),
    (
      AdvantageConfig(centre="leave_one_out", scale="none"),
      [0.75, -0.5, -0.5, 0.75, -0.5],
    ),
    (
      AdvantageConfig(centre="length_weighted", scale="none"),
      [0.583333, -0.416667, -0.416667, 0.583333, -0.416667],
    ),
    (AdvantageConfig(centre="group_median", scale="none"), [1, 0, 0, 1, 0]),
    (AdvantageConfig(centre="group_unique_mean", scale="none"), [0.5, -0.5, -0.5, 0.5, -0.5]),
    (AdvantageConfig(centre="none", scale="none"), [1, 0, 0, 1, 0]),
    (AdvantageConfig(scale="nonzero_advantages"), [0.6, -0.4, -0.4, 0.6, -0.4]),
    (AdvantageConfig(scale="nonzero_rewards"), [1.5, -1.0, -1.0, 1.5, -1.0]),
  ],
)
def test_golden_group_of_five(config, expected):
  config.validate()
  lengths = jnp.array([2.0, 4.0, 1.0, 3.0, 2.0])
  ours = run(REWARDS, ONE_GROUP, config, lengths=lengths)
  np.testing.assert_allclose(ours, expected, atol=2e-6)


def test_only_the_best_member_learns_against_the_second_best():
  config = AdvantageConfig(centre="runner_up", scale="none")
  ours = run([0.2, 0.9, 0.5, 0.4, 0.4, 0.1], [0, 0, 0, 1, 1, 1], config)
  # A tie at the top teaches nothing.
  np.testing.assert_allclose(ours, [0, 0.4, 0, 0, 0, 0], atol=1e-6)


def test_median_of_an_even_group_is_the_middle_of_its_two_middle_rewards():
  ours = run([5.0, 1.0, 2.0, 4.0], [0] * 4, AdvantageConfig(centre="group_median", scale="none"))
  np.testing.assert_allclose(ours, [2, -2, -1, 1])


def test_group_mean_with_batch_std_divides_by_the_spread_of_all_rewards():
  rewards = np.array([1.0, 0.0, 3.0, 2.0])
  ours = run(rewards, [0, 0, 1, 1], AdvantageConfig(scale="batch_std", epsilon=0.0))
  expected = np.array([0.5, -0.5, 0.5, -0.5]) / rewards.std(ddof=1)
  np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_counts_make_every_trajectory_weigh_the_same():
  """A trajectory cut into nine sequences must not outvote one of a single sequence."""
  rewards, groups = [1.0] + [0.0] * 9, [0] * 10
  counts = jnp.array([1.0] + [1 / 9] * 9)
  for config, good in [
    (AdvantageConfig(ddof=0), 1.0),
    (AdvantageConfig(centre="leave_one_out", scale="none"), 1.0),
    (AdvantageConfig(centre="group_median", scale="none"), 0.5),
  ]:
    ours = run(rewards, groups, config, counts=counts)
    np.testing.assert_allclose(ours[[0, 1]], [good, good - 1 if good < 1 else -1.0], atol=1e-5)
  by_row = run(rewards, groups, AdvantageConfig(ddof=0))
  np.testing.assert_allclose(by_row[0], 3.0, atol=1e-4)


groups_and_rewards = (
  st.integers(2, 9)
  .flatmap(
    lambda n: st.tuples(
      st.lists(st.integers(0, 2), min_size=n, max_size=n),
      st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.7, 1.0]), min_size=n, max_size=n),
      st.lists(st.booleans(), min_size=n, max_size=n),
    )
  )
  .map(lambda case: tuple(np.asarray(x + x[:1] * (9 - len(x))) for x in case))
)


@settings(max_examples=60, deadline=None)
@given(groups_and_rewards, st.sampled_from(GROUP_CENTRES))
def test_invalid_members_change_nothing_and_get_nothing(case, centre):
  groups, rewards, valid = case
  config = AdvantageConfig(centre=centre, scale="group_std")
  ours = run(rewards, groups, config, valid)
  poisoned = run(np.where(valid, rewards, np.nan), groups, config, valid)
  np.testing.assert_array_equal(ours, poisoned)
  assert not ours[~valid].any()
  elsewhere = run(rewards, np.where(valid, groups, 8), config)
  np.testing.assert_allclose(ours[valid], elsewhere[valid], atol=1e-4)


def test_fractions_of_gpg_are_of_valid_sequences():
  valid = [True, True, True, True, False, False]
  rewards, groups = [1.0, 0.0, 0.4, 0.4, 9.0, 9.0], [0, 0, 1, 1, 1, 0]
  by_reward = run(rewards, groups, AdvantageConfig(scale="nonzero_rewards"), valid)
  np.testing.assert_allclose(by_reward, np.array([0.5, -0.5, 0, 0, 0, 0]) * 4 / 3, rtol=1e-6)
  by_signal = run(rewards, groups, AdvantageConfig(scale="nonzero_advantages"), valid)
  np.testing.assert_allclose(by_signal, np.array([0.5, -0.5, 0, 0, 0, 0]) * 2, rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(groups_and_rewards, st.sampled_from(GROUP_CENTRES), st.sampled_from(["none", "group_std"]))
def test_a_group_that_agrees_with_itself_teaches_nothing(case, centre, scale):
  groups, rewards, _ = case
  same = np.array([0.1, 0.7, 0.3])[groups]  # not exact in binary: means of them round
  config = AdvantageConfig(centre=centre, scale=scale)
  assert not run(same, groups, config).any()
  lone = run(rewards, np.arange(9), config)
  assert not lone.any()


@settings(max_examples=40, deadline=None)
@given(groups_and_rewards, st.floats(-3, 3), st.floats(0.5, 4))
def test_group_z_scores_ignore_shift_and_scale_of_rewards(case, shift, scale):
  groups, rewards, _ = case
  config = AdvantageConfig(epsilon=0.0)
  ours, moved = run(rewards, groups, config), run(scale * rewards + shift, groups, config)
  np.testing.assert_allclose(ours, moved, atol=2e-3)
  for group in range(3):
    np.testing.assert_allclose(ours[groups == group].sum(), 0, atol=1e-4)


def test_group_of_ids_in_any_order_gives_the_same_advantages():
  rewards, groups = np.arange(6.0), np.array([0, 1, 0, 1, 2, 2])
  order = np.array([3, 0, 5, 1, 4, 2])
  config = AdvantageConfig()
  moved = run(rewards[order], (2 - groups)[order], config)
  np.testing.assert_allclose(run(rewards, groups, config)[order], moved, rtol=1e-6)


def test_advantages_are_one_compiled_function_of_arrays():
  traces = []

  def traced(rewards, valid, groups):
    traces.append(1)
    return sequence_advantages(rewards, valid, groups, AdvantageConfig())

  function = jax.jit(traced)
  for seed in range(3):
    random = np.random.default_rng(seed)
    function(
      jnp.asarray(random.normal(size=6)),
      jnp.asarray(random.random(6) < 0.8),
      jnp.asarray(random.integers(0, 3, 6)),
    )
  assert len(traces) == 1


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("sentinel", [np.nan, np.inf, -np.inf])
def test_sentinel_rewards_are_refused_where_valid_only(sentinel):
  rewards, groups = np.array([1.0, sentinel, 0.0]), np.zeros(3, int)
  check_rewards(rewards, np.array([True, False, True]), groups)
  with pytest.raises(ValueError, match=r"finite, got .* at \[1\]"):
    check_rewards(rewards, np.ones(3, bool), groups)


def test_groups_outside_the_batch_are_refused():
  with pytest.raises(ValueError, match=r"0\.\.2, got \[7\] at \[1\]"):
    check_rewards(np.zeros(3), np.ones(3, bool), np.array([0, 7, 1]))
  check_rewards(np.zeros(3), np.array([True, False, True]), np.array([0, -1, 1]))


def test_a_group_of_one_is_refused_before_it_gives_zero_advantage():
  with pytest.raises(ConfigError, match=r"rollout\.group_size=1 with .*centre='group_mean'"):
    check_group_size(AdvantageConfig(), 1, "rollout.group_size", "objective.advantage")
  check_group_size(AdvantageConfig(centre="none", scale="none"), 1, "size", "advantage")
  check_group_size(AdvantageConfig(), 2, "size", "advantage")


@pytest.mark.parametrize(
  "changes, named",
  [
    ({"ddof": 2}, "ddof"),
    ({"epsilon": -1.0}, "epsilon"),
    ({"clip": 0.0}, "clip"),
    ({"gamma": 1.5, "credit": "reward_to_go"}, "gamma"),
    ({"centre": "none"}, "scale='group_std'"),
    ({"centre": "none", "scale": "nonzero_advantages"}, "nonzero_rewards"),
    ({"credit": "gae"}, "value head"),
    ({"gamma": 0.9}, "no effect"),
    ({"index_set": "turn"}, "credit='reward_to_go' | 'gae'"),
    ({"kl_in_reward": 0.1}, "kl_in_reward"),
    ({"credit": "reward_to_go", "gae_lambda": 0.9}, "gae_lambda"),
    ({"credit": "reward_to_go", "length_adaptive_lambda": 0.05}, "length_adaptive_lambda"),
    ({"centre": "mean"}, "centre"),
  ],
)
def test_impossible_settings_name_their_field(changes, named):
  with pytest.raises(ConfigError) as error:
    dataclasses.replace(AdvantageConfig(), **changes).validate("objective.advantage")
  assert named in str(error.value)
  assert "objective.advantage." in str(error.value)


def test_lambda_and_its_length_rule_exclude_each_other():
  config = AdvantageConfig(
    centre="none", scale="none", credit="gae", gae_lambda=0.9, length_adaptive_lambda=0.05
  )
  with pytest.raises(ConfigError, match="replaces"):
    config.validate()


def test_missing_inputs_are_named():
  rewards = jnp.zeros(2)
  for centre, name in [("baseline", "baselines"), ("length_weighted", "lengths")]:
    with pytest.raises(ValueError, match=name):
      sequence_advantages(
        rewards,
        jnp.ones(2, bool),
        jnp.zeros(2, jnp.int32),
        AdvantageConfig(centre=centre, scale="none"),
      )
