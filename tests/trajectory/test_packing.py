import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax.trajectory.builder import TrajectoryBuilder, TrajectoryError, check_trajectory
from agentjax.trajectory.columns import TEACHER_COLUMNS
from agentjax.trajectory.packing import (
  PackedSequence,
  PackingError,
  pack,
  plan_rows,
  repack,
  to_sequences,
  unpack,
)
from agentjax.trajectory.record import Reward, Status, Trajectory

PAD = 63
GRIDS = {
  "token_ids": PAD,
  "weights": 0,
  "behaviour_log_probs": 0,
  "entropies": 0,
  "versions": -1,
  "turns": -1,
  "positions": 0,
}


def _sequence(length: int, seed: int = 0, **about) -> PackedSequence:
  rng = np.random.default_rng((seed, length))
  return PackedSequence(
    name=f"sequence {seed}",
    token_ids=rng.integers(0, 60, length).astype(np.int32),
    weights=rng.random(length).astype(np.float32),
    behaviour_log_probs=-rng.random(length).astype(np.float32),
    entropies=rng.random(length).astype(np.float32),
    versions=rng.integers(-1, 5, length).astype(np.int32),
    turns=np.sort(rng.integers(0, 4, length)).astype(np.int32),
    **about,
  )


def test_what_a_teacher_said_goes_with_its_tokens_through_a_tree():
  """-1 and NaN stand on prompts, on what has no candidates and on padding."""
  builder = TrajectoryBuilder(step=0, task_id=0, sample=0, source="x")
  builder.append("user", [1, 2])
  for parent in (0, 0):
    builder.append_sampled([3, 4, 5], [-1.0] * 3, [0.0] * 3, 0, parent=parent)
  trajectory = builder.build(reward=Reward(1.0))
  for i in (1, 2):
    ids = np.arange(6, dtype=np.int32).reshape(3, 2) + 10 * i
    trajectory.segments[i].columns = {
      "teacher_top_ids": ids,
      "teacher_top_log_probs": -ids.astype(np.float32),
    }
  check_trajectory(trajectory)
  alone = _sequence(4, 7)
  batch = pack([*to_sequences([trajectory]), alone], row_length=16, pad_id=PAD)
  assert batch.columns.keys() == {"teacher_top_ids", "teacher_top_log_probs"}
  found, log_probs = batch.columns["teacher_top_ids"], batch.columns["teacher_top_log_probs"]
  parts = unpack(found, batch.segment_ids, 3)
  none = [[-1, -1]]
  np.testing.assert_array_equal(parts[0], 2 * none + [[10, 11], [12, 13], [14, 15]])
  np.testing.assert_array_equal(parts[1], 2 * none + [[20, 21], [22, 23], [24, 25]])
  np.testing.assert_array_equal(parts[2], 4 * none)
  known = found >= 0
  assert not known[batch.segment_ids == 0].any()
  np.testing.assert_array_equal(np.isnan(log_probs), ~known)
  np.testing.assert_array_equal(log_probs[known], -found[known].astype(np.float32))
  assert not batch.without(*TEACHER_COLUMNS).columns
  columns = trajectory.segments[1].columns
  trajectory.segments[1].columns = {"teacher_top_ids": columns["teacher_top_ids"]}
  with pytest.raises(TrajectoryError, match="teacher_top_ids .* without teacher_top_log_probs"):
    check_trajectory(trajectory)
  fewer = columns["teacher_top_log_probs"][:, :1]
  trajectory.segments[1].columns = {**columns, "teacher_top_log_probs": fewer}
  with pytest.raises(TrajectoryError, match="candidates=1 and teacher_top_ids has 2"):
    check_trajectory(trajectory)


LENGTHS = st.lists(st.integers(0, 16), min_size=1, max_size=24)


@given(lengths=LENGTHS, align=st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=50, deadline=None)
def test_aligned_sequences_start_on_the_grid(lengths, align):
  sequences = [_sequence(n, i) for i, n in enumerate(lengths)]
  batch = pack(sequences, row_length=16, pad_id=PAD, align=align)
  column = np.broadcast_to(np.arange(16), batch.token_ids.shape)
  first = (batch.positions == 0) & (batch.segment_ids != 0)
  assert (column[first] % align == 0).all()
  parts = unpack(batch.token_ids, batch.segment_ids, len(lengths))
  for part, sequence in zip(parts, sequences, strict=True):
    np.testing.assert_array_equal(part, sequence.token_ids)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, more_rows=st.integers(0, 3), more_places=st.integers(0, 3))
def test_unpacking_gives_back_what_was_packed(lengths, more_rows, more_places):
  sequences = [_sequence(n, i) for i, n in enumerate(lengths)]
  rows = plan_rows(lengths, 16).num_rows + more_rows
  places = len(lengths) + more_places
  batch = pack(sequences, row_length=16, pad_id=PAD, rows=rows, max_sequences=places)
  assert batch.token_ids.shape == (rows, 16) and batch.num_sequences == places
  for name in GRIDS:
    parts = unpack(getattr(batch, name), batch.segment_ids, places)
    assert len(parts) == places and not any(len(p) for p in parts[len(lengths) :])
    for part, sequence in zip(parts, sequences, strict=False):
      expected = np.arange(len(sequence)) if name == "positions" else getattr(sequence, name).copy()
      if name in ("weights", "behaviour_log_probs", "entropies"):
        expected[:1] = 0  # nothing stands before the first token to predict it from
      np.testing.assert_array_equal(part, expected)
  padding = batch.segment_ids == 0
  for name, fill in GRIDS.items():
    assert (getattr(batch, name)[padding] == fill).all()


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS)
def test_a_sequence_is_one_run_of_one_row(lengths):
  batch = pack([_sequence(n, i) for i, n in enumerate(lengths)], row_length=16, pad_id=PAD)
  for number, length in enumerate(lengths, start=1):
    rows, columns = np.nonzero(batch.segment_ids == number)
    assert len(rows) == length and len(set(rows.tolist())) <= 1
    if length:
      np.testing.assert_array_equal(columns, columns[0] + np.arange(length))


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 16), min_size=1, max_size=24))
def test_at_most_one_row_is_half_empty(lengths):
  plan = plan_rows(lengths, 16)
  tokens = np.bincount(plan.rows, weights=lengths, minlength=plan.num_rows)
  assert len(tokens) == plan.num_rows and (tokens > 0).all() and (tokens <= 16).all()
  assert (tokens <= 8).sum() <= 1


def test_first_fit_decreasing_fills_as_by_hand():
  plan = plan_rows([4, 7, 0, 3, 6, 10], 10)
  assert plan.rows.tolist() == [2, 1, -1, 1, 2, 0]
  assert plan.starts.tolist() == [6, 0, 0, 7, 0, 0]
  assert plan.num_rows == 3


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 9))
def test_repack_undoes_unpack(lengths, seed):
  batch = pack([_sequence(n, i) for i, n in enumerate(lengths)], row_length=16, pad_id=PAD)
  values = np.random.default_rng(seed).random(batch.segment_ids.shape)
  parts = unpack(values, batch.segment_ids, len(lengths))
  back = repack(parts, batch.segment_ids, fill=-7.0)
  np.testing.assert_array_equal(back, np.where(batch.segment_ids > 0, values, -7.0))


def test_unpack_keeps_trailing_axes():
  batch = pack([_sequence(3), _sequence(2, 1)], row_length=8, pad_id=PAD)
  values = np.arange(8 * 5).reshape(1, 8, 5)
  first, second = unpack(values, batch.segment_ids, 2)
  assert first.shape == (3, 5) and second.shape == (2, 5)


def _trajectory(
  task_id: int,
  sample: int,
  *,
  step: int = 0,
  tokens: int = 3,
  group: str = "",
  source: str = "s",
  reward: Reward = Reward(1.0),  # noqa: B008 - frozen
  status: Status = Status.OK,
) -> Trajectory:
  builder = TrajectoryBuilder(step=step, task_id=task_id, sample=sample, source=source, group=group)
  builder.append("user", [1, 2])
  builder.append_sampled(list(range(tokens)), [-1.0] * tokens, [0.5] * tokens, 2)
  return builder.build(reward=reward, status=status)


def test_groups_are_the_tasks_of_a_step_unless_named():
  sequences = to_sequences(
    [
      _trajectory(5, 0),
      _trajectory(5, 1),
      _trajectory(9, 0),
      _trajectory(5, 0, step=1),
      _trajectory(5, 0, source="other"),
      _trajectory(5, 2, group="hard"),
      _trajectory(9, 2, group="hard"),
      _trajectory(9, 1),
    ]
  )
  assert [s.group for s in sequences] == [0, 0, 1, 2, 3, 4, 4, 1]


def test_rewards_are_valid_only_where_nothing_failed():
  batch = pack(
    to_sequences(
      [
        _trajectory(0, 0, reward=Reward(2.0)),
        _trajectory(0, 1, reward=Reward.invalid("judge down")),
        _trajectory(0, 2, status=Status.ENV_ERROR),
        _trajectory(0, 3, status=Status.VERIFIER_ERROR),
        _trajectory(0, 4, status=Status.POLICY_ERROR, reward=Reward(0.0)),
        _trajectory(0, 5, status=Status.TRUNCATED, reward=Reward(-1.0)),
      ]
    ),
    row_length=32,
    pad_id=PAD,
    max_sequences=8,
  )
  assert batch.valid.tolist() == [True, False, False, False, True, True, False, False]
  assert batch.rewards.tolist() == [2, 0, 0, 0, 0, -1, 0, 0]
  assert batch.groups.tolist() == [0] * 6 + [-1, -1]


def test_a_tree_becomes_a_sequence_a_leaf_and_its_weights_count_once():
  builder = TrajectoryBuilder(step=0, task_id=0, sample=0, source="s")
  builder.append("user", [9])
  shared = builder.append_sampled([1, 2], [-1, -1], [0, 0], 0)
  builder.append_sampled([3], [-1], [0], 0)
  builder.append_sampled([4, 5], [-1, -1], [0, 0], 0, parent=shared)
  batch = pack(to_sequences([builder.build(reward=Reward(1.0))]), row_length=6, pad_id=PAD)
  ids = unpack(batch.token_ids, batch.segment_ids, 2)
  assert [i.tolist() for i in ids] == [[9, 1, 2, 3], [9, 1, 2, 4, 5]]
  assert batch.weights.sum() == 5  # tokens sampled in the tree
  assert batch.groups.tolist() == [0, 0] and batch.valid.all()


def test_an_episode_without_a_prompt_gives_no_sequence():
  nothing = Trajectory(0, 1, 0, "s", segments=[], status=Status.ENV_ERROR)
  assert [s.name for s in to_sequences([nothing, _trajectory(0, 0)])] == [
    "step=0, task=0, sample=0, leaf=1"
  ]


def test_dtypes_are_those_the_batch_documents():
  batch = pack([_sequence(3)], row_length=4, pad_id=PAD)
  dtypes = {k: str(v.dtype) for k, v in vars(batch).items() if k != "columns"}
  assert not batch.columns
  integers = ("token_ids", "segment_ids", "positions", "versions", "turns", "groups")
  assert dtypes == {
    **dict.fromkeys(integers, "int32"),
    **dict.fromkeys(("weights", "behaviour_log_probs", "entropies", "rewards"), "float32"),
    "valid": "bool",
  }


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: pack([], row_length=4, pad_id=0), "got no sequence"),
    (
      lambda: pack([_sequence(2), _sequence(5, 7)], row_length=4, pad_id=0),
      r"\(sequence 7\) has 5 tokens, row_length=4; raise row_length",
    ),
    (
      lambda: pack([_sequence(3, i) for i in range(3)], row_length=4, pad_id=0, rows=2),
      "need 3 rows of row_length=4, got rows=2",
    ),
    (
      lambda: pack([_sequence(1)] * 3, row_length=4, pad_id=0, max_sequences=2),
      "3 sequences for max_sequences=2",
    ),
    (
      lambda: pack([_sequence(1, 3, reward=float("nan"))], row_length=4, pad_id=0),
      r"\(sequence 3\) has reward nan marked valid",
    ),
    (
      lambda: pack([dataclasses.replace(_sequence(3), turns=np.zeros(2))], row_length=4, pad_id=0),
      r"has turns of shape \(2,\) for 3 token ids",
    ),
    (lambda: plan_rows([3, 9], 8), "sequence 1 has 9 tokens"),
    (lambda: unpack(np.zeros((1, 3)), np.ones((1, 4), int), 1), "do not start with the shape"),
    (lambda: unpack(np.zeros((1, 4)), np.full((1, 4), 3), 2), "go up to 3, num_sequences=2"),
    (lambda: repack([np.zeros(3)], np.ones((1, 4), int)), "do not match"),
  ],
)
def test_what_does_not_fit_is_named(make, message):
  with pytest.raises(PackingError, match=message):
    make()


def test_a_long_trajectory_is_named_by_its_address():
  with pytest.raises(PackingError, match="step=2, task=11, sample=3, leaf=1"):
    pack(to_sequences([_trajectory(11, 3, step=2, tokens=9)]), row_length=8, pad_id=PAD)


def test_a_thousand_trajectories_pack_in_a_moment():
  rng = np.random.default_rng(0)
  sequences = [_sequence(int(n), i) for i, n in enumerate(rng.integers(50, 1024, 1024))]
  pack(sequences[:8], row_length=1024, pad_id=PAD)
  seconds = []
  for _ in range(3):
    start = time.process_time()
    batch = pack(sequences, row_length=1024, pad_id=PAD)
    seconds.append(time.process_time() - start)
  assert min(seconds) < 0.3  # 0.03 s measured; the rest is for a busy machine
  assert (batch.segment_ids > 0).mean() > 0.95
