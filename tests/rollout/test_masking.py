"""Masked shares by cause, and whether masking goes with what the policy does."""

import numpy as np
import pytest

from agentjax.faults import FAULT, Fault, Owner
from agentjax.rollout.masking import MaskingWatch
from agentjax.rollout.statistics import rollout_statistics
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Reward, Status, ToolRecord


def episode(task, sample, *, turns, calls, status=Status.OK, fault=None, reason=None):
  """``calls`` of each turn; each call costs three tokens."""
  builder = TrajectoryBuilder(step=0, task_id=task, sample=sample, source="made")
  builder.append("user", [1])
  for turn in range(turns):
    drawn = [5] * (1 + 3 * calls[turn])
    builder.append_sampled(drawn, [-1.0] * len(drawn), [0.5] * len(drawn), 0)
    builder.append("tool", [7])
  tools = [ToolRecord(t, "shell", {}, "ok", "", 0.1) for t in range(turns) for _ in range(calls[t])]
  metadata = {} if fault is None else {FAULT: fault.to_dict()}
  reward = Reward.invalid(reason or "a fault") if status.masked else Reward(0.0)
  return builder.build(status=status, tools=tools, reward=reward, metadata=metadata)


SANDBOX = Fault(Owner.INFRASTRUCTURE, "sandbox", "gone")
FILES = Fault(Owner.POLICY, "files", "a directory")


def test_masked_and_counted_shares_are_published_by_cause():
  made = [
    episode(0, 0, turns=1, calls=[0]),
    episode(0, 1, turns=1, calls=[0], status=Status.ENV_ERROR, fault=SANDBOX),
    episode(0, 2, turns=1, calls=[0], status=Status.VERIFIER_ERROR),
    episode(0, 3, turns=1, calls=[0], status=Status.POLICY_ERROR, fault=FILES),
    episode(0, 4, turns=1, calls=[0], status=Status.VERIFIER_ERROR, reason="screened: odd"),
  ]
  figures = rollout_statistics(made, tool_names=[])
  assert figures.masked == {"sandbox": 0.2, "verifier": 0.2, "screened": 0.2}
  assert figures.counted == {"files": 0.2}
  flat = figures.metrics()
  assert flat["rollout/masked_sandbox"] == 0.2 and flat["rollout/counted_files"] == 0.2
  assert flat["rollout/fault_share"] == pytest.approx(0.6)


def groups(random, *, count, mask):
  """Groups of 8; ``mask(random, calls of a turn)`` says whether it breaks there."""
  for task in range(count):
    for sample in range(8):
      calls = random.poisson(1.5, size=4).tolist()
      turns, status = 4, Status.OK
      for turn in range(4):
        if mask(random, calls[turn]):
          turns, status = turn + 1, Status.ENV_ERROR
          break
      fault = SANDBOX if status.masked else None
      yield episode(task, sample, turns=turns, calls=calls, status=status, fault=fault)


def test_faults_that_strike_whatever_is_done_raise_no_alarm():
  # Episodes that break are shorter and made fewer calls in all; that must not count.
  values = []
  for seed in range(40):
    random = np.random.default_rng(seed)
    watch = MaskingWatch()
    assert watch.add(list(groups(random, count=10, mask=lambda r, calls: r.random() < 0.1))) is None
    values += watch.z.values()
  assert abs(np.mean(values)) < 0.4 and 0.6 < np.std(values) < 1.4


def test_masking_that_goes_with_what_is_done_warns_once_and_names_the_causes():
  random = np.random.default_rng(0)
  watch = MaskingWatch()
  said = [
    watch.add(list(groups(random, count=6, mask=lambda r, calls: calls >= 4))) for _ in range(6)
  ]
  (warning,) = filter(None, said)
  assert "more calls" in warning and "sandbox" in warning
  assert watch.metrics()["rollout/masking_z_calls"] > 4


def test_a_group_that_is_masked_as_a_whole_says_nothing_of_its_members():
  watch = MaskingWatch()
  watch.add(list(groups(np.random.default_rng(0), count=9, mask=lambda r, calls: True)))
  assert watch.z == {"calls": 0.0, "tokens": 0.0}


def test_verdicts_that_fail_are_compared_at_the_end():
  watch = MaskingWatch()
  made = []
  for task in range(20):
    for sample in range(6):
      many = sample == task % 6
      status = Status.VERIFIER_ERROR if many else Status.OK
      made.append(episode(task, sample, turns=1, calls=[5 if many else 1], status=status))
  assert "verifier 20" in watch.add(made)
