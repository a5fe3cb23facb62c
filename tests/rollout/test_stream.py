"""The stream of groups: each is handed over once, in time, whatever ends first."""

import asyncio
import sys
import time

import numpy as np
import pytest

from agentjax.data import TaskIterator
from agentjax.rollout import stream as stream_module
from agentjax.rollout.loop import GroupPlayer, collect
from agentjax.rollout.schedule import ScheduleConfig, bound_staleness
from agentjax.rollout.stream import GroupStream
from agentjax.threads import LoopThread
from agentjax.trajectory.record import Trajectory
from agentjax.world.question import QuestionEnvironment
from tests.rollout.conftest import REGISTRY, REWARDS, make_player, make_task, question
from tests.rollout.scripted_engine import ScriptedEngine, say
from tests.rollout.test_loop import content

FIRST, STEPS, SIZE, GROUP = 3, 8, 2, 2
TASKS = [make_task(i, answer=str(i)) for i in range(5)]


def answers(address, turn):
  return say("", call=f"calculator {address[1]}+0") if turn == 0 else say(f"#### {address[1]}")


def slow_now_and_then(seed):
  """Most model calls take 1 ms, every fifth one 30."""

  def delay(address):
    return 0.03 if np.random.default_rng([seed, *address]).random() < 0.2 else 0.001

  return delay


def held_back(engine, count, version):
  """Environments of which the first ``count`` answer only once the weights are of ``version``."""
  made = []

  class HeldBack(QuestionEnvironment):
    async def step(self, action):
      while made.index(self) < count and engine.version < version:
        await asyncio.sleep(0.001)
      return await super().step(action)

  def make_environment(task):
    made.append(HeldBack(REGISTRY, max_turns=4, tool_timeout=30.0))
    return made[-1]

  return make_environment


def make_stream(
  engine,
  schedule,
  *,
  on_finish=None,
  state=None,
  share=list,
  make_environment=question,
):
  stream = GroupStream(
    GroupPlayer(make_player(engine), make_environment, REWARDS, on_finish),
    TaskIterator(TASKS, batch_size=SIZE, seed=1),
    first=FIRST,
    group_size=GROUP,
    schedule=schedule,
    share=share,
  )
  if state is not None:
    stream.set_state(state.plain)
    stream.remember(state.episodes)
  return stream


async def steps(stream, engine, schedule, first=FIRST, last=FIRST + STEPS - 1, seconds=0.01):
  """Takes the batches of some steps; each update takes ``seconds``."""
  batches = []
  for step in range(first, last + 1):
    left = last - step
    engine.version = step
    await stream.fill(step, (min(left, schedule.bound) + 1) * SIZE)
    batch = await stream.take(step, SIZE)
    await stream.consume({t.address[:2] for t in batch})
    batches.append(batch)
    await asyncio.sleep(seconds)
  return batches


def run(engine, schedule, **settings):
  async def main():
    stream = make_stream(engine, schedule, **settings)
    try:
      return await steps(stream, engine, schedule)
    finally:
      await stream.close()
      assert asyncio.all_tasks() == {asyncio.current_task()}

  batches = asyncio.run(main())
  assert engine.live_contexts == engine.live_prefixes == 0
  return batches


def first_address():
  tasks = next(TaskIterator(TASKS, batch_size=SIZE, seed=1))
  return FIRST, min(task.id for task in tasks), 0


def versions_of(trajectory):
  return np.concatenate([s.versions[s.sampled] for s in trajectory.segments])


def expected_groups():
  tasks = TaskIterator(TASKS, batch_size=SIZE, seed=1)
  return {(FIRST + i, task.id) for i in range(STEPS) for task in next(tasks)}


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_every_group_is_handed_over_once_and_none_too_old(staleness):
  schedule = ScheduleConfig("async", staleness)
  batches = run(ScriptedEngine(answers, delay=slow_now_and_then(staleness)), schedule)
  taken = [t.address for batch in batches for t in batch]
  assert len(taken) == len(set(taken)) == STEPS * SIZE * GROUP
  assert {address[:2] for address in taken} == expected_groups()
  ages = [FIRST + i - versions_of(t).min() for i, batch in enumerate(batches) for t in batch]
  assert max(ages) <= staleness
  assert (max(ages) > 0) == (staleness > 0)
  for batch in batches:
    assert [t.address for t in batch] == sorted(t.address for t in batch)


def test_with_staleness_zero_it_is_collect():
  engine = ScriptedEngine(answers, delay=slow_now_and_then(0))
  batches = run(engine, ScheduleConfig("async", 0))
  tasks = TaskIterator(TASKS, batch_size=SIZE, seed=1)

  async def one_step(step):
    engine.version = step
    return await collect(
      next(tasks),
      step=step,
      samples_per_task=GROUP,
      player=make_player(engine),
      make_environment=question,
      rewards=REWARDS,
    )

  for i, batch in enumerate(batches):
    np.testing.assert_equal(content(batch), content(asyncio.run(one_step(FIRST + i))))


def test_an_episode_goes_on_under_new_weights_and_ends_in_a_later_step():
  schedule = ScheduleConfig("async", 3)
  engine = ScriptedEngine(answers)
  batches = run(engine, schedule, make_environment=held_back(engine, 1, FIRST + 2))
  ((step, crossed),) = [
    (i, t) for i, batch in enumerate(batches) for t in batch if t.address == first_address()
  ]
  assert step >= 2 and versions_of(crossed)[0] == FIRST and versions_of(crossed)[-1] >= FIRST + 2


def test_one_straggler_holds_up_no_step_before_its_time():
  engine, taken_in = ScriptedEngine(answers), {}
  held = held_back(engine, SIZE * GROUP, FIRST + 2)
  batches = run(engine, ScheduleConfig("async", 2), make_environment=held)
  for i, batch in enumerate(batches):
    taken_in.update({t.address[:2]: i for t in batch})
  stragglers = sorted(step for (number, _), step in taken_in.items() if number == FIRST)
  # Both fall due at the third step, and all of it is theirs.
  assert stragglers == [2, 2]


def test_masked_schedules_wait_for_nobody_and_old_tokens_are_masked():
  schedule = ScheduleConfig("async", 1, "mask")

  def delay(address):
    return 0.08 if address[0] == FIRST and address[1] % 2 else 0.0

  batches = run(ScriptedEngine(answers, delay=delay), schedule)
  ages = {}
  for i, batch in enumerate(batches):
    for t in batch:
      ages[t.address] = FIRST + i - versions_of(t).min()
    bounded = bound_staleness(batch, FIRST + i, schedule)
    for trajectory in bounded:
      for segment in trajectory.segments:
        old = segment.sampled & (segment.versions < FIRST + i - 1)
        assert not segment.weights[old].any()
  assert len(ages) == STEPS * SIZE * GROUP and {a[:2] for a in ages} == expected_groups()


def test_dropped_groups_are_cancelled_and_others_take_their_place():
  schedule = ScheduleConfig("async", 1, "drop")

  def delay(address):
    return 30.0 if address[0] == FIRST else 0.002

  engine = ScriptedEngine(answers, delay=delay)

  async def main():
    stream = make_stream(engine, schedule)
    try:
      batches = await steps(stream, engine, schedule, last=FIRST + STEPS - 1)
      return batches, stream.dropped
    finally:
      await stream.close()

  batches, dropped = asyncio.run(asyncio.wait_for(main(), 20))
  assert dropped >= SIZE and [len(b) for b in batches] == [SIZE * GROUP] * STEPS
  taken = [t.address for batch in batches for t in batch]
  assert len(taken) == len(set(taken)) and min(taken)[0] == FIRST + 1
  assert engine.live_contexts == 0
  for i, batch in enumerate(batches):
    bound_staleness(batch, FIRST + i, schedule)


def test_a_stream_goes_on_from_its_state_and_trains_each_group_once():
  schedule = ScheduleConfig("async", 2)
  engine = ScriptedEngine(answers, delay=slow_now_and_then(7))
  finished = {}

  async def part(first, last, state):
    stream = make_stream(
      engine,
      schedule,
      on_finish=lambda t: finished.update({t.address: t}),
      state=state,
    )
    try:
      # The first part ends as a killed process would: in the middle of groups.
      batches = []
      for step in range(first, last + 1):
        engine.version = step
        await stream.fill(step, min(FIRST + STEPS - step, 3) * SIZE)
        batches.append(await stream.take(step, SIZE))
        await stream.consume({t.address[:2] for t in batches[-1]})
      return batches, await stream.get_state()
    finally:
      await stream.close()

  taken, state = [], None
  for first, last in ((FIRST, FIRST + 2), (FIRST + 3, FIRST + 3), (FIRST + 4, FIRST + STEPS - 1)):
    batches, state = asyncio.run(part(first, last, state))
    for i, batch in enumerate(batches):
      bound_staleness(batch, first + i, schedule)
      taken += [t.address for t in batch]
  assert len(taken) == len(set(taken)) and {a[:2] for a in taken} == expected_groups()
  assert state.plain == {**state.plain, "round": FIRST + STEPS, "consumed": []}
  assert state.episodes == []
  played = [address for address, turn, _ in engine.requests if turn == 1]
  assert len(finished) == len(taken) <= len(played)


def test_an_error_of_the_engine_ends_the_take_and_close_frees_the_rest():
  def broken(address, turn):
    return RuntimeError("device lost") if address[2] == 1 else answers(address, turn)

  engine = ScriptedEngine(broken, delay=slow_now_and_then(0))
  with pytest.raises(RuntimeError, match="device lost"):
    run(engine, ScheduleConfig("async", 1))
  assert engine.live_contexts == engine.live_prefixes == 0


def test_more_groups_than_were_started_cannot_be_waited_for():
  async def main():
    stream = make_stream(ScriptedEngine(answers), ScheduleConfig())
    await stream.fill(FIRST, 1)
    await stream.take(FIRST, SIZE)

  with pytest.raises(RuntimeError, match=r"needs 2 groups and only 1 have begun"):
    asyncio.run(main())


def test_processes_play_their_shares_of_the_same_rounds():
  def shares(index):
    engine = ScriptedEngine(answers)

    async def main():
      stream = make_stream(engine, ScheduleConfig(), share=lambda items: items[index::2])
      found = []
      for step in range(FIRST, FIRST + 4):
        await stream.fill(step, 1)
        found.append(await stream.take(step, 1))
        others = {(step, task.id) for task in TASKS}
        await stream.consume(others)
      return [t.address for batch in found for t in batch]

    return asyncio.run(main())

  one, two = shares(0), shares(1)
  assert not set(one) & set(two)
  wanted = {g for g in expected_groups() if g[0] < FIRST + 4}
  assert {a[:2] for a in one + two} == wanted


def test_a_thread_that_trains_never_meets_the_groups_that_go_on():
  """Half of the groups are refused, and others begin, while steps are taken and trained on."""
  tasks, size, last = [make_task(i, answer=str(i)) for i in range(64)], 32, 30
  written = []
  playing = GroupPlayer(
    make_player(ScriptedEngine(answers), concurrency=256), question, REWARDS, written.append
  )

  def accept(members, version=0):
    return sum(members[0].address[:2]) % 2 == 0

  stream = GroupStream(
    playing,
    TaskIterator(tasks, batch_size=size, seed=1),
    first=0,
    group_size=1,
    schedule=ScheduleConfig("async", 2),
    accept=accept,
    refill=size,
  )
  later = [Trajectory(1000 + i, 0, 0, "made", []) for i in range(20_000)]
  stream.remember(later)  # so that to look through all of it takes a while
  taken, refused = [], []
  interval = sys.getswitchinterval()
  sys.setswitchinterval(1e-6)
  runner = LoopThread()
  try:
    for step in range(last):
      playing.player.engine.version = step
      runner.run(stream.fill(step, 3 * size))
      batch = runner.run(stream.take(step, size))
      time.sleep(0.003)  # where it trains; groups end, are refused and begin
      given_up = runner.run(stream.take_refused())
      runner.run(stream.consume({t.address[:2] for t in (*batch, *given_up)}))
      if step % 10 == 0:
        kept = {t.address for t in runner.run(stream.get_state()).episodes}
        assert kept >= {t.address for t in later}
        assert not kept & {t.address for t in (*batch, *given_up)}
      taken, refused = taken + batch, refused + given_up
  finally:
    sys.setswitchinterval(interval)
    runner.run(stream.close())
    runner.close()
  addresses = [t.address for t in (*taken, *refused)]
  assert len(addresses) == len(set(addresses)) and refused
  assert {a for a in addresses} <= {t.address for t in written}
  assert all(accept([t]) for t in taken) and not any(accept([t]) for t in refused)


def test_the_oldest_version_of_a_group_is_looked_for_once(monkeypatch):
  looked = []
  found = stream_module._oldest_version

  def counting(trajectory, default):
    looked.append(trajectory.address)
    return found(trajectory, default)

  monkeypatch.setattr(stream_module, "_oldest_version", counting)
  batches = run(ScriptedEngine(answers, delay=slow_now_and_then(1)), ScheduleConfig("async", 3))
  assert sorted(looked) == sorted(t.address for batch in batches for t in batch)


def test_episodes_of_a_dropped_group_are_not_kept():
  schedule = ScheduleConfig("async", 1, "drop")

  def delay(address):
    return 30.0 if address[0] == FIRST and address[2] else 0.002

  engine = ScriptedEngine(answers, delay=delay)

  async def main():
    stream = make_stream(engine, schedule)
    try:
      await steps(stream, engine, schedule)
      return stream.dropped, (await stream.get_state()).episodes
    finally:
      await stream.close()

  dropped, episodes = asyncio.run(asyncio.wait_for(main(), 20))
  assert dropped and all(t.step > FIRST for t in episodes)


def test_a_group_that_is_dropped_may_break_on_its_way_out():
  schedule = ScheduleConfig("async", 1, "drop")

  class Breaking(ScriptedEngine):
    async def open(self, prefix, *, priority=()):
      if priority[0] != FIRST:
        return await super().open(prefix, priority=priority)
      try:
        await asyncio.sleep(30)
      except asyncio.CancelledError as cancelled:
        raise RuntimeError("broken while it was cancelled") from cancelled

  engine = Breaking(answers, delay=lambda address: 0.002)

  async def main():
    stream = make_stream(engine, schedule)
    try:
      return await steps(stream, engine, schedule), stream.dropped
    finally:
      await stream.close()

  batches, dropped = asyncio.run(asyncio.wait_for(main(), 20))
  assert dropped >= SIZE and [len(b) for b in batches] == [SIZE * GROUP] * STEPS
