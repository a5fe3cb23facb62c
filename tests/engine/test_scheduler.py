"""Continuous batching: what waits, forks, parks, fails or is cancelled never changes a sample."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref

import jax
import numpy as np
import pytest

from agentjax.engine import (
  ContextLengthError,
  EngineBusyError,
  EngineError,
  Finish,
  NonFiniteError,
  Sample,
  SampleRequest,
  SamplingConfig,
  address_key,
)

PROMPTS = [[1, 2, 3], [9] * 4, list(range(5, 27)), [7, 1], list(range(40, 20, -1)), [3] * 17]


def request(*address: int, tokens: int = 11, **fields) -> SampleRequest:
  return SampleRequest(address_key(0, *address), tokens, **fields)


def assert_same_bits(found: list[Sample], expected: list[Sample]) -> None:
  assert len(found) == len(expected)
  for a, b in zip(found, expected, strict=True):
    for name in ("token_ids", "behaviour_log_probs", "entropies", "versions"):
      np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert a.finish == b.finish


async def episode(engine, index: int, *, pause=0.0, prefix=None, priority=()) -> list[Sample]:
  """Three turns with observations between; prompt and keys are those of ``index``."""
  if prefix is None:
    context = await engine.open_ids(PROMPTS[index % len(PROMPTS)], priority=priority)
  else:
    context = await engine.open(prefix, priority=priority)
  samples = []
  with contextlib.closing(context):
    for turn in range(3):
      samples.append(await context.generate(request(index, turn, tokens=5 + 3 * turn)))
      await asyncio.sleep(pause * ((index * 7 + turn) % 3))
      await context.extend([4, 5, index, turn, 6])
  return samples


def run_episodes(engine, order, *, pause=0.0) -> dict[int, list[Sample]]:
  async def main():
    results = await asyncio.gather(*(episode(engine, i, pause=pause) for i in order))
    return dict(zip(order, results, strict=True))

  return asyncio.run(main())


def free_slots(engine) -> int:
  return sum(len(lane.free) for lane in engine.scheduler.lanes)


def test_schedule_slots_lanes_and_order_change_no_bit(make_engine):
  alone = {i: run_episodes(make_engine(), [i])[i] for i in (0, 2, 5)}
  few = run_episodes(make_engine(), range(6))
  many = run_episodes(make_engine(slots=8, lanes=2), [5, 9, 1, 3, 8, 0, 4, 7, 2, 6], pause=0.005)
  parked = run_episodes(make_engine(host_turns=0), range(9, -1, -1), pause=0.01)
  for i in alone:
    assert_same_bits(few[i], alone[i])
  for i in range(6):
    assert_same_bits(many[i], few[i])
  for i in range(10):
    assert_same_bits(parked[i], many[i])


def test_idle_contexts_are_parked_while_others_run(make_engine):
  engine = make_engine()
  expected = run_episodes(engine, range(4))
  assert engine.stats.parked == 0

  async def main():
    # Four contexts sit in all four slots; four others come, then the first go on.
    contexts = [await engine.open_ids(PROMPTS[i]) for i in range(4)]
    first = [await c.generate(request(i, 0, tokens=5)) for i, c in enumerate(contexts)]
    await asyncio.gather(*(episode(engine, i) for i in range(4, 8)))
    rest = []
    for i, context in enumerate(contexts):
      await context.extend([4, 5, i, 0, 6])
      rest.append(await context.generate(request(i, 1, tokens=8)))
      context.close()
    return first, rest

  first, rest = asyncio.run(main())
  assert engine.stats.parked >= 4
  assert_same_bits(first, [expected[i][0] for i in range(4)])
  assert_same_bits(rest, [expected[i][1] for i in range(4)])
  assert free_slots(engine) == 4


def test_without_room_to_park_a_call_waits_while_others_work(make_engine):
  engine = make_engine(device_store_mb=0, host_store_mb=0)

  async def main():
    held = [await engine.open_ids([i]) for i in range(4)]
    for context in held:
      await context.generate(request(tokens=1))
    at_work = asyncio.create_task(held[0].generate(request(tokens=40)))
    await asyncio.sleep(0)
    late = asyncio.create_task(episode(engine, 1))
    while engine.stats.sampled_tokens < 4 + 24:
      assert engine.stats.parked == 0
      await asyncio.sleep(0.001)
    assert not late.done()
    held[2].close()
    await at_work
    return await late

  assert_same_bits(asyncio.run(main()), run_episodes(engine, [1])[1])


def test_a_shared_prefix_equals_independent_prefill(make_engine):
  engine = make_engine()
  expected = run_episodes(engine, [2, 8])

  async def main():
    prefix = await engine.prefill(PROMPTS[2])
    assert len(prefix) == len(PROMPTS[2])
    before = engine.stats.extended_tokens
    found = await asyncio.gather(*(episode(engine, i, prefix=prefix) for i in (2, 8)))
    assert engine.stats.extended_tokens - before == 2 * 2 * 5  # observations alone
    prefix.release()
    with pytest.raises(EngineError, match="released"):
      await engine.open(prefix)
    return found

  found = asyncio.run(main())
  assert_same_bits(found[0], expected[2])
  assert_same_bits(found[1], expected[8])


def test_a_fork_goes_on_as_its_source_would(make_engine):
  engine = make_engine()

  async def main():
    source = await engine.open_ids(PROMPTS[0])
    await source.generate(request(0))
    await source.extend([8, 9])
    forks = await source.fork(5)
    await source.extend([1])  # must not reach the forks
    straight = await engine.open_ids(PROMPTS[0])
    await straight.generate(request(0))
    await straight.extend([8, 9])
    expected = await straight.generate(request(1, 0))
    found = await asyncio.gather(*(f.generate(request(1, 0)) for f in forks))
    assert len(forks[0]) == len(straight)
    other = await (await forks[1].fork(1))[0].generate(request(2))
    again = await (await forks[2].fork(1))[0].generate(request(2))
    return found, expected, other, again

  found, expected, other, again = asyncio.run(main())
  assert_same_bits(list(found), [expected] * 5)
  assert_same_bits([other], [again])


def test_a_fork_of_a_context_on_its_way_out_of_its_slot_keeps_what_it_held(make_engine):
  async def episode_that_forks(engine, index: int) -> list[Sample]:
    context = await engine.open_ids(PROMPTS[index % len(PROMPTS)])
    samples = [await context.generate(request(index, tokens=5))]
    for fork in await context.fork(2):
      samples.append(await fork.generate(request(index, 1, tokens=5)))
      fork.close()
    context.close()
    return samples

  async def main(engine):
    # Ten at once in four slots: each call that ends is followed by an eviction.
    return await asyncio.gather(*(episode_that_forks(engine, i) for i in range(10)))

  crowded = asyncio.run(main(make_engine()))
  alone = make_engine()
  for i, found in enumerate(crowded):
    assert_same_bits(found, asyncio.run(episode_that_forks(alone, i)))


@pytest.mark.parametrize("interrupted", [1, 8, 11])
def test_a_call_continues_from_its_recorded_tokens_to_the_same_bits(make_engine, interrupted):
  engine = make_engine()

  async def sample(**fields) -> list[Sample]:
    context = await engine.open_ids(PROMPTS[3])
    first = await context.generate(request(0, tokens=20, **fields))
    await context.extend([1, 2])
    return [first, await context.generate(request(1))]

  whole = asyncio.run(sample())
  ids = tuple(whole[0].token_ids[:interrupted].tolist())
  assert_same_bits(asyncio.run(sample(forced_ids=ids)), whole)


@pytest.mark.parametrize("where", [(2, 5), (6, 11), (0, 1), (13, 16)])
def test_a_stop_string_across_tokens_cuts_the_call_without_a_trace(make_engine, where):
  engine = make_engine()

  async def sample(tokens: int, **fields) -> list[Sample]:
    context = await engine.open_ids(PROMPTS[4])
    first = await context.generate(request(0, tokens=tokens, **fields))
    await context.extend([1, 2])
    length = len(context)
    second = await context.generate(request(1))
    assert length == len(PROMPTS[4]) + len(first.token_ids) + 2
    context.close()
    return [first, second]

  free, _ = asyncio.run(sample(20))
  stop = engine.decode(free.token_ids[slice(*where)].tolist())
  end = engine.decode(free.token_ids.tolist()).index(stop) + len(stop)
  found = asyncio.run(sample(20, stop_strings=("~~", stop)))
  expected = asyncio.run(sample(end))
  assert found[0].finish == Finish.STOP_STRING and expected[0].finish == Finish.LENGTH
  np.testing.assert_array_equal(found[0].token_ids, expected[0].token_ids)
  np.testing.assert_array_equal(found[0].behaviour_log_probs, expected[0].behaviour_log_probs)
  assert_same_bits(found[1:], expected[1:])
  assert free_slots(engine) == 4


def test_stop_strings_without_a_decoder_are_refused(make_engine):
  engine = make_engine()
  engine.decode = None

  async def main():
    context = await engine.open_ids([1])
    with pytest.raises(ValueError, match="decode=tokenizer.decode"):
      await context.generate(request(stop_strings=("a",)))

  asyncio.run(main())


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"tokens": 0}, "max_tokens"),
    ({"stop_strings": ("",)}, "stop string"),
    ({"forced_ids": (1,) * 12}, "forced_ids"),
    ({"stop_ids": tuple(range(5))}, "engine.max_stop_ids=4"),
    ({"stop_ids": (48,)}, r"stop_ids\[0\]=48; allowed: whole numbers from 0 to 47"),
    ({"forced_ids": (1, -1)}, r"forced_ids\[1\]=-1"),
    ({"sampling": SamplingConfig(top_p=2.0)}, "sampling.top_p"),
    ({"sampling": SamplingConfig(top_k=2**31)}, "sampling.top_k"),
  ],
)
def test_an_impossible_request_names_the_field_and_costs_nothing(make_engine, fields, message):
  engine = make_engine()

  async def main():
    context = await engine.open_ids([1])
    with pytest.raises(ValueError, match=message):
      await context.generate(request(**fields))
    return await context.generate(request())

  assert len(asyncio.run(main()).token_ids) == 11


def test_too_many_tokens_are_refused_and_the_context_lives_on(make_engine):
  engine = make_engine()

  async def main():
    with pytest.raises(ContextLengthError, match=r"65.*engine\.max_length=64"):
      await engine.prefill([1] * 65)
    with pytest.raises(ContextLengthError, match=r"65.*engine\.max_length=64"):
      await engine.open_ids([1] * 65)
    context = await engine.open_ids([1] * 50)
    with pytest.raises(ContextLengthError, match=r"50 tokens cannot take 15 more"):
      await context.extend([2] * 15)
    await context.extend([2] * 10)
    sample = await context.generate(request())
    assert (len(sample.token_ids), sample.finish, context.room) == (4, Finish.CONTEXT_FULL, 0)

  asyncio.run(main())
  assert free_slots(engine) == 3  # the context was not closed


def test_a_cancelled_call_frees_its_slot_and_disturbs_no_other(make_engine):
  engine = make_engine()
  expected = run_episodes(engine, range(4))

  async def main():
    victims = [await engine.open_ids([1, 2]) for _ in range(6)]
    calls = [asyncio.create_task(v.generate(request(tokens=60))) for v in victims]
    others = [asyncio.create_task(episode(engine, i)) for i in range(4)]
    while engine.stats.decode_dispatches == start:
      await asyncio.sleep(0.001)
    for call in calls:
      call.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(r, asyncio.CancelledError) for r in results)
    with pytest.raises(EngineError, match="cancelled"):
      await victims[0].generate(request())
    for victim in victims:
      victim.close()
    return await asyncio.gather(*others)

  start = engine.stats.decode_dispatches
  found = asyncio.run(main())
  for i in range(4):
    assert_same_bits(found[i], expected[i])
  assert free_slots(engine) == 4


def test_closing_a_context_ends_its_call(make_engine):
  engine = make_engine()

  async def main():
    context = await engine.open_ids([1])
    call = asyncio.create_task(context.generate(request(tokens=60)))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="busy"):
      await context.extend([1])
    context.close()
    with pytest.raises(EngineError, match="closed"):
      await call

  asyncio.run(main())
  assert free_slots(engine) == 4


def test_an_error_in_device_work_reaches_every_waiter(make_engine, monkeypatch):
  engine = make_engine()

  def fail(plan):
    raise RuntimeError("device on fire")

  monkeypatch.setattr(engine.scheduler.lanes[0].slots, "start", fail)

  async def main():
    calls = [episode(engine, i) for i in range(7)] + [engine.prefill([1])]
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
    with pytest.raises(EngineError, match="device on fire"):
      await engine.prefill([1])
    return results

  results = asyncio.run(main())
  failed = [r for r in results if isinstance(r, EngineError) and "device on fire" in str(r)]
  assert len(failed) >= 7  # the prefill may have come before
  assert isinstance(failed[0].__cause__, RuntimeError)


def test_an_interrupted_event_loop_leaves_the_engine_usable(make_engine):
  engine = make_engine()
  expected = run_episodes(engine, range(4))

  async def interrupted():
    async with asyncio.timeout(0.02):
      await asyncio.gather(*(episode(engine, i, pause=1.0) for i in range(9)))

  with pytest.raises(TimeoutError):
    asyncio.run(interrupted())
  assert free_slots(engine) == 4
  found = run_episodes(engine, range(4))
  for i in range(4):
    assert_same_bits(found[i], expected[i])


@contextlib.contextmanager
def nothing_is_read(lane):
  """Results of cycles do not come."""
  gate = threading.Event()
  lane.waiter.submit(gate.wait)
  try:
    yield
  finally:
    gate.set()


async def started(engine, lane):
  """An episode whose first cycle was dispatched."""
  task = asyncio.ensure_future(episode(engine, 7))
  while not lane.under_way:
    await asyncio.sleep(0)
  return task


@pytest.mark.parametrize("closed", [True, False])
def test_an_event_loop_that_was_stopped_leaves_the_engine_usable(make_engine, closed):
  """Unlike ``asyncio.run`` it cancels nothing: a cycle is under way, and a call waits for ever."""
  expected = run_episodes(make_engine(), range(4))
  engine = make_engine()
  loop, lane = asyncio.new_event_loop(), engine.scheduler.lanes[0]

  with nothing_is_read(lane):
    task = loop.run_until_complete(started(engine, lane))
    assert lane.under_way and not task.done()
  if closed:
    loop.close()
  found = run_episodes(engine, range(4))
  for i in range(4):
    assert_same_bits(found[i], expected[i])
  assert free_slots(engine) == 4
  if not closed:
    with pytest.raises(EngineError, match="the event loop ended"):
      loop.run_until_complete(task)
    loop.close()


def test_no_work_is_done_while_every_program_waits(make_engine):
  engine = make_engine()

  async def main():
    context = await engine.open_ids([1])
    await context.generate(request(tokens=3))
    await asyncio.sleep(0.05)
    dispatches = dict(engine.scheduler.lanes[0].slots.device.dispatches)
    assert engine.scheduler.lanes[0].task is None
    await asyncio.sleep(0.1)
    assert dict(engine.scheduler.lanes[0].slots.device.dispatches) == dispatches
    return await context.generate(request(tokens=3))

  assert len(asyncio.run(main()).token_ids) == 3


def test_programs_that_come_back_at_once_lose_no_chunk(make_engine):
  engine = make_engine()

  async def one(i: int):
    context = await engine.open_ids([i])
    for turn in range(3):
      await context.generate(request(i, turn, tokens=8))
      for _ in range(5):  # a quick tool call
        await asyncio.sleep(0)
      await context.extend([1])

  async def main():
    await asyncio.gather(*(one(i) for i in range(4)))

  asyncio.run(main())
  assert engine.stats.decode_dispatches == 3


def test_waiting_contexts_get_slots_in_order_of_priority(make_engine):
  engine = make_engine(device_store_mb=0, host_store_mb=0)
  entered = []

  async def one(priority: int):
    context = await engine.open_ids([1], priority=(priority,))
    await context.generate(request(tokens=8))
    entered.append(priority)
    context.close()

  async def hold(tokens: int):
    context = await engine.open_ids([1])
    await context.generate(request(tokens=tokens))
    context.close()

  async def main():
    held = [asyncio.create_task(hold(8 * (i + 1))) for i in range(4)]
    await asyncio.sleep(0)
    calls = [asyncio.create_task(one(p)) for p in (5, 2, 9, 1)]
    await asyncio.gather(*held)
    await asyncio.gather(*calls)

  asyncio.run(main())
  assert entered == [1, 2, 5, 9]


def test_a_prefix_of_old_weights_is_run_again(make_engine, other_params):
  engine = make_engine()

  async def open_after_publish():
    prefix = await engine.prefill(PROMPTS[2])
    engine.publish(other_params, 7)
    return await episode(engine, 2, prefix=prefix)

  found = asyncio.run(open_after_publish())
  expected = run_episodes(engine, [2])[2]
  assert_same_bits(found, expected)
  assert set(found[0].versions) == {7} and engine.version == 7


def test_tokens_carry_the_version_that_sampled_them(make_engine, params, other_params):
  engine = make_engine()

  async def main():
    context = await engine.open_ids([1])
    call = asyncio.create_task(context.generate(request(tokens=60)))
    while not engine.stats.decode_dispatches:
      await asyncio.sleep(0)
    engine.publish(other_params, 1)
    return await call

  sample = asyncio.run(main())
  versions = sample.versions.tolist()
  assert versions == sorted(versions) and set(versions) == {0, 1}
  # Weights change between dispatches, whose first token is drawn from what the one before gave.
  assert versions.count(0) % 8 == 1


def test_sampling_before_weights_is_an_error(model_config, make_engine):
  engine = make_engine()
  engine.scheduler._weights = {}

  async def main():
    with pytest.raises(EngineError, match="publish"):
      await engine.prefill([1])

  asyncio.run(main())


def test_a_closed_engine_ends_calls(make_engine):
  engine = make_engine()

  async def main():
    context = await engine.open_ids([1])
    call = asyncio.create_task(context.generate(request(tokens=60)))
    await asyncio.sleep(0)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
      await call

  asyncio.run(main())


def test_a_closed_engine_keeps_nothing_of_a_cycle_whose_event_loop_ended(make_engine):
  engine = make_engine()
  lane = engine.scheduler.lanes[0]
  with nothing_is_read(lane):
    asyncio.run(started(engine, lane))
    assert lane.under_way
  engine.close()
  assert not lane.under_way


def test_all_engines_of_one_shape_share_their_programs(make_engine):
  one = make_engine(warmup=True)
  programs = one.scheduler.lanes[0].slots.programs
  before = dict(programs.traces)
  other = make_engine(slots=8, lanes=2)
  run_episodes(one, range(3))
  run_episodes(other, range(3))
  assert other.scheduler.lanes[1].slots.programs is programs
  assert programs.traces == before
  assert set(one.executables()) <= set(before)
  assert [home.devices for home in one.scheduler._weights] == [(jax.local_devices()[0],)]


def test_a_long_prompt_does_not_stall_those_who_decode(make_engine):
  engine = make_engine(prefill_tokens=16)

  async def main():
    quick = await engine.open_ids([1, 2])
    await quick.generate(request(0, tokens=2))
    chunks = engine.stats.decode_dispatches
    slow = await engine.open_ids(list(range(3, 45)))  # three pieces of at most 16 tokens
    first = asyncio.create_task(slow.generate(request(1, tokens=1)))
    await quick.generate(request(2, tokens=16))
    assert engine.stats.decode_dispatches - chunks >= 2
    found = await first
    slow.close()
    quick.close()
    return found

  found = asyncio.run(main())
  alone = make_engine(prefill_tokens=1024)

  async def at_once():
    context = await alone.open_ids(list(range(3, 45)))
    return await context.generate(request(1, tokens=1))

  assert_same_bits([found], [asyncio.run(at_once())])


def test_prompts_that_begin_alike_are_run_once(make_engine):
  shared = list(range(3, 36))  # 33 tokens: two pieces of 16, and one
  engine = make_engine(snapshot_tokens=16)
  plain = make_engine(prefix_reuse="none")

  async def main(engine):
    samples = []
    for i, tail in enumerate(([40], [41, 42], [40])):
      context = await engine.open_ids([*shared, *tail])
      samples.append(await context.generate(request(i, tokens=4)))
      context.close()
    return samples

  expected = asyncio.run(main(plain))
  assert (plain.stats.extended_tokens, plain.stats.reused_tokens) == (34 + 35 + 34, 0)
  assert_same_bits(asyncio.run(main(engine)), expected)
  assert (engine.stats.extended_tokens, engine.stats.reused_tokens) == (34 + 3 + 2, 64)


def test_a_conversation_that_comes_back_whole_costs_its_new_tokens(make_engine):
  engine = make_engine(prefix_reuse="turns")
  plain = make_engine(prefix_reuse="none")

  async def main(engine):
    ids, samples = list(PROMPTS[0]), []
    for turn in range(3):
      context = await engine.open_ids(ids)
      samples.append(await context.generate(request(turn, tokens=7)))
      context.close()
      ids += [*samples[-1].token_ids.tolist(), 4, 5]
    return samples

  found, expected = asyncio.run(main(engine)), asyncio.run(main(plain))
  assert engine.stats.extended_tokens == len(PROMPTS[0]) + 2 + 2
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_array_equal(a.token_ids, b.token_ids)
    np.testing.assert_allclose(a.behaviour_log_probs, b.behaviour_log_probs, atol=1e-5)


def test_a_context_closed_outside_an_event_loop_is_kept_all_the_same(make_engine):
  engine = make_engine(prefix_reuse="turns")
  loop = asyncio.new_event_loop()

  async def begin():
    context = await engine.open_ids(PROMPTS[0])
    return context, await context.generate(request(0))

  context, sample = loop.run_until_complete(begin())
  context.close()

  async def go_on():
    again = await engine.open_ids([*PROMPTS[0], *sample.token_ids.tolist(), 4])
    return await again.generate(request(9))

  before = engine.stats.extended_tokens
  loop.run_until_complete(asyncio.wait_for(go_on(), 60))
  loop.close()
  assert engine.stats.extended_tokens - before == 1


def test_a_slot_freed_outside_an_event_loop_goes_to_the_call_that_waits_in_one(make_engine):
  engine = make_engine()
  loop = asyncio.new_event_loop()

  async def begin():
    contexts = [await engine.open_ids([1]) for _ in range(5)]
    calls = [asyncio.create_task(c.generate(request(i, tokens=40))) for i, c in enumerate(contexts)]
    await asyncio.sleep(0)
    return contexts, calls

  contexts, calls = loop.run_until_complete(begin())
  assert engine.waiting == 1
  for context in contexts[:4]:
    context.close()
  sample = loop.run_until_complete(asyncio.wait_for(calls[4], 60))
  lost = loop.run_until_complete(asyncio.gather(*calls[:4], return_exceptions=True))
  loop.close()
  assert len(sample.token_ids) == 40 and all(isinstance(e, EngineError) for e in lost)


def test_known_prefixes_make_way_for_parked_contexts(make_engine):
  engine = make_engine(device_store_mb=0, host_store_mb=0)
  programs = engine.scheduler.lanes[0].slots.programs
  engine.scheduler.store.host_bytes = 4 * programs.context_bytes(9)

  async def main():
    for i in range(3):
      (await engine.prefill([i + 1] * 9)).release()
    known = len(engine.scheduler.known[0])
    found = await asyncio.gather(*(episode(engine, i) for i in range(9)))
    return known, found

  known, found = asyncio.run(main())
  assert known > len(engine.scheduler.known[0])
  for i in (0, 4, 8):
    assert_same_bits(found[i], run_episodes(make_engine(), [i])[i])
  assert free_slots(engine) == 4


def test_a_full_store_stops_nobody_for_ever(make_engine):
  engine = make_engine(device_store_mb=0, host_store_mb=0)

  async def main():
    held = [await engine.open_ids(PROMPTS[0]) for _ in range(4)]
    for context in held:
      await context.generate(request(0, tokens=1))
    # All slots are held by contexts without a call, and none may be stored.
    return await asyncio.gather(*(episode(engine, i) for i in range(3)))

  found = asyncio.run(asyncio.wait_for(main(), 60))
  assert engine.stats.store_overruns > 0
  assert_same_bits(found[1], run_episodes(make_engine(), [1])[1])


def test_log_probs_that_are_not_finite_end_one_context_alone(make_engine):
  engine = make_engine()
  expected = {i: run_episodes(make_engine(), [i])[i] for i in (1, 2)}

  async def main():
    bad = await engine.open_ids(PROMPTS[0])
    await bad.generate(request(0, tokens=2))
    lane, slot = bad.state.home
    state = lane.slots.device.state
    lane.slots.device.state = state.replace(logits=state.logits.at[slot].set(np.nan))
    found = await asyncio.gather(
      bad.generate(request(1)), episode(engine, 1), episode(engine, 2), return_exceptions=True
    )
    with pytest.raises(EngineError, match="not finite"):
      await bad.generate(request(2))
    return found

  error, *found = asyncio.run(main())
  assert isinstance(error, NonFiniteError)
  assert_same_bits(found[0], expected[1])
  assert_same_bits(found[1], expected[2])
  assert free_slots(engine) == 4
  # The slot that held it is clean again.
  again = run_episodes(engine, [1, 2, 3, 4])
  assert_same_bits(again[1], expected[1])


def test_more_waiting_calls_than_allowed_are_refused_at_once(make_engine):
  engine = make_engine(max_waiting=2)

  async def main():
    contexts = [await engine.open_ids(PROMPTS[0]) for _ in range(8)]
    calls = [asyncio.ensure_future(c.generate(request(0))) for c in contexts]
    found = await asyncio.gather(*calls, return_exceptions=True)
    refused = [c for c, f in zip(contexts, found, strict=True) if isinstance(f, EngineBusyError)]
    assert len(refused) == 8 - 4 - 2
    again = await refused[0].generate(request(0))  # as it was
    return [f for f in found if not isinstance(f, Exception)], again

  found, again = asyncio.run(main())
  assert_same_bits(found, [again] * 6)


def test_released_weights_are_gone_and_the_next_ones_sample_alike(make_engine, params):
  engine = make_engine(warmup=True)
  expected = run_episodes(engine, [0, 1])
  held = [weakref.ref(w) for w in jax.tree.leaves(engine.scheduler.lanes[0].slots.weights.params)]
  traces = dict(engine.scheduler.lanes[0].slots.programs.traces)

  async def released():
    context = await engine.open_ids(PROMPTS[0])
    sampling = asyncio.create_task(context.generate(request(0)))
    await asyncio.sleep(0)
    await engine.release_weights()  # waits for what is under way
    assert sampling.done()
    with pytest.raises(EngineError, match="no weights yet"):
      await context.generate(request(1))
    context.close()

  asyncio.run(released())
  gc.collect()
  assert engine.version == -1 and not any(ref() is not None for ref in held)
  engine.publish(params, 0)
  found = run_episodes(engine, [0, 1])
  for i in (0, 1):
    assert_same_bits(found[i], expected[i])
  assert traces == engine.scheduler.lanes[0].slots.programs.traces


def test_a_compilation_in_the_loop_is_a_fault(make_engine, monkeypatch):
  engine = make_engine(warmup=True, max_length=72)  # programs of its own
  programs = engine.scheduler.lanes[0].slots.programs
  run_episodes(engine, [0])

  fresh = programs._jit("read", programs._read)  # a program that nobody warmed up
  monkeypatch.setattr(programs, "read", fresh)

  async def main():
    context = await engine.open_ids(PROMPTS[0])
    return await context.fork(1)

  with pytest.raises(EngineError, match="compiled in the loop"):
    asyncio.run(main())
