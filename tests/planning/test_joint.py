"""What lies on a device together, and what a step costs, against counts by hand."""

from __future__ import annotations

import dataclasses

import pytest

from agentjax.models.attend import CACHE_BLOCK
from agentjax.models.lora import LoraConfig
from agentjax.planning.chips import Chip
from agentjax.planning.compile import LaneMemory, Plan
from agentjax.planning.hlo import ProgramCost
from agentjax.planning.joint import phases, step_cost
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.training import DeviceConfig
from tests.training.stages import staged_experiment

LANE = LaneMemory(weights=100, state=40, parked=7, tokens=80, token=0.5, windows=0, block_tokens=16)
TRAINED = {"parameters": 20, "optimiser": 60}
PLANS = {
  "update": Plan(8, TRAINED | {"batch": 3}, 50, 133, fits=True),
  "cast": Plan(1, {"parameters": 20}, 25, 45, fits=True),
  "publish": Plan(1, {"cast weights": 25}, 110, 135, fits=True),
  "decode": Plan(4, {"lane's weights": 100, "cache": 40}, 9, 149, fits=True),
}


def experiment(schedule="sync", **changes):
  return staged_experiment(ScheduleConfig(mode=schedule), **changes)


def sizes(run):
  return {phase.program: phase.size for phase in phases(run, PLANS, LANE)}


def test_in_turn_the_lanes_weights_are_there_only_while_they_sample():
  kept = 20 + 60 + 40 + 7
  assert sizes(experiment()) == {
    "update": kept + 3 + 50,
    "cast": kept + 25,
    "publish": kept + 25 + 110,
    "decode": kept + 100 + 9,
  }


def test_adapters_are_added_to_weights_that_stay():
  found, in_turn = sizes(experiment(lora=LoraConfig())), sizes(experiment())
  assert found["update"] == in_turn["update"] + 100 and found["decode"] == in_turn["decode"]
  let_go = experiment(lora=LoraConfig())
  let_go.engine.keep_base = False
  assert sizes(let_go) == in_turn


def test_devices_of_their_own_hold_their_own_part_and_two_sets_of_weights():
  apart = experiment("one_step_off", devices=DeviceConfig(training=(0,)))
  assert sizes(apart) == {
    "update": 20 + 60 + 3 + 50,
    "cast": 20 + 60 + 25,
    "publish": 20 + 60 + 25 + 110,
    "decode": 2 * 100 + 40 + 7 + 9,
  }


def test_a_step_is_as_many_runs_as_its_episodes_need():
  run = experiment()
  run.rl = dataclasses.replace(
    run.rl, tasks_per_step=8, minibatches=2, epochs=3, row_length=100, old_log_probs="recomputed"
  )
  run.rollout = dataclasses.replace(
    run.rollout, group_size=4, max_total_tokens=100, max_turns=2, max_tokens_per_turn=30
  )
  run.engine = dataclasses.replace(
    run.engine,
    slots=10,
    lanes=2,
    max_length=100,
    chunk_tokens=16,
    extend_buckets=(8, 20),
    extend_rows=(1, 2),
  )
  chip = Chip(
    10**9, flops=10.0, hbm_bandwidth=5.0, link_bandwidth=1.0, clock=2.0, smallest="", a_chip=2
  )
  nothing, unit = ProgramCost(0, 0, 0, {}), ProgramCost(100, 20, 6, {"all-reduce": 2})

  def plan(rows, fixed, loop):
    return Plan(rows, {}, 0, 0, fits=True, fixed=fixed, loop=loop)

  plans = {
    "update": plan(4, unit, unit),
    "score": plan(4, nothing, unit),
    "publish": plan(1, unit, nothing),
    "extend 20": plan(5, unit, nothing),
    "decode": plan(5, unit, nothing),
  }
  cost = step_cost(run, plans, lanes=4, devices=8, chip=chip)
  assert CACHE_BLOCK >= 100  # one block of cache
  # 32 episodes, 8 on a lane of 5 slots: two waves of 4 dispatches for 60 tokens; 40 are taken in,
  # 40 at a time. 16 episodes of a minibatch fill 16 rows: 4 micro-batches.
  assert cost.runs == {"update": 24, "score": 8, "publish": 1, "extend 20": 8, "decode": 8}
  assert cost.sampled == 32 * 60
  # Ten seconds of products are the longest part; 3 of cycles and 2 of links are the estimate.
  assert cost.least == {
    "update": 6 * 50.0,
    "score": 80.0,
    "publish": 10.0,
    "extend 20": 80.0,
    "decode": 80.0,
  }
  assert cost.estimated["update"] == 6 * 25.0 and cost.estimated["decode"] == 40.0
  least, estimated = cost.price(chip_hour=9.0)
  assert (least, estimated) == pytest.approx((550 / 100, (150 + 40 + 5 + 40 + 40) / 100))
