"""Estimators against brute force, and reports on scripted policies whose success is known."""

import asyncio
import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.rewards import Formula, RewardGraph
from agentjax.rollout import keys
from agentjax.rollout.evaluation import HeldOutConfig, bootstrap, pass_at_k, summarise
from agentjax.trajectory.record import Reward
from tests.rollout.conftest import REGISTRY, REWARDS, evaluate, make_player, make_task, question
from tests.rollout.scripted_engine import ScriptedEngine, say


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_success(n):
  for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
    draws = list(itertools.combinations([i < correct for i in range(n)], k))
    assert pass_at_k(n, correct, k) == pytest.approx(np.mean([any(d) for d in draws]), abs=1e-12)


def test_pass_at_k_does_not_overflow():
  assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5, abs=1e-9)


@pytest.mark.parametrize("n, c, k", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_impossible_counts_are_refused(n, c, k):
  with pytest.raises(ValueError, match="must be in"):
    pass_at_k(n, c, k)


def test_an_interval_covers_the_truth_as_often_as_it_says():
  rng = np.random.default_rng(0)
  covered = 0
  for trial in range(300):
    values = (rng.random(80) < 0.3).astype(float)
    estimate = bootstrap(values, seed=[trial], resamples=200, confidence=0.9)
    covered += estimate.low <= 0.3 <= estimate.high
  assert 0.84 < covered / 300 < 0.95  # 0.9 give or take three standard errors of 0.017


def test_an_interval_depends_on_its_seed_alone():
  values = np.linspace(0.0, 1.0, 30)
  first, again, other = (
    bootstrap(values, seed=[s], resamples=100, confidence=0.95) for s in (1, 1, 2)
  )
  assert first == again != other
  assert first.low < first.mean < first.high and first.count == 30


def test_an_interval_of_equal_values_is_a_point():
  estimate = bootstrap([0.5] * 9, seed=[0], resamples=10, confidence=0.95)
  assert (estimate.low, estimate.mean, estimate.high) == (0.5, 0.5, 0.5)


def test_an_estimate_from_nothing_is_refused():
  with pytest.raises(ValueError, match="at least one task"):
    bootstrap([], seed=[0], resamples=10, confidence=0.95)


# Tasks 0..3 have the answer 4. Greedily only tasks 0 and 1 are solved; when sampling, task t is
# solved by samples s >= t, of four.
def solver():
  made = ScriptedEngine(None)

  def script(address, turn):
    _, task, sample = address
    greedy = made.requests[-1][2].sampling.temperature == 0.0
    return say(f"#### {4 if (task < 2 if greedy else sample >= task) else 5}")

  made.script = script
  return made


TASKS = [make_task(i, source="sums" if i < 3 else "other", level=1 + i % 2) for i in range(4)]


def report_on(engine, tasks=TASKS, *, plan, rewards=REWARDS, step=9, seed=7, make=question):
  return asyncio.run(
    evaluate(
      tasks,
      player=make_player(engine),
      make_environment=make,
      rewards=rewards,
      plan=plan,
      tool_names=REGISTRY.schemas,
      step=step,
    )
  )


def test_a_report_says_what_was_solved():
  report = report_on(solver(), plan=HeldOutConfig(samples=4, pass_at=(1, 2, 4)))
  assert report.overall.greedy.mean == 0.5
  assert report.overall.average.mean == pytest.approx((4 + 3 + 2 + 1) / 16)
  assert report.overall.pass_at[1].mean == pytest.approx((4 + 3 + 2 + 1) / 16)
  assert report.overall.pass_at[2].mean == pytest.approx((1 + 1 + 5 / 6 + 1 / 2) / 4)
  assert report.overall.pass_at[4].mean == 1.0
  assert report.masked == 0
  assert set(report.breakdown) == {
    "sums", "other", "sums/level_1", "sums/level_2", "other/level_2",
  }  # fmt: skip
  assert report.breakdown["sums"].tasks == 3
  assert report.breakdown["sums"].greedy.mean == pytest.approx(2 / 3)
  assert report.breakdown["other/level_2"].average.mean == pytest.approx(1 / 4)
  assert [t.address for t in report.greedy_trajectories] == [(9, i, 0) for i in range(4)]
  assert len(report.sampled_trajectories) == 16


def test_in_the_background_its_contexts_stand_behind_those_of_all_training():
  class Queue(ScriptedEngine):
    async def open(self, prefix, *, priority=()):
      opened.append(priority)
      return await super().open(prefix, priority=priority[-3:])

  opened, engine = [], Queue(lambda address, turn: say("#### 4"))
  player = dataclasses.replace(make_player(engine), background=True)
  plan = HeldOutConfig(samples=0)
  asyncio.run(
    evaluate(
      TASKS, player=player, make_environment=question, rewards=REWARDS, plan=plan,
      tool_names=REGISTRY.schemas, step=9,
    )
  )  # fmt: skip
  assert len(opened) == len(TASKS) and min(opened) > (10**12, 0, 0)
  assert [address[-3:] for address in sorted(opened)] == [(9, i, 0) for i in range(4)]


def test_a_report_becomes_flat_metrics_and_json():
  report = report_on(solver(), plan=HeldOutConfig(samples=4, pass_at=(2,)))
  metrics = report.metrics()
  assert metrics["greedy"] == 0.5 and metrics["greedy_low"] <= 0.5 <= metrics["greedy_high"]
  assert metrics["avg@4"] == pytest.approx(10 / 16)
  assert metrics["sums/greedy"] == pytest.approx(2 / 3)
  assert metrics["sampled/rollout/turns"] == 1.0
  assert all(type(value) is float for value in metrics.values())
  loaded = json.loads(json.dumps(report.to_dict(), allow_nan=False))
  assert loaded["overall"]["pass_at"]["2"]["mean"] == metrics["pass@2"]
  assert loaded["greedy_statistics"]["episodes"] == 4
  assert not any("trajectories" in name for name in loaded)


def test_either_kind_of_episode_can_be_left_out():
  greedy = report_on(solver(), plan=HeldOutConfig(samples=0))
  assert greedy.overall.average is None and greedy.sampled_statistics is None
  assert set(greedy.estimates(greedy.overall)) == {"greedy"}
  plan = HeldOutConfig(samples=2, pass_at=(2,))
  episodes = report_on(solver(), plan=plan).sampled_trajectories
  sampled = summarise(TASKS, [], episodes, plan=plan, tool_names=REGISTRY.schemas, seed=7, step=9)
  assert sampled.overall.greedy is None
  assert set(sampled.estimates(sampled.overall)) == {"avg@2", "pass@2"}


def test_masked_episodes_are_left_out_and_counted():
  def judge(trajectory, task):
    if task.id == 0 and trajectory.sample < 3:
      raise ConnectionError("judge unreachable")
    return float(trajectory.answer == "4")

  report = report_on(
    solver(),
    plan=HeldOutConfig(samples=4, pass_at=(2,), success_part="judge"),
    rewards=RewardGraph({"judge": judge}, Formula("judge")),
  )
  assert report.masked == 4
  assert report.overall.greedy.count == 3  # task 0 has no valid greedy episode
  assert report.overall.average.mean == pytest.approx((1 + 3 / 4 + 2 / 4 + 1 / 4) / 4)
  assert report.overall.pass_at[2].count == 3  # task 0 has one valid sample, too few for pass@2


def test_an_evaluation_without_a_verdict_has_none():
  report = report_on(
    solver(),
    plan=HeldOutConfig(samples=2, pass_at=(2,), success_part=""),
    rewards=RewardGraph({"judge": _unreachable}, Formula("judge")),
  )
  assert report.masked == 12
  assert report.estimates(report.overall) == {"greedy": None, "avg@2": None, "pass@2": None}
  metrics = report.metrics()
  for name in ("greedy", "avg@2", "pass@2_low", "sums/greedy"):
    assert math.isnan(metrics[name]), name
  json.dumps(report.to_dict(), allow_nan=False)


def test_success_is_read_from_the_part_even_where_the_total_is_invalid():
  rewards = RewardGraph(
    {"exact_match": lambda t, task: float(t.answer == "4"), "style": _unreachable}, Formula("style")
  )
  report = report_on(solver(), plan=HeldOutConfig(samples=0), rewards=rewards)
  assert report.overall.greedy.mean == 0.5 and report.masked == 0


def _unreachable(trajectory, task):
  return Reward.invalid("judge unreachable")


def test_an_unknown_success_part_is_refused():
  with pytest.raises(ValueError, match="success_part='match'.*allowed: exact_match, or ''"):
    report_on(solver(), plan=HeldOutConfig(samples=0, success_part="match"))


def test_the_total_reward_may_tell_success():
  report = report_on(solver(), plan=HeldOutConfig(samples=0, success_part=""))
  assert report.overall.greedy.mean == 0.5


def test_an_evaluation_draws_with_keys_of_its_own():
  engine = solver()
  report_on(engine, plan=HeldOutConfig(samples=2))
  for address, turn, request in engine.requests:
    training = keys.turn_key(7, address, turn)
    assert list(request.key_data) != training.tolist()


def test_the_same_evaluation_gives_the_same_report():
  plan = HeldOutConfig(samples=4, pass_at=(2,))
  first, again = (report_on(solver(), plan=plan) for _ in range(2))
  assert first.overall == again.overall and first.breakdown == again.breakdown


def test_an_evaluation_of_nothing_is_refused():
  with pytest.raises(ValueError, match="at least one task"):
    report_on(solver(), [], plan=HeldOutConfig(samples=1))


@pytest.mark.parametrize(
  "settings",
  [
    {"samples": 2, "pass_at": (3,)},
    {"samples": -1},
    {"samples": 2, "pass_at": (2,), "resamples": 0},
    {"samples": 2, "pass_at": (2,), "confidence": 1.0},
  ],
)
def test_a_plan_that_measures_nothing_sensible_is_refused(settings):
  with pytest.raises(ConfigError, match="allowed:"):
    HeldOutConfig(**settings).validate()
