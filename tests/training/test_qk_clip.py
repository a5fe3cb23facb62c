"""QK-clip: scores come down to the threshold, and only the heads above it change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.models.config import MlaConfig
from agentjax.models.param_ops import qk_clip_obstacle, qk_clip_scales, rescale
from agentjax.training.experiment import RLStage
from agentjax.training.optimizer import OptimizerConfig
from agentjax.training.update import UpdateSettings
from tests.models import rows
from tests.training.machine import ATTENTION, machine, sequences, step, update_batch
from tests.training.smoke import smoke_experiment

_ONE = dataclasses.replace(rows.TINY, qk_norm=False, attention_bias=True, record_max_scores=True)
_KINDS = {
  "shared keys": dataclasses.replace(_ONE, pattern="*"),
  "own keys": dataclasses.replace(_ONE, pattern="*", num_kv_heads=4),
  "latent": dataclasses.replace(
    _ONE, pattern="A", mla=MlaConfig(query_lora=12, kv_lora=8, nope_dim=8, rope_dim=4, value_dim=8)
  ),
}


def _tokens():
  rng = np.random.default_rng(0)
  members = [rng.integers(0, rows.TINY.vocab_size, n) for n in (9, 5, 12)]
  return rows.pack(members, [[0, 1], [2]], 16)


@pytest.mark.parametrize(
  "kind",
  [pytest.param(k, marks=[pytest.mark.slow] if k == "own keys" else []) for k in _KINDS],
)
def test_after_clipping_no_score_of_the_batch_is_above_the_threshold(kind):
  config = _KINDS[kind]
  params = rows.draw(config, seed=1)
  params = jax.tree.map(lambda w: 3 * w, params)  # so that scores are large
  before = np.asarray(rows.forward(params, config, *_tokens()).max_scores)
  threshold = float(np.sort(before[0])[1:3].mean())  # between the second and the third of four
  assert (before > threshold).sum() == 2
  scales, clipped = qk_clip_scales(params, config, jnp.asarray(before), threshold=threshold)
  after = np.asarray(rows.forward(rescale(params, scales), config, *_tokens()).max_scores)
  assert int(clipped) == 2
  np.testing.assert_allclose(after, np.minimum(before, threshold), rtol=1e-4)


@pytest.mark.parametrize("kind", _KINDS)
def test_only_the_offending_heads_change(kind):
  config = dataclasses.replace(_KINDS[kind], pattern=2 * _KINDS[kind].pattern + "-")
  params = rows.draw(config, seed=2)
  top = jnp.ones((2, 4)).at[1, 2].set(400.0)  # the third head of the second layer
  scales, clipped = qk_clip_scales(params, config, top, threshold=100.0)
  moved = rescale(params, scales)
  old, new = (p.groups[0][0].mixer for p in (params, moved))
  expected = {
    "shared keys": {"query": 0.25, "query_bias": 0.25},
    "own keys": {"query": 0.5, "key": 0.5, "query_bias": 0.5, "key_bias": 0.5},
    "latent": {"query_nope": 0.5, "key_up": 0.5, "query_rope": 0.25},
  }[kind]
  assert int(clipped) == 1
  for field in dataclasses.fields(old):
    a, b = getattr(old, field.name), getattr(new, field.name)
    if field.name not in expected:
      assert a is b
      continue
    heads = a.ndim - 2
    clipped_head = (1, *(slice(None),) * (heads - 1), 2)
    np.testing.assert_allclose(b[clipped_head], expected[field.name] * a[clipped_head], rtol=1e-6)
    mask = np.ones(a.shape, bool)
    mask[clipped_head] = False
    np.testing.assert_array_equal(np.asarray(a)[mask], np.asarray(b)[mask])
  untouched = dataclasses.replace(params, groups=()), dataclasses.replace(moved, groups=())
  assert all(a is b for a, b in zip(*map(jax.tree.leaves, untouched), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_clips_after_its_step_whatever_the_micro_batches(dtype):
  model = dataclasses.replace(ATTENTION, param_dtype=dtype)
  plain = OptimizerConfig(learning_rate=1e-3)
  _, whole = update_batch(sequences(), 4)
  free = machine(model, UpdateSettings(), plain)
  made = machine(model, UpdateSettings(qk_clip=0.05), plain)
  unclipped, _ = step(free, free.fresh(), whole, 4)
  results = [step(made, made.fresh(), whole, size) for size in (4, 1)]
  for state, metrics in results:
    assert metrics["qk_clip/max"] > 0.05 and metrics["qk_clip/heads"] >= 1
    ratio = np.asarray(state.weights.policy.groups[0][0].mixer.query, np.float32) / np.asarray(
      unclipped.weights.policy.groups[0][0].mixer.query, np.float32
    )
    largest = 0.05 / metrics["qk_clip/max"]
    np.testing.assert_allclose(ratio.min(), largest, rtol=2e-5 if dtype == "float32" else 1e-2)
    if dtype == "bfloat16":  # what the next step starts from is clipped as well
      masters = state.networks["policy"].opt_state.inner_state.masters
      master = masters.policy.groups[0][0].mixer.query
      narrow = state.weights.policy.groups[0][0].mixer.query.astype(jnp.float32)
      np.testing.assert_allclose(master, narrow, rtol=2**-7)
  assert results[0][1]["qk_clip/max"] == pytest.approx(results[1][1]["qk_clip/max"], rel=1e-5)


@pytest.mark.slow
def test_a_skipped_update_clips_nothing():
  made = machine(ATTENTION, UpdateSettings(qk_clip=1e-3))
  _, whole = update_batch(sequences(), 4)
  broken = dataclasses.replace(
    whole, prepared=whole.prepared.replace(advantages=whole.prepared.advantages * np.nan)
  )
  before = made.fresh().weights
  state, metrics = step(made, made.fresh(), broken, 4)
  assert metrics["bad_steps"] == 1
  jax.tree.map(np.testing.assert_array_equal, state.weights, before)


def test_models_whose_scores_cannot_be_clipped_are_refused():
  assert qk_clip_obstacle(_KINDS["latent"]) is None
  model = smoke_experiment().model
  for change, reason in (
    ({"qk_norm": True}, "normed"),
    ({"pattern": "M-"}, "no block of model.pattern has attention"),
  ):
    stage = RLStage(steps=1, qk_clip=100.0)
    with pytest.raises(ConfigError, match=rf"config\.rl\.qk_clip=100.0; allowed: none.*{reason}"):
      smoke_experiment(rl=stage, model=dataclasses.replace(model, **change)).validate()


@pytest.mark.slow
def test_scores_are_recorded_only_where_asked_for():
  quiet = dataclasses.replace(_KINDS["shared keys"], record_max_scores=False)
  assert models.forward(rows.draw(quiet, 1), quiet, *_tokens()).max_scores is None
