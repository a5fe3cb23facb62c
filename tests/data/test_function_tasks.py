"""Generated functions: repeatable, graded, apart from their test side, never met by a constant."""

import ast

import pytest

from agentjax.config import ConfigError
from agentjax.worlds.code.function_tasks import FunctionTaskConfig, function_tasks


def make(train=60, test=60, seed=0, **settings):
  return function_tasks(FunctionTaskConfig(**settings), train_size=train, test_size=test, seed=seed)


def test_the_same_seed_gives_the_same_tasks_and_another_gives_others():
  assert make(10, 5) == make(10, 5)
  assert make(10, 5).train == make(20, 5).train[:10]
  assert make(10, 5).train != make(10, 5, seed=1).train


def test_train_and_test_share_no_function():
  train = {t.answer for s in range(3) for t in make(seed=s).train}
  test = {t.answer for s in range(3) for t in make(seed=s).test}
  assert train and test and not train & test


def test_levels_are_as_often_and_count_the_stages():
  tasks = make(min_level=2, max_level=4).train
  levels = [t.metadata["level"] for t in tasks]
  assert [levels.count(n) for n in (2, 3, 4)] == [20, 20, 20]
  assert all(t.answer.count("  numbers = ") == t.metadata["level"] for t in tasks)


def test_no_constant_passes_what_is_kept_back():
  for task in make().train:
    asserts = task.metadata["unit_tests"]["source"].strip().splitlines()
    assert len(asserts) == 8
    shown = [line for line in asserts if line in task.prompt[0].content]
    kept = [ast.parse(line).body[0].test.comparators[0] for line in asserts[2:]]
    assert asserts[:2] == shown[:2]
    assert len({ast.unparse(node) for node in kept}) >= 2


@pytest.mark.parametrize(
  "settings", [{"min_level": 0}, {"max_level": 9}, {"tests": 2}, {"shown_tests": 7}]
)
def test_impossible_settings_are_refused(settings):
  with pytest.raises(ConfigError, match=r"config\.world\.tasks"):
    make(**settings)
