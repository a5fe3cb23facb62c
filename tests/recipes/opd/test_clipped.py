"""Clipped ratios of candidates: numbers by hand, gradients, and what the clip does in a run."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax import models
from agentjax.config import ConfigError
from agentjax.objectives import PolicyLossConfig
from agentjax.objectives.distillation import CandidateInputs, DistillationConfig, teacher_advantages
from agentjax.objectives.objective import policy_objective
from agentjax.objectives.policy_loss import policy_loss
from agentjax.recipes.opd import ClippedCandidates
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.signals.teacher import TeacherConfig, TeacherTargets, kept_places, teacher_divergences
from agentjax.training import OptimizerConfig
from agentjax.training.build import build_parts
from agentjax.training.experiment import resolve
from agentjax.training.learner import Learner
from tests.training.stages import extensions, staged_experiment
from tests.training.teachers import MODEL, WIDER, episodes, save_policy

# A candidate a column: clipped above, above but free, clipped below, below but free, inside of both
# bounds, beyond the dual clip, and a place that is not in the set.
RATIOS = np.array([1.5, 1.5, 0.5, 0.5, 1.1, 4.0, 9.0])
OLD = np.log([0.2, 0.3, 0.1, 0.1, 0.05, 0.05, 0.9])
TEACHER = OLD + np.array([0.7, -0.4, -0.9, 0.6, 0.2, -0.8, 5.0])
INSIDE = np.array([True] * 6 + [False])
CLIPPED = [True, False, True, False, False, True]


def case():
  """Two tokens; the second has the candidates of the first in another order and fewer of them."""
  order = [5, 4, 3, 2, 1, 0, 6]
  pair = [jnp.asarray(np.stack([x, x[order]])) for x in (OLD + np.log(RATIOS), OLD, TEACHER)]
  inside = np.stack([INSIDE, INSIDE[order] & (np.arange(7) > 1)])
  return CandidateInputs(
    log_probs=pair[0], old_log_probs=pair[1], teacher_log_probs=pair[2], inside=jnp.asarray(inside)
  )


def by_hand(inputs, weights, normalise):
  """The loss of each token, one candidate after the other."""
  result = []
  fields = (inputs.log_probs, inputs.old_log_probs, inputs.teacher_log_probs, inputs.inside)
  for now, old, teacher, inside in zip(*map(np.asarray, fields), strict=True):
    w = {"student_p": np.exp(old), "teacher_p": np.exp(teacher), "none": np.ones(7)}[weights]
    w = w / w[inside].sum() if normalise else w
    total = 0.0
    for v in np.flatnonzero(inside):
      a, r = w[v] * (teacher[v] - old[v]), np.exp(now[v] - old[v])
      one = max(-a * r, -a * min(max(r, 0.8), 1.2))
      total += min(one, -3.0 * a) if a < 0 else one
    result.append(total)
  return result


@pytest.mark.parametrize(
  ("weights", "normalise"),
  list(itertools.product(("student_p", "teacher_p", "none"), (True, False))),
)
def test_numbers_by_hand(weights, normalise, x64):
  loss, metrics = ClippedCandidates(weights, normalise)(case())
  np.testing.assert_allclose(loss, by_hand(case(), weights, normalise), rtol=1e-12)
  of_second = sum(np.array(CLIPPED)[:4]) / 4  # those at places 2 to 5
  np.testing.assert_allclose(metrics["candidate_clip_fraction"], [3 / 6, of_second])


def test_golden_numbers(x64):
  """Weights 1/6: bounds 1.2 .7, 1.5 .4, .8 .9, .5 .6, 1.1 .2 and the dual clip's 3 .8."""
  loss, _ = ClippedCandidates("none")(case())
  expected = (-1.2 * 0.7 + 1.5 * 0.4 + 0.8 * 0.9 - 0.5 * 0.6 - 1.1 * 0.2 + 3 * 0.8) / 6
  np.testing.assert_allclose(loss[0], expected, rtol=1e-12)


def test_gradients_are_the_finite_differences_and_0_where_it_clips(x64):
  inputs = case()

  def loss(now):
    return jnp.sum(ClippedCandidates()(dataclasses.replace(inputs, log_probs=now))[0])

  found, step = np.asarray(jax.grad(loss)(inputs.log_probs)), 1e-6
  for place in np.ndindex(found.shape):
    moved = [loss(inputs.log_probs.at[place].add(s)) for s in (step, -step)]
    assert found[place] == pytest.approx(float(moved[0] - moved[1]) / (2 * step), abs=1e-8)
  np.testing.assert_array_equal(found[0] == 0, [*CLIPPED, True])


def test_no_number_of_an_absent_place_reaches_loss_or_gradient():
  inputs = case()
  broken = {
    name: jnp.where(inputs.inside, getattr(inputs, name), jnp.nan)
    for name in ("log_probs", "old_log_probs", "teacher_log_probs")
  }

  def both(given):
    def loss(now):
      return jnp.sum(ClippedCandidates()(dataclasses.replace(given, log_probs=now))[0])

    return jax.value_and_grad(loss)(given.log_probs)

  for ours, wanted in zip(both(dataclasses.replace(inputs, **broken)), both(inputs), strict=True):
    np.testing.assert_array_equal(ours, wanted)
  empty = dataclasses.replace(inputs, inside=jnp.zeros_like(inputs.inside))
  assert not np.any(both(empty)[1]) and both(empty)[0] == 0


@pytest.mark.parametrize("weights", ["student_p", "none"])
def test_one_candidate_that_is_the_sampled_token_gives_the_sampled_form(weights, x64):
  random = np.random.default_rng(0)
  old, teacher = (jnp.asarray(random.normal(-2, 1, (3, 12))) for _ in range(2))
  now = old + jnp.asarray(random.normal(0, 0.8, (3, 12)))
  ones, settings = jnp.ones((3, 12)), PolicyLossConfig(dual_clip=3.0)

  def sampled(now):
    credit = teacher_advantages(teacher, old)
    return policy_loss(now, old, credit, ones, jnp.ones((3, 12), int), settings).per_token

  def candidates(now):
    given = (x[..., None] for x in (now, old, teacher, ones > 0))
    names = (field.name for field in dataclasses.fields(CandidateInputs))
    return ClippedCandidates(weights)(CandidateInputs(**dict(zip(names, given, strict=True))))[0]

  np.testing.assert_allclose(candidates(now), sampled(now), rtol=1e-12)
  gradients = [jax.grad(lambda x, f=f: jnp.sum(f(x)))(now) for f in (candidates, sampled)]
  np.testing.assert_allclose(*gradients, rtol=1e-12)
  assert np.any(np.asarray(gradients[0]) == 0)  # somewhere it clips


def test_padding_changes_neither_loss_nor_gradient():
  """More time steps, more kept places than tokens, and chunks of another size."""
  student = models.init(MODEL, jax.random.key(0))
  random = np.random.default_rng(0)
  hidden = jnp.asarray(random.normal(size=(2, 20, 16)), jnp.float32)
  weights = (random.uniform(size=(2, 20)) < 0.6).astype(np.float32)
  weights[:, 0] = 0
  kept = kept_places(weights, 1)
  shape = (*kept.shape, 6)
  targets = TeacherTargets(
    ids=jnp.asarray(random.integers(0, 264, shape)),
    log_probs=jnp.asarray(random.normal(-4, 1, shape), jnp.float32),
    inside=jnp.asarray(random.uniform(size=shape) < 0.7),
    old_log_probs=jnp.asarray(random.normal(-5.5, 0.5, shape), jnp.float32),
  )
  settings = DistillationConfig(
    form="top_k", candidates="union", top_k=3, candidate_loss=ClippedCandidates()
  )

  def run(model, hidden, kept, targets, weights):
    def loss(hidden):
      values, metrics = teacher_divergences(
        student, model, hidden, kept, targets, None, settings, 1.0
      )
      return jnp.sum(weights * values), metrics

    (value, metrics), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(hidden)
    return float(value), grad, float(np.sum(weights * metrics["candidate_clip_fraction"]))

  def longer(x, number):
    return jnp.pad(x, ((0, 0), (0, number)) + ((0, 0),) * (x.ndim - 2))

  value, grad, clipped = run(MODEL, hidden, kept, targets, weights)
  padded = jax.tree.map(lambda x: longer(x, 5), targets)
  other = dataclasses.replace(MODEL, logits_chunk=8)
  again = run(other, longer(hidden, 9), longer(jnp.asarray(kept), 5), padded, longer(weights, 9))
  assert again[0] == pytest.approx(value, rel=1e-5) and abs(value) > 1e-3
  np.testing.assert_allclose(again[1][:, :20], grad, atol=1e-6)
  assert not np.any(again[1][:, 20:]) and again[2] == pytest.approx(clipped, rel=1e-6)
  assert clipped > 0


def trained(directory, loss):
  """The policy after a step of two updates, and the step's metrics."""
  experiment = staged_experiment(ScheduleConfig())
  experiment.model = dataclasses.replace(MODEL)
  experiment.rollout.group_size = 2
  stage = experiment.rl
  stage.objective.advantage = dataclasses.replace(
    stage.objective.advantage, centre="none", scale="none"
  )
  stage.objective.distillation = DistillationConfig(
    form="top_k", top_k=4, candidates="union", candidate_loss=loss
  )
  stage.teachers = (TeacherConfig(str(directory / "teacher")),)
  stage.microbatch_rows, stage.minibatches = 2, 2
  stage.optimizer = OptimizerConfig(learning_rate=3e-2)
  parts = build_parts(resolve(experiment), directory, extensions())
  learner = Learner(parts, policy_objective(experiment.rl.objective))
  state, metrics = learner.rl_step(learner.begin_rl(learner.initial_state("rl")), episodes(), 1)
  policy = jax.tree.leaves(learner.policy(state))
  return np.concatenate([np.ravel(x) for x in policy]), metrics


def test_the_clip_acts_from_the_second_update_on(tmp_path):
  save_policy(tmp_path / "teacher", WIDER, seed=1)
  free = ClippedCandidates(clip_low=1.0, clip_high=1e6, dual_clip=None)
  (clipped, seen), (unclipped, without), (divergence, plain) = (
    trained(tmp_path, loss) for loss in (ClippedCandidates(), free, None)
  )
  # The first of the two updates is on policy: nothing is clipped there.
  assert 0 < seen["policy/candidate_clip_fraction"] <= 0.5
  assert without["policy/candidate_clip_fraction"] == 0
  assert "policy/candidate_loss" in seen and "policy/divergence" in plain
  assert np.abs(clipped - unclipped).max() > 1e-3
  assert np.abs(clipped - divergence).max() > 1e-3


def test_settings_that_cannot_be_are_named():
  own = ClippedCandidates()
  with pytest.raises(ConfigError, match="form='full'; allowed: 'top_k' with"):
    DistillationConfig(form="full", candidate_loss=own).validate()
  with pytest.raises(ConfigError, match="rest='bucket'; allowed: 'renormalise', the default"):
    DistillationConfig(form="top_k", rest="bucket", candidate_loss=own).validate()
  with pytest.raises(ConfigError, match="dual_clip=1.1; allowed: above 1"):
    ClippedCandidates(dual_clip=1.1).validate()
  settings = DistillationConfig(form="top_k", candidate_loss=ClippedCandidates("none"))
  assert DistillationConfig.from_dict(settings.to_dict(), "distillation") == settings
