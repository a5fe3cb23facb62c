"""What stages earn: published terms, and what must not pay."""

import pytest

from agentjax.recipes.grandcode.lengths import AdaptiveLengthConfig, adaptive_length
from agentjax.recipes.grandcode.rewards import (
  difficulty,
  generator_reward,
  hypothesis_reward,
  joint_reward,
  length_penalty,
  solution_reward,
  summary_reward,
)
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Reward, Task

_TASK = Task(0, (), "", "x")


def test_a_hypothesis_is_paid_for_its_checks_and_for_what_the_solver_makes_of_it():
  assert hypothesis_reward(6, 8, caught=3, decoys=8) == 0.75
  assert joint_reward(1.0, [0, 1, 0, 0], 0.5) == pytest.approx(0.375)
  assert joint_reward(0.0, [0, 1, 0, 0], 0.5) == pytest.approx(-0.125)
  assert joint_reward(1.0, [], 0.5) == 0


def test_a_conjecture_that_refuses_nothing_earns_nothing():
  assert hypothesis_reward(8, 8, caught=0, decoys=8) == 0
  assert hypothesis_reward(0, 0, caught=0, decoys=0) == 0


def test_solutions_are_paid_in_the_published_order():
  slow, fast, faster = (
    solution_reward("right", seconds=s, brute_seconds=1.0) for s in (2.0, 0.5, 0.05)
  )
  assert solution_reward("broken") == solution_reward("wrong") == 0
  assert 0 < solution_reward("late") == 0.1 < slow == 0.5 < fast < faster == 1.0
  assert solution_reward("right") == 1.0


def test_a_generator_is_paid_for_what_it_separates_and_pays_for_invalid_inputs():
  assert generator_reward(10, 10, 3, 6) == 0.5
  assert generator_reward(5, 10, 3, 6) == 0.25
  assert generator_reward(0, 10, 0, 6) == generator_reward(1, 10, 0, 6) == 0
  assert generator_reward(0, 0, 0, 0) == 0


def test_a_summary_pays_for_its_length_beyond_the_budget():
  assert summary_reward(1.0, 100, 100) == 1.0
  assert summary_reward(1.0, 150, 100) == pytest.approx(0.9)
  assert summary_reward(1.0, 900, 100) == pytest.approx(0.8)
  assert summary_reward(0.0, 900, 100) == 0


def test_levels_are_fifths_of_success():
  assert [difficulty(s) for s in (1, 0.81, 0.8, 0.5, 0.21, 0.2, 0)] == [1, 1, 2, 3, 4, 5, 5]


def test_length_costs_most_on_easy_problems():
  cost = [length_penalty(300, level, budget=100, weight=0.2) for level in range(1, 6)]
  assert cost == pytest.approx([0.2, 0.1, 0, 0, 0])
  with pytest.raises(ValueError, match="allowed: 1 to 5"):
    length_penalty(1, 6, budget=1, weight=1)


def _episode(tokens, value, agent="solver"):
  builder = TrajectoryBuilder(step=1, task_id=0, sample=0, source="x")
  builder.append("user", [1], agent=agent)
  builder.append_sampled([4] * tokens, [-1.0] * tokens, [0.5] * tokens, 0, agent=agent)
  made = builder.build()
  made.reward_parts["environment"] = (
    Reward.invalid("no verdict") if value is None else Reward(value)
  )
  return made


def test_only_right_answers_of_the_named_seats_pay_by_the_level_of_their_group():
  score = adaptive_length(AdaptiveLengthConfig(budget=10, weight=0.2))
  easy = [_episode(20, 1.0), _episode(10, 1.0), _episode(20, 1.0)]
  assert [r.value for r in score(easy, _TASK)] == pytest.approx([0.2, 0, 0.2])
  hard = [_episode(20, 1.0), *(_episode(20, 0.0) for _ in range(9))]
  assert [r.value for r in score(hard, _TASK)] == [0.0] * 10
  mixed = [_episode(20, 1.0), _episode(20, 1.0, "hypothesis"), _episode(20, None)]
  assert [r.value for r in score(mixed, _TASK)] == pytest.approx([0.2, 0, 0])
  assert [r.value for r in score([_episode(20, None)], _TASK)] == [0.0]
