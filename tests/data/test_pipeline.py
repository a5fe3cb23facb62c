import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.data.mixture import mix
from agentjax.data.pipeline import TaskIterator
from agentjax.trajectory.record import Message, Task


def tasks(count, source="made"):
  return [Task(i, (Message("user", str(i)),), str(i), source) for i in range(count)]


def take(iterator, count):
  return [[t.id for t in next(iterator)] for _ in range(count)]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_every_epoch_is_a_new_order_without_repeats(count, batch, seed):
  batch = min(batch, count)
  iterator = TaskIterator(tasks(count), batch_size=batch, seed=seed)
  per_epoch = count // batch
  for _ in range(3):
    seen = [i for ids in take(iterator, per_epoch) for i in ids]
    assert len(set(seen)) == len(seen) == per_epoch * batch


def test_epochs_and_seeds_differ_and_a_seed_repeats_itself():
  def order(seed, epochs=2):
    return take(TaskIterator(tasks(16), batch_size=16, seed=seed), epochs)

  first, second = order(0)
  assert first != second
  assert order(0) == [first, second]
  assert order(1)[0] != first


def test_without_shuffling_tasks_come_in_their_order():
  iterator = TaskIterator(tasks(5), batch_size=2, seed=0, shuffle=False)
  assert take(iterator, 4) == [[0, 1], [2, 3], [0, 1], [2, 3]]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9), st.integers(1, 9))
def test_a_saved_position_goes_on_with_the_same_batches(before, after):
  original = TaskIterator(tasks(10), batch_size=3, seed=7)
  take(original, before)
  state = json.loads(json.dumps(original.get_state()))
  fresh = TaskIterator(tasks(10), batch_size=3, seed=7)
  fresh.set_state(state)
  assert take(fresh, after) == take(original, after)
  assert fresh.get_state() == original.get_state()


@pytest.mark.parametrize(
  ("changed", "name"),
  [
    ({"batch_size": 4}, "batch_size=3, this run 4"),
    ({"seed": 8}, "seed"),
    ({"shuffle": False}, "shuffle"),
    ({"tasks": tasks(11)}, "tasks=10, this run 11"),
  ],
)
def test_a_position_in_other_data_is_refused_by_name(changed, name):
  settings_ = {"tasks": tasks(10), "batch_size": 3, "seed": 7}

  def make(tasks, **rest):
    return TaskIterator(tasks, **rest)

  state = make(**settings_).get_state()
  with pytest.raises(ValueError, match=name):
    make(**{**settings_, **changed}).set_state(state)


@pytest.mark.parametrize(("count", "batch"), [(10, 0), (10, 11), (0, 1), (10, -1)])
def test_an_impossible_batch_size_is_refused_and_says_which_setting(count, batch):
  with pytest.raises(ValueError, match=f"batch_size={batch} with {count} tasks.*tasks_per_step"):
    TaskIterator(tasks(count), batch_size=batch, seed=0)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(seed):
  with pytest.raises(ValueError, match="seed"):
    TaskIterator(tasks(3), batch_size=1, seed=seed)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.integers(0, 200))
def test_every_prefix_of_a_mixture_keeps_the_proportions(weights, size):
  sources = [tasks(7, source=str(i)) for i in range(len(weights))]
  mixed = mix(sources, weights, size=size, first_id=50)
  assert [t.id for t in mixed] == list(range(50, 50 + size))
  for n in range(1, size + 1, 13):
    for i, weight in enumerate(weights):
      count = sum(t.source == str(i) for t in mixed[:n])
      assert abs(count - n * weight / sum(weights)) < len(weights)


def test_a_mixture_takes_each_source_in_order_and_starts_over():
  mixed = mix([tasks(3, "a"), tasks(2, "b")], [1.0, 1.0], size=10, first_id=0)
  taken = [(t.source, t.metadata["source_id"]) for t in mixed]
  assert [i for s, i in taken if s == "a"] == [0, 1, 2, 0, 1]
  assert [i for s, i in taken if s == "b"] == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(
  ("sources", "weights", "reason"),
  [
    ([], [], "0 sources"),
    ([tasks(1)], [1.0, 1.0], "1 sources with 2 weights"),
    ([tasks(0)], [1.0], "no tasks"),
    ([tasks(1)], [0.0], "positive"),
  ],
)
def test_an_impossible_mixture_is_refused(sources, weights, reason):
  with pytest.raises(ValueError, match=reason):
    mix(sources, weights, size=1, first_id=0)


def test_reading_and_scoring_tasks_never_loads_jax():
  code = """
import sys
import agentjax.adapters.tfds, agentjax.world, agentjax.worlds.sql, agentjax.rewards
from agentjax.data import DataConfig, load_tasks
from agentjax.worlds.question.word_problems import WordProblemConfig
assert len(load_tasks(DataConfig(WordProblemConfig(), train_size=5, test_size=5)).train) == 5
loaded = {"jax", "flax", "tensorflow", "torch"} & set(sys.modules)
assert not loaded, loaded
"""
  subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
