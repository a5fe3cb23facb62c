"""Losses of one's own: two forms of one meaning, and faults told before anything compiles."""

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives.advantages import AdvantageConfig
from agentjax.objectives.custom_loss import load_function
from agentjax.objectives.objective import ObjectiveConfig, policy_objective
from agentjax.objectives.policy_loss import PolicyLossConfig
from agentjax.objectives.preparation import abstract_inputs, prepare
from agentjax.testing import check_objective


def surrogate(inputs):
  ratio = jnp.exp(inputs.log_probs - inputs.old_log_probs)
  clipped = jnp.clip(ratio, 0.8, 1.2)
  return -jnp.minimum(ratio * inputs.advantages, clipped * inputs.advantages)


def with_metric(inputs):
  return surrogate(inputs), {"seen": inputs.log_probs}


def whole(inputs):
  return jnp.sum(inputs.coefficients * surrogate(inputs)), {}


@pytest.fixture
def inputs(packer):
  """Prepared inputs of three sequences, with NaN wherever a token has no weight."""
  pack = packer(3, 4, per_row=2, gap=1)
  random = np.random.default_rng(0)
  weights = np.ones((3, 4), np.float32)
  weights[:, :2] = 0
  old = random.normal(-1, 0.3, (3, 4)).astype(np.float32)
  batch = pack.batch(weights, old, np.array([1.0, 0.0, 0.5], np.float32))
  prepared, _ = prepare(batch, ObjectiveConfig(), reference_log_probs=pack.pack(old - 0.1))
  now = pack.pack(np.where(weights > 0, old + 0.3 * random.normal(size=old.shape), np.nan), np.nan)
  return prepared.with_scores(now, jnp.full_like(now, 0.5))


def gradient(config, function, inputs):
  objective = policy_objective(config, function)

  def loss(log_probs):
    return objective(dataclasses.replace(inputs, log_probs=log_probs))

  return jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs.log_probs)


def test_a_loss_a_token_stands_in_the_surrogates_place_and_other_terms_stay(inputs):
  config = ObjectiveConfig(
    policy_loss=PolicyLossConfig(
      kl_coefficient=0.3, kl_estimator="k2", entropy_coefficient=0.1, aggregation="token_mean"
    )
  )
  (named, expected), right = gradient(config, None, inputs)
  (own, metrics), slope = gradient(config, with_metric, inputs)
  np.testing.assert_allclose(own, named, rtol=1e-6)
  np.testing.assert_allclose(slope, right, rtol=1e-6)
  assert np.isfinite(slope).all() and np.any(slope)  # NaN on prompts reached nothing
  assert {"kl_reference", "entropy", "kl_old", "policy_loss"} <= set(metrics) & set(expected)
  seen = np.where(inputs.weights > 0, inputs.log_probs, 0)
  np.testing.assert_allclose(metrics["seen"], np.sum(inputs.shares * seen), rtol=1e-6)


def test_the_whole_objective_is_left_as_it_is(inputs):
  clean = dataclasses.replace(inputs, log_probs=jnp.nan_to_num(inputs.log_probs))
  config = ObjectiveConfig(policy_loss=PolicyLossConfig(kl_coefficient=0.3, kl_estimator="k2"))
  loss, metrics = policy_objective(config, whole)(clean)
  assert metrics == {}
  np.testing.assert_allclose(loss, whole(clean)[0])


@pytest.mark.parametrize("function", [surrogate, whole])
def test_both_forms_keep_the_promises(function):
  check_objective(function, seed=0)


def test_a_token_whose_loss_is_not_finite_is_counted_only_with_weight(inputs):
  def logarithm(inputs):
    return jnp.log(inputs.log_probs)  # -inf on the zeros of prompts, NaN below 0

  _, metrics = policy_objective(ObjectiveConfig(), logarithm)(inputs)
  assert int(metrics["nonfinite/per_token"]) == np.count_nonzero(inputs.weights)


def needs_a_reference(inputs):
  return inputs.log_probs - inputs.reference_log_probs


@pytest.mark.parametrize(
  ("function", "message"),
  [
    (lambda inputs: jnp.sum(inputs.log_probs), r"returned float32\[\] for inputs \[3, 5\]"),
    (lambda inputs: inputs.log_probs[:, 1:], r"returned float32\[3, 4\] for inputs \[3, 5\]"),
    (lambda inputs: inputs.segment_ids, r"returned int32\[3, 5\] for inputs .* a float array"),
    (lambda inputs: None, "returned NoneType; allowed: a float array"),
    (lambda inputs: (inputs.log_probs, 1.0, 2.0), "returned .*float32.*; allowed"),
    (lambda inputs: (inputs.log_probs, [1.0]), "returned .*; allowed"),
    (
      lambda inputs: (inputs.log_probs, {"x": jnp.sum(inputs.log_probs)}),
      r"the metric 'x' as float32\[\]; allowed: an array \[3, 5\]",
    ),
    (
      lambda inputs: (jnp.sum(inputs.log_probs), {"x": inputs.log_probs}),
      r"the metric 'x' as float32\[3, 5\]; allowed: an array \[\]",
    ),
    (lambda inputs: inputs.logprobs, "raised AttributeError: .*logprobs"),
    (lambda inputs: inputs.column("old_log_probs"), "losses are not given.*'old_log_probs'"),
    (lambda inputs: 1.0 if inputs.log_probs[0, 0] > 0 else 2.0, "raised TracerBool"),
    (needs_a_reference, "raised TypeError.*None are .*reference_log_probs.*with_reference=True"),
  ],
)
def test_what_cannot_be_a_loss_is_told_without_computing(function, message):
  objective = policy_objective(ObjectiveConfig(), function)
  with pytest.raises(ConfigError, match=f"(?s){message}"):
    jax.eval_shape(objective, abstract_inputs(ObjectiveConfig(), 3, 5))


def test_a_function_may_ask_for_the_reference():
  config = ObjectiveConfig(with_reference=True)
  assert config.needs_reference
  jax.eval_shape(policy_objective(config, needs_a_reference), abstract_inputs(config, 3, 5))


@pytest.fixture
def module(monkeypatch):
  made = types.ModuleType("my_losses")
  made.surrogate, made.number, made.two = surrogate, 3, lambda inputs, more: inputs
  monkeypatch.setitem(sys.modules, "my_losses", made)
  return made


def test_a_function_is_found_by_its_name(module):
  assert load_function("my_losses:surrogate") is surrogate
  config = ObjectiveConfig(function="my_losses:surrogate")
  config.validate("objective")
  assert ObjectiveConfig.from_dict(config.to_dict()) == config
  inputs = abstract_inputs(config, 3, 5)
  assert jax.eval_shape(policy_objective(config), inputs)[0].shape == ()


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("nowhere:loss", "no module 'nowhere' on the import path .*PYTHONPATH"),
    (
      "my_losses:missing",
      "my_losses has no 'missing', but number, surrogate, two; allowed:",
    ),
    ("my_losses:number", "is int; allowed: a function of one argument"),
    ("my_losses:two", r"takes \(inputs, more\); allowed: a function of one argument"),
  ],
)
def test_a_name_that_leads_nowhere_says_what_is_there(module, name, message):
  with pytest.raises(ConfigError, match=message):
    load_function(name)


def test_a_module_that_fails_is_told_apart_from_one_that_is_missing(tmp_path, monkeypatch):
  (tmp_path / "failing_loss.py").write_text("import not_installed_anywhere\n")
  (tmp_path / "raising_loss.py").write_text("raise RuntimeError('no')\n")
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(ConfigError, match="importing failing_loss failed: .*not_installed_anywhere"):
    load_function("failing_loss:loss")
  with pytest.raises(ConfigError, match="importing raising_loss raised RuntimeError: no"):
    load_function("raising_loss:loss")


@pytest.mark.parametrize("name", ["my_losses", "my_losses:", "a:b:c", "my losses:f", "x.py:f/g"])
def test_what_is_no_name_is_refused_by_the_config(name):
  with pytest.raises(ConfigError, match=r"objective\.function=.*'module:attribute'"):
    ObjectiveConfig(function=name).validate("objective")


def test_a_whole_config_traces_with_everything_it_asks_for():
  config = ObjectiveConfig(
    AdvantageConfig(centre="none", scale="none", credit="gae"),
    PolicyLossConfig(kl_coefficient=0.1, covariance="kl"),
  )
  jax.eval_shape(policy_objective(config), abstract_inputs(config, 2, 3))
