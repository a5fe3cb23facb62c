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


def test_a_group_of_nearly_equal_rewards_is_dropped():
  flat = [episode(0, 1.0, task=1), episode(1, 1.05, task=1)]
  mixed = [episode(0, 1.0), episode(1, 0.0)]
  found, metrics = Denoise(DenoiseConfig()).observe(StepContext(1, None), [*flat, *mixed])
  assert [one.task_id for one in found] == [0, 0] and metrics["denoise/groups"] == 0.5


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


def test_a_part_that_the_reward_does_not_have_is_refused():
  with pytest.raises(ConfigError, match=r"signals\[0\]\.part='judge'"):
    DenoiseConfig(part="judge").check_run(smoke_experiment(), "config.rl.signals[0]")
