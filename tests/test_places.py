"""Places are shared fairly, and waiting for others costs no time."""

import asyncio
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax import places as places_module
from agentjax.places import Clock, Places, QueueTimeout, owned_by, wait_within


def hold(places, owner, seconds, log, **options):
  async def work():
    with owned_by(owner), Clock() as clock:
      async with places.one(**options):
        log.append(owner)
        await asyncio.sleep(seconds)
      return clock.elapsed

  return work()


def test_one_owner_neither_takes_all_places_nor_keeps_others_waiting():
  log = []

  async def main():
    places = Places(2)
    flood = [asyncio.ensure_future(hold(places, "a", 0.05, log)) for _ in range(24)]
    await asyncio.sleep(0.01)
    assert log == ["a"]  # half of the places
    await hold(places, "b", 0.0, log)
    assert log[1] == "b"
    await asyncio.gather(*flood)

  asyncio.run(main())
  assert log.count("a") == 24


def test_the_next_place_goes_to_whoever_holds_the_fewest():
  log = []

  async def main():
    places = Places(3)
    held = [hold(places, "x", 0.3, log), *(hold(places, "a", 0.05, log) for _ in range(6))]
    running = [asyncio.ensure_future(work) for work in held]
    await asyncio.sleep(0.01)
    await hold(places, "b", 0.0, log)
    await asyncio.gather(*running)

  asyncio.run(main())
  assert log[:4] == ["x", "a", "a", "b"]


def test_waiting_for_others_stops_the_clock_and_waiting_for_oneself_does_not():
  async def main():
    places = Places(1)
    return await asyncio.gather(
      hold(places, "a", 0.3, []), hold(places, "b", 0.01, []), hold(places, "a", 0.01, [])
    )

  first, other, own = asyncio.run(main())
  assert first == pytest.approx(0.3, abs=0.15) and other < 0.15
  assert own > 0.25  # it waited for the first one, which is the same owner's


def test_waiting_for_oneself_is_never_a_queue_that_was_too_long():
  async def main():
    places = Places(1, seconds=0.1)
    own = [hold(places, "a", 0.2, []) for _ in range(3)]
    results = await asyncio.gather(*own, hold(places, "b", 0.0, []), return_exceptions=True)
    return results

  *own, other = asyncio.run(main())
  assert all(isinstance(seconds, float) for seconds in own)
  assert isinstance(other, QueueTimeout) and "concurrency (1)" in str(other)


def test_alone_waits_for_all_and_keeps_all_out():
  log = []

  async def main():
    places = Places(3)
    running = [asyncio.ensure_future(hold(places, i, 0.05, log)) for i in range(2)]
    await asyncio.sleep(0.01)
    alone = asyncio.ensure_future(hold(places, "alone", 0.05, log, exclusive=True))
    await asyncio.sleep(0.01)
    late = asyncio.ensure_future(hold(places, "late", 0.0, log))
    await asyncio.gather(*running, alone, late)

  asyncio.run(main())
  assert log == [0, 1, "alone", "late"]


def test_a_waiter_that_is_cancelled_leaves_the_queue_and_its_clock_running():
  async def main():
    places = Places(1)
    with Clock() as clock:
      async with places.one():
        with owned_by("x"):
          waiting = asyncio.ensure_future(hold(places, "x", 0, []))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
        before = clock.elapsed
        await asyncio.sleep(0.05)
        assert clock.elapsed - before > 0.03
    async with places.one():
      pass

  asyncio.run(main())


def test_places_hold_across_threads():
  places, now, most = Places(2), 0, 0
  lock = threading.Lock()

  async def work():
    nonlocal now, most
    for _ in range(20):
      async with places.one():
        with lock:
          now += 1
          most = max(most, now)
        await asyncio.sleep(0.001)
        with lock:
          now -= 1

  threads = [threading.Thread(target=lambda: asyncio.run(work())) for _ in range(6)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert most == 2 and places._taken == 0 and not places._queues


class _Member:
  """One that holds a place until it is let go."""

  def __init__(self, places, owner, exclusive):
    self.owner, self.exclusive, self.holds, self.let_go = owner, exclusive, False, asyncio.Event()
    self.task = asyncio.ensure_future(self._hold(places))

  async def _hold(self, places):
    with owned_by(self.owner):
      async with places.one(exclusive=self.exclusive):
        self.holds = True
        await self.let_go.wait()
    self.holds = False


def _hand_out(count, waiting, holding):
  """The rule, by looking at everyone: members of ``waiting`` that may go move to ``holding``."""
  while True:
    taken = sum(count if m.exclusive else 1 for m in holding)
    held = [sum(h.owner == m.owner for h in holding) for m in waiting]
    able = [(n, at) for at, n in enumerate(held) if n < (count + 1) // 2]
    if taken >= count or not able or (waiting[min(able)[1]].exclusive and taken):
      return
    holding.append(waiting.pop(min(able)[1]))


@settings(max_examples=60, deadline=None)
@given(
  st.integers(1, 5),
  st.lists(
    st.one_of(
      st.tuples(st.just("come"), st.integers(0, 3), st.booleans()),
      st.tuples(st.sampled_from(["end", "cancel"]), st.integers(0, 30), st.booleans()),
    ),
    max_size=50,
  ),
)
def test_places_go_to_whom_a_look_at_everyone_gives_them(count, steps):
  async def main():
    places, waiting, holding = Places(count), [], []
    for kind, number, flag in steps:
      if kind == "come":
        waiting.append(_Member(places, number, flag and number == 3))
      elif (kind == "end" and holding) or (kind == "cancel" and waiting):
        members = holding if kind == "end" else waiting
        member = members.pop(number % len(members))
        member.let_go.set() if kind == "end" else member.task.cancel()
      for _ in range(5):
        await asyncio.sleep(0)
      _hand_out(count, waiting, holding)
      assert [m.holds for m in (*waiting, *holding)] == [False] * len(waiting) + [True] * len(
        holding
      )
    everyone = [*waiting, *holding]
    for member in everyone:
      member.let_go.set()
    await asyncio.gather(*(m.task for m in everyone))
    assert places._taken == 0 and not places._queues

  asyncio.run(main())


def test_what_a_place_costs_does_not_grow_with_those_that_wait(monkeypatch):
  looked_at = 0

  class Counted(places_module._Waiter):
    def __getattribute__(self, name):
      nonlocal looked_at
      looked_at += 1
      return super().__getattribute__(name)

  async def main(count):
    nonlocal looked_at
    places, looked_at = Places(2), 0
    await asyncio.gather(*(hold(places, i, 0, []) for i in range(count)))
    return looked_at / count

  monkeypatch.setattr(places_module, "_Waiter", Counted)
  assert asyncio.run(main(2_000)) < 1.5 * asyncio.run(main(100))


def test_a_wait_is_bounded_by_the_clock_alone():
  async def main():
    places = Places(1)

    async def work():
      async with places.one():
        await asyncio.sleep(0.05)

    async with places.one():
      with Clock() as clock:
        task = asyncio.ensure_future(work())
      waiting = asyncio.ensure_future(wait_within(task, 0.15, clock))
      start = time.monotonic()
      await asyncio.sleep(0.4)
    assert await waiting and time.monotonic() - start > 0.4

  asyncio.run(main())


@pytest.mark.parametrize(("seconds", "endless", "done"), [(0.02, 0, 1), (0.02, 1, 0), (0, 0, 0)])
def test_a_loop_that_was_held_up_leaves_a_turn_to_work_that_has_time(seconds, endless, done):
  async def work():
    if endless:
      await asyncio.sleep(60)

  async def main():
    clock, task = Clock(), asyncio.ensure_future(work())
    time.sleep(0.05)  # nothing else runs meanwhile
    assert await wait_within(task, seconds, clock) is bool(done)
    task.cancel()

  asyncio.run(main())
