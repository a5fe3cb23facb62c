import numpy as np

from agentjax.rewards.process import monte_carlo_labels

NAN = float("nan")


def test_hard_labels_ask_for_one_success_and_soft_ones_for_the_share():
  played = np.array([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, NAN, 0], [NAN] * 4])
  np.testing.assert_array_equal(monte_carlo_labels(played, "hard"), [1, 0, 1, NAN])
  np.testing.assert_allclose(monte_carlo_labels(played, "soft"), [0.25, 0, 2 / 3, NAN])
