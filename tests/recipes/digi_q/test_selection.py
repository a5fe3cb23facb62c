"""Which of some candidates is imitated."""

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.recipes.digi_q import ExtractionConfig
from agentjax.recipes.digi_q.selection import advantages, select


@pytest.mark.parametrize("used, share", [(1, 0.125), (4, 0.414), (16, 0.882)])
def test_the_best_of_eight_actions_is_found_as_often_as_chance_has_it(used, share):
  """``1 - (7/8)^N``; with N = 1 it is what a policy that draws evenly does anyway."""
  drawn = np.random.default_rng(0).integers(8, size=(40_000, 16))
  chosen = select(ExtractionConfig(stored=16, used=used), drawn / 8.0)
  best = drawn[np.arange(len(drawn)), chosen.best] == 7
  assert np.mean(best) == pytest.approx(share, abs=0.008)  # three standard errors


def test_a_state_without_a_good_action_is_left_out():
  found = np.array([[0.04, 0.05], [0.06, -1.0], [-0.5, -0.2]])
  for threshold, imitated in ((0.05, [False, True, False]), (0.0, [True, True, False])):
    chosen = select(ExtractionConfig(stored=2, used=2, threshold=threshold), found)
    assert chosen.imitated.tolist() == imitated
    assert chosen.best.tolist() == [1, 0, 1]


def test_only_candidates_that_are_used_and_can_be_imitated_count():
  found = np.array([[0.1, 0.9, 0.3, 0.95], [0.1, 0.9, 0.3, 0.95]])
  eligible = np.array([[True, False, True, True], [False, False, False, True]])
  chosen = select(ExtractionConfig(stored=4, used=3), found, eligible)
  assert chosen.best[0] == 2 and chosen.imitated.tolist() == [True, False]
  assert chosen.advantages.tolist() == [0.3, -np.inf]


@pytest.mark.parametrize("heads, golden", [("max", [[0.3, -0.1]]), ("min", [[-0.1, -0.2]])])
def test_an_advantage_takes_one_of_the_two_heads_on_either_side(heads, golden):
  actions, states = np.array([[[0.9, 0.2]], [[0.3, 0.5]]]), np.array([[0.6], [0.4]])
  found = advantages(ExtractionConfig(heads=heads), actions, states)
  np.testing.assert_allclose(found, golden)


def test_no_more_candidates_are_used_than_are_stored():
  with pytest.raises(ConfigError, match=r"used=8; allowed: at most extraction.stored=4"):
    ExtractionConfig(stored=4, used=8).validate()
