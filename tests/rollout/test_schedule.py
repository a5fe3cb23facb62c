"""Which groups a step takes, and what becomes of tokens that are too old."""

import dataclasses
import itertools

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.rollout.schedule import (
  Pending,
  ScheduleConfig,
  StalenessError,
  bound_staleness,
  choose,
)
from agentjax.trajectory.builder import TrajectoryBuilder


def asynchronous(staleness, stale="wait"):
  return ScheduleConfig("async", staleness, stale)


@pytest.mark.parametrize(
  "config, field",
  [
    (ScheduleConfig("async"), "staleness=None"),
    (ScheduleConfig("async", -1), "staleness=-1"),
    (ScheduleConfig("sync", 2), "staleness=2"),
    (ScheduleConfig("one_step_off", None, "mask"), "stale='mask'"),
    (ScheduleConfig("later"), "mode='later'"),  # type: ignore[arg-type]
  ],
)
def test_a_schedule_that_says_nothing_is_refused_by_field(config, field):
  with pytest.raises(ConfigError, match=rf"config\.rl\.schedule\.{field}"):
    config.validate()


def test_the_bound_follows_from_the_mode():
  bounds = [ScheduleConfig(), ScheduleConfig("one_step_off"), asynchronous(3), asynchronous(0)]
  assert [c.bound for c in bounds] == [0, 1, 3, 0]
  assert [c.repeatable for c in bounds] == [True, True, False, True]


def test_the_oldest_whole_groups_go_first():
  pending = [Pending(k, v, True) for k, v in ((3, 5), (1, 6), (2, 5), (0, 7))]
  assert choose(pending, 7, 2, asynchronous(4)) == [2, 3]


def test_a_step_waits_for_a_group_that_would_be_too_old_for_the_next():
  young = [Pending(i, 4, True) for i in range(1, 4)]
  straggler = Pending(0, 3, False)
  assert choose([straggler, *young], 4, 2, asynchronous(2)) == [1, 2]
  assert choose([straggler, *young], 5, 2, asynchronous(2)) is None
  assert choose([straggler._replace(whole=True), *young], 5, 2, asynchronous(2)) == [0, 1]
  assert choose([straggler, *young], 5, 2, asynchronous(2, "mask")) == [1, 2]


def test_it_looks_further_ahead_than_the_next_step():
  # Three of version 0 fall due at step 2, of which each step trains one: one must go now.
  slow = [Pending(i, 0, False) for i in range(2)]
  assert choose([*slow, Pending(2, 1, True)], 1, 1, asynchronous(2)) is None
  assert choose([slow[0], Pending(1, 0, True), Pending(2, 1, True)], 1, 1, asynchronous(2)) == [1]


@pytest.mark.parametrize("bound, size", [(0, 2), (1, 1), (1, 3), (2, 2), (4, 2)])
def test_whatever_ends_first_no_group_is_ever_too_old_and_some_choice_always_comes(bound, size):
  rng = np.random.default_rng(bound * 10 + size)
  for _ in range(30):
    names, pending, taken = itertools.count(), [], []
    for step in range(12):
      while len(pending) < (bound + 1) * size:
        pending.append(Pending(next(names), step, False))
      chosen = None
      while chosen is None:
        running = [i for i, p in enumerate(pending) if not p.whole]
        if running and rng.random() < 0.7:
          i = running[int(rng.integers(len(running)))]
          pending[i] = pending[i]._replace(whole=True)
        chosen = choose(pending, step, size, asynchronous(bound))
        assert running or chosen is not None
      assert len(chosen) == size
      assert all(step - p.version <= bound for p in pending if p.key in chosen)
      taken += chosen
      pending = [p for p in pending if p.key not in chosen]
    assert len(taken) == len(set(taken)) == 12 * size


def aged(*versions):
  builder = TrajectoryBuilder(step=4, task_id=0, sample=1, source="made")
  builder.append("user", [1, 2])
  n = len(versions)
  builder.append_sampled(list(range(n)), [-1.0] * n, [0.5] * n, list(versions))
  return builder.build()


def test_tokens_past_the_bound_lose_their_weight_and_the_record_keeps_it():
  trajectory = aged(3, 4, 5, 5)
  (masked,) = bound_staleness([trajectory], 6, asynchronous(1, "mask"))
  assert masked.segments[1].weights.tolist() == [0, 0, 1, 1]
  assert masked.segments[0].weights.tolist() == [0, 0]
  assert trajectory.segments[1].weights.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("stale", ["wait", "drop"])
def test_a_token_past_the_bound_is_never_trained_on(stale):
  kept = bound_staleness([aged(4, 5)], 5, asynchronous(1, stale))
  assert kept[0].segments[1].weights.tolist() == [1, 1]
  with pytest.raises(StalenessError, match=r"step 6: .*\(4, 0, 1\).*version 4, 2 updates ago"):
    bound_staleness([aged(4, 5)], 6, asynchronous(1, stale))
  without_weight = dataclasses.replace(kept[0])
  without_weight.segments[1].weights[:] = 0
  bound_staleness([without_weight], 6, asynchronous(1, stale))
