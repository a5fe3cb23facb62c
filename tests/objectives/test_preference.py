import dataclasses
import gzip
import json
import math
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives import (
  PreferenceConfig,
  dpo_loss,
  implicit_prm_loss,
  policy_objective,
  prepare,
  preset,
)
from agentjax.objectives.preference import preference_advantages
from agentjax.objectives.segments import sequence_sum

ROOT = os.environ.get("AGENTJAX_DATA")
advise = jax.jit(preference_advantages, static_argnums=4)


def test_dpo_golden():
  """beta .1, policy -10 and -12 against reference -11 and -11: margin .2, log(1 + e^-.2)."""
  loss = dpo_loss(jnp.array([1.0, 0.0]), jnp.array([-1.0, 0.0]))
  np.testing.assert_allclose(loss, [math.log1p(math.exp(-0.2)), math.log(2)], rtol=1e-6)
  smooth = dpo_loss(jnp.array(1.0), jnp.array(-1.0), label_smoothing=0.1)
  right, wrong = math.log1p(math.exp(-0.2)), math.log1p(math.exp(0.2))
  np.testing.assert_allclose(smooth, 0.9 * right + 0.1 * wrong, rtol=1e-6)


def test_losses_stay_finite_where_policies_are_far_apart():
  for far in (1e4, -1e4):
    value, slope = jax.value_and_grad(lambda x: dpo_loss(x, 0.0))(far)
    assert np.isfinite(value) and np.isfinite(slope)
    value, slope = jax.value_and_grad(lambda x: implicit_prm_loss(x, 1.0, beta=1.0))(far)
    assert np.isfinite(value) and np.isfinite(slope)


def test_implicit_prm_golden():
  """beta .05, s = 4: s(.2) = .549834; outcome 1 costs .598139, 0 costs .798139, 1/2 their mean."""
  losses = implicit_prm_loss(jnp.full(3, 4.0), jnp.array([1.0, 0.0, 0.5]), beta=0.05)
  np.testing.assert_allclose(losses, [0.598139, 0.798139, 0.698139], atol=1e-6)


@pytest.mark.parametrize("form", ["dpo", "outcome"])
def test_gradients_are_those_of_finite_differences(x64, form):
  rng = np.random.default_rng(0)
  a, b, outcomes = rng.normal(size=5) * 3, rng.normal(size=5) * 3, rng.uniform(size=5)

  def total(x):
    if form == "dpo":
      return jnp.sum(dpo_loss(x, b, beta=0.4, label_smoothing=0.05))
    return jnp.sum(implicit_prm_loss(x, outcomes, beta=0.4))

  slope, step = jax.grad(total)(jnp.asarray(a)), 1e-5
  for i in range(5):
    move = step * np.eye(5)[i]
    difference = (total(a + move) - total(a - move)) / (2 * step)
    np.testing.assert_allclose(slope[i], difference, rtol=1e-8, atol=1e-10)


# ----------------------------------------------------------- the same gradient through the pipeline

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 0.0, 1.0, 1.0])
GROUPS = np.array([0, 0, 1, 1, 2, 2, 3, 3, 3, 0])  # 2: no preference; 3: three members
VALID = np.array([True] * 9 + [False])  # the last of group 0 has no verdict


def example(packer, seed=0):
  rng = np.random.default_rng(seed)
  count, length = len(REWARDS), 6
  made = packer(count, length)
  weights = (rng.uniform(size=(count, length)) < 0.7).astype(float)
  weights[:, -1] = 1
  now, reference = -rng.uniform(0, 3, (2, count, length))
  rewards = np.where(VALID, REWARDS, np.nan)
  batch = made.batch(weights, now, rewards, valid=VALID, groups=GROUPS)
  return made, weights, now, reference, batch


def direct(config, log_probs, reference, weights):
  """The loss as the paper writes it, a loop over pairs."""
  sums = [jnp.sum(w * (p - r)) for w, p, r in zip(weights, log_probs, reference, strict=True)]
  members = [i for i in range(len(REWARDS)) if VALID[i]]
  if config.form == "outcome":
    outcomes = np.clip(REWARDS, 0, 1)
    terms = [implicit_prm_loss(sums[i], outcomes[i], beta=config.beta) for i in members]
    return sum(terms) / len(terms)
  groups = []
  for group in sorted(set(GROUPS)):
    own = [i for i in members if GROUPS[i] == group]
    pairs = [(i, j) for i in own for j in own if REWARDS[i] > REWARDS[j]]
    terms = [
      dpo_loss(sums[i], sums[j], beta=config.beta, label_smoothing=config.label_smoothing)
      for i, j in pairs
    ]
    if terms:
      groups.append(sum(terms) / len(terms))
  return sum(groups) / len(groups)


@pytest.mark.parametrize(
  "config",
  [
    PreferenceConfig(),
    PreferenceConfig(beta=0.7, label_smoothing=0.2),
    PreferenceConfig(form="outcome", beta=0.5),
  ],
)
def test_an_update_is_the_gradient_of_the_loss_wherever_its_pairs_lie(packer, x64, config):
  made, weights, now, reference, batch = example(packer)
  if config.form == "outcome":
    batch = dataclasses.replace(batch, rewards=jnp.clip(batch.rewards, 0, 1))
  settings = preset("dpo")
  settings.preference = config
  packed_now, packed_reference = made.pack(now), made.pack(reference)
  prepared, metrics = jax.jit(
    lambda b, old, ref: prepare(b, settings, old_log_probs=old, reference_log_probs=ref)
  )(batch, packed_now, packed_reference)
  objective = policy_objective(settings)
  ours = jax.jit(jax.grad(lambda x, p: objective(p.with_scores(x, jnp.zeros_like(x)))[0]))
  whole = jax.jit(jax.value_and_grad(lambda x: direct(config, x, reference, weights)))
  expected, slope = whole(jnp.asarray(now))
  np.testing.assert_allclose(metrics["preference/loss"], expected, rtol=1e-10)
  np.testing.assert_allclose(made.unpack(ours(packed_now, prepared)), slope, atol=1e-10)

  # Row by row, as micro-batches are, the gradient is the same.
  rows = [
    ours(packed_now[i : i + 1], jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], prepared))
    for i in range(len(packed_now))
  ]
  np.testing.assert_allclose(made.unpack(np.concatenate(rows)), slope, atol=1e-10)


def test_metrics_say_how_many_pairs_stand_right():
  log_ratios = jnp.array([2.0, 1.0, -3.0, 1.0])
  rewards, valid = jnp.array([1.0, 0.0, 1.0, 0.0]), jnp.ones(4, bool)
  config = PreferenceConfig(beta=0.5).freeze()
  advantages, metrics = advise(log_ratios, rewards, valid, jnp.array([0, 0, 1, 1]), config)
  assert metrics["preference/accuracy"] == 0.5
  np.testing.assert_allclose(metrics["preference/margin"], 0.5 * (1 - 4) / 2)
  assert advantages[0] == -advantages[1] > 0 and advantages[2] == -advantages[3]
  assert advantages[2] > advantages[0]  # the pair that stands wrong teaches more
  outcomes = PreferenceConfig(form="outcome").freeze()
  _, outcome = advise(log_ratios, rewards, valid, jnp.zeros(4, int), outcomes)
  assert outcome["preference/accuracy"] == 0.25


def test_a_batch_without_preferences_teaches_nothing():
  ones = jnp.ones(4)
  config = PreferenceConfig(beta=0.5).freeze()
  advantages, metrics = advise(ones, ones, jnp.ones(4, bool), jnp.array([0, 0, 1, 1]), config)
  assert not advantages.any() and all(np.isfinite(v) for v in metrics.values())


def test_settings_that_would_train_another_loss_are_refused():
  for name in ("dpo", "implicit_prm"):
    preset(name).validate()
  for room, field, value in (
    ("policy_loss", "aggregation", "token_mean"),
    ("policy_loss", "clip", "mask"),
    ("advantage", "centre", "group_mean"),
    ("advantage", "whiten", True),
  ):
    settings = preset("dpo")
    setattr(getattr(settings, room), field, value)
    with pytest.raises(ConfigError, match=f"{room}.{field}"):
      settings.validate()
  for changes in ({"beta": 0.0}, {"label_smoothing": 0.5}):
    with pytest.raises(ConfigError, match=next(iter(changes))):
      PreferenceConfig(**changes).validate()


def test_a_missing_reference_is_named(packer):
  ones = np.ones((2, 3))
  with pytest.raises(ValueError, match="reference_log_probs"):
    prepare(packer(2, 3).batch(ones, -ones, np.array([1.0, 0.0])), preset("dpo"))


@pytest.mark.slow
@pytest.mark.skipif(not ROOT, reason="set AGENTJAX_DATA to the folder that holds preferences/")
def test_dpo_brings_real_preferences_into_order_with_a_model_of_byte_pairs():
  """200 pairs and a table of bigrams from uniform."""
  path = pathlib.Path(ROOT or "") / "preferences" / "dpo_en_demo.json.gz"
  rows = json.load(gzip.open(path, "rt"))
  assert len(rows) == 300
  width = 256

  def ids(text):
    data = text.encode()[: width + 1]
    return np.frombuffer(data.ljust(width + 1, b" "), np.uint8).astype(int), len(data) - 1

  texts = [ids(row[name]["value"]) for row in rows for name in ("chosen", "rejected")]
  tokens = np.stack([t for t, _ in texts])
  lengths = np.array([n for _, n in texts])
  weights = jnp.asarray(np.arange(width) < lengths[:, None], jnp.float32)
  rewards = jnp.tile(jnp.array([1.0, 0.0]), len(rows))
  groups = jnp.repeat(jnp.arange(len(rows)), 2)
  before, after = jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:])
  reference = jnp.zeros((256, 256))
  trained = jnp.arange(2 * len(rows)) < 400
  config = PreferenceConfig(beta=0.1)

  def log_probs(table):
    return jax.nn.log_softmax(table, axis=1)[before, after]

  def sums(table):
    gained = weights * (log_probs(table) - log_probs(reference))
    segments = jnp.broadcast_to(jnp.arange(1, 2 * len(rows) + 1)[:, None], gained.shape)
    return sequence_sum(gained, segments, 2 * len(rows))

  @jax.jit
  def step(table):
    advantages, metrics = preference_advantages(sums(table), rewards, trained, groups, config)

    def surrogate(table):
      per_token = -advantages[:, None] * log_probs(table) * weights
      return jnp.sum(per_token) / jnp.sum(trained)

    return table - 1.0 * jax.grad(surrogate)(table), metrics

  table, history = reference, []
  for _ in range(30):
    table, metrics = step(table)
    history.append(metrics)
  assert history[0]["preference/loss"] == pytest.approx(math.log(2), rel=1e-5)
  assert history[-1]["preference/loss"] < 0.6
  assert history[-1]["preference/accuracy"] > 0.7
