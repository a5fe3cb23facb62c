r"""Wall time of the training loop under every schedule, with tools that are slow now and then.

  JAX_PLATFORMS=cpu python benchmarks/schedules.py
  JAX_PLATFORMS=cpu python benchmarks/schedules.py --fleet   # no run: a simulated fleet

A tiny policy is paid for drawing ASCII. Each of an episode's two turns is answered after a
lognormal time (median 0.15 s, sigma 1.2, at most 2 s), the same for an episode under every
schedule. All schedules have the same objective, with old log-probs recomputed and truncated
importance weights, so that they treat staleness alike. Everything is compiled before the clock
runs; seconds are those of the steps, checkpoints left out, CPU seconds those of the whole run.

"of bound" is the share of the time that the schedule could not do without: the largest of all
sampling (the engine's seconds), all updates, and all tool seconds over the episodes that may be
under way at once. "simulated" is what ``benchmarks.simulator`` predicts from the first run's rates.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import pathlib
import tempfile
import time

import jax
import numpy as np
from absl import app, flags, logging
from rich.console import Console
from simulator import (
  SCHEDULES,
  Fixed,
  Fleet,
  LogNormal,
  Plan,
  Workload,
  compare,
  simulate,
)

from agentjax import (
  Environment,
  Experiment,
  Extensions,
  Message,
  Observation,
  Reward,
  Run,
  Step,
  Task,
  TaskSplits,
)
from agentjax.engine import EngineConfig
from agentjax.models import ModelConfig
from agentjax.objectives import MismatchConfig
from agentjax.rewards import RewardConfig
from agentjax.rollout import RolloutConfig, ScheduleConfig
from agentjax.rollout.statistics import num_sampled_tokens
from agentjax.training import HeldOutConfig, OptimizerConfig, RLStage
from agentjax.training.journal import read_journal
from agentjax.training.metrics import read_metrics
from agentjax.trajectory.record import Trajectory

_STEPS = flags.DEFINE_integer("steps", 24, "Training steps of each run.")
_NAMES = [f"async_{s.bound}" if s.mode == "async" else s.mode for s in SCHEDULES]
_SCHEDULES = flags.DEFINE_multi_enum(
  "schedule", _NAMES, _NAMES, "Schedules to run; ratios are to the first one."
)
_FLEET = flags.DEFINE_bool("fleet", False, "Print a simulated fleet instead of running anything.")

_TOOL = LogNormal(0.15, 1.2, cap=2.0)
_TASKS, _GROUP, _TURNS, _SLOTS = 4, 8, 2, 32


class SlowAscii(Environment):
  """Pays the share of ASCII among the characters drawn; answers late, now and then very late."""

  async def reset(self, task, key):
    self._latency, self._paid = np.random.default_rng(key), []
    return Observation((Message("user", f"Task {task.id}."),))

  async def step(self, action):
    await asyncio.sleep(_TOOL.draw(self._latency))
    self._paid.append(sum(c.isascii() for c in action.text) / max(len(action.text), 1))
    if len(self._paid) == _TURNS:
      return Step(Observation(()), Reward(float(np.mean(self._paid))), terminated=True)
    return Step(Observation((Message("user", "Again."),)))

  def snapshot(self):
    return json.dumps(self._paid).encode()

  def restore(self, state):
    self._paid = json.loads(state)


def _experiment(schedule: ScheduleConfig, steps: int) -> Experiment:
  experiment = Experiment(
    name="schedules",
    model=ModelConfig(
      vocab_size=264,
      d_model=64,
      pattern="*-*-",
      num_heads=4,
      num_kv_heads=2,
      head_dim=16,
      d_mlp=128,
    ),
    engine=EngineConfig(
      slots=_SLOTS, max_length=128, chunk_tokens=16, extend_buckets=(32,), extend_rows=(8,)
    ),
    rollout=RolloutConfig(
      group_size=_GROUP,
      max_turns=_TURNS,
      max_tokens_per_turn=16,
      max_total_tokens=128,
      concurrency=1024,
    ),
    reward=RewardConfig(parts=("environment",)),
    rl=RLStage(
      steps=steps,
      tasks_per_step=_TASKS,
      row_length=256,
      microbatch_rows=16,
      old_log_probs="recomputed",
      schedule=schedule,
      mismatch_alarm=10.0,
      optimizer=OptimizerConfig(learning_rate=1e-2),
    ),
    evaluation=HeldOutConfig(tasks=0),
  )
  experiment.rl.objective.policy_loss.mismatch = MismatchConfig(weight_level="token")
  return experiment


def _run(
  schedule: ScheduleConfig, directory: pathlib.Path, steps: int, known: list[Trajectory]
) -> _Result:
  """One run; ``known`` episodes of another one are used to compile everything beforehand."""
  tasks = [Task(id=i, prompt=(), answer="", source="ascii") for i in range(16)]
  made = Run(
    _experiment(schedule, steps),
    directory,
    extensions=Extensions(
      tasks=TaskSplits(tasks, tasks[:1]), make_environment=lambda task: SlowAscii()
    ),
    console=Console(file=io.StringIO()),
  )
  with made._session() as session:
    state = session.learner.begin_rl(session.learner.initial_state("rl"))
    session.engine.publish(session.learner.policy(state), 0)
    if known:
      session.learner.rl_step(state, known, step=1)
    cpu = time.process_time()
    session.train()
    cpu = time.process_time() - cpu
    stats = session.engine.stats
  rows = read_metrics(directory / "metrics.jsonl")
  trained = [t for kind, t in read_journal(directory / "journal.log") if kind == "trajectory"]
  wall = sum(row["time/step"] for row in rows)
  ahead = (schedule.bound + 1) * _TASKS * _GROUP
  tools = sum(s.seconds for t in trained for s in t.segments if not s.sampled.any())
  tools *= _TURNS / (_TURNS - 1)  # the last answer leaves no segment
  updates = sum(row["time/update"] for row in rows)
  last = rows[-max(len(rows) // 4, 1) :]
  return _Result(
    schedule=schedule,
    wall=wall,
    cpu=cpu,
    reward=float(np.mean([row["reward/mean"] for row in last])),
    staleness=float(np.mean([row["schedule/staleness_mean"] for row in rows])),
    oldest=max(row["schedule/staleness_max"] for row in rows),
    bound=max(stats.device_seconds, updates, tools / ahead) / wall,
    update_seconds=updates / len(rows),
    rate=sum(map(num_sampled_tokens, trained)) / stats.device_seconds,
    trained=trained,
  )


@dataclasses.dataclass
class _Result:
  schedule: ScheduleConfig
  wall: float
  cpu: float
  reward: float
  staleness: float
  oldest: float
  bound: float
  update_seconds: float
  rate: float
  trained: list[Trajectory] = dataclasses.field(repr=False)


def _predicted(first: _Result, schedule: ScheduleConfig) -> float:
  turns = [len(s) for t in first.trained for s in t.segments if s.sampled.any()]
  load = Workload(Fixed(_TURNS), Fixed(float(np.mean(turns))), _TOOL)
  fleet = Fleet(_SLOTS, ((1, first.rate),), first.update_seconds)
  runs = [
    simulate(fleet, load, Plan(_STEPS.value, _TASKS, _GROUP, schedule, seed=seed)).seconds
    for seed in range(8)
  ]
  return float(np.mean(runs))


def _print_fleet() -> None:
  """Eight engines of 64 slots; figures of a hypothetical 8-billion-parameter policy."""
  fleet = Fleet(
    slots=64,
    decode_rate=((1, 90.0), (8, 650.0), (32, 2200.0), (64, 3600.0)),
    update_seconds=25.0,
    prefill_seconds=5e-5,
    publish_seconds=2.0,
    engines=8,
  )
  load = Workload(
    turns=LogNormal(6.0, 0.5, cap=30.0),
    turn_tokens=LogNormal(250.0, 0.7, cap=2000.0),
    tool_seconds=LogNormal(2.0, 1.5, cap=300.0),
    prompt_tokens=Fixed(800.0),
    observation_tokens=LogNormal(200.0, 1.0, cap=4000.0),
  )
  print(compare(fleet, load, Plan(steps=20, tasks_per_step=32, group_size=16)))


def main(argv: list[str]) -> None:
  del argv
  logging.set_verbosity(logging.ERROR)
  if _FLEET.value:
    _print_fleet()
    return
  print(
    f"{_STEPS.value} steps of {_TASKS} x {_GROUP} episodes, {jax.device_count()} "
    f"{jax.default_backend()} device(s), {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
  )
  print(
    f"{'schedule':14s} {'wall s':>7s} {'CPU s':>6s} {'ratio':>6s} {'reward':>7s} "
    f"{'staleness':>10s} {'of bound':>9s} {'simulated s':>12s}"
  )
  with tempfile.TemporaryDirectory() as folder:
    place = pathlib.Path(folder)
    # Its episodes compile the others' programs.
    known = _run(ScheduleConfig(), place / "warm", 1, []).trained
    first: _Result | None = None
    for name in _SCHEDULES.value:
      schedule = SCHEDULES[_NAMES.index(name)]
      result = _run(schedule, place / name, _STEPS.value, known)
      first = first or result
      print(
        f"{name:14s} {result.wall:7.1f} {result.cpu:6.1f} {first.wall / result.wall:5.2f}x "
        f"{result.reward:7.3f} {result.staleness:5.2f} / {result.oldest:.0f} "
        f"{result.bound:9.0%} {_predicted(first, schedule):12.1f}",
        flush=True,
      )


if __name__ == "__main__":
  app.run(main)
