"""Memory of mistakes: repeats cost more and more, new mistakes nothing, and state comes back."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.config import ConfigError
from agentjax.recipes.meds.mistakes import (
  NOISE,
  MedsConfig,
  MistakeMemory,
  answer_place,
  density_clusters,
  repetition_penalty,
)

_WIDTH = 6


def _kind(direction, rng):
  """A feature of one kind of mistake, with a little of everything else."""
  return np.eye(_WIDTH)[direction] * rng.uniform(1, 5) + 0.005 * rng.standard_normal(_WIDTH)


@pytest.mark.parametrize(
  "members,expected",
  [(0, 0.0), (1, 0.069315), (2, 0.109861), (5, 0.179176), (6, 0.194591), (7, 0.2), (50, 0.2)],
)
def test_the_penalty_grows_with_the_cluster_up_to_its_bound(members, expected):
  assert repetition_penalty(members, 0.1, 0.2) == pytest.approx(expected, abs=1e-6)


def test_a_repeated_mistake_costs_more_each_time_and_a_new_one_nothing():
  rng, memory = np.random.default_rng(0), MistakeMemory(MedsConfig())
  costs = [memory.penalties(["task"], [_kind(0, rng)])[0] for _ in range(10)]
  # One earlier mistake is no cluster; from two on it is.
  assert costs[:2] == [0.0, 0.0]
  growing = costs[2:9]
  assert growing == sorted(growing) and growing[0] == pytest.approx(0.109861, abs=1e-6)
  assert costs[6] > costs[3] and costs[9] == pytest.approx(0.2)
  assert memory.penalties(["task"], [_kind(1, rng)]) == [0.0]
  assert memory.penalties(["another task"], [_kind(0, rng)]) == [0.0]


def test_noise_is_never_a_cluster_however_much_of_it_there_is():
  memory = MistakeMemory(MedsConfig(radius=0.05))
  rng = np.random.default_rng(1)
  lone = np.linalg.qr(rng.standard_normal((_WIDTH, _WIDTH)))[0]
  assert (density_clusters(lone, 0.05) == NOISE).all()
  memory.remember("task", lone)
  # Also right on top of one, and of all new ones.
  assert memory.penalties(["task"] * 7, [*lone, rng.standard_normal(_WIDTH)]) == [0.0] * 7


def test_members_of_one_batch_do_not_see_each_other():
  rng, memory = np.random.default_rng(0), MistakeMemory(MedsConfig())
  assert memory.penalties(["task"] * 4, [_kind(0, rng) for _ in range(4)]) == [0.0] * 4
  assert memory.penalties(["task"], [_kind(0, rng)])[0] == pytest.approx(0.1 * np.log(5))


def test_two_kinds_are_told_apart_and_counted_apart():
  rng, memory = np.random.default_rng(0), MistakeMemory(MedsConfig())
  memory.remember("task", np.stack([_kind(i, rng) for i in (0, 1, 0, 1, 1)]))
  assert memory.members("task", np.stack([_kind(i, rng) for i in (0, 1, 2)])) == [2, 3, 0]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_clusters_are_those_of_the_definition_in_any_order(seed):
  rng = np.random.default_rng(seed)
  points = rng.standard_normal((9, 2))
  points /= np.linalg.norm(points, axis=1, keepdims=True)
  labels = density_clusters(points, 0.3)
  near = np.linalg.norm(points[:, None] - points[None], axis=-1) <= 0.3
  reach = np.linalg.matrix_power(near.astype(int), 9) > 0
  same = (labels[:, None] == labels[None]) & (labels[:, None] != NOISE)
  np.testing.assert_array_equal(same | np.eye(9, dtype=bool), reach)
  order = rng.permutation(9)
  again = density_clusters(points[order], 0.3)
  np.testing.assert_array_equal(again == NOISE, labels[order] == NOISE)


def test_a_memory_that_was_saved_goes_on_as_if_it_had_not_been():
  rng = np.random.default_rng(0)
  memory, config = MistakeMemory(MedsConfig(most=4)), MedsConfig(most=4)
  memory.penalties(["a", "b", "a"], [_kind(0, rng), _kind(1, rng), _kind(0, rng)])
  copy = MistakeMemory(config)
  copy.set_state(json.loads(json.dumps(memory.get_state())))
  for _ in range(4):
    batch = [_kind(0, rng), _kind(1, rng)]
    assert copy.penalties(["a", "b"], batch) == memory.penalties(["a", "b"], batch)
  assert copy.get_state() == memory.get_state()
  # The oldest are forgotten: never more than four members.
  assert max(memory.members("a", np.stack([_kind(0, rng)]))) == 4


@pytest.mark.parametrize(
  "pieces,place",
  [
    ([b"So \\box", b"ed{", b"42", b"}"], 2),
    ([b"\\boxed{1} no, \\boxed", b"{7", b"}"], 1),
    ([b"", b"\\boxed{", b"", b"3}"], 3),
    ([b"no answer"], None),
    ([b"\\boxed{"], None),
  ],
)
def test_the_answer_is_the_token_after_the_last_marker(pieces, place):
  assert answer_place(pieces, "\\boxed{") == place


@pytest.mark.parametrize("field,value", [("radius", 0.0), ("marker", ""), ("neighbours", 0)])
def test_impossible_settings_name_the_field(field, value):
  with pytest.raises(ConfigError, match=f"config.rl.signals.{field}"):
    MedsConfig(**{field: value}).validate()
