"""Loops in threads: work of several callers, cancelling, what is left at the end."""

import asyncio
import contextvars
import threading

import pytest

from agentjax.threads import LoopThread, call_in_thread, run_in_loop


async def _name():
  return threading.current_thread().name


def test_a_loop_serves_blocking_and_awaiting_callers_in_one_thread():
  bridge = LoopThread("bridge")
  assert not bridge.alive
  assert bridge.run(_name()) == "bridge"
  assert asyncio.run(bridge.wait(_name())) == "bridge"
  bridge.close()
  assert not bridge.alive
  assert bridge.run(_name()) == "bridge"  # another thread
  bridge.close()


def test_what_is_left_on_the_loop_is_cancelled_at_the_end():
  bridge, seen = LoopThread(), []

  async def forever():
    try:
      await asyncio.Event().wait()
    finally:
      seen.append("cancelled")

  async def leave():
    task = asyncio.ensure_future(forever())
    await asyncio.sleep(0)
    return task

  bridge.run(leave())
  bridge.close()
  assert seen == ["cancelled"]


def test_cancelling_the_caller_cancels_the_work():
  bridge, begun, ended = LoopThread(), threading.Event(), threading.Event()

  async def forever():
    begun.set()
    try:
      await asyncio.Event().wait()
    finally:
      ended.set()

  async def caller():
    waiting = asyncio.ensure_future(bridge.wait(forever()))
    await asyncio.to_thread(begun.wait)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
      await waiting

  asyncio.run(caller())
  assert ended.wait(10)
  bridge.close()


def test_work_for_another_loop_runs_there_and_work_for_ones_own_here():
  bridge = LoopThread("bridge")

  async def where():
    return asyncio.get_running_loop()

  theirs = bridge.run(where())

  async def caller():
    own = asyncio.get_running_loop()
    assert await run_in_loop(theirs, where()) is theirs
    assert await run_in_loop(None, where()) is own
    assert await run_in_loop(own, where()) is own

  asyncio.run(caller())
  bridge.close()


def test_a_call_in_a_thread_keeps_context_and_raises_what_was_raised():
  variable = contextvars.ContextVar("variable")

  def stops():
    raise StopIteration("end")

  async def caller():
    variable.set("kept")
    assert await call_in_thread(variable.get, name="call") == "kept"
    with pytest.raises(ZeroDivisionError):
      await call_in_thread(lambda: 1 / 0, name="call")
    with pytest.raises(RuntimeError, match="StopIteration"):
      await call_in_thread(stops, name="call")

  asyncio.run(caller())


def test_a_call_that_ends_after_its_caller_says_so():
  go, late = threading.Event(), []

  async def caller():
    call = call_in_thread(go.wait, name="call", on_late_end=lambda: late.append(True))
    with pytest.raises(TimeoutError):
      await asyncio.wait_for(call, 0.01)
    go.set()
    while not late:
      await asyncio.sleep(0.001)

  asyncio.run(asyncio.wait_for(caller(), 10))
  assert late == [True]
