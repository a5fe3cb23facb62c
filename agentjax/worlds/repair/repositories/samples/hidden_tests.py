from samples import (
  crosstab,
  histogram,
  longest_rise,
  median,
  mode,
  moving_sum,
  outliers,
  quantile,
  ranks,
)


def test_median():
  assert median([4, 1, 3, 2]) == 2.5
  assert median([7]) == 7
  assert median([5, 1, 9, 7, 3]) == 5


def test_median_of_nothing():
  raised = False
  try:
    median([])
  except ValueError:
    raised = True
  assert raised


def test_quantile():
  assert quantile([1, 2, 3, 4], 50) == 2
  assert quantile([1, 2, 3, 4], 51) == 3
  assert quantile([4, 3, 2, 1], 100) == 4
  assert quantile([4, 3, 2, 1], 0) == 1


def test_mode():
  assert mode([3, 3, 1, 1, 2]) == 1
  assert mode([2, 5, 5]) == 5
  assert mode([]) is None


def test_ranks_with_ties():
  assert ranks([20, 10, 20]) == [2.5, 1.0, 2.5]
  assert ranks([5, 5, 5]) == [2.0, 2.0, 2.0]


def test_moving_sum():
  assert moving_sum([1, 2, 3, 4], 3) == [6, 9]
  assert moving_sum([1, 2], 3) == []
  assert moving_sum([4, 5], 1) == [4, 5]


def test_moving_sum_needs_a_width():
  raised = False
  try:
    moving_sum([1, 2], 0)
  except ValueError:
    raised = True
  assert raised


def test_longest_rise():
  assert longest_rise([1, 2, 2, 3, 4, 1]) == 3
  assert longest_rise([3, 2, 1]) == 1
  assert longest_rise([]) == 0


def test_outliers():
  assert outliers([1, 2, 3, 2, 1, 50]) == [50]
  assert outliers([1, 2, 3, 2, 1, 5], 2) == [5]
  assert outliers([10, 12, 14, 16, 18, 2], 1) == [18, 2]
  assert outliers([]) == []


def test_histogram():
  assert histogram([0, 4, 5, 14], 5) == [2, 1, 1]
  assert histogram([10, 3, 20], 5, 10) == [1, 0, 1]
  assert histogram([], 3) == []


def test_crosstab():
  assert crosstab([("b", 1), ("a", 2), ("b", 1)]) == (["a", "b"], [1, 2], [[0, 1], [2, 0]])
