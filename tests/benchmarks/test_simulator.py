"""The simulator: cases told by hand, and the real loop with an engine of known speed."""

import asyncio
import heapq
import time

import numpy as np
import pytest

from agentjax.data import TaskIterator
from agentjax.rollout.loop import GroupPlayer, groups_of
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.rollout.stream import GroupStream
from agentjax.trajectory.builder import TrajectoryBuilder
from agentjax.trajectory.record import Message, Reward
from agentjax.world.environment import Environment, Observation, Step
from benchmarks.simulator import (
  Empirical,
  Fixed,
  Fleet,
  LogNormal,
  Plan,
  Workload,
  compare,
  simulate,
  workload_of,
)
from tests.rollout.conftest import REWARDS, make_player, make_task
from tests.rollout.scripted_engine import ScriptedEngine, say

pytestmark = pytest.mark.slow

MANY = 10_000
HEAVY = Workload(
  turns=Empirical((1.0, 2.0, 3.0)),
  turn_tokens=LogNormal(20.0, 0.5),
  tool_seconds=LogNormal(0.5, 1.2, cap=20.0),
)


def even_slots(slots, *, update=0.0, **settings):
  """Every slot draws 10 tokens a second, whatever the others do."""
  return Fleet(slots, ((1, 10.0), (MANY, 10.0 * MANY)), update, **settings)


def test_one_slot_without_tools_takes_the_sum_of_all_times():
  load = Workload(Fixed(3), LogNormal(20.0, 1.0), Fixed(0.0), Fixed(7.0), Fixed(5.0))
  report = simulate(even_slots(1, update=4.0, prefill_seconds=0.01), load, Plan(2, 2, 3))
  # 2 steps x 2 groups: a prompt of 7 a group, and 2 observations of 5 in each of 3 episodes.
  intake = 4 * (7 + 3 * 2 * 5) * 0.01
  assert report.seconds == pytest.approx(report.tokens / 10.0 + intake + 2 * 4.0)
  assert report.slot_share == pytest.approx((report.tokens / 10.0) / report.seconds)
  assert report.least_seconds == pytest.approx(report.tokens / 10.0 + intake)


def test_with_slots_for_all_a_step_takes_as_long_as_its_longest_episode():
  load = Workload(Fixed(2), Fixed(10.0), Empirical((1.0, 5.0)))
  report = simulate(even_slots(MANY, update=3.0), load, Plan(4, 3, 4, seed=1))
  # 2 turns of 1 s and 2 tool calls of 1 or 5 s; of 12 episodes one meets 5 s twice, or hardly.
  for seconds in report.step_seconds:
    assert seconds - 3.0 == pytest.approx(12.0) or seconds - 3.0 == pytest.approx(8.0)
  assert max(report.step_seconds) == pytest.approx(15.0)
  assert report.seconds == pytest.approx(sum(report.step_seconds))


def test_slots_share_the_measured_rate():
  fleet = Fleet(4, ((1, 10.0), (4, 20.0)), 0.0)
  load = Workload(Fixed(1), Fixed(30.0))
  report = simulate(fleet, load, Plan(1, 1, 4))
  assert report.seconds == pytest.approx(4 * 30.0 / 20.0)
  assert fleet.rate(2) == pytest.approx(10.0 + 10.0 / 3) and fleet.rate(9) == 20.0


def test_engines_share_the_episodes():
  load = Workload(Fixed(1), Fixed(30.0))
  alone = simulate(even_slots(2), load, Plan(1, 1, 8))
  four = simulate(even_slots(2, engines=4), load, Plan(1, 1, 8))
  assert alone.seconds == pytest.approx(4 * 3.0) and four.seconds == pytest.approx(3.0)


def test_updates_stop_the_engines_they_share_devices_with():
  load, plan = Workload(Fixed(1), Fixed(50.0)), Plan(6, 1, 1, ScheduleConfig("one_step_off"))
  apart = simulate(even_slots(1, update=5.0), load, plan)
  shared = simulate(even_slots(1, update=5.0, shared=True), load, plan)
  assert apart.seconds == pytest.approx(7 * 5.0) and shared.seconds == pytest.approx(12 * 5.0)
  assert shared.least_seconds == pytest.approx(60.0)


@pytest.mark.parametrize("slots", [3, 16, MANY])
@pytest.mark.parametrize("seed", range(4))
def test_more_staleness_is_never_slower_and_never_past_the_bound(slots, seed):
  fleet, seconds = even_slots(slots, update=2.0), []
  for schedule in (
    ScheduleConfig(),
    ScheduleConfig("one_step_off"),
    ScheduleConfig("async", 1),
    ScheduleConfig("async", 4),
  ):
    report = simulate(fleet, HEAVY, Plan(10, 4, 4, schedule, seed=seed))
    assert report.staleness_max <= schedule.bound
    assert report.seconds >= report.least_seconds * (1 - 1e-9)
    seconds.append(report.seconds)
  assert sorted(seconds, reverse=True) == pytest.approx(seconds, rel=0.02)
  if slots == MANY:
    assert seconds[0] / seconds[-1] > 1.5


def test_staleness_zero_is_synchronous():
  sync, zero = (
    simulate(even_slots(5, update=1.0), HEAVY, Plan(5, 2, 4, schedule))
    for schedule in (ScheduleConfig(), ScheduleConfig("async", 0))
  )
  assert sync == zero and sync.staleness_max == 0


def test_one_step_off_is_one_version_old_in_every_step_but_the_first():
  report = simulate(even_slots(5, update=1.0), HEAVY, Plan(8, 2, 4, ScheduleConfig("one_step_off")))
  assert report.staleness_max == 1 and 0.7 < report.staleness_mean < 1


def test_a_step_that_does_not_wait_for_the_tail_is_quicker_still():
  wait, mask = (
    simulate(even_slots(MANY, update=0.1), HEAVY, Plan(30, 2, 2, ScheduleConfig("async", 1, stale)))
    for stale in ("wait", "mask")
  )
  assert mask.seconds < wait.seconds and mask.staleness_max > 1


def test_dropping_is_refused():
  with pytest.raises(ValueError, match="'drop' is not simulated"):
    simulate(even_slots(1), HEAVY, Plan(1, 1, 1, ScheduleConfig("async", 1, "drop")))


def test_recorded_episodes_become_a_workload():
  builder = TrajectoryBuilder(step=0, task_id=0, sample=0, source="made")
  builder.append("user", [1, 2, 3], seconds=9.0)
  builder.append_sampled([5, 6], [-1.0] * 2, [0.5] * 2, 0, seconds=3.0)
  builder.append("tool", [7], seconds=0.25)
  builder.append("assistant", [8])
  builder.append_sampled([5], [-1.0], [0.5], 0, seconds=3.0)
  load = workload_of([builder.build()])
  assert load == Workload(
    turns=Empirical((2.0,)),
    turn_tokens=Empirical((2.0, 1.0)),
    tool_seconds=Empirical((0.25,)),
    prompt_tokens=Empirical((3.0,)),
    observation_tokens=Empirical((2.0,)),
  )
  with pytest.raises(ValueError, match="none of the 0 trajectories"):
    workload_of([])


def test_a_table_of_schedules_can_be_printed():
  table = compare(even_slots(8, update=1.0), HEAVY, Plan(4, 2, 4)).splitlines()
  assert [line.split("  ")[0] for line in table[1:]] == [
    "sync", "one_step_off", "async 1", "async 2", "async 4",
  ]  # fmt: skip
  assert "1.00x" in table[1]


# Against the real loop.

TURN, UPDATE, SIZE, GROUP, STEPS, SLOTS = 0.06, 0.12, 2, 2, 5, 3
TOOL = LogNormal(0.12, 1.0, cap=1.0)
TASKS = [make_task(i) for i in range(6)]


class Slotted(ScriptedEngine):
  """A model call takes ``TURN`` seconds and one of ``SLOTS`` slots, the lowest address first."""

  def __init__(self):
    super().__init__(lambda address, turn: say("go on"), delay=lambda address: TURN)
    self.free, self.waiting = SLOTS, []

  async def open(self, prefix, *, priority=()):
    context = await super().open(prefix, priority=priority)
    generate = context.generate

    async def in_a_slot(request):
      if not self.free:
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self.waiting, (priority, turn))
        await turn
      else:
        self.free -= 1
      try:
        return await generate(request)
      finally:
        if self.waiting:
          heapq.heappop(self.waiting)[1].set_result(None)
        else:
          self.free += 1

    context.generate = in_a_slot
    return context


class Latent(Environment):
  """Two turns, each answered after the seconds the simulator draws for that episode."""

  def __init__(self, rng):
    self.rng, self.turns = rng, 0

  async def reset(self, task, key):
    return Observation((Message("user", "Begin."),))

  async def step(self, action):
    await asyncio.sleep(TOOL.draw(self.rng))
    self.turns += 1
    if self.turns == 2:
      return Step(Observation(()), Reward(1.0), terminated=True)
    return Step(Observation((Message("user", "Go on."),)))

  def snapshot(self):
    return b""

  def restore(self, state):
    del state


def real_seconds(schedule):
  """Wall seconds of the real stream with updates that only sleep."""
  tasks = TaskIterator(TASKS, batch_size=SIZE, seed=0)
  order = [at[0][:2] for i in range(STEPS) for _, at in groups_of(next(tasks), i, GROUP)]
  engine, began = Slotted(), {}

  def make_environment(task):
    # Samples of a group begin in their order, groups in that of their rounds.
    count = began[task.id] = began.get(task.id, -1) + 1
    own = [i for i, (_, task_id) in enumerate(order) if task_id == task.id]
    return Latent(np.random.default_rng([0, own[count // GROUP], count % GROUP]))

  async def main():
    stream = GroupStream(
      GroupPlayer(make_player(engine, concurrency=1000), make_environment, REWARDS),
      TaskIterator(TASKS, batch_size=SIZE, seed=0),
      first=0,
      group_size=GROUP,
      schedule=schedule,
    )
    await stream.fill(0, SIZE)  # opening the data takes a while, too
    start = time.monotonic()
    for step in range(STEPS):
      engine.version = step
      await stream.fill(step, (min(schedule.bound, STEPS - 1 - step) + 1) * SIZE)
      batch = await stream.take(step, SIZE)
      await stream.consume({t.address[:2] for t in batch})
      await asyncio.sleep(UPDATE)
    return time.monotonic() - start

  return asyncio.run(main())


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_it_predicts_the_real_loop(staleness):
  schedule = ScheduleConfig("async", staleness)
  fleet = Fleet(SLOTS, ((1, 1.0 / TURN), (SLOTS, SLOTS / TURN)), UPDATE)
  load = Workload(turns=Fixed(2), turn_tokens=Fixed(1.0), tool_seconds=TOOL)
  predicted = simulate(fleet, load, Plan(STEPS, SIZE, GROUP, schedule)).seconds
  quickest = float("inf")
  for _ in range(4):  # the machine does other things, too
    quickest = min(quickest, real_seconds(schedule))
    if quickest <= predicted * 1.15:
      break
  assert quickest == pytest.approx(predicted, rel=0.15)
