"""From a packed batch to a loss: prepare, the config's objective, and a loss of one's own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.objectives import preset
from agentjax.objectives.advantages import AdvantageConfig
from agentjax.objectives.mismatch import MismatchConfig
from agentjax.objectives.objective import ObjectiveConfig, policy_objective
from agentjax.objectives.policy_loss import PolicyLossConfig
from agentjax.objectives.preparation import abstract_inputs, prepare, prepare_supervised
from agentjax.objectives.returns import bilevel_gae
from agentjax.objectives.segments import turn_units
from agentjax.objectives.supervised import supervised_objective
from agentjax.objectives.value_loss import ValueLossConfig
from agentjax.schedules import LinearSchedule, schedules_in

prepared = jax.jit(prepare, static_argnames="config")

SEQUENCES, LENGTH = 6, 5


@pytest.fixture
def pack(packer):
  return packer(SEQUENCES, LENGTH, per_row=2, gap=2)


class Data:
  def __init__(self):
    random = np.random.default_rng(1)
    shape = (SEQUENCES, LENGTH)
    self.behaviour = random.normal(-1, 0.3, shape).astype(np.float32)
    self.old = self.behaviour + random.normal(0, 0.1, shape).astype(np.float32)
    self.now = self.old + random.normal(0, 0.1, shape).astype(np.float32)
    self.weights = np.ones(shape, np.float32)
    self.weights[:, 0] = 0  # prompt
    self.weights[:, 3] = 0  # observation
    self.turns = np.tile([0, 0, 0, 0, 1], (SEQUENCES, 1))
    self.rewards = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], np.float32)
    self.groups = np.array([0, 0, 0, 1, 1, 1])


@pytest.fixture
def data():
  return Data()


def batch_of(pack, data, **kwargs):
  kwargs.setdefault("groups", data.groups)
  return pack.batch(data.weights, data.behaviour, data.rewards, turns=data.turns, **kwargs)


def test_prepare_gives_group_advantages_on_weighted_tokens_only(pack, data):
  result, _ = prepared(batch_of(pack, data), ObjectiveConfig(AdvantageConfig(scale="none")))
  expected = np.array([2, -1, -1, 1, 1, -2])[:, None] / 3 * data.weights
  np.testing.assert_allclose(pack.unpack(result.advantages), expected, atol=1e-6)
  np.testing.assert_allclose(result.coefficients.sum(), 1.0, rtol=1e-6)
  np.testing.assert_allclose(result.shares.sum(), 1.0, rtol=1e-6)


def test_an_invalid_sequence_leaves_loss_denominators_and_group_statistics(pack, data):
  valid = np.array([1, 0, 1, 1, 1, 1], bool)
  data.rewards[1] = np.nan
  result, metrics = prepared(
    batch_of(pack, data, valid=valid), ObjectiveConfig(AdvantageConfig(scale="none"))
  )
  advantages = pack.unpack(result.advantages)
  np.testing.assert_allclose(advantages[:3, 1], [0.5, 0, -0.5], atol=1e-6)
  assert not pack.unpack(result.weights)[1].any()
  np.testing.assert_allclose(pack.unpack(result.coefficients)[0, 1], 1 / 15, rtol=1e-6)
  assert int(metrics["tokens/weighted"]) == 15


def test_a_loss_and_the_metrics_know_replayed_episodes(pack, data):
  batch = batch_of(pack, data)
  plain, metrics = prepared(batch, ObjectiveConfig())
  assert "tokens/replayed" not in metrics and not plain.column("replayed").any()
  replayed = np.array([0, 0, 1, 0, 0, 1], bool)
  result, metrics = prepared(
    batch.with_columns({"replayed": jnp.asarray(replayed)}), ObjectiveConfig()
  )
  marked = pack.unpack(result.column("replayed"))
  np.testing.assert_array_equal(marked, np.broadcast_to(replayed[:, None], marked.shape))
  share = pack.unpack(result.weights)[replayed].sum() / pack.unpack(result.weights).sum()
  np.testing.assert_allclose(metrics["tokens/replayed"], share, rtol=1e-6)


@pytest.mark.parametrize("dropped, counted", [("exclude", 17), ("count", 18)])
def test_dropped_tokens_are_in_the_denominators_as_they_are_set_to_be(pack, data, dropped, counted):
  data.behaviour[2, 4] = data.old[2, 4] - 3.0  # ratio e^3
  config = ObjectiveConfig(
    AdvantageConfig(scale="none"),
    PolicyLossConfig(
      mismatch=MismatchConfig(
        weight_level="token",
        weight_cap=1.05,
        filter_level="token",
        filter_high=5.0,
        dropped=dropped,
      )
    ),
  )
  result, metrics = prepared(batch_of(pack, data), config, old_log_probs=pack.pack(data.old))
  weights = pack.unpack(result.weights)
  assert weights.sum() == counted and (weights[2, 4] == 0) == (dropped == "exclude")
  np.testing.assert_allclose(pack.unpack(result.coefficients)[0, 1], 1 / counted, rtol=1e-6)
  ratio = np.minimum(np.exp(data.old - data.behaviour), 1.05)
  ratio[2, 4] = 0
  expected = (np.array([2, -1, -1, 1, 1, -2])[:, None] / 3) * ratio * data.weights
  np.testing.assert_allclose(pack.unpack(result.advantages), expected, atol=1e-5)
  np.testing.assert_allclose(metrics["mismatch/kept"], 17 / 18, rtol=1e-6)


def test_mismatch_without_the_trainers_log_probs_is_refused(pack, data):
  config = ObjectiveConfig(
    policy_loss=PolicyLossConfig(mismatch=MismatchConfig(weight_level="token"))
  )
  assert config.needs_old_log_probs
  with pytest.raises(ValueError, match="needs old_log_probs"):
    prepare(batch_of(pack, data), config)


def test_kl_in_the_reward_reaches_every_earlier_token_discounted(pack, data):
  config = ObjectiveConfig(
    AdvantageConfig(centre="none", scale="none", credit="reward_to_go", gamma=0.5, kl_in_reward=0.1)
  )
  config.validate("objective")
  assert config.needs_reference
  reference = np.zeros_like(data.old)
  reference[0, 4] = data.behaviour[0, 4] - 2.0  # k1 = 2 on the last token of the first sequence
  reference[0, 1:3] = data.behaviour[0, 1:3]
  result, _ = prepared(batch_of(pack, data), config, reference_log_probs=pack.pack(reference))
  np.testing.assert_allclose(pack.unpack(result.advantages)[0], [0, 0.2, 0.4, 0, 0.8], atol=1e-6)
  with pytest.raises(ValueError, match="needs reference_log_probs"):
    prepare(batch_of(pack, data), config)


def test_discounted_chunk_returns_reach_whole_turns(pack, data):
  config = ObjectiveConfig(
    AdvantageConfig(centre="none", scale="none", credit="reward_to_go", index_set="turn", gamma=0.5)
  )
  result, _ = prepared(batch_of(pack, data), config)
  np.testing.assert_allclose(pack.unpack(result.advantages)[0], [0, 0.5, 0.5, 0, 1], atol=1e-6)


def test_token_rewards_need_a_credit_that_spreads_them(pack, data):
  with pytest.raises(ValueError, match="credit='reward_to_go'"):
    prepare(
      batch_of(pack, data), ObjectiveConfig(), token_rewards=jnp.zeros_like(pack.pack(data.now))
    )


def test_whiten_clip_and_multiplier_act_in_this_order(pack, data):
  config = ObjectiveConfig(AdvantageConfig(scale="none", whiten=True, clip=0.9, multiplier=2.0))
  result, _ = prepared(batch_of(pack, data), config)
  advantages = pack.unpack(result.advantages)[:, 1]
  raw = np.array([2, -1, -1, 1, 1, -2]) / 3
  white = raw / np.repeat(raw, 3).std(ddof=1)
  np.testing.assert_allclose(advantages, 2 * np.clip(white, -0.9, 0.9), rtol=1e-5)


@pytest.mark.parametrize("index_set", ["token", "turn"])
def test_gae_trains_values_where_they_are_read(pack, data, index_set):
  config = ObjectiveConfig(
    AdvantageConfig(
      centre="none",
      scale="none",
      credit="gae",
      gamma=0.9,
      gae_lambda=0.8,
      index_set=index_set,
    ),
    value_loss=ValueLossConfig(coefficient=2.0, clip=None),
  )
  config.validate("objective")
  assert config.needs_values
  values = np.tile([9.0, 0.1, 0.2, 9.0, 0.3], (SEQUENCES, 1)).astype(np.float32)
  result, _ = prepared(batch_of(pack, data), config, values=pack.pack(values))
  last = 1 - 0.3
  if index_set == "token":
    middle = 0.9 * 0.3 - 0.2 + 0.72 * last
    expected = [0, 0.9 * 0.2 - 0.1 + 0.72 * middle, middle, 0, last]
    targets = [0, 0.81, 0.9, 0, 1]  # value_lambda 1: discounted returns
  else:
    first = 0.9 * 0.3 - 0.1 + 0.72 * last
    expected, targets = [0, first, first, 0, last], [0, 0.9, 0, 0, 1]
  np.testing.assert_allclose(pack.unpack(result.advantages)[0], expected, atol=1e-6)
  np.testing.assert_allclose(pack.unpack(result.returns)[0], targets, atol=1e-6)

  now = pack.pack(data.now)
  objective = policy_objective(config)

  def loss(values):
    return objective(result.with_scores(now, jnp.zeros_like(now), values))[0]

  gradient = pack.unpack(jax.jit(jax.grad(loss))(pack.pack(values)))[0]
  trained = np.array(targets) != 0
  count = SEQUENCES * trained.sum()
  expected_gradient = 2.0 * (values[0] - targets) * trained / count
  np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)
  poisoned = pack.pack(np.where(trained, values, np.nan), fill=np.nan)
  result, _ = prepared(batch_of(pack, data), config, values=poisoned)
  np.testing.assert_allclose(pack.unpack(result.advantages)[0], expected, atol=1e-6)
  np.testing.assert_allclose(
    pack.unpack(jax.jit(jax.grad(loss))(poisoned))[0], expected_gradient, atol=1e-6
  )
  with pytest.raises(ValueError, match="needs values"):
    prepare(batch_of(pack, data), config)


def scores(result, now, entropies=None):
  return result.with_scores(now, jnp.ones_like(now) if entropies is None else entropies)


def test_added_terms_are_what_their_coefficients_say(pack, data):
  plain = PolicyLossConfig()
  reference = pack.pack(data.now - 0.5)
  now, entropies = pack.pack(data.now), pack.pack(np.full_like(data.now, 0.7))

  def value(policy_loss):
    config = ObjectiveConfig(AdvantageConfig(scale="none"), policy_loss)
    result, _ = prepared(batch_of(pack, data), config, reference_log_probs=reference)
    return jax.jit(policy_objective(config))(scores(result, now, entropies))

  base, metrics = value(plain)
  np.testing.assert_allclose(metrics["entropy"], 0.7, rtol=1e-6)
  with_entropy, _ = value(dataclasses.replace(plain, entropy_coefficient=0.1))
  np.testing.assert_allclose(with_entropy - base, -0.07, atol=1e-6)
  with_kl, metrics = value(dataclasses.replace(plain, kl_coefficient=0.2, kl_estimator="k3"))
  k3 = np.exp(-0.5) + 0.5 - 1
  np.testing.assert_allclose(metrics["kl_reference"], k3, rtol=1e-5)
  np.testing.assert_allclose(with_kl - base, 0.2 * k3, atol=1e-6)
  with_nll, _ = value(dataclasses.replace(plain, positive_nll_coefficient=0.3))
  positive = data.weights * np.array([1, 0, 0, 1, 1, 0])[:, None]
  np.testing.assert_allclose(with_nll - base, -0.3 * (positive * data.now).sum() / 18, rtol=1e-4)


def test_clip_cov_silences_and_kl_cov_holds_the_selected_tokens(pack, data):
  now = pack.pack(data.now)

  def gradient(covariance):
    config = ObjectiveConfig(
      AdvantageConfig(scale="none"),
      PolicyLossConfig(clip="none", covariance=covariance, covariance_fraction=0.2),
    )
    result, _ = prepared(batch_of(pack, data), config)
    objective = policy_objective(config)
    slope = jax.jit(jax.grad(lambda x: objective(scores(result, x))[0]))(now)
    return result.covariance_selected, np.asarray(slope)

  _, plain = gradient("none")
  chosen, silenced = gradient("clip")
  _, held = gradient("kl")
  chosen = np.asarray(chosen)
  assert chosen.sum() == 3
  assert not silenced[chosen].any() and plain[chosen].all()
  np.testing.assert_allclose(silenced[~chosen], plain[~chosen])
  np.testing.assert_allclose(held[~chosen], plain[~chosen])
  direction = np.sign(pack.pack(data.now - data.behaviour))[chosen] / 18
  np.testing.assert_allclose(held[chosen] - plain[chosen], direction, atol=1e-6)


def test_supervised_objective_is_the_mean_nll_of_taught_tokens(pack, data):
  data.weights[2] *= 3.0  # a demonstration that counts three times
  now = pack.pack(data.now)
  result = prepare_supervised(batch_of(pack, data))
  loss, metrics = supervised_objective(scores(result, now))
  expected = -(data.weights * data.now).sum() / data.weights.sum()
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  np.testing.assert_allclose(metrics["nll"], expected, rtol=1e-6)
  by_sequence = prepare_supervised(batch_of(pack, data), "sequence_mean_token_mean")
  means = -(data.weights * data.now).sum(1) / data.weights.sum(1)
  np.testing.assert_allclose(
    supervised_objective(scores(by_sequence, now))[0], means.mean(), rtol=1e-6
  )


def test_prepare_is_one_compiled_function_without_gradient(pack, data):
  config = ObjectiveConfig(PolicyLossConfig() and AdvantageConfig())
  traces = []

  def traced(batch, old):
    traces.append(1)
    return prepare(batch, config, old_log_probs=old)[0].advantages.sum()

  function = jax.jit(jax.grad(traced, argnums=1))
  for shift in (0.0, 0.1):
    gradient = function(batch_of(pack, data), pack.pack(data.old + np.float32(shift)))
    assert not np.any(gradient)
  assert len(traces) == 1


def test_the_whole_config_survives_a_trip_through_json():
  config = ObjectiveConfig(
    AdvantageConfig(centre="none", scale="none", credit="gae", gae_lambda=0.9),
    PolicyLossConfig(dual_clip=3.0, mismatch=MismatchConfig(weight_level="turn")),
  )
  assert ObjectiveConfig.from_dict(config.to_dict()) == config


def test_bilevel_gae_is_chosen_by_config(pack, data):
  """What ``prepare`` gives is ``bilevel_gae`` on the outcome at the last token of each sequence."""
  settings = AdvantageConfig(
    centre="none",
    scale="none",
    credit="gae",
    index_set="turn_then_token",
    gamma=0.9,
    turn_gamma=0.8,
    gae_lambda=0.7,
  )
  batch = batch_of(pack, data)
  values = pack.pack(np.linspace(-1, 1, data.now.size).reshape(data.now.shape))
  result, _ = prepared(batch, ObjectiveConfig(settings), values=values)
  weights, segment_ids = result.weights, batch.segment_ids
  rewards = np.zeros(weights.shape, np.float32)
  for row, time in zip(*np.nonzero(weights), strict=True):
    number = segment_ids[row, time]
    later = np.flatnonzero((segment_ids[row] == number) & (np.asarray(weights[row]) > 0))
    if time == later[-1]:
      rewards[row, time] = batch.rewards[number - 1]
  units = turn_units(segment_ids, batch.turns)

  def expected(lam):
    return jax.jit(bilevel_gae)(
      rewards, values, weights, segment_ids, units, gamma=0.9, lam=lam, unit_gamma=0.8
    )

  np.testing.assert_allclose(result.advantages, expected(0.7), atol=1e-6)
  targets = np.where(np.asarray(weights) > 0, expected(1.0) + values, 0)
  np.testing.assert_allclose(result.returns, targets, atol=1e-6)
  token_level, _ = prepared(
    batch, ObjectiveConfig(dataclasses.replace(settings, index_set="token")), values=values
  )
  assert not np.allclose(result.advantages, token_level.advantages, atol=1e-3)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_reward_is_the_estimate_that_is_named(pack, data, estimator):
  config = AdvantageConfig(
    centre="none",
    scale="none",
    credit="reward_to_go",
    kl_in_reward=0.1,
    kl_in_reward_estimator=estimator,
  )
  batch = batch_of(pack, data)
  reference = pack.pack(data.behaviour - 0.5)
  result, _ = prepared(batch, ObjectiveConfig(config), reference_log_probs=reference)
  bare = dataclasses.replace(config, kl_in_reward=0.0)
  plain, _ = prepared(batch, ObjectiveConfig(bare), reference_log_probs=reference)
  one = {"k1": 0.5, "k2": 0.125, "k3": np.exp(-0.5) - 0.5}[estimator]
  paid = pack.unpack(plain.advantages - result.advantages)
  left = np.cumsum((data.weights > 0)[:, ::-1], axis=1)[:, ::-1] * (data.weights > 0)
  np.testing.assert_allclose(paid, 0.1 * one * left, atol=1e-5)


def test_the_likelihood_term_is_on_sequences_that_were_rewarded_not_on_good_tokens(pack, data):
  """VAPO: with a value head a token of a right answer may have a negative advantage."""
  batch = batch_of(pack, data)
  config = preset("vapo")
  result, _ = prepared(batch, config, values=pack.pack(np.full_like(data.now, 5.0)))
  assert not (np.asarray(result.advantages) > 0).any()
  rewarded = pack.unpack(result.rewarded.astype(np.float32))
  given = np.asarray(data.rewards) > 0
  np.testing.assert_array_equal(rewarded.astype(bool), np.repeat(given[:, None], LENGTH, 1))


def test_a_scaled_loss_is_that_many_times_as_large(pack, data):
  config = preset("ppo")
  result, _ = prepared(batch_of(pack, data), config, values=pack.pack(0 * data.now))
  now = pack.pack(data.now)

  def loss(prepared_):
    return policy_objective(config)(prepared_.with_scores(now, now, now))[0]

  np.testing.assert_allclose(loss(result.scaled(0.25)), 0.25 * loss(result), rtol=1e-5)


def test_traced_numbers_of_schedules_are_the_numbers_that_a_config_may_hold(pack, data):
  loss = PolicyLossConfig(
    clip_high=LinearSchedule(0.2, 0.4, 10),
    kl_coefficient=LinearSchedule(0.0, 0.5, 10),
    entropy_coefficient=LinearSchedule(0.1, 0.0, 10),
    covariance="kl",
    covariance_fraction=LinearSchedule(0.5, 0.9, 10),
  )
  credit = AdvantageConfig(
    centre="none",
    scale="none",
    credit="reward_to_go",
    gamma=LinearSchedule(0.5, 1.0, 10),
    kl_in_reward=LinearSchedule(0.5, 0.0, 10),
    clip=LinearSchedule(0.5, 0.9, 10),
    multiplier=LinearSchedule(1.0, 3.0, 10),
  )
  config = ObjectiveConfig(credit, loss)
  config.validate()
  assert config.needs_reference
  now, reference = pack.pack(data.now), pack.pack(data.now - 0.5)
  batch = batch_of(pack, data)

  @jax.jit
  def value(numbers):
    result, metrics = prepare(batch, config, numbers=numbers, reference_log_probs=reference)
    inputs = result.with_scores(now, jnp.ones_like(now), numbers=numbers)
    return policy_objective(config)(inputs), metrics

  for step in (0, 3, 10):
    numbers = {k: np.float32(s.number(step, None)) for k, s in schedules_in(config).items()}
    plain = config.at({k: float(v) for k, v in numbers.items()})
    result, metrics = prepare(batch, plain, reference_log_probs=reference)
    expected = policy_objective(plain)(scores(result, now)), metrics
    found, more = value(numbers)
    np.testing.assert_allclose(found[0], expected[0][0], rtol=2e-6)
    for name, metric in expected[0][1].items():
      np.testing.assert_allclose(found[1][name], metric, rtol=2e-6, err_msg=name)
    np.testing.assert_allclose(more["advantage/mean_abs"], metrics["advantage/mean_abs"], rtol=2e-6)
  assert value._cache_size() == 1
  with pytest.raises(ValueError, match=r"the number advantage\.gamma"):
    prepare(batch, config)


def test_a_loss_of_ones_own_reads_the_numbers_by_name(pack, data):
  config = ObjectiveConfig(policy_loss=PolicyLossConfig(clip_high=LinearSchedule(0.2, 0.4, 10)))
  result, _ = prepare(batch_of(pack, data), config, numbers={"policy_loss.clip_high": 0.2})
  now = pack.pack(data.now)
  objective = policy_objective(config, lambda inputs: inputs.numbers["policy_loss.clip_high"] + now)
  for number in (0.2, 0.3):
    given = {"policy_loss.clip_high": jnp.float32(number)}
    total, _ = objective(result.with_scores(now, now, numbers=given))
    expected = jnp.sum(result.coefficients * jnp.where(result.weights > 0, now + number, 0))
    np.testing.assert_allclose(total, expected, rtol=1e-6)
  jax.eval_shape(objective, abstract_inputs(config, *now.shape))
