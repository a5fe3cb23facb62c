import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Flag, Status, Trajectory
from agentjax.trajectory.weights import (
  WeightConfig,
  apply_weight_rules,
  failed_turns,
  token_weights,
)

BAD_CALL, REFLECTION, GOOD_CALL = 1, 4, 7


def _episode(status: Status = Status.OK) -> Trajectory:
  """A failed call, a reflection whose call fails too, a good call; token 6 is <|call|>."""
  builder = TrajectoryBuilder(step=0, task_id=0, sample=0, source="s")
  builder.append("user", [9, 9])
  builder.append_sampled([10, 6], [-1, -1], [0, 0], 0)
  builder.append("tool", [11], flags=[Flag.TOOL_ERROR])
  builder.append("assistant", [4])  # markup before the turn
  builder.append_sampled([12, 6], [-1, -1], [0, 0], 0, flags=[Flag.REFLECTION])
  builder.append("tool", [13], flags=[Flag.TOOL_ERROR])
  builder.append("assistant", [4])
  builder.append_sampled([14, 6, 15], [-1] * 3, [0] * 3, 0, weights=[1, 1, 0])
  return builder.build(status=status)


def _joined(config: WeightConfig, status: Status = Status.OK) -> list[float]:
  config.validate()
  return np.concatenate(token_weights(_episode(status), config)).tolist()


@pytest.mark.parametrize(
  ("config", "expected"),
  [
    (WeightConfig(rules=("none",)), [1] * 13),
    (WeightConfig(rules=("role",)), [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0]),
    (WeightConfig(rules=("observations",)), [0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0]),
    (WeightConfig(rules=("role", "error_masked")), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0]),
    (
      WeightConfig(rules=("role", "error_masked"), error_factor=0.5),
      [0, 0, 0.5, 0.5, 0, 0, 0.5, 0.5, 0, 0, 1, 1, 0],
    ),
    (WeightConfig(rules=("role", "partial")), [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0]),
    (
      WeightConfig(rules=("role", "special_tokens"), special_token_ids=(6, 15)),
      [0, 0, 1, 3, 0, 0, 1, 3, 0, 0, 1, 3, 0],
    ),
    (
      WeightConfig(rules=("none", "error_masked")),
      [1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1],
    ),
    (WeightConfig(rules=("role", "incomplete")), [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0]),
  ],
)
def test_weights_are_the_product_of_the_rules(config, expected):
  assert _joined(config) == expected


@pytest.mark.parametrize(
  ("status", "kept"),
  [
    (Status.OK, True),
    (Status.POLICY_ERROR, True),  # a legitimate negative
    (Status.TRUNCATED, False),
    (Status.ENV_ERROR, False),
    (Status.VERIFIER_ERROR, False),
  ],
)
def test_an_incomplete_trajectory_teaches_nothing(status, kept):
  assert any(_joined(WeightConfig(rules=("role", "incomplete")), status)) == kept


def _said(*turns: list[int], status: Status = Status.OK) -> Trajectory:
  builder = TrajectoryBuilder(step=0, task_id=0, sample=0, source="s")
  for turn in turns:
    builder.append("user", [7] * 40)  # what others say does not count
    builder.append_sampled(turn, [-1] * len(turn), [0] * len(turn), 0)
  return builder.build(status=status)


_LOOP = [1, 2, 3] * 5  # the run 1, 2, 3 stands five times, 1, 2, 3, 1 four times


@pytest.mark.parametrize(
  ("turns", "length", "times", "repeats"),
  [
    ([_LOOP], 3, 5, True),
    ([_LOOP], 3, 6, False),
    ([_LOOP], 4, 5, False),
    ([_LOOP, [4], _LOOP], 3, 10, True),  # of all turns together
    ([[1, 2], [3, 1], [2, 3]] * 5, 3, 2, False),  # no run crosses turns
    ([[5] * 11], 3, 9, True),  # runs may overlap
    ([[1, 2]], 3, 2, False),  # shorter than a run
    ([list(range(99))], 1, 2, False),
  ],
)
def test_a_trajectory_that_repeats_itself_teaches_nothing(turns, length, times, repeats):
  config = WeightConfig(("role", "repetitive"), repeated_tokens=length, repetitions=times)
  config.validate()
  found = np.concatenate(token_weights(_said(*turns), config))
  assert found.any() == (not repeats)


@pytest.mark.parametrize(
  ("status", "kept_of_a_loop", "kept_of_others"),
  [
    (Status.OK, True, True),
    (Status.TRUNCATED, True, False),  # a failure, and a failure that nothing is known of
    (Status.ENV_ERROR, False, False),
    (Status.VERIFIER_ERROR, False, False),
  ],
)
def test_what_was_cut_off_while_it_repeated_itself_stays(status, kept_of_a_loop, kept_of_others):
  config = WeightConfig(("role", "incomplete_unless_repetitive"), repeated_tokens=3, repetitions=5)
  for turn, kept in ((_LOOP, kept_of_a_loop), (list(range(15)), kept_of_others)):
    assert np.concatenate(token_weights(_said(turn, status=status), config)).any() == kept


def test_a_failure_belongs_to_the_call_it_answers_in_every_branch():
  builder = TrajectoryBuilder(step=0, task_id=0, sample=0, source="s")
  builder.append("user", [1])
  shared = builder.append_sampled([2], [-1], [0], 0)
  builder.append("tool", [3])
  bad = builder.append_sampled([4], [-1], [0], 0)
  builder.append("tool", [5])  # two tools answer; the second fails
  builder.append("tool", [6], flags=[Flag.TOOL_ERROR])
  builder.append_sampled([7], [-1], [0], 0, parent=shared)
  flagged = builder.append_sampled([8], [-1], [0], 0, flags=[Flag.TOOL_ERROR])
  assert failed_turns(builder.build()) == {bad, flagged}
  assert failed_turns(_episode()) == {BAD_CALL, REFLECTION}


def test_markup_between_a_call_and_its_failure_is_passed_over():
  builder = TrajectoryBuilder(step=0, task_id=0, sample=0, source="s")
  builder.append("user", [1])
  builder.append("assistant", [4])
  cut_off = builder.append_sampled([2], [-1], [0], 0)
  builder.append("environment", [7])  # the <|end|> it lacked
  builder.append("tool", [5], flags=[Flag.TOOL_ERROR])
  builder.append("assistant", [4], flags=[Flag.TOOL_ERROR])
  assert failed_turns(builder.build()) == {cut_off}


def test_a_demonstration_is_weighed_by_the_same_rules():
  builder = TrajectoryBuilder(step=0, task_id=0, sample=0, source="s")
  builder.append("user", [1])
  builder.append("assistant", [4])
  builder.append("assistant", [2], weight=1.0)
  builder.append("tool", [3], flags=[Flag.TOOL_ERROR])
  builder.append("assistant", [4])
  builder.append("assistant", [5], weight=1.0)
  demonstration = builder.build()
  role = token_weights(demonstration, WeightConfig())
  masked = token_weights(demonstration, WeightConfig(rules=("role", "error_masked")))
  assert np.concatenate(role).tolist() == [0, 0, 1, 0, 0, 1]
  assert np.concatenate(masked).tolist() == [0, 0, 0, 0, 0, 1]


def test_applying_rules_leaves_the_record_alone():
  trajectory = _episode()
  config = WeightConfig(rules=("role", "special_tokens"), special_token_ids=(6,))
  before = [s.weights.copy() for s in trajectory.segments]
  once, again = apply_weight_rules(trajectory, config), apply_weight_rules(trajectory, config)
  for s, b, o, a in zip(trajectory.segments, before, once.segments, again.segments, strict=True):
    np.testing.assert_array_equal(s.weights, b)
    np.testing.assert_array_equal(o.weights, a.weights)
    assert o.weights.dtype == np.float32
  assert once.segments[GOOD_CALL].weights.tolist() == [1, 3, 0]
  assert once.address == trajectory.address


@pytest.mark.parametrize(
  ("config", "field"),
  [
    (WeightConfig(rules=()), "weights.rules="),
    (WeightConfig(rules=("role", "role")), "weights.rules="),
    (WeightConfig(rules=("none", "role")), "weights.rules="),
    (WeightConfig(rules=("observations", "role")), "weights.rules="),
    (WeightConfig(rules=("incomplete",)), "weights.rules="),
    (WeightConfig(rules=("roles",)), "weights.rules="),  # type: ignore[arg-type]
    (WeightConfig(rules=("role", "special_tokens")), "weights.special_token_ids="),
    (WeightConfig(special_token_ids=(6,)), "weights.special_token_ids="),
    (WeightConfig(error_factor=-1.0), "weights.error_factor=-1.0"),
    (WeightConfig(repeated_tokens=0), "weights.repeated_tokens=0"),
    (WeightConfig(repetitions=1), "weights.repetitions=1"),
  ],
)
def test_a_bad_setting_is_named(config, field):
  with pytest.raises(ConfigError, match=field):
    config.validate("weights")


def test_a_token_counts_as_often_as_branches_share_it():
  builder = TrajectoryBuilder(step=0, task_id=0, sample=0, source="s")
  builder.append("user", [1])
  shared = builder.append_sampled([2, 3], [-1, -1], [0, 0], 0)
  middle = builder.append_sampled([4], [-1], [0], 0)
  builder.append_sampled([5], [-1], [0], 0)
  builder.append_sampled([6], [-1], [0], 0, parent=middle)
  builder.append_sampled([7], [-1], [0], 0, parent=shared)
  builder.append("user", [8], parent=None)
  found = token_weights(builder.build(), WeightConfig(rules=("role", "leaves")))
  assert [w.tolist() for w in found[:6]] == [[0], [3, 3], [2], [1], [1], [1]]
  once = token_weights(builder.build(), WeightConfig())
  assert [w.tolist() for w in once[:6]] == [[0], [1, 1], [1], [1], [1], [1]]
