"""Both methods called SPPO: sequence-level PPO 2604.08865, self-play preference 2405.00675."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives import preset
from agentjax.objectives.advantages import AdvantageConfig, check_group_size, sequence_advantages
from agentjax.objectives.objective import ObjectiveConfig, policy_objective
from agentjax.objectives.preparation import prepare
from agentjax.objectives.value_loss import ValueLossConfig

LOGITS = np.array([0.2, -1.0])
PROMPT = 2


@pytest.fixture
def packed(packer):
  """Two episodes: two prompt tokens, a turn of two, an observation, a turn of one; one row."""
  pack = packer(2, 6, per_row=2, gap=1)
  weights = np.tile(np.array([0, 0, 1, 1, 0, 1], np.float32), (2, 1))
  old = np.full((2, 6), -1.0, np.float32)
  batch = pack.batch(weights, old, np.array([1.0, 0.0], np.float32), groups=np.array([0, 1]))
  versions = pack.pack(np.where(weights > 0, 3, -1), fill=-1)
  # A value says what is expected before its token: the prompt's is that of the first drawn one.
  outputs = np.full((2, 6), np.nan, np.float32)
  outputs[:, PROMPT] = LOGITS
  return pack, dataclasses.replace(batch, versions=versions), pack.pack(outputs, np.nan)


def test_golden_advantages_and_loss_from_the_last_prompt_token_alone(packed):
  pack, batch, outputs = packed
  config = preset("sppo")
  prepared, _ = prepare(batch, config, values=outputs)
  advantages = pack.unpack(prepared.advantages)
  inside = pack.unpack(batch.weights) > 0
  for i, expected in enumerate([0.450166, -0.268941]):
    np.testing.assert_allclose(advantages[i][inside[i]], expected, atol=1e-6)
  assert not advantages[~inside].any()

  now = prepared.old_log_probs

  @jax.jit
  def loss(outputs, now):
    inputs = prepared.with_scores(now, jnp.zeros_like(now), outputs)
    return policy_objective(config)(inputs)

  (_, metrics), (to_values, to_policy) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
    outputs, now
  )
  assert float(metrics["value_loss"]) == pytest.approx(0.4557, abs=1e-4)
  slope = pack.unpack(to_values)
  expected = np.zeros((2, 6))
  chance = 1 / (1 + np.exp(-LOGITS))
  expected[:, PROMPT] = config.value_loss.coefficient * (chance - [1, 0]) / 2
  np.testing.assert_allclose(slope, expected, atol=1e-6)
  # On policy the token mean of -r A, whatever the length.
  np.testing.assert_allclose(pack.unpack(to_policy), -advantages / inside.sum(), atol=1e-6)


def test_the_value_is_read_before_the_first_drawn_token_even_where_that_has_no_weight(packed):
  pack, batch, outputs = packed
  silenced = pack.unpack(batch.weights).copy()
  silenced[0, 2:4] = 0  # a rule took the first turn out
  silenced[1, 0] = 1  # another weights a prompt token
  prepared, _ = prepare(
    dataclasses.replace(batch, weights=pack.pack(silenced)), preset("sppo"), values=outputs
  )
  trained = pack.unpack(prepared.value_coefficients)
  np.testing.assert_allclose(trained[:, PROMPT], 0.5)
  assert np.count_nonzero(trained) == 2
  np.testing.assert_allclose(pack.unpack(prepared.advantages)[0, 5], 0.450166, atol=1e-6)


def test_an_invalid_or_weightless_episode_trains_no_value(packed):
  pack, batch, outputs = packed
  weights = pack.unpack(batch.weights).copy()
  weights[0] = 0
  for other in (
    dataclasses.replace(batch, weights=pack.pack(weights)),
    dataclasses.replace(batch, valid=jnp.array([False, True]), rewards=jnp.array([jnp.nan, 0.0])),
  ):
    prepared, _ = prepare(other, preset("sppo"), values=outputs)
    np.testing.assert_allclose(pack.unpack(prepared.value_coefficients).sum(1), [0, 1])
    assert np.isfinite(prepared.returns).all() and np.isfinite(prepared.advantages).all()


def test_one_rollout_a_task_learns_where_grpo_cannot(packed):
  _, batch, outputs = packed
  check_group_size(preset("sppo").advantage, 1, "group_size", "advantage")
  with pytest.raises(ConfigError, match="'prompt_value'"):
    check_group_size(preset("grpo").advantage, 1, "group_size", "advantage")
  assert np.any(prepare(batch, preset("sppo"), values=outputs)[0].advantages)
  assert not np.any(prepare(batch, preset("grpo"))[0].advantages)
  with pytest.raises(ValueError, match="needs values"):
    prepare(batch, preset("sppo"))


@pytest.mark.parametrize(
  ("config", "message"),
  [
    (
      ObjectiveConfig(value_loss=ValueLossConfig(kind="bernoulli")),
      "centre='group_mean'; allowed: centre='prompt_value'",
    ),
    (
      ObjectiveConfig(
        AdvantageConfig(centre="prompt_value", scale="none"),
        value_loss=ValueLossConfig(kind="bernoulli", clip=0.2),
      ),
      "value_loss.clip=0.2; allowed: None with",
    ),
    (
      ObjectiveConfig(AdvantageConfig(centre="prompt_value")),
      "divides by the spread of a group that is not centred on itself",
    ),
  ],
)
def test_settings_that_mean_nothing_are_refused(config, message):
  with pytest.raises(ConfigError, match=message):
    config.validate("objective")


def test_with_squared_errors_any_reward_will_do(packed):
  pack, batch, outputs = packed
  config = ObjectiveConfig(AdvantageConfig(centre="prompt_value", scale="none"))
  config.validate("objective")
  batch = dataclasses.replace(batch, rewards=jnp.array([5.0, -2.0]))
  prepared, _ = prepare(batch, config, values=outputs)
  np.testing.assert_allclose(pack.unpack(prepared.advantages)[:, PROMPT], [4.8, -1.0], rtol=1e-6)
  np.testing.assert_allclose(pack.unpack(prepared.returns)[:, PROMPT], [5.0, -2.0])


def test_win_rates_count_lower_rewards_and_half_of_ties():
  rewards = jnp.array([0.9, 0.1, 0.5, 0.5, 7.0, 7.0, 3.0, 99.0])
  valid = jnp.array([1, 1, 1, 1, 1, 1, 1, 0], bool)
  groups = jnp.array([0, 0, 0, 0, 1, 1, 2, 0])
  found = sequence_advantages(
    rewards, valid, groups, AdvantageConfig(centre="win_rate", scale="none")
  )
  # Beats 3 and ties with itself: 3.5 of 4; a group that agrees and one alone learn nothing.
  np.testing.assert_allclose(found, [0.375, -0.375, 0, 0, 0, 0, 0, 0], atol=1e-7)


def self_play(packer, ratios, eta):
  """Loss and gradient on two episodes of one group, rewards 1 and 0, log-ratio a token given."""
  pack = packer(2, 4, per_row=1, gap=2)
  weights = np.tile(np.array([0, 1, 0, 1], np.float32), (2, 1))
  old = np.full((2, 4), -1.0, np.float32)
  batch = pack.batch(weights, old, np.array([1.0, 0.0], np.float32))
  config = preset("self_play_preference")
  config.advantage.multiplier = eta
  prepared, _ = prepare(batch, config)
  now = pack.pack(old + np.asarray(ratios, np.float32)[:, None])
  objective = policy_objective(config)

  def loss(now):
    return objective(prepared.with_scores(now, jnp.zeros_like(now)))[0]

  value, slope = jax.jit(jax.value_and_grad(loss))(now)
  return float(value), pack.unpack(slope)


def test_self_play_regresses_the_log_ratio_of_whole_sequences(packer):
  # Win rates 3/4 and 1/4; sums of two weighted tokens; eta 8: targets 2 and -2.
  value, slope = self_play(packer, [0.3, 0.1], 8.0)
  assert value == pytest.approx(((0.6 - 2) ** 2 + (0.2 + 2) ** 2) / 2, rel=1e-5)
  expected = np.array([[0, 1, 0, 1]]) * np.array([[0.6 - 2], [0.2 + 2]])
  np.testing.assert_allclose(slope, expected, atol=1e-5)


def test_self_play_stops_at_its_target_where_grpo_goes_on(packer):
  _, slope = self_play(packer, [1.0, -1.0], 8.0)
  np.testing.assert_allclose(slope, 0, atol=1e-5)
  _, beyond = self_play(packer, [1.5, -1.0], 8.0)
  assert beyond[0, 1] > 0  # the winner is too likely by now: its log-prob goes down again


def test_the_published_scale_is_a_thousand():
  assert preset("self_play_preference").advantage.multiplier == 1000.0
  assert not preset("self_play_preference").needs_values and preset("sppo").needs_values


def test_kimi_goes_to_a_policy_that_keeps_its_chances_and_grpo_to_the_best_arm(packer):
  """Two arms, rewards 1 and 0: for a large tau (r - mean r - tau log ratio)^2 is least at ratios of
  chances exp(1 / tau); GRPO's loss falls until only one arm is left."""
  tau, pack = 5.0, packer(2, 2, per_row=1, gap=2)
  drawn = np.tile(np.array([0, 1], np.float32), (2, 1))
  half = np.full((2, 2), np.log(0.5), np.float32)
  batch = pack.batch(drawn, half, np.array([1.0, 0.0], np.float32))
  arms = jnp.maximum(batch.segment_ids - 1, 0)

  def train(config, *, on_policy):
    objective = policy_objective(config)

    def loss(logits):
      now = jax.nn.log_softmax(logits)[arms]
      old = jax.lax.stop_gradient(now) if on_policy else None
      prepared, _ = prepare(batch, config, old_log_probs=old)
      return objective(prepared.with_scores(now, jnp.zeros_like(now)))[0]

    step = jax.jit(lambda logits: logits - 0.5 * jax.grad(loss)(logits))
    logits = jnp.zeros(2)
    for _ in range(400):
      logits = step(logits)
    return np.asarray(jax.nn.softmax(logits))

  config = preset("kimi")
  config.advantage.multiplier = 1 / tau
  kimi = train(config, on_policy=False)
  assert kimi[0] / kimi[1] == pytest.approx(np.exp(1 / tau), rel=2e-3)
  assert train(ObjectiveConfig(), on_policy=True)[0] > 0.98


def test_the_preset_of_kimi_is_that_loss_over_tau_squared(packer):
  pack = packer(2, 4, per_row=1, gap=2)
  weights = np.tile(np.array([0, 1, 0, 1], np.float32), (2, 1))
  old = np.full((2, 4), -1.0, np.float32)
  config, tau = preset("kimi"), 0.1
  prepared, _ = prepare(pack.batch(weights, old, np.array([1.0, 0.0], np.float32)), config)
  now = pack.pack(old + np.array([[0.3], [0.1]], np.float32))
  found, _ = policy_objective(config)(prepared.with_scores(now, jnp.zeros_like(now)))
  by_hand = ((0.5 - tau * 0.6) ** 2 + (-0.5 - tau * 0.2) ** 2) / 2
  assert float(found) * tau**2 == pytest.approx(by_hand, rel=1e-5)
