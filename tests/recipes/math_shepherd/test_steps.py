"""Completions from behind every step."""

import numpy as np
import pytest

from agentjax.recipes.math_shepherd.steps import monte_carlo_steps, solution_score
from agentjax.rewards.process import monte_carlo_labels
from tests.rewards.judging import run


def test_monte_carlo_finds_the_step_after_which_nothing_helps():
  keys = []

  async def complete(steps, key):
    keys.append(key)
    if key % 7 == 0:
      return None
    return "wrong" not in steps and key % 2 == 0

  played = run(monte_carlo_steps(["a", "b", "wrong", "c"], complete, completions=16, key=4))
  assert played.shape == (4, 16) and len(set(keys)) == 64
  assert list(monte_carlo_labels(played, "hard")) == [1, 1, 0, 0]
  soft = monte_carlo_labels(played, "soft")
  assert solution_score(soft) == 0 and solution_score(soft[:2]) > 0.2
  again = run(monte_carlo_steps(["a", "b", "wrong", "c"], complete, completions=16, key=4))
  np.testing.assert_array_equal(played, again)


def test_a_solution_is_as_good_as_its_weakest_step():
  steps = [0.5, 0.25, 1.0]
  for how, value in (("min", 0.25), ("product", 0.125), ("mean", 7 / 12), ("last", 1.0)):
    assert solution_score(steps, how) == pytest.approx(value)
  with pytest.raises(ValueError, match="at least one"):
    solution_score([])
