"""Nine published losses, written by hand from their papers and scripts, against one config each.

The hand-written ones see an unpacked [sequence, token] batch in float64; ours sees packed rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.objectives.advantages import AdvantageConfig
from agentjax.objectives.mismatch import MismatchConfig
from agentjax.objectives.objective import ObjectiveConfig, policy_objective
from agentjax.objectives.policy_loss import PolicyLossConfig
from agentjax.objectives.preparation import prepare
from agentjax.recipes.credit import AgreementTerm

SEQUENCES, LENGTH = 6, 14
sg = jax.lax.stop_gradient


class Data:
  """Log-probs of three policies, a mask with observations, one advantage a sequence."""

  def __init__(self):
    random = np.random.default_rng(0)
    shape = (SEQUENCES, LENGTH)
    self.now = random.normal(-1.2, 0.5, shape)
    self.old = self.now + random.normal(0, 0.35, shape)
    self.sampler = self.old + random.normal(0, 0.15, shape)
    self.mask = (random.random(shape) < 0.7).astype(float)
    self.mask[:, 0] = 1
    self.advantage = random.normal(0, 1, SEQUENCES)
    self.score = random.uniform(0.3, 0.8, SEQUENCES)
    # A chunk is a run of sampled tokens up to the next observation.
    starts = (self.mask == 1) & (np.pad(self.mask, ((0, 0), (1, 0)))[:, :-1] == 0)
    self.chunk = np.cumsum(starts, axis=1)

  @property
  def spread(self):
    return jnp.asarray(self.advantage)[:, None]

  def token_mean(self, per_token):
    return (per_token * self.mask).sum() / self.mask.sum()

  def chunk_mean(self, values):
    """[sequence, token] mean over the sampled tokens of the same chunk."""
    same = (self.chunk[:, :, None] == self.chunk[:, None, :]) * self.mask[:, None, :]
    return jnp.einsum("bts,bs->bt", same, values) / np.maximum(same.sum(-1), 1)


def grpo(d, now):
  r = jnp.exp(now - d.old)
  return d.token_mean(-jnp.minimum(r * d.spread, jnp.clip(r, 0.8, 1.28) * d.spread))


def gspo(d, now):
  mean = ((now - d.old) * d.mask).sum(1) / d.mask.sum(1)
  s = jnp.exp(mean)
  return -jnp.minimum(s * d.advantage, jnp.clip(s, 0.97, 1.04) * d.advantage).mean()


def cispo(d, now):
  return d.token_mean(-sg(jnp.clip(jnp.exp(now - d.old), 0.9, 1.1)) * d.spread * now)


def tis(d, now):
  return d.token_mean(-sg(jnp.minimum(jnp.exp(now - d.old), 1.0)) * d.spread * now)


def topr(d, now):
  weight = jnp.where(d.spread > 0, 1.0, sg(jnp.minimum(jnp.exp(now - d.old), 1.0)))
  return d.token_mean(-weight * d.spread * now)


def minirl(d, now):
  r = sg(jnp.exp(now - d.old))
  beyond = ((r > 1.28) & (d.spread > 0)) | ((r < 0.8) & (d.spread < 0))
  return (-r * d.spread * now * d.mask * ~beyond).sum(1).mean()


def longcat(d, now):
  r = jnp.exp(now - d.old)
  surrogate = jnp.minimum(r * d.spread, jnp.clip(r, 0.8, 1.28) * d.spread)
  surrogate = jnp.where(d.spread < 0, jnp.maximum(surrogate, 3.0 * d.spread), surrogate)
  weight = np.minimum(np.exp(d.old - d.sampler), 2.0)
  return -(weight * surrogate * d.mask).sum() / (SEQUENCES * 32)


def adpo(d, now):
  advantage = d.spread * (0.6 + 0.4 * np.clip((d.score - 0.3) / 0.5, 0, 1))[:, None]
  high = (1.2 + 0.1 * np.clip((0.8 - d.score) / 0.5, 0, 1))[:, None]
  r = jnp.exp(now - d.old)
  return d.token_mean(-jnp.minimum(r * advantage, jnp.clip(r, 0.8, high) * advantage))


def ipa(d, now):
  keep = d.mask * (jnp.exp(d.chunk_mean(d.old - d.sampler)) <= 1.05)
  weight = sg(jnp.minimum(jnp.exp(d.chunk_mean(now - d.old)), 1.0))
  weight = jnp.where(d.spread > 0, 1.0, weight)
  return (-weight * d.spread * now * keep).sum() / keep.sum()


CASES = {
  "grpo_clip_higher": (grpo, PolicyLossConfig(clip_high=0.28)),
  "gspo": (
    gspo,
    PolicyLossConfig(
      ratio_level="sequence",
      clip_low=0.03,
      clip_high=0.04,
      aggregation="sequence_mean_token_mean",
    ),
  ),
  "cispo": (
    cispo,
    PolicyLossConfig(gradient_form="score", clip="ppo", clip_low=0.1, clip_high=0.1),
  ),
  "tis": (tis, PolicyLossConfig(gradient_form="score", clip="truncate", clip_high=0.0)),
  "topr": (
    topr,
    PolicyLossConfig(
      gradient_form="score", clip="truncate", clip_high=0.0, positive_weight_one=True
    ),
  ),
  "minirl": (
    minirl,
    PolicyLossConfig(
      gradient_form="score",
      clip="mask",
      clip_high=0.28,
      aggregation="sequence_mean_token_sum",
    ),
  ),
  "longcat": (
    longcat,
    PolicyLossConfig(
      clip_high=0.28,
      dual_clip=3.0,
      aggregation="constant",
      aggregation_constant=32.0,
      mismatch=MismatchConfig(weight_level="token", weight_cap=2.0),
    ),
  ),
  "adpo": (adpo, PolicyLossConfig()),
  "ipa": (
    ipa,
    PolicyLossConfig(
      ratio_level="turn",
      gradient_form="score",
      clip="truncate",
      clip_high=0.0,
      positive_weight_one=True,
      mismatch=MismatchConfig(filter_level="turn", filter_high=1.05, dropped="exclude"),
    ),
  ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_config_is_the_published_loss(name, packer, x64):
  by_hand, settings = CASES[name]
  config = ObjectiveConfig(AdvantageConfig(centre="none", scale="none"), settings)
  if name == "adpo":
    config.advantage.terms = (AgreementTerm(),)
  config.validate()
  data, pack = Data(), packer(SEQUENCES, LENGTH, per_row=2, gap=3)
  batch = pack.batch(data.mask, data.sampler, data.advantage, turns=data.chunk)
  terms = {"agreement": jnp.asarray(data.score)} if name == "adpo" else {}

  def ours(now):
    prepared, _ = prepare(batch, config, old_log_probs=pack.pack(data.old), **terms)
    return policy_objective(config)(prepared.with_scores(now, jnp.zeros_like(now)))[0]

  value, gradient = jax.jit(jax.value_and_grad(ours))(pack.pack(data.now))
  expected, expected_gradient = jax.jit(jax.value_and_grad(lambda x: by_hand(data, x)))(
    jnp.asarray(data.now)
  )
  assert value.dtype == jnp.float64
  np.testing.assert_allclose(value, expected, atol=1e-10, rtol=0)
  np.testing.assert_allclose(pack.unpack(gradient), expected_gradient, atol=1e-10, rtol=0)
  assert np.abs(expected_gradient).max() > 1e-3


def test_dual_clip_acts_on_negative_advantages_only(x64):
  """LongCat's Eq. 4 as printed bounds positives too, which would silence every good sample."""
  from agentjax.objectives.policy_loss import clipped_surrogate

  advantages = jnp.array([1.0, 1.0, -1.0, -1.0])
  log_ratio = jnp.log(jnp.array([1.1, 0.5, 1.1, 5.0]))

  def total(x):
    return clipped_surrogate(x, advantages, 0.2, 0.28, dual_clip=3.0).per_token.sum()

  np.testing.assert_allclose(jax.grad(total)(log_ratio), [-1.1, -0.5, 1.1, 0.0], atol=1e-12)
