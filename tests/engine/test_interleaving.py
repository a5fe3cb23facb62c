"""Whatever is submitted, extended, forked, cancelled, evicted, published in between: fresh bits.

Contexts live in few slots, few pages and a store of a few blocks, over a tree of known prefixes;
each turn is then computed again by an engine that does nothing else, from the context's history
alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjax import models
from agentjax.engine import Engine, EngineConfig, EngineError, SampleRequest, address_key
from agentjax.models import ModelConfig, Params
from tests.engine.conftest import dispatched
from tests.engine.test_windows import local

pytestmark = pytest.mark.optimised

PROMPTS = (
  tuple(range(3, 40)),  # longer than the largest extension of 16
  (*range(3, 36), 7, 7, 7),  # shares 33 tokens with it
  tuple(range(3, 19)),  # its first piece
  (9, 8),
)


@dataclasses.dataclass
class Trial:
  """A live context and how it came to be."""

  context: object
  history: list[tuple]  # ("ids", ids) or ("call", key, version, ids, log_probs), in order
  version: int  # of its weights; -1 where they changed under it


Step = st.tuples(
  st.sampled_from(["open", "prefill", "extend", "generate", "fork", "close", "cancel", "publish"]),
  st.integers(0, 7),
)


def sizes(**changes) -> EngineConfig:
  return EngineConfig(
    **{
      "slots": 4,
      "max_length": 128,
      "chunk_tokens": 4,
      "extend_buckets": (4, 16),
      "extend_rows": (4, 2),
      "prefill_tokens": 16,
      "block_tokens": 8,
      "snapshot_tokens": 16,
      "warmup": False,
      **changes,
    }
  )


async def act(engine: Engine, weights, steps, tiny: bool) -> list[Trial]:
  live: list[Trial] = []
  done: list[Trial] = []
  version, calls = 0, 0
  if tiny:
    engine.scheduler.store.device_bytes = 3 * engine.scheduler.lanes[0].slots.programs.state_bytes
    engine.scheduler.store.host_bytes = 6 * engine.scheduler.lanes[0].slots.programs.state_bytes

  async def call(trial: Trial, key: int) -> None:
    sample = await trial.context.generate(SampleRequest(address_key(key, 1), 6))
    for v in set(sample.versions.tolist()):
      trial.version = v if trial.version in (v, None) else -1
    trial.history.append(("call", key, sample.token_ids, sample.behaviour_log_probs))

  for kind, which in steps:
    trial = live[which % len(live)] if live else None
    if kind in ("open", "prefill"):
      ids = PROMPTS[which % len(PROMPTS)]
      if kind == "open":
        context = await engine.open_ids(ids)
      else:
        prefix = await engine.prefill(ids)
        context = await engine.open(prefix)
        prefix.release()
      live.append(Trial(context, [("ids", ids)], None))
    elif kind == "publish":
      version += 1
      engine.publish(weights[version % 2], version)
    elif trial is None:
      continue
    elif kind == "extend" and trial.context.room > 20:
      ids = tuple(range(10, 10 + 3 * which + 1))[: trial.context.room - 10]
      await trial.context.extend(ids)
      trial.history.append(("ids", ids))
    elif kind == "generate":
      # All that have room, at the same time: they share slots, chunks and the store.
      ready = [t for t in live if t.context.room > 10]
      calls += 1
      await asyncio.gather(*(call(t, 100 * calls + i) for i, t in enumerate(ready)))
    elif kind == "fork":
      if trial.context.state.pending:  # now run through the model, for all copies
        trial.version = version if trial.version in (version, None) else -1
      for context in await trial.context.fork(1 + which % 2):
        live.append(Trial(context, list(trial.history), trial.version))
    elif kind == "close":
      live.remove(trial)
      trial.context.close()
      done.append(trial)
    elif kind == "cancel" and trial.context.room > 10:
      task = asyncio.ensure_future(trial.context.generate(SampleRequest((0, 0), 50)))
      for _ in range(which):
        await asyncio.sleep(0)
      task.cancel()
      with pytest.raises((asyncio.CancelledError, EngineError)):
        await task
        raise asyncio.CancelledError  # it may have ended first
      live.remove(trial)
      trial.context.close()
      done.append(trial)
  for trial in live:
    trial.context.close()
  return done + live


async def fresh(engine: Engine, history) -> list[tuple]:
  """The calls of a history, computed in one context that nothing disturbs."""
  context = None
  results = []
  for event in history:
    if event[0] == "ids":
      if context is None:
        context = await engine.open_ids(event[1])
      else:
        await context.extend(event[1])
    else:
      sample = await context.generate(SampleRequest(address_key(event[1], 1), 6))
      results.append((sample.token_ids, sample.behaviour_log_probs))
  if context is not None:
    context.close()
  return results


class World:
  """A model, two sets of weights, and an engine for each that nothing disturbs."""

  def __init__(self, config: ModelConfig, weights: tuple[Params, Params]) -> None:
    self.config, self.weights = config, weights
    self.references = [Engine(config, sizes(prefix_reuse="none")) for _ in weights]
    for engine, params in zip(self.references, weights, strict=True):
      engine.publish(params, 0)


@pytest.fixture(scope="module", params=["hybrid", pytest.param("windows", marks=pytest.mark.slow)])
def world(request, model_config) -> Iterator[World]:
  config = model_config if request.param == "hybrid" else local(11)
  made = World(config, tuple(models.init(config, jax.random.key(i)) for i in range(2)))
  yield made
  for engine in made.references:
    engine.close()


@pytest.mark.parametrize("reuse", ["prompts", pytest.param("turns", marks=pytest.mark.slow)])
@settings(max_examples=10, deadline=None)
@given(
  steps=st.lists(Step, min_size=4, max_size=24),
  tiny=st.booleans(),
  lanes=st.integers(1, 2),
  room=st.sampled_from([0, 128, 200]),
  ahead=st.booleans(),
)
def test_any_interleaving_gives_what_a_fresh_run_gives(
  world, reuse, steps, tiny, lanes, room, ahead
):
  config = sizes(prefix_reuse=reuse, slots=4 * lanes, lanes=lanes, cache_tokens=room * lanes)
  engine = Engine(world.config, config)
  engine.publish(world.weights[0], 0)
  try:
    with dispatched(ahead=ahead):
      trials = asyncio.run(act(engine, world.weights, steps, tiny))
    for trial in trials:
      if trial.version is None or trial.version < 0:
        continue  # no call, or made by several weights
      found = [event[2:] for event in trial.history if event[0] == "call"]
      expected = asyncio.run(fresh(world.references[trial.version % 2], trial.history))
      for (ids, log_probs), (wanted, wanted_log_probs) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ids, wanted)
        if reuse == "prompts":
          np.testing.assert_array_equal(log_probs, wanted_log_probs)
        else:
          np.testing.assert_allclose(log_probs, wanted_log_probs, atol=1e-5)
    # Nothing is left behind: every slot is free, and only known prefixes are stored.
    assert sorted(len(lane.free) for lane in engine.scheduler.lanes) == [4] * lanes
    assert all(not lane.jobs and not lane.idle for lane in engine.scheduler.lanes)
  finally:
    engine.close()
  assert engine.waiting == 0
  trials.clear()
  gc.collect()  # the end of the event loop may have cut a cycle short
  blank = engine.scheduler.lanes[0].slots.programs.state_bytes * lanes
  assert sum(engine.stored_bytes) <= blank
  for lane in engine.scheduler.lanes:
    for table in lane.slots.tables:
      assert all(pool.free == table.layers.pages - 1 for pool in table.pools)
