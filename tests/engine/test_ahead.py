"""A chunk that is dispatched before the last one is read changes no bit and leaves no trace."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from agentjax.engine import Finish, SampleRequest, compile_regex
from tests.engine.conftest import dispatched
from tests.engine.test_grammar import ROOM, STOP, TOKENIZER
from tests.engine.test_scheduler import (  # those named test_* run here again, always ahead
  PROMPTS,
  assert_same_bits,
  episode,
  free_slots,
  request,
  test_a_cancelled_call_frees_its_slot_and_disturbs_no_other,  # noqa: F401
  test_a_fork_goes_on_as_its_source_would,  # noqa: F401
  test_a_stop_string_across_tokens_cuts_the_call_without_a_trace,  # noqa: F401
  test_an_error_in_device_work_reaches_every_waiter,  # noqa: F401
  test_an_interrupted_event_loop_leaves_the_engine_usable,  # noqa: F401
  test_log_probs_that_are_not_finite_end_one_context_alone,  # noqa: F401
  test_tokens_carry_the_version_that_sampled_them,  # noqa: F401
)


@pytest.fixture(autouse=True)
def always_ahead() -> Iterator[None]:
  with dispatched(ahead=True):
    yield


async def busy(engine, index: int):
  """Turns that end in a stop id, a stop string or a number of tokens, in the middle of others."""
  context = await engine.open_ids(PROMPTS[index % len(PROMPTS)], priority=(index % 2,))
  samples = []
  with contextlib.closing(context):
    for turn in range(3):
      ends = [{}, {"stop_ids": (1, 7, 20, 33)}, {"stop_strings": ("~~", "Q", "A")}]
      fields = ends[(index + turn) % 3]
      samples.append(await context.generate(request(index, turn, tokens=17 + index, **fields)))
      await context.extend([4, 5, index])
      (fork,) = await context.fork(1)
      samples.append(await fork.generate(request(index, turn, 1, tokens=9)))
      fork.close()
      if context.room < 30:
        break
  return samples


@pytest.mark.parametrize(
  "changes",
  [
    {"cache_tokens": 64},
    *(
      pytest.param(changes, marks=pytest.mark.slow)
      for changes in ({}, {"speculate": "ngram"}, {"slots": 8, "lanes": 2})
    ),
  ],
  ids=str,
)
def test_whatever_ends_a_call_what_was_drawn_past_it_is_gone(make_engine, changes):
  def play(ahead: bool):
    engine = make_engine(**changes)

    async def main():
      return await asyncio.gather(*(busy(engine, i) for i in range(7)))

    with dispatched(ahead=ahead):
      found = asyncio.run(main())
    assert free_slots(engine) == engine.config.slots
    return [sample for samples in found for sample in samples], engine.stats

  found, stats = play(True)
  expected, plain = play(False)
  assert_same_bits(found, expected)
  assert stats.ahead_dispatches > 0 == plain.ahead_dispatches
  finishes = {sample.finish for sample in found}
  assert finishes >= {Finish.STOP, Finish.STOP_STRING, Finish.LENGTH}


def test_a_slot_that_ended_is_left_as_it_was_by_the_dispatch_ahead(slot_engine):
  engine = slot_engine
  drawn = []
  for stop in (-1, None):
    engine.place(None, [0, 1, 2])
    engine.extend([(slot, np.arange(3 + slot, dtype=np.int32)) for slot in (0, 1, 2)])
    first, second = engine.idle_plan(), engine.idle_plan()
    for plan, index in ((first, 0), (second, 8)):
      plan.budget[:2] = 8
      plan.filters.temperature[:2], plan.token_index[:2] = 1.0, index
      plan.stop_ids[0, 0] = drawn[0].token_ids[0, 2] if stop is None else stop
    second.budget[2] = 5  # comes with the second
    second.ahead[:2] = True
    one = engine.start(first)
    two = engine.start(second)
    for drawing in (one, two):
      drawn.append(drawing.chunk())
      engine.end(drawing, drawn[-1])
  before, after, cut, idle = drawn
  np.testing.assert_array_equal(idle.counts, [0, 8, 5, 0])
  assert cut.stopped[0] and cut.counts[0] <= 3 and engine.lengths[0] == 3 + cut.counts[0]
  assert engine.lengths[1] == 4 + 16 and engine.lengths[2] == 5 + 5
  # Its neighbours, and what it draws from there on, are those of a run without a stop.
  np.testing.assert_array_equal(idle.token_ids[1:3], after.token_ids[1:3])
  plan = engine.idle_plan()
  rest = 8 - int(cut.counts[0])
  plan.budget[0], plan.token_index[0], plan.filters.temperature[0] = rest, cut.counts[0], 1.0
  again = engine.decode(plan)
  np.testing.assert_array_equal(again.token_ids[0, :rest], before.token_ids[0, -rest:])
  np.testing.assert_array_equal(
    again.behaviour_log_probs[0, :rest], before.behaviour_log_probs[0, -rest:]
  )


@pytest.mark.parametrize("changes", [{}, {"speculate": "ngram"}], ids=str)
def test_calls_bound_to_grammars_go_on_in_the_state_that_the_device_knows(make_engine, changes):
  """Four grammars and room for three, so that they take turns and move in the table."""
  grammars = [compile_regex(f"({a}[ab]{{3}}){{8}}", TOKENIZER, STOP) for a in "0125"]

  def play(ahead: bool):
    engine = make_engine(**ROOM, **changes)

    async def one(i: int):
      context = await engine.open_ids([1, 2 + i])
      request = SampleRequest((0, i), 30 + i, stop_ids=STOP, grammar=grammars[i])
      return await context.generate(request)

    async def main():
      return await asyncio.gather(*map(one, range(4)))

    with dispatched(ahead=ahead):
      return asyncio.run(main()), engine.stats.ahead_dispatches

  found, count = play(True)
  expected, none = play(False)
  assert_same_bits(found, expected)
  assert count > 0 == none
  for sample, grammar in zip(found, grammars, strict=True):
    assert grammar.advance(0, sample.token_ids) >= 0
  assert max(len(sample.token_ids) for sample in found) > 16


def test_pages_taken_ahead_are_given_back(make_engine):
  engine = make_engine(cache_tokens=96, prefix_reuse="none")
  (pool,) = engine.scheduler.lanes[0].slots.pools
  free = pool.free

  async def main():
    await asyncio.gather(
      *(episode(engine, i) for i in range(4)), *(busy(engine, i) for i in (1, 2))
    )

  asyncio.run(main())
  assert engine.stats.ahead_dispatches > 0
  engine.close()
  assert pool.free == free


def test_the_time_in_which_the_device_waits_is_counted(make_engine):
  engine = make_engine()

  async def main():
    await asyncio.gather(*(episode(engine, i) for i in range(4)))

  with dispatched(ahead=False):
    asyncio.run(main())
  stats = engine.stats
  assert stats.idle_seconds > 0 < stats.device_seconds and 0 < stats.idle_share < 1
