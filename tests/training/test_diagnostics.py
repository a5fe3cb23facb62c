"""Mutual information against golden numbers and limits; signs of collapse; both in a run."""

import dataclasses

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.training import HeldOutConfig, TrainingError
from agentjax.training.diagnostics import (
  CollapseMonitor,
  DiagnosticsConfig,
  collapse_metrics,
  repetition,
)
from agentjax.training.metrics import read_metrics
from agentjax.training.selectors import SelectionConfig
from agentjax.trajectory.record import Reward, Segment, Trajectory
from tests.training.stages import run, staged_experiment


def segment(owner, ids, drawn, parent, turn=0):
  ids = np.array(ids, np.int32)
  zeros = np.zeros(len(ids), np.float32)
  sampled = np.arange(len(ids)) >= len(ids) - drawn
  return Segment(owner, ids, sampled, zeros, zeros, zeros, ids, turn=turn, parent=parent)


def episode(task, sample, answers, reward=0.0):
  segments = [segment("user", [1, 10 + task], 0, None)]
  for turn, answer in enumerate(answers):
    segments.append(segment("assistant", [2, *answer], len(answer), len(segments) - 1, turn))
    segments.append(segment("user", [3], 0, len(segments) - 1, turn))
  return Trajectory(1, task, sample, "x", segments, reward=Reward(reward))


EPISODES = [episode(t, s, [[30 + t, s], [40, 41, s]]) for t in range(3) for s in range(4)]


def test_repetition_counts_runs_that_stood_before():
  assert repetition([episode(0, 0, [[1, 2, 3, 4, 5, 6]])]) == 0.0
  assert repetition([episode(0, 0, [[7] * 13])]) == pytest.approx(0.9)
  assert repetition([episode(0, 0, [[1, 2, 3, 4], [1, 2, 3, 4]])]) == 0.5  # across turns
  assert repetition([]) == 0.0


def test_spread_within_groups_is_reported():
  rewards = [0.0, 1.0, 0.5, 0.5]
  members = [episode(i // 2, i % 2, [[1]], r) for i, r in enumerate(rewards)]
  found = collapse_metrics(members)
  assert found["collapse/reward_std"] == pytest.approx(0.5**0.5 / 2)
  assert found["collapse/silent_groups"] == 0.5


def signs(rows, config=None, selection=None, **changes):
  config = config or DiagnosticsConfig(window=3, **changes)
  monitor = CollapseMonitor(config, selection or SelectionConfig(), rows[:-1])
  return {sign.name: sign.ends for sign in monitor.observe(rows[-1])}


def rows(**series):
  return [dict(zip(series, values, strict=True)) for values in zip(*series.values(), strict=True)]


STD = "collapse/reward_std"


@pytest.mark.parametrize("stop", [False, True])
def test_a_fallen_spread_of_rewards_is_a_sign(stop):
  fallen = rows(**{STD: [0.5, 0.4, 0.6, 0.3, 0.04, 0.04, 0.04]})
  assert signs(fallen, stop=stop) == {"reward_std": stop}
  assert signs(rows(**{STD: [0.5, 0.4, 0.6, 0.3, 0.2, 0.04, 0.04]})) == {}
  assert signs(fallen[:2]) == {}  # too early to tell


def test_jumps_are_signs_and_steady_falls_are_not():
  entropy, norm = "collapse/entropy", "grad_norm"
  both = {"entropy_jump": False, "entropy_rise": False}
  assert signs(rows(**{entropy: [0.5, 0.4, 0.3, 0.9]})) == both
  assert signs(rows(**{entropy: [0.5, 0.4, 0.3, 0.2]})) == {}
  assert signs(rows(**{norm: [1.0, 2.0, 1.0, 30.0]})) == {"gradient_spike": False}
  assert signs(rows(**{norm: [1.0, 2.0, None, 30.0]})) == {}  # two known steps only
  assert signs(rows(**{"collapse/repetition": [0.1, 0.6]})) == {"repetition": False}


def test_entropy_that_creeps_up_and_information_that_is_lost_are_signs():
  creeping = rows(**{"collapse/entropy": [1.0, 1.0, 1.0, 1.1, 1.2, 1.3]})
  assert signs(creeping) == {"entropy_rise": False}
  assert signs(creeping[:-1]) == {}
  information = "information/first_turn_sequence"
  lost = rows(**{information: [2.0, None, 1.2, None, 0.9]})
  assert signs(lost) == {"information": False}
  assert signs(lost, information_floor=0.4) == {} == signs(lost[:3]) == signs(lost[:1])
  assert signs([*lost, {"grad_norm": 1.0}]) == {}  # said once an estimate


def test_entropy_is_of_all_that_was_sampled():
  members = [episode(i // 2, i % 2, [[1, 2]]) for i in range(4)]
  for member, value in zip(members, (0.0, 1.0, 2.0, 5.0), strict=True):
    member.segments[1].entropies[-2:] = value
  assert collapse_metrics(members)["collapse/entropy"] == pytest.approx(2.0)


def test_lasting_failure_and_empty_selections_are_signs():
  success = rows(**{"eval/greedy": [0.3, 0.0, 0.005, 0.0]})
  assert signs(success, success_patience=3, stop=True) == {"success": True}
  assert signs(success[:3], success_patience=3) == {}
  empty = rows(**{"selection/groups": [4, 0, 0]})
  assert signs(empty, selection=SelectionConfig(patience=2)) == {"selection": True}
  assert signs(empty, selection=SelectionConfig(patience=3)) == {}


def test_settings_are_checked():
  with pytest.raises(ConfigError, match=r"rl\.diagnostics\.prompts=1"):
    DiagnosticsConfig(prompts=1).validate("config.rl.diagnostics")


def test_a_run_reports_information_and_stops_at_a_sign(tmp_path):
  watched = DiagnosticsConfig(
    information_every=2, prompts=2, samples=2, success_floor=1.0, success_patience=2, stop=True
  )
  schedule = ScheduleConfig()
  stage = dataclasses.replace(staged_experiment(schedule).rl, diagnostics=watched)
  held_out = HeldOutConfig(
    tasks=2, every=1, samples=0, pass_at=(), success_part="environment", resamples=10
  )
  with pytest.raises(TrainingError, match=r"step 2: held-out success was below 1.0 2 times"):
    run(tmp_path / "run", schedule, rl=stage, evaluation=held_out).train()
  assert (tmp_path / "run" / "checkpoints" / "2").exists()
  found = read_metrics(tmp_path / "run" / "metrics.jsonl")
  assert [row["step"] for row in found] == [1, 2]
  for row in found:
    for turn in ("first_turn", "any_turn"):
      assert (f"information/{turn}_sequence" in row) == (row["step"] % 2 == 1)
    assert row["collapse/reward_std"] >= 0 and row["collapse/repetition"] >= 0
  assert found[0]["information/first_turn_sequence"] <= np.log(2) + 1e-6
  assert found[0]["information/first_turn_chance"] == 0.5
