"""Losses of methods that are configs, from the configs themselves, against plain GRPO."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentjax.objectives import AdvantageConfig, ObjectiveConfig, policy_objective, prepare
from agentjax.recipes.scorers.lengths import overlong
from agentjax.rewards.formula import Formula
from agentjax.training import load_experiment
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.packing import pack, to_sequences
from agentjax.trajectory.record import Reward, Task

_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
_GRPO = ObjectiveConfig()


def objective(name):
  return load_experiment(_CONFIGS / f"{name}.py").rl.objective


def episode(sample, reward, tokens=1, log_prob=-1.0):
  builder = TrajectoryBuilder(step=1, task_id=0, sample=sample, source="x")
  builder.append("user", [1, 2])
  builder.append_sampled([3] * tokens, [log_prob] * tokens, [0.5] * tokens, 0)
  return builder.build(reward=Reward(reward))


def pulls(config, episodes, ratios=None, old=None):
  """By episode, minus the gradient of the loss at its drawn tokens.

  Args:
    ratios: of the present policy to the one before the update, an episode each.
    old: log-probs of the trainer before the update, an episode each; the sampler's if None.
  """
  batch = pack(to_sequences(episodes), row_length=64, pad_id=0)
  ids = np.asarray(batch.segment_ids)
  inside = np.asarray(batch.weights) > 0

  def spread(values, fill):
    padded = np.array([fill, *values], np.float32)
    return jnp.where(jnp.asarray(inside), padded[np.minimum(ids, len(values))], fill)

  before = batch.behaviour_log_probs if old is None else spread(old, -1.0)
  prepared, _ = prepare(batch, config, old_log_probs=before, reference_log_probs=before)
  shift = jnp.log(spread(ratios or [1.0] * len(episodes), 1.0))

  def loss(x):
    return policy_objective(config)(prepared.with_scores(x, jnp.ones_like(x)))[0]

  found = -np.asarray(jax.grad(loss)(prepared.old_log_probs + shift))
  return [found[inside & (ids == i + 1)] for i in range(len(episodes))]


# GRPO-TCR


def test_a_long_episode_weighs_by_its_tokens():
  """Lengths 1 and 9: 1 to 9 by means over tokens, 1 to 1 by means over sequences."""
  group = [episode(0, 1.0, 1), episode(1, 0.0, 9)]
  by_sequence = ObjectiveConfig(AdvantageConfig())
  by_sequence.policy_loss.aggregation = "sequence_mean_token_mean"
  for config, ratio in ((objective("grpo_tcr_word_problems"), 9), (by_sequence, 1)):
    short, long = pulls(config, group)
    assert -long.sum() / short.sum() == pytest.approx(ratio, rel=1e-5)


def test_an_unlikely_token_may_rise_further():
  """A ratio of 1.25 is within 1.28 and beyond 1.2."""
  group = [episode(0, 1.0), episode(1, 0.0)]
  assert pulls(objective("grpo_tcr_word_problems"), group, [1.25, 1.0])[0][0] > 0
  assert pulls(_GRPO, group, [1.25, 1.0])[0][0] == 0


def test_the_penalty_grows_over_the_last_fifth_of_the_budget():
  experiment = load_experiment(_CONFIGS / "grpo_tcr_word_problems.py")
  settings = experiment.reward.settings["overlong"]
  assert (settings.limit, settings.buffer, settings.penalty) == (96, 19, 1.0)
  assert (experiment.rl.selection.above, experiment.rl.selection.refill) == (0.0, 10)


def test_an_episode_has_room_for_the_whole_penalty():
  """The longest prompt has 57 tokens, and the results of a worked solution up to 21."""
  experiment = load_experiment(_CONFIGS / "grpo_tcr_word_problems.py")
  score = overlong(experiment.reward.settings["overlong"])
  longest = episode(0, 0.0, tokens=experiment.rollout.max_total_tokens - 57 - 21)
  assert score(longest, Task(0, (), "", "x")) <= -1
  assert score(episode(0, 0.0, tokens=51), Task(0, (), "", "x")) == 0  # the longest solution


# Clip rules


@pytest.mark.parametrize(
  ("name", "updates"), [("grpo_tcr", 4), ("aepo", 4), ("agent0", 4), ("arpo", 4), ("sppo", 2)]
)
def test_a_method_of_clip_bounds_has_updates_on_which_they_act(name, updates):
  stage = load_experiment(_CONFIGS / f"{name}_word_problems.py").rl
  assert stage.minibatches * stage.epochs == updates


# DART


def test_tokens_weigh_by_trainer_over_sampler_and_by_one_at_most():
  """Sampler (.9, .1), trainer (.5, .5): .9 w = .5 is the true share of the first arm, .1 w = .1 is
  less than the true .5 of the second."""
  group = [episode(0, 1.0, log_prob=np.log(0.9)), episode(1, 0.0, log_prob=np.log(0.1))]
  first, second = pulls(objective("dart_word_problems"), group, old=[np.log(0.5)] * 2)
  plain = pulls(_GRPO, group, old=[np.log(0.5)] * 2)
  assert first[0] / plain[0][0] == pytest.approx(0.5 / 0.9, rel=1e-4)
  assert second[0] / plain[1][0] == pytest.approx(1, rel=1e-4)


# A3T


def test_groups_without_a_difference_teach_and_failures_push_as_much_as_successes():
  config = objective("a3t_word_problems")
  wins, losses = [episode(i, 1.0) for i in range(2)], [episode(i, -1.0) for i in range(2)]
  assert all(p[0] == 0.0 for p in pulls(_GRPO, wins))
  up, down = pulls(config, wins), pulls(config, losses)
  np.testing.assert_allclose([p[0] for p in up], [0.5, 0.5])
  np.testing.assert_allclose([p[0] for p in down], [-0.5, -0.5])


def test_with_successes_alone_it_is_supervised_learning_on_them():
  """Rewards of 1 and 0: the gradient is that of the log-likelihood of the successes."""
  found = pulls(objective("a3t_word_problems"), [episode(0, 1.0, 3), episode(1, 0.0, 2)])
  np.testing.assert_allclose(found[0], [0.5] * 3)
  np.testing.assert_allclose(found[1], [0.0] * 2)


# AgentCPM-Explore


def test_a_bonus_by_turns_stays_small_where_wrong_episodes_alone_are_left():
  """Rewards of -.1, 0, .1 against one of 1 and 0; divided by deviations they would pull alike."""
  config = objective("agentcpm_word_problems")
  bonus = pulls(config, [episode(i, reward) for i, reward in enumerate((-0.1, 0.0, 0.1))])
  outcome = pulls(config, [episode(0, 1.0), episode(1, 0.0)])
  # .15 to 1 by advantage; a loss is a mean over its three, or two, episodes.
  assert 3 * bonus[2][0] == pytest.approx(0.15 * 2 * outcome[0][0], rel=1e-5)


# IPA


def test_failures_are_learnt_with_the_clipped_ratio_and_successes_with_weight_1():
  experiment = load_experiment(_CONFIGS / "ipa_word_problems.py")
  pay = Formula(experiment.reward.formula)
  rewards = [pay.evaluate({"exact_match": Reward(found)}).value for found in (1.0, 0.0, 0.0)]
  assert rewards[0] >= experiment.world.success > rewards[1]
  group = [episode(i, reward) for i, reward in enumerate(rewards)]
  found = pulls(experiment.rl.objective, group, [0.5, 0.5, 2.0])
  np.testing.assert_allclose([p[0] * 3 for p in found], [1.0, -0.5, -1.0], rtol=1e-5)


# Kimi


def _trained(config, rewards, steps=1500, rate=0.1):
  """Log-ratios of three arms to the uniform policy that sampled each once."""
  start = float(np.log(1 / 3))
  group = [episode(i, reward, log_prob=start) for i, reward in enumerate(rewards)]
  batch = pack(to_sequences(group), row_length=64, pad_id=0)
  prepared, _ = prepare(batch, config)
  arm = jnp.maximum(batch.segment_ids - 1, 0)

  def loss(logits):
    log_probs = jax.nn.log_softmax(logits)[arm]
    return policy_objective(config)(prepared.with_scores(log_probs, jnp.ones_like(log_probs)))[0]

  step = jax.jit(lambda logits, _: (logits - rate * jax.grad(loss)(logits), None))
  logits, _ = jax.lax.scan(step, jnp.zeros(3), None, length=steps)
  return np.asarray(jax.nn.log_softmax(logits)) - start


def test_log_ratios_end_at_their_targets_and_do_not_run_on_to_the_best_arm():
  """tau .1, rewards 0, .01, .02: targets -.1, 0, .1, up to the norm of the policy, 1/2 var A."""
  config = objective("kimi_word_problems")
  found = _trained(config, [0.0, 0.01, 0.02])
  np.testing.assert_allclose(found, [-0.1, 0.0, 0.1], atol=0.01)
  np.testing.assert_allclose(_trained(config, [0.0, 0.01, 0.02], steps=3000), found, atol=1e-3)
  unbounded = ObjectiveConfig(AdvantageConfig(scale="none", multiplier=10.0))
  unbounded.policy_loss.clip = "none"
  assert _trained(unbounded, [0.0, 0.01, 0.02], steps=3000)[2] > 0.5
