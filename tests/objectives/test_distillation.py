"""On-policy distillation: formulas against numbers, and what separates it from rewards."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.objectives import preset
from agentjax.objectives.distillation import (
  DistillationConfig,
  candidate_divergence,
  candidate_set,
  compare,
  divergence,
  entropy,
  keep_best,
  select_tokens,
  soft_or,
  teacher_advantages,
  without_absent,
)
from agentjax.objectives.objective import policy_objective
from agentjax.objectives.preparation import prepare

STUDENT = jax.nn.log_softmax(jnp.array([2.0, 1.0, 0.0, -1.0]))
TEACHER = jax.nn.log_softmax(jnp.array([0.5, 2.0, 0.0, -3.0]))
KINDS = ("reverse_kl", "forward_kl", "jsd", "mixed")


def _random_logits(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def test_one_position_by_hand():
  top = jnp.array([0, 1])
  both = STUDENT[top], TEACHER[top]
  assert divergence(STUDENT, TEACHER, "reverse_kl") == pytest.approx(0.66422, abs=1e-6)
  renormalised = candidate_divergence(*both, "reverse_kl", "renormalise")
  assert renormalised == pytest.approx(0.715798, abs=1e-6)
  # The released rewards are renormalised weights on log-ratios that are not.
  released = jax.nn.softmax(both[0]) * (both[1] - both[0])
  np.testing.assert_allclose(released, [-1.002364, 0.303604], atol=1e-6)
  assert -jnp.sum(released) != pytest.approx(float(renormalised), abs=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_divergence_is_zero_at_the_teacher_and_positive_elsewhere(kind, x64):
  p, q = (jax.nn.log_softmax(_random_logits(40, 7, seed=s)) for s in (0, 1))
  assert (divergence(p, q, kind, 0.3) > 0).all()
  np.testing.assert_allclose(divergence(q, q, kind, 0.3), 0, atol=1e-12)
  assert (divergence(p, q, "jsd") <= np.log(2)).all()
  np.testing.assert_allclose(divergence(p, q, "jsd"), divergence(q, p, "jsd"), atol=1e-12)


@pytest.mark.parametrize(
  ("which", "expected"),
  [
    ("student", {0, 1}),
    ("teacher", {1, 2}),
    ("intersection", {1}),
    ("union", {0, 1, 2}),
    ("difference", {0, 2}),
  ],
)
def test_sets_of_candidates_by_hand(which, expected):
  log_q = jnp.array([-3.0, -0.2, -1.0, -4.0])
  ids, inside = candidate_set(STUDENT, log_q, 2, which)
  assert sorted(ids[inside].tolist()) == sorted(expected)  # none twice
  assert ids.shape[-1] == DistillationConfig(form="top_k", top_k=2, candidates=which).places


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rest", ["renormalise", "bucket", "drop", "floor"])
def test_places_that_are_not_in_the_set_change_nothing(kind, rest, x64):
  """Neither the divergence nor its gradient; without any candidate both are 0."""
  if (kind, rest) == ("jsd", "floor"):
    return
  q, top = jax.nn.log_softmax(_random_logits(6, seed=1)), jnp.array([0, 3, 4])
  inside = jnp.array([True, False, True])

  def loss(logits, inside):
    p = jax.nn.log_softmax(logits)
    both = (without_absent(x[top], inside) for x in (p, q))
    return candidate_divergence(*both, kind, rest, 0.3, entropy(p))

  def few(logits):
    p = jax.nn.log_softmax(logits)
    return candidate_divergence(p[top[inside]], q[top[inside]], kind, rest, 0.3, entropy(p))

  logits = _random_logits(6)
  np.testing.assert_allclose(loss(logits, inside), few(logits), atol=1e-12)
  np.testing.assert_allclose(jax.grad(loss)(logits, inside), jax.grad(few)(logits), atol=1e-12)
  if rest != "floor":
    empty = jax.value_and_grad(loss)(logits, jnp.zeros(3, bool))
    np.testing.assert_allclose(empty[0], 0, atol=1e-12)
    np.testing.assert_allclose(empty[1], 0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rest", ["renormalise", "bucket", "drop"])
def test_gradients_are_the_finite_differences(kind, rest, x64):
  logits, q = _random_logits(6), jax.nn.log_softmax(_random_logits(6, seed=1))
  top = jnp.array([0, 3, 4])

  def loss(z):
    p = jax.nn.log_softmax(z)
    return divergence(p, q, kind, 0.3) + candidate_divergence(p[top], q[top], kind, rest, 0.3)

  step = 1e-6
  numeric = [(loss(logits + step * e) - loss(logits - step * e)) / (2 * step) for e in jnp.eye(6)]
  np.testing.assert_allclose(jax.grad(loss)(logits), numeric, atol=1e-8)


# The teacher gives .7 and .2 to two of four tokens: q' = 7/9 and 2/9 on them, e^-100 on the others.
@pytest.mark.parametrize(
  "kind, expected", [("reverse_kl", 12.000784), ("forward_kl", 0.688261), ("mixed", 9.172653)]
)
def test_a_teacher_that_has_nothing_outside_its_candidates_by_hand(kind, expected, x64):
  weight = 0.25
  p, q = np.exp([2.0, 1.0, 0.0, -1.0]), np.full(4, -100.0)
  p, top = p / p.sum(), np.array([1, 0])
  log_q = np.log([0.7, 0.2])
  q[top] = log_q - np.log(np.exp(log_q).sum())
  reverse = np.sum(p * (np.log(p) - q))
  forward = np.sum(np.exp(q[top]) * (q[top] - np.log(p[top])))
  by_hand = {"reverse_kl": reverse, "forward_kl": forward}
  by_hand["mixed"] = weight * forward + (1 - weight) * reverse
  found = candidate_divergence(
    jnp.asarray(np.log(p)[top]), jnp.asarray(log_q), kind, "floor", weight, -np.sum(p * np.log(p))
  )
  assert found == pytest.approx(by_hand[kind], abs=1e-9)
  assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "mixed"])
def test_its_gradients_are_the_finite_differences(kind, x64):
  logits, q = _random_logits(6), jax.nn.log_softmax(_random_logits(6, seed=1))
  top = jnp.array([0, 3, 4])

  def loss(z):
    p = jax.nn.log_softmax(z)
    return candidate_divergence(p[top], q[top], kind, "floor", 0.3, entropy(p))

  step = 1e-6
  numeric = [(loss(logits + step * e) - loss(logits - step * e)) / (2 * step) for e in jnp.eye(6)]
  np.testing.assert_allclose(jax.grad(loss)(logits), numeric, atol=1e-7)


def test_the_floor_needs_the_whole_student(x64):
  p = jax.nn.log_softmax(_random_logits(3))
  for kind, known in (("reverse_kl", None), ("jsd", entropy(p))):
    with pytest.raises(ValueError, match="entropies"):
      candidate_divergence(p, p, kind, "floor", 0.5, known)
  with pytest.raises(ConfigError, match="distillation.rest"):
    DistillationConfig(form="top_k", divergence="jsd", rest="floor").validate()


def test_the_sampled_advantage_is_an_unbiased_estimate_of_the_exact_gradient(x64):
  """Expectation over the token, exactly: sum_v p_v A_v grad log p_v = -grad KL(p || q)."""
  logits, q = _random_logits(6), jax.nn.log_softmax(_random_logits(6, seed=1))

  def surrogate(z):
    p = jax.nn.log_softmax(z)
    return -jnp.sum(jax.lax.stop_gradient(jnp.exp(p)) * teacher_advantages(q, p) * p)

  exact = jax.grad(lambda z: divergence(jax.nn.log_softmax(z), q, "reverse_kl"))(logits)
  np.testing.assert_allclose(jax.grad(surrogate)(logits), exact, atol=1e-12)


def test_candidates_bound_the_divergence_from_below_and_reach_it(x64):
  p, q = (jax.nn.log_softmax(_random_logits(50, 8, seed=s)) for s in (2, 3))
  bound = candidate_divergence(p[:, :4], q[:, :4], "reverse_kl", "bucket")
  whole = divergence(p, q, "reverse_kl")
  assert (bound <= whole + 1e-12).all() and (bound > 0).all()
  for rest in ("renormalise", "drop"):
    np.testing.assert_allclose(candidate_divergence(p, q, "reverse_kl", rest), whole, atol=1e-9)
  assert candidate_divergence(p[:, :4], q[:, :4], "reverse_kl", "drop").min() < 0


def test_soft_or_by_hand():
  h, d = jnp.array([0.1, 0.5, 2.0, 4.0]), jnp.array([3.0, 0.1, 0.2, 1.0])
  inside = jnp.ones(4, bool)
  wanted = [1, 0.102564, 0.504863, 1]
  np.testing.assert_allclose(soft_or(h, d, inside, 1.0), wanted, atol=1e-6)
  # What is outside takes part in no scale.
  wide = [jnp.append(v, jnp.array([99.0, -7.0])) for v in (h, d)]
  mask = jnp.append(inside, jnp.zeros(2, bool))
  np.testing.assert_allclose(soft_or(*wide, mask, 1.0), [*wanted, 0, 0], atol=1e-6)


def test_soft_or_keeps_the_confidently_wrong_token_that_entropy_drops():
  h = jnp.array([[0.01, 2.0, 1.8, 0.02], [0.03, 0.05, 1.5, 0.04]])
  d = jnp.array([[4.0, 0.5, 0.4, 0.01], [0.02, 0.01, 0.3, 0.03]])
  inside = jnp.ones(h.shape, bool)
  config = DistillationConfig(form="full", keep=0.25)
  by_both = select_tokens(h, d, inside, config)
  by_entropy = select_tokens(h, d, inside, dataclasses.replace(config, select_by="entropy"))
  assert by_both[0, 0] and not by_entropy[0, 0]
  assert by_both.sum() == by_entropy.sum() == 2


@pytest.mark.parametrize(("share", "count"), [(1.0, 7), (0.5, 4), (0.2, 2), (1e-3, 1)])
def test_the_best_share_is_kept_among_those_inside(share, count):
  scores = jnp.array([5.0, 1, 1, 1, 1, 1, 2, 9])
  inside = jnp.array([1, 1, 1, 1, 1, 1, 1, 0], bool)
  kept = keep_best(scores, inside, share)
  assert kept.sum() == count and kept[0] and not kept[7]
  assert bool(kept[6]) == (count > 1)


def test_overlap_of_equal_and_of_disjoint_tops():
  same = compare(STUDENT[None], STUDENT[None], 2)
  assert same["overlap"][0] == 1 and same["overlap_advantage"][0] == pytest.approx(0, abs=1e-6)
  assert same["entropy_gap"][0] == 0
  assert same["overlap_mass"][0] == pytest.approx(float(jnp.exp(STUDENT[:2]).sum()), abs=1e-6)
  half = compare(STUDENT[None], TEACHER[None][:, jnp.array([1, 3, 2, 0])], 2)
  assert half["overlap"][0] == 0.5 and half["overlap_advantage"][0] != 0
  apart = compare(STUDENT[None], STUDENT[None, ::-1], 2)
  assert apart["overlap"][0] == apart["overlap_mass"][0] == apart["overlap_advantage"][0] == 0
  gap = abs(float(entropy(STUDENT) - entropy(TEACHER)))
  assert compare(STUDENT[None], TEACHER[None], 2)["entropy_gap"][0] == pytest.approx(gap, abs=1e-6)


def _batch(packer, rewards=(1.0, 0.0)):
  weights = np.array([[0.0, 1, 1], [0, 1, 1]])
  behaviour = np.array([[0, -0.5, -1.0], [0, -2.0, -0.1]])
  teacher = packer(2, 3).pack([[0, -0.1, -3.0], [0, -2.5, -0.1]])
  return packer(2, 3).batch(weights, behaviour, rewards), teacher


def test_a_teacher_gives_every_token_its_own_credit_and_rewards_none(packer):
  batch, teacher = _batch(packer)
  prepared, metrics = prepare(batch, preset("opd"), teacher_log_probs=teacher)
  wanted = [[0, 0.4, -2.0], [0, -0.5, 0]]
  np.testing.assert_allclose(packer(2, 3).unpack(prepared.advantages), wanted, atol=1e-6)
  assert metrics["distillation/advantage"] == pytest.approx(np.mean([0.4, -2.0, -0.5, 0]))
  other, _ = prepare(_batch(packer, (0.3, 0.7))[0], preset("opd"), teacher_log_probs=teacher)
  np.testing.assert_array_equal(prepared.advantages, other.advantages)
  # GRPO has one number a sequence.
  plain, _ = prepare(batch, preset("grpo"))
  assert len(set(packer(2, 3).unpack(plain.advantages)[0, 1:].tolist())) == 1


@pytest.mark.parametrize(("centre", "largest"), [("none", 2.8), ("batch_mean", 2.1)])
def test_on_stored_tokens_the_gradient_is_that_of_a_regression(packer, centre, largest):
  """Of half the squared log-ratio, or of half its variance, whoever sampled the tokens."""
  batch, teacher = _batch(packer)
  layout = packer(2, 3)
  now = layout.pack([[0, -1.5, -0.2], [0, -0.3, -0.9]])
  config = preset("lightning_opd")
  config.distillation.centre = centre
  prepared, metrics = prepare(batch, config, old_log_probs=now, teacher_log_probs=teacher)
  assert metrics["distillation/advantage"] == pytest.approx((1.4 - 2.8 - 2.2 + 0.8) / 4)

  def loss(log_probs):
    return policy_objective(config)(prepared.with_scores(log_probs, log_probs))[0]

  def regression(log_probs):
    inside = jnp.where(prepared.weights > 0, teacher - log_probs, 0)
    mean = jnp.sum(inside) / 4 if centre == "batch_mean" else 0
    return 0.5 * (jnp.sum(inside**2) / 4 - mean**2)

  found = jax.grad(loss)(now)
  np.testing.assert_allclose(found, jax.grad(regression)(now), atol=1e-6)
  assert np.abs(layout.unpack(found)).max() == pytest.approx(largest / 4)


def test_rewards_join_with_their_weight_and_the_clip_is_the_teachers(packer):
  batch, teacher = _batch(packer)
  config = preset("grpo")
  config.distillation = DistillationConfig(clip=1.0, coefficient=2.0, outcome_weight=0.5)
  both = packer(2, 3).unpack(prepare(batch, config, teacher_log_probs=teacher)[0].advantages)
  outcome = packer(2, 3).unpack(prepare(batch, preset("grpo"))[0].advantages)
  wanted = 0.5 * outcome + 2 * np.array([[0, 0.4, -1.0], [0, -0.5, 0]])
  np.testing.assert_allclose(both, wanted, atol=1e-6)


def test_without_a_teacher_the_objective_says_what_is_missing(packer):
  with pytest.raises(ValueError, match="needs teacher_log_probs"):
    prepare(_batch(packer)[0], preset("opd"))
  prepared, _ = prepare(_batch(packer)[0], preset("opd_full"))
  with pytest.raises(ValueError, match="needs divergences"):
    policy_objective(preset("opd_full"))(prepared.with_scores(*[prepared.weights] * 2))


def test_dropped_tokens_are_out_of_the_mean(packer):
  """The loss is a mean over the kept tokens: dropping half is no smaller learning rate."""
  batch, _ = _batch(packer)
  layout = packer(2, 3)
  divergences = layout.pack([[7, 2.0, 4.0], [7, 6.0, 8.0]])
  selected = layout.pack([[False, True, False], [False, False, True]])
  config = preset("tip")
  prepared, _ = prepare(batch, config, selected=selected)

  def loss(divergences, log_probs):
    inputs = prepared.with_scores(log_probs, log_probs, divergences=divergences)
    return policy_objective(config)(inputs)[0]

  value, (to_divergence, to_log_prob) = jax.value_and_grad(loss, (0, 1))(
    divergences, batch.behaviour_log_probs
  )
  assert value == pytest.approx((2 + 8) / 2)
  wanted = [[0, 0.5, 0], [0, 0, 0.5]]
  np.testing.assert_allclose(layout.unpack(to_divergence), wanted, atol=1e-7)
  assert not to_log_prob.any()


def test_only_wrong_answers_are_pushed_away_in_the_first_phase_of_dsrl(packer):
  batch, _ = _batch(packer)
  layout = packer(2, 3)
  prepared, _ = prepare(batch, preset("nsr_prerl"))
  advantages = layout.unpack(prepared.advantages)
  assert not advantages[0].any() and (advantages[1, 1:] < 0).all()
  np.testing.assert_allclose(advantages[1, 1:], -0.5 * 0.01)  # centred, not scaled
  np.testing.assert_allclose(layout.unpack(prepared.coefficients), [[0, 0, 0], [0, 0.5, 0.5]])
  config = preset("nsr_prerl")
  config.advantage.learn_from = "positive"
  prepared, _ = prepare(batch, config)
  assert (layout.unpack(prepared.advantages) > 0).sum() == 2


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"keep": 0.0}, "keep=0.0; allowed: over 0, up to 1"),
    ({"clip": 1.0, "form": "full"}, "clip=1.0; allowed: none"),
    ({"centre": "batch_mean", "form": "full"}, "centre='batch_mean'; allowed: 'none' with"),
    ({"jsd_beta": 1.0}, "jsd_beta=1.0"),
    ({"top_k": 0}, "top_k=0"),
    ({"outcome_weight": -1.0}, "outcome_weight=-1.0"),
  ],
)
def test_impossible_settings_are_named(changes, message):
  with pytest.raises(ConfigError, match=message):
    DistillationConfig(**changes).validate()
