import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.trajectory.builder import (
  TrajectoryBuilder,
  TrajectoryError,
  check_trajectory,
  leaves,
  path,
  token_path,
  token_paths,
)
from agentjax.trajectory.record import Flag, Reward, Status, ToolRecord, Trajectory


def _builder() -> TrajectoryBuilder:
  return TrajectoryBuilder(step=3, task_id=7, sample=1, source="test")


def _sampled(builder: TrajectoryBuilder, ids: list[int], **where) -> int:
  n = len(ids)
  return builder.append_sampled(ids, [-0.5 * (k + 1) for k in range(n)], [0.25] * n, 4, **where)


@st.composite
def trees(draw) -> Trajectory:
  """Any forest of up to 12 segments; token values are unique, so a token tells its place."""
  builder, serial = _builder(), 0
  for index in range(draw(st.integers(1, 12))):
    parent = draw(st.none() | st.integers(0, index - 1)) if index else None
    n = draw(st.integers(0, 4))
    ids = list(range(serial, serial + n))
    serial += n
    if draw(st.booleans()):
      _sampled(builder, ids, parent=parent)
    else:
      builder.append("tool", ids, parent=parent)
  return builder.build()


@settings(max_examples=200, deadline=None)
@given(tree=trees())
def test_every_path_runs_from_a_root_to_its_leaf(tree):
  for leaf in leaves(tree):
    chain = path(tree, leaf)
    assert chain[-1] == leaf and tree.segments[chain[0]].parent is None
    assert all(tree.segments[b].parent == a for a, b in zip(chain, chain[1:], strict=False))
    tokens = token_path(tree, leaf)
    expected = [i for s in chain for i in tree.segments[s].token_ids]
    assert tokens.token_ids.tolist() == expected
    assert [tokens.segment_of.tolist().count(s) for s in chain] == [
      len(tree.segments[s]) for s in chain
    ]


@settings(max_examples=200, deadline=None)
@given(tree=trees())
def test_leaves_cover_the_tree_and_count_each_token_once(tree):
  paths = token_paths(tree)
  assert [p.segments[-1] for p in paths] == list(leaves(tree))
  total: dict[int, float] = {}
  for tokens in paths:
    for token, weight in zip(tokens.token_ids.tolist(), tokens.weights.tolist(), strict=True):
      total[token] = total.get(token, 0.0) + weight
  expected = {
    int(t): float(w) for s in tree.segments for t, w in zip(s.token_ids, s.weights, strict=True)
  }
  assert total == expected


def test_a_shared_prefix_keeps_its_weight_on_the_first_leaf():
  builder = _builder()
  builder.append("user", [1])
  shared = _sampled(builder, [2, 3])
  _sampled(builder, [4])
  _sampled(builder, [5], parent=shared)
  first, second = token_paths(builder.build())
  assert first.weights.tolist() == [0, 1, 1, 1]
  assert second.weights.tolist() == [0, 0, 0, 1]
  assert second.behaviour_log_probs.tolist() == [
    0,
    -0.5,
    -1.0,
    -0.5,
  ]  # only the weight is counted once
  assert second.sampled.tolist() == [False, True, True, True]


def test_turns_count_model_calls_along_a_path():
  builder = _builder()
  builder.append("user", [1])
  first = _sampled(builder, [2])
  builder.append("tool", [3])
  _sampled(builder, [4])
  builder.append("tool", [5])
  _sampled(builder, [6], parent=first)
  builder.append("system", [7], parent=None)
  _sampled(builder, [8])
  assert [s.turn for s in builder.segments] == [0, 0, 0, 1, 1, 1, 0, 0]


def test_turns_of_a_demonstration_count_too():
  builder = _builder()
  builder.append("user", [1])
  builder.append("assistant", [2])  # the markup before a turn
  builder.append("assistant", [3, 4], weight=1.0)
  builder.append("tool", [5])
  builder.append("assistant", [6], weight=1.0)
  trajectory = builder.build()
  tokens = token_path(trajectory, 4)
  assert tokens.weights.tolist() == [0, 0, 1, 1, 0, 1]
  assert tokens.turns.tolist() == [0, 0, 0, 0, 0, 1]
  assert not tokens.sampled.any() and (tokens.versions == -1).all()


def test_a_builder_records_all_it_is_told():
  builder = _builder()
  builder.append("user", [1], agent="planner", visible_to=("planner", "judge"), seconds=0.5)
  turn = builder.append_sampled(
    [5, 6], [-1.0, -2.0], [0.1, 0.2], [3, 4], weights=[1, 0], policy="old", flags=[Flag.REFLECTION]
  )
  builder.flag(turn, Flag.TOOL_ERROR)
  record = ToolRecord(0, "calculator", {"expression": "1"}, "ok", "1", 0.01)
  built = builder.build(
    status=Status.TRUNCATED, reward=Reward(0.5), tools=[record], answer="1", metadata={"a": 1}
  )
  assert built.address == (3, 7, 1) and built.status is Status.TRUNCATED
  assert (built.reward, built.answer, built.tools) == (Reward(0.5), "1", [record])
  assert built.metadata == {"a": 1}
  prompt, sampled = built.segments
  assert (prompt.agent, prompt.visible_to, prompt.seconds) == (
    "planner",
    ("planner", "judge"),
    0.5,
  )
  assert sampled.flags == {Flag.REFLECTION, Flag.TOOL_ERROR} and sampled.policy == "old"
  assert sampled.versions.tolist() == [3, 4] and sampled.weights.tolist() == [1, 0]


def test_an_unscored_trajectory_has_no_reward():
  builder = _builder()
  builder.append("user", [1])
  assert builder.build().reward == Reward.invalid("not scored")


@pytest.mark.parametrize("parent", [1, 5, -2])
def test_a_parent_must_stand_before(parent):
  builder = _builder()
  builder.append("user", [1])
  where = r"trajectory \(step=3, task=7, sample=1\) segment 1: parent="
  with pytest.raises(TrajectoryError, match=where):
    builder.append("tool", [2], parent=parent)
  assert len(builder.segments) == 1


@pytest.mark.parametrize(
  ("parents", "segment"), [((0, 0), 0), ((None, 1), 1), ((1, None), 0), ((None, -1), 1)]
)
def test_a_tree_with_a_cycle_or_a_stranger_is_refused(parents, segment):
  builder = _builder()
  builder.append("user", [1])
  builder.append("tool", [2])
  tree = builder.build()
  for s, parent in zip(tree.segments, parents, strict=True):
    s.parent = parent
  with pytest.raises(TrajectoryError, match=f"segment {segment}: parent="):
    check_trajectory(tree)
  with pytest.raises(TrajectoryError, match="parent="):
    path(tree, 1 if segment else 0)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("token_ids", np.array([1, -2], np.int32)),
    ("token_ids", np.array([1, 2], np.int64)),
    ("behaviour_log_probs", np.array([-1, np.nan], np.float32)),
    ("behaviour_log_probs", np.array([-1, -np.inf], np.float32)),
    ("behaviour_log_probs", np.array([-1, 0.5], np.float32)),
    ("behaviour_log_probs", np.array([-1], np.float32)),
    ("behaviour_log_probs", np.array([-1, -1], np.float64)),
    ("entropies", np.array([-0.5, 1], np.float32)),
    ("versions", np.array([0, -1], np.int32)),
    ("weights", np.array([1, -1], np.float32)),
    ("weights", np.array([1, np.inf], np.float32)),
    ("sampled", np.array([True, False])),
  ],
)
def test_impossible_token_data_is_refused_by_name(field, value):
  builder = _builder()
  _sampled(builder, [1, 2])
  tree = builder.build()
  tree.segments[0] = dataclasses.replace(tree.segments[0], **{field: value})
  named = "versions" if field == "sampled" else field
  with pytest.raises(TrajectoryError, match=rf"segment 0: {named}"):
    check_trajectory(tree)


def test_arrays_of_unlike_lengths_never_enter():
  builder = _builder()
  with pytest.raises(
    TrajectoryError, match=r"behaviour_log_probs is float32\[1\].*there are 2 token ids"
  ):
    builder.append_sampled([1, 2], [-1.0], [0.0, 0.0], 0)
  assert not builder.segments


def test_what_one_branch_is_paid_is_not_paid_to_another():
  builder = TrajectoryBuilder(step=0, task_id=0, sample=0, source="s")
  builder.append("user", [1, 2])
  one, other = builder.build(), builder.branch(1).build()
  one.reward_parts["environment"] = Reward(1.0)
  one.turn_rewards["environment"] = [1.0]
  assert not other.reward_parts and not other.turn_rewards


@pytest.mark.parametrize("paid", [[1.0], [1.0, None, 2.0], [float("nan"), None]])
def test_turn_rewards_that_fit_no_segments_are_refused(paid):
  builder = TrajectoryBuilder(step=0, task_id=0, sample=0, source="s")
  builder.append("user", [1, 2])
  builder.append_sampled([3], [-1.0], [0.5], 0)
  with pytest.raises(TrajectoryError, match=r"turn_rewards\['x'\] is .*; allowed: a finite number"):
    builder.build(turn_rewards={"x": paid})
