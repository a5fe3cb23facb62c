"""Sampler against trainer: golden ratios, every rule, and that it never meets a gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives.advantages import AdvantageConfig
from agentjax.objectives.mismatch import MismatchConfig, mismatch_correction
from agentjax.objectives.objective import ObjectiveConfig, policy_objective
from agentjax.objectives.policy_loss import PolicyLossConfig
from agentjax.objectives.preparation import prepare
from agentjax.recipes.presets import PRESETS

# The sequences [-.9, -1, -1.5] and [-.2, -1.2] in one row, with padding.
OLD = jnp.array([[-0.9, -1.0, -1.5, 0.0, -0.2, -1.2, 0.0]])
SAMPLER = jnp.array([[-1.2, -0.9, -1.5, 5.0, -0.2, -6.2, -5.0]])
SEGMENTS = jnp.array([[1, 1, 1, 0, 2, 2, 0]])
WEIGHTS = (SEGMENTS > 0).astype(jnp.float32)
TURNS = jnp.array([[0, 0, 1, -1, 0, 1, -1]])


def run(config, weights=WEIGHTS):
  config.validate()
  return mismatch_correction(OLD, SAMPLER, weights, SEGMENTS, config, turns=TURNS)


@pytest.mark.parametrize(
  "config, expected",
  [
    (
      dict(weight_level="token", weight_cap=None),
      [1.349859, 0.904837, 1, 1, 148.413159],
    ),
    (dict(weight_level="token", weight_cap=2.0), [1.349859, 0.904837, 1, 1, 2.0]),
    (
      dict(weight_level="sequence", weight_cap=None, weight_statistic="product"),
      [1.221403] * 3 + [148.413159] * 2,
    ),
    (
      dict(weight_level="sequence", weight_cap=None),
      [1.068939] * 3 + [12.182494] * 2,
    ),
    (
      dict(weight_level="turn", weight_cap=None),
      [np.exp(0.1)] * 2 + [1, 1, 148.413159],
    ),
  ],
)
def test_golden_importance_weights(config, expected):
  importance, keep = run(MismatchConfig(**config))
  np.testing.assert_allclose(importance[WEIGHTS > 0], expected, rtol=1e-6)
  assert keep.all()


@pytest.mark.parametrize(
  "config, kept",
  [
    (dict(filter_level="token", filter_low=0.5, filter_high=5.0), [1, 1, 1, 1, 0]),
    (dict(filter_level="token", filter_low=0.95), [1, 0, 1, 1, 1]),
    (dict(filter_level="turn", filter_high=1.05), [0, 0, 1, 1, 0]),
    (dict(filter_level="sequence", filter_high=1.07), [1, 1, 1, 0, 0]),
    (
      dict(filter_level="sequence", filter_high=1.07, filter_statistic="product"),
      [0, 0, 0, 0, 0],
    ),
    # mean(rho - log rho - 1) is .018232 and 71.2.
    (
      dict(filter_level="sequence", filter_high=0.0183, filter_statistic="k3"),
      [1, 1, 1, 0, 0],
    ),
    (
      dict(filter_level="sequence", filter_high=0.0182, filter_statistic="k3"),
      [0, 0, 0, 0, 0],
    ),
    # exp|log rho| has the means 1.151677 and 74.7.
    (
      dict(filter_level="sequence", filter_high=1.152, filter_statistic="multiplicative_error"),
      [1, 1, 1, 0, 0],
    ),
    (
      dict(filter_level="sequence", filter_high=1.151, filter_statistic="multiplicative_error"),
      [0, 0, 0, 0, 0],
    ),
    (dict(veto_below=0.95), [0, 0, 0, 1, 1]),
  ],
)
def test_every_filter_drops_what_leaves_its_bounds(config, kept):
  importance, keep = run(MismatchConfig(**config))
  np.testing.assert_array_equal(keep[WEIGHTS > 0], np.array(kept, bool))
  np.testing.assert_array_equal(importance[WEIGHTS > 0], np.ones(5))


def test_icepop_drops_what_it_would_have_weighed_most():
  config = MismatchConfig(
    weight_level="token", weight_cap=None, filter_level="token", filter_low=0.5, filter_high=5.0
  )
  importance, keep = run(config)
  np.testing.assert_allclose(
    (importance * keep)[WEIGHTS > 0], [1.349859, 0.904837, 1, 1, 0], rtol=1e-6
  )


# The same two sequences with rewards 1 and -1/2: at the start of the update the loss of a token is
# - weight * reward.
ICEPOP = dict(
  weight_level="token", weight_cap=None, filter_level="token", filter_low=0.5, filter_high=5.0
)
GEOMETRIC = dict(filter_level="sequence", filter_low=0.9, filter_high=1.1)
FIRST = 1.349859 + 0.904837 + 1


@pytest.mark.parametrize(
  "mismatch, aggregation, dropped, value",
  [
    (ICEPOP, "token_mean", "count", -(FIRST - 0.5) / 5),
    (ICEPOP, "token_mean", "exclude", -(FIRST - 0.5) / 4),
    (ICEPOP, "sequence_mean_token_mean", "count", -(FIRST / 3 - 0.5 / 2) / 2),
    (ICEPOP, "sequence_mean_token_mean", "exclude", -(FIRST / 3 - 0.5) / 2),
    # The second sequence, of geometric mean 12.2, is dropped as a whole.
    (GEOMETRIC, "token_mean", "count", -3 / 5),
    (GEOMETRIC, "token_mean", "exclude", -1),
    (GEOMETRIC, "sequence_mean_token_mean", "count", -1 / 2),
    (GEOMETRIC, "sequence_mean_token_mean", "exclude", -1),
  ],
)
@pytest.mark.parametrize(
  "function",
  [None, lambda inputs: -inputs.advantages - 7 * (inputs.log_probs - inputs.old_log_probs)],
)
def test_golden_losses_with_dropped_tokens_in_the_denominators_and_without(
  packer, mismatch, aggregation, dropped, value, function
):
  pack = packer(2, 3, per_row=2, gap=1)
  weights = np.array([[1, 1, 1], [1, 1, 0]], np.float32)
  sampler = np.array([[-1.2, -0.9, -1.5], [-0.2, -6.2, 0]], np.float32)
  old = pack.pack(np.array([[-0.9, -1.0, -1.5], [-0.2, -1.2, 0]], np.float32))
  config = ObjectiveConfig(
    AdvantageConfig(centre="none", scale="none"),
    PolicyLossConfig(
      clip="none", aggregation=aggregation, mismatch=MismatchConfig(**mismatch, dropped=dropped)
    ),
  )
  config.validate()
  batch = pack.batch(weights, sampler, np.array([1.0, -0.5], np.float32))
  prepared, metrics = prepare(batch, config, old_log_probs=old)
  objective = policy_objective(config, function)

  def loss(now):
    return objective(prepared.with_scores(now, jnp.zeros_like(now)))[0]

  found, slope = jax.value_and_grad(loss)(old)
  np.testing.assert_allclose(found, value, rtol=1e-5)
  assert pack.unpack(slope)[1, 1] == 0  # a dropped token has no gradient, of any loss
  assert float(metrics["mismatch/kept"]) == pytest.approx(4 / 5 if mismatch is ICEPOP else 3 / 5)


def test_other_terms_of_a_counted_token_stay(packer):
  """The reference's KL is a mean over all tokens, dropped ones as well."""
  pack = packer(1, 2, per_row=1, gap=0)
  old = pack.pack(np.array([[-1.0, -1.0]], np.float32))
  sampler = np.array([[-1.0, -4.0]], np.float32)
  for dropped, value in (("count", 0.3 * 0.5), ("exclude", 0.0)):
    config = ObjectiveConfig(
      AdvantageConfig(centre="none", scale="none"),
      PolicyLossConfig(
        kl_coefficient=0.3,
        kl_estimator="k2",
        mismatch=MismatchConfig(filter_level="token", filter_high=5.0, dropped=dropped),
      ),
    )
    batch = pack.batch(np.ones((1, 2), np.float32), sampler, np.zeros(1, np.float32))
    reference = pack.pack(np.array([[-1.0, -1.0 - np.sqrt(2)]], np.float32))
    prepared, _ = prepare(batch, config, old_log_probs=old, reference_log_probs=reference)
    found = policy_objective(config)(prepared.with_scores(old, jnp.zeros_like(old)))[0]
    np.testing.assert_allclose(found, value, atol=1e-6)


def test_the_presets_take_the_convention_of_their_sources():
  found = {n: c.policy_loss.mismatch for n, c in PRESETS.items() if c.policy_loss.mismatch.drops}
  assert {name: m.dropped for name, m in found.items()} == {
    "icepop": "count",
    "mopd": "count",
    "k3_rejection": "count",
    "geometric_rejection": "count",
    "ipa": "exclude",
  }


def test_tokens_without_weight_are_never_looked_at():
  weights = WEIGHTS.at[0, 5].set(0)  # the token whose ratio is 148
  _, keep = run(MismatchConfig(filter_level="sequence", filter_high=1.07), weights)
  assert keep[0, 4]


@pytest.mark.parametrize("statistic, expected", [("geometric", -0.05), ("product", -0.1)])
def test_garbage_without_weight_enters_no_statistic_and_no_length(statistic, expected):
  weights = WEIGHTS.at[0, 0].set(0)
  config = MismatchConfig(weight_level="sequence", weight_cap=None, weight_statistic=statistic)
  old = OLD.at[0, 0].set(jnp.nan)
  importance, _ = mismatch_correction(old, SAMPLER, weights, SEGMENTS, config)
  np.testing.assert_allclose(importance[0, :3], [np.exp(expected)] * 3, rtol=1e-6)
  assert np.isfinite(importance).all()


def test_self_normalised_weights_have_mean_one_over_kept_tokens():
  config = MismatchConfig(
    weight_level="token",
    weight_cap=None,
    self_normalise=True,
    filter_level="token",
    filter_high=5.0,
  )
  importance, keep = run(config)
  np.testing.assert_allclose(importance[(WEIGHTS > 0) & keep].mean(), 1.0, rtol=1e-6)


def test_no_gradient_passes_through_a_correction():
  def total(old):
    config = MismatchConfig(weight_level="sequence", weight_cap=None)
    return mismatch_correction(old, SAMPLER, WEIGHTS, SEGMENTS, config).importance.sum()

  assert not np.any(jax.grad(total)(OLD))


@pytest.mark.parametrize(
  "changes, named",
  [
    ({"weight_cap": 0.0}, "weight_cap"),
    ({"filter_high": 2.0}, "filter_level='none'"),
    ({"filter_level": "token"}, "needs"),
    ({"filter_level": "token", "filter_low": 2.0, "filter_high": 1.0}, "below"),
    ({"self_normalise": True}, "weight_level"),
    ({"veto_below": -1.0}, "veto_below"),
    ({"dropped": "exclude", "weight_level": "token"}, "dropped"),
    ({"filter_level": "word"}, "filter_level"),
  ],
)
def test_impossible_settings_name_their_field(changes, named):
  with pytest.raises(ConfigError, match="loss.mismatch.") as error:
    dataclasses.replace(MismatchConfig(), **changes).validate("loss.mismatch")
  assert named in str(error.value)
