"""What AgentCPM-Explore drops, by hand."""

import pytest

from agentjax.config import ConfigError
from agentjax.recipes.agentcpm.denoise import Denoise, DenoiseConfig
from agentjax.signals.signal import StepContext
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Reward, Status
from tests.training.smoke import smoke_experiment


def episode(sample, reward, *, turns=2, status=Status.OK, right=None, task=0):
  builder = TrajectoryBuilder(step=1, task_id=task, sample=sample, source="x")
  builder.append("user", [1])
  for _ in range(turns):
    builder.append_sampled([2], [-1.0], [0.5], 0)
    builder.append("tool", [3])
  made = builder.build(reward=Reward(reward), status=status)
  made.reward_parts = {"exact_match": Reward(float(reward >= 1 if right is None else right))}
  return made


def kept(episodes, **settings):
  found, metrics = Denoise(DenoiseConfig(**settings)).observe(StepContext(1, None), episodes)
  return [one.sample for one in found], metrics


def test_lucky_answers_and_cut_episodes_are_dropped():
  """Plain GRPO trains on all five."""
  group = [
    episode(0, 1.0, turns=1),
    episode(1, 1.0),
    episode(2, 0.0),
    episode(3, 0.0, turns=1),
    episode(4, 0.0, status=Status.TRUNCATED),
  ]
  samples, metrics = kept(group)
  assert samples == [1, 2, 3]
  assert metrics == {"denoise/kept": 0.6, "denoise/groups": 1.0}
  assert kept(group, few_turns=0, truncated=1)[0] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("spread", [0.0, 0.2])
def test_a_group_without_a_difference_in_its_outcomes_is_dropped(spread):
  """However much the rest of the reward, or turns, differ in it."""
  right = [episode(0, 1.0, task=1, turns=2), episode(1, 1.2, task=1, turns=5)]
  wrong = [episode(0, 0.0, task=2, turns=2), episode(1, 0.2, task=2, turns=5)]
  mixed = [episode(0, 1.0), episode(1, 0.0)]
  denoise = Denoise(DenoiseConfig(spread=spread))
  found, metrics = denoise.observe(StepContext(1, None), [*mixed, *right, *wrong])
  assert [one.task_id for one in found] == [0, 0]
  assert metrics["denoise/groups"] == pytest.approx(1 / 3)


def test_among_right_answers_fewer_turns_earn_more_and_among_wrong_ones_more():
  """Turns 3, 5, 5, 9 of right ones: +.1, 0, 0, -.1; 10 and 40 of wrong ones: -.1, +.1. The right
  one of one turn has no place among them, and one that ran out has."""
  group = [episode(i, 1.0, turns=n) for i, n in enumerate((3, 5, 5, 9, 1))]
  group += [episode(5, 0.0, turns=10), episode(6, 0.0, turns=40, status=Status.TRUNCATED)]
  found, _ = Denoise(DenoiseConfig(spread=0.2)).observe(StepContext(1, None), group)
  assert [one.sample for one in found] == [0, 1, 2, 3, 5, 6]
  paid = [one.reward.value for one in found]
  assert paid == pytest.approx([1.1, 1.0, 1.0, 0.9, -0.1, 0.1])
  assert [one.reward.value for one in group[:4]] == [1.0] * 4  # the record stays as it was


def test_the_outcomes_are_compared_before_lucky_answers_are_dropped():
  """One alone of its kind gets no bonus."""
  group = [episode(0, 1.0, turns=1), episode(1, 0.0, turns=2), episode(2, 1.0, turns=4)]
  found, _ = Denoise(DenoiseConfig(spread=0.2)).observe(StepContext(1, None), group)
  assert [(one.sample, one.reward.value) for one in found] == [(1, 0.0), (2, 1.0)]
  assert kept(group[:2])[0] == [1]


def test_a_step_without_anything_left_keeps_its_episodes():
  samples, metrics = kept([episode(0, 0.0), episode(1, 0.0)])
  assert samples == [0, 1] and metrics["denoise/kept"] == 0


@pytest.mark.parametrize(
  ("right", "wrong", "left"), [(1, 7, (1, 2)), (6, 1, (3, 1)), (4, 4, (4, 4))]
)
def test_balance_leaves_one_more_wrong_or_two_more_right(right, wrong, left):
  group = [episode(i, float(i < right)) for i in range(right + wrong)]
  samples, _ = kept(group, balance=True)
  assert (sum(i < right for i in samples), sum(i >= right for i in samples)) == left
  assert samples == kept(group, balance=True)[0]


@pytest.mark.parametrize(
  ("settings", "field"),
  [
    ({"balance": True, "spread": 0.2}, "spread"),
    ({"spread": 0.2, "truncated": 1}, "truncated"),
    ({"balance": True, "truncated": 1}, "truncated"),
  ],
)
def test_settings_of_rules_that_are_replaced_are_refused(settings, field):
  with pytest.raises(ConfigError, match=rf"signals\[0\]\.{field}="):
    DenoiseConfig(**settings).check_run(smoke_experiment(), "config.rl.signals[0]")


def test_a_part_that_the_reward_does_not_have_is_refused():
  with pytest.raises(ConfigError, match=r"signals\[0\]\.part='judge'"):
    DenoiseConfig(part="judge").check_run(smoke_experiment(), "config.rl.signals[0]")
