"""Numbers made by verl's own functions (a [12, 10] batch, one sequence a row), reproduced."""

import dataclasses
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.objectives.advantages import AdvantageConfig, sequence_advantages
from agentjax.objectives.aggregation import token_coefficients
from agentjax.objectives.kl import kl_estimate
from agentjax.objectives.objective import LossInputs, ObjectiveConfig, policy_objective
from agentjax.objectives.policy_loss import PolicyLossConfig, covariance_selection
from agentjax.objectives.returns import gae, reward_to_go, whiten
from agentjax.objectives.segments import broadcast_to_tokens, sequence_sum
from agentjax.objectives.value_loss import squared_value_loss

ROOT = os.environ.get("AGENTJAX_DATA")
pytestmark = pytest.mark.skipif(
  not ROOT, reason="set AGENTJAX_DATA to the folder that holds peer_golden/"
)
SEQUENCES, TIME = 12, 10


@pytest.fixture(scope="module")
def golden():
  return dict(np.load(pathlib.Path(ROOT or "") / "peer_golden" / "verl_core_algos.npz"))


@pytest.fixture(scope="module")
def segment_ids():
  """One sequence a row. Observations inside a row (mask 0) belong to its sequence."""
  return jnp.broadcast_to(jnp.arange(1, SEQUENCES + 1)[:, None], (SEQUENCES, TIME))


def assert_on_mask(ours, theirs, mask, atol):
  np.testing.assert_allclose(np.asarray(ours) * mask, theirs * mask, atol=atol)


# --------------------------------------------------------------------------------- advantages


@pytest.mark.parametrize(
  "case, config",
  {
    "grpo_stdTrue": AdvantageConfig(),
    "grpo_stdFalse": AdvantageConfig(scale="none"),
    "grpo_passk": AdvantageConfig(centre="runner_up"),
    "rloo": AdvantageConfig(centre="leave_one_out", scale="none"),
    "opo": AdvantageConfig(centre="length_weighted", scale="none"),
    "remax": AdvantageConfig(centre="baseline", scale="none"),
    "gpg": AdvantageConfig(scale="nonzero_rewards"),
  }.items(),
)
def test_sequence_advantages_equal_the_peer(golden, segment_ids, case, config):
  ours = sequence_advantages(
    jnp.asarray(golden["rewards_outcome"].sum(1)),
    jnp.ones(SEQUENCES, bool),
    jnp.asarray(golden["index"]),
    config,
    lengths=sequence_sum(jnp.asarray(golden["mask"]), segment_ids, SEQUENCES),
    baselines=jnp.asarray(golden["reward_baselines"]),
  )
  tokens = broadcast_to_tokens(ours, segment_ids)
  assert_on_mask(tokens, golden[f"adv/{case}/advantages"], golden["mask"], atol=2e-6)


@pytest.mark.parametrize("mask", ["single", "multi_turn"])
@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0)])
def test_gae_and_returns_equal_the_peer(golden, segment_ids, gamma, lam, mask):
  weights = golden["mask" if mask == "single" else "mask_multi_turn"]
  values = golden["values"]
  raw = gae(
    jnp.asarray(golden["rewards_dense"]),
    jnp.asarray(values),
    jnp.asarray(weights),
    segment_ids,
    gamma=gamma,
    lam=lam,
  )
  case = f"adv/gae_g{gamma}_l{lam}_{mask}"
  white = whiten(raw, jnp.asarray(weights))
  assert_on_mask(white, golden[f"{case}/advantages"], weights, atol=5e-6)
  assert_on_mask(raw + values, golden[f"{case}/returns"], weights, atol=2e-6)


def test_reinforce_pp_equals_the_peer(golden, segment_ids):
  weights = jnp.asarray(golden["mask"])
  returns = reward_to_go(jnp.asarray(golden["rewards_dense"]), weights, segment_ids, gamma=0.98)
  case = "adv/reinforce_pp"
  assert_on_mask(returns, golden[f"{case}/returns"], golden["mask"], atol=2e-6)
  assert_on_mask(whiten(returns, weights), golden[f"{case}/advantages"], golden["mask"], atol=5e-6)


def test_reinforce_pp_baseline_equals_the_peer(golden, segment_ids):
  centred = sequence_advantages(
    jnp.asarray(golden["rewards_outcome"].sum(1)),
    jnp.ones(SEQUENCES, bool),
    jnp.asarray(golden["index"]),
    AdvantageConfig(scale="none"),
  )
  ours = whiten(broadcast_to_tokens(centred, segment_ids), jnp.asarray(golden["mask"]))
  theirs = golden["adv/reinforce_pp_baseline/advantages"]
  assert_on_mask(ours, theirs, golden["mask"], atol=5e-6)


# ------------------------------------------------------------------------------- policy losses

AGGREGATIONS = {
  "token-mean": dict(aggregation="token_mean"),
  "seq-mean-token-sum": dict(aggregation="sequence_mean_token_sum"),
  "seq-mean-token-mean": dict(aggregation="sequence_mean_token_mean"),
  # verl divides the sum by the time axis alone: our constant is a sequence's share of it.
  "seq-mean-token-sum-norm": dict(aggregation="constant", aggregation_constant=TIME / SEQUENCES),
}
LOSSES = {
  "vanilla": PolicyLossConfig(clip_high=0.28, dual_clip=3.0),
  "gpg": PolicyLossConfig(gradient_form="score", clip="unit"),
  "cispo": PolicyLossConfig(gradient_form="score", clip="ppo", clip_high=0.28),
  "gspo": PolicyLossConfig(ratio_level="sequence", clip_high=0.28),
  "sapo": PolicyLossConfig(clip="sapo"),
  "geo_mean": PolicyLossConfig(ratio_level="sequence", clip="gmpo", clip_high=0.28),
  "kl_cov": PolicyLossConfig(clip="none", covariance="kl", covariance_fraction=0.2),
}
CASES = [
  (loss, aggregation)
  for loss, aggregations in {
    "vanilla": AGGREGATIONS,
    "gpg": AGGREGATIONS,
    "cispo": AGGREGATIONS,
    "gspo": ["seq-mean-token-mean"],
    "sapo": ["seq-mean-token-mean"],
    "geo_mean": ["token-mean"],
    "kl_cov": ["token-mean"],
  }.items()
  for aggregation in aggregations
]


@pytest.mark.parametrize("loss, aggregation", CASES)
def test_policy_loss_and_gradient_equal_the_peer(golden, segment_ids, loss, aggregation):
  settings = dict(AGGREGATIONS[aggregation])
  if loss == "geo_mean":  # verl averages sequences whatever it is asked for
    settings = dict(AGGREGATIONS["seq-mean-token-mean"])
  config = dataclasses.replace(LOSSES[loss], **settings)
  config.validate()
  weights = jnp.asarray(golden["mask"])
  advantages = jnp.asarray(golden["advantages"])

  def total(log_probs):
    prepared = LossInputs(
      advantages=advantages,
      coefficients=token_coefficients(
        weights,
        segment_ids,
        SEQUENCES,
        mode=config.aggregation,
        constant=config.aggregation_constant,
      ),
      shares=weights / weights.sum(),
      weights=weights,
      segment_ids=segment_ids,
      turns=jnp.zeros_like(segment_ids),
      old_log_probs=jnp.asarray(golden["old_log_probs"]),
      behaviour_log_probs=jnp.asarray(golden["rollout_log_prob"]),
      # verl selects by the current policy; we by the one at the start of the update.
      covariance_selected=covariance_selection(
        jnp.asarray(golden["log_prob"]), advantages, weights, config.covariance_fraction
      ),
      log_probs=log_probs,
      entropies=jnp.zeros_like(log_probs),
    )
    return policy_objective(ObjectiveConfig(policy_loss=config))(prepared)

  (value, metrics), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(
    jnp.asarray(golden["log_prob"])
  )
  case = f"loss/{loss}/{aggregation}"
  np.testing.assert_allclose(value, golden[f"{case}/loss"], rtol=2e-5, atol=2e-7)
  np.testing.assert_allclose(gradient, golden[f"{case}/grad_log_prob"], rtol=2e-5, atol=2e-6)
  if loss == "vanilla":
    theirs = sum(
      golden[f"{case}/metric/actor/{name}"] for name in ("pg_clipfrac", "pg_clipfrac_lower")
    )
    np.testing.assert_allclose(metrics["clip_fraction"], theirs, rtol=1e-5)
    np.testing.assert_allclose(metrics["kl_old"], golden[f"{case}/metric/actor/ppo_kl"], rtol=1e-4)


# ------------------------------------------------------------------------- value, entropy, KL


def test_value_loss_and_gradient_equal_the_peer(golden, segment_ids):
  weights = jnp.asarray(golden["mask"])

  def loss(values):
    errors = squared_value_loss(
      values,
      jnp.asarray(golden["value_returns"]),
      old_values=jnp.asarray(golden["values"]),
      clip=0.2,
    )
    return jnp.sum(token_coefficients(weights, segment_ids, SEQUENCES, mode="token_mean") * errors)

  value, gradient = jax.value_and_grad(loss)(jnp.asarray(golden["vpreds"]))
  np.testing.assert_allclose(value, golden["loss/value/loss"], rtol=2e-6)
  np.testing.assert_allclose(gradient, golden["loss/value/grad_vpreds"], atol=2e-7)


def test_entropy_mean_and_gradient_equal_the_peer(golden, segment_ids):
  weights = jnp.asarray(golden["mask"])

  def mean_entropy(logits):
    log_probs = jax.nn.log_softmax(logits)
    entropies = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    return jnp.sum(
      token_coefficients(weights, segment_ids, SEQUENCES, mode="token_mean") * entropies
    )

  value, gradient = jax.value_and_grad(mean_entropy)(jnp.asarray(golden["entropy/logits"]))
  np.testing.assert_allclose(value, golden["entropy/loss"], rtol=2e-6)
  np.testing.assert_allclose(gradient, golden["entropy/grad"], atol=2e-7)


@pytest.mark.parametrize(
  "theirs, ours",
  [
    ("kl", "k1"),
    ("k1", "k1"),
    ("abs", "absolute"),
    ("mse", "k2"),
    ("k2", "k2"),
    ("low_var_kl", "k3"),
    ("k3", "k3"),
  ],
)
def test_kl_estimators_and_gradients_equal_the_peer(golden, theirs, ours):
  log_probs = jnp.asarray(golden["log_prob"])
  reference = jnp.asarray(golden["ref_log_prob"])
  value = kl_estimate(log_probs, reference, ours)
  mask = golden["mask"]
  gradient = jax.grad(lambda x: (mask * kl_estimate(x, reference, ours)).sum())(log_probs)
  np.testing.assert_allclose(value, golden[f"kl/{theirs}"], atol=2e-6)
  np.testing.assert_allclose(gradient, golden[f"kl/{theirs}/grad"], atol=2e-6)
