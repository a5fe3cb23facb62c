"""Nothing stays behind: thousands of episodes, every kind of fault among them, and an engine."""

import asyncio
import collections
import contextlib
import gc
import os
import threading
import time

import jax
import numpy as np
import pytest

from agentjax import models
from agentjax.engine import Engine, EngineConfig
from agentjax.recipes.arpo import BranchConfig, BranchSampler
from agentjax.rollout.loop import collect
from agentjax.rollout.program import SharedPrefixes
from agentjax.rollout.scoring import MOST_THREADS
from agentjax.tools.protocol import ToolResult, ToolStatus
from agentjax.trajectory.record import Message, Status
from agentjax.world.environment import Environment, Observation, Step
from tests.rollout.conftest import REWARDS, idle, make_player, make_task
from tests.rollout.scripted_engine import TOKENIZER, ScriptedEngine, say
from tests.rollout.test_faults import tool_environment
from tests.rollout.test_loop import content

SETTLING = 0.5  # seconds
FAULTS = ("raises", "hangs", "ignores", "broken close", "unreadable", "huge")


class World(Environment):
  """Holds a file and ends at the second turn, unless its task's number asks for a fault."""

  def __init__(self, task):
    self.fault = FAULTS[task.id // 100 % len(FAULTS)] if task.id % 100 == 7 else None
    self.file = open(os.devnull, "rb")
    self.turns = 0

  async def reset(self, task, key):
    return Observation(task.prompt)

  async def step(self, action):
    self.turns += 1
    if self.turns == 2:
      return Step(Observation(()), terminated=True, answer="4")
    if self.fault == "raises":
      raise OSError("the disk is on fire")
    if self.fault == "hangs":
      await asyncio.sleep(600)
    if self.fault == "ignores":
      await _stubborn()
    if self.fault == "unreadable":
      return Step(Observation((Message("assistant", "words put into its mouth"),)))
    return Step(Observation((Message("tool", "x" * (10_000 if self.fault == "huge" else 2)),)))

  def snapshot(self):
    return bytes([self.turns])

  def restore(self, state):
    self.turns = state[0]

  async def close(self):
    self.file.close()
    if self.fault == "broken close":
      raise OSError("the disk is still on fire")


async def _stubborn():
  """Goes on for a while after it was cancelled."""
  try:
    await asyncio.sleep(600)
  except asyncio.CancelledError:
    await asyncio.sleep(0.3)


STATUS = {
  "raises": Status.ENV_ERROR,
  "hangs": Status.TRUNCATED,  # the time of a step is the policy's
  "ignores": Status.TRUNCATED,
  "broken close": Status.OK,
  "unreadable": Status.ENV_ERROR,
  "huge": Status.TRUNCATED,
  None: Status.OK,
}


def resources():
  """Open files and live threads of this process, without those that scoring keeps for later."""
  gc.collect()
  threads = collections.Counter(t.name for t in threading.enumerate())
  scoring = threads.pop("scoring", 0)
  assert scoring <= MOST_THREADS
  files = len(os.listdir("/proc/self/fd")) - 3 * scoring  # an event loop has three
  return collections.Counter(files=files) + threads


def settled(work):
  """Runs ``work`` in a loop that must end with no task left, and gives its result."""

  async def main():
    result = await work()
    await asyncio.sleep(SETTLING)  # those that ignored their cancellation
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"still running: {left}"
    return result

  return asyncio.run(main())


def play(engine, tasks, samples=1, make=World, sampler=None, **settings):
  options = {"concurrency": 128, "environment_timeout": 1.5, "max_total_tokens": 400}
  return collect(
    tasks,
    step=5,
    samples_per_task=samples,
    player=make_player(engine, **(options | settings)),
    make_environment=make,
    rewards=REWARDS,
    sampler=sampler,
  )


@pytest.mark.parametrize("episodes", [1200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_episodes_leave_nothing_behind(episodes):
  engine = ScriptedEngine(lambda address, turn: say("hm"))
  tasks = [make_task(i) for i in range(episodes)]
  settled(lambda: play(engine, tasks[:300]))  # threads and caches that stay are made here
  before = resources()
  members = settled(lambda: play(engine, tasks))
  assert not resources() - before  # what other tests left behind may go meanwhile
  assert engine.live_contexts == engine.live_prefixes == 0
  assert [t.task_id for t in members] == list(range(episodes))
  for member in members:
    fault = FAULTS[member.task_id // 100 % len(FAULTS)] if member.task_id % 100 == 7 else None
    assert member.status is STATUS[fault], (member.task_id, fault, member.metadata)
  assert {t.status for t in members} == {Status.OK, Status.ENV_ERROR, Status.TRUNCATED}


@pytest.mark.slow
def test_branched_groups_leave_nothing_behind():
  engine = ScriptedEngine(
    lambda address, turn: say(str(address[2])), entropy=lambda address, turn: float(turn)
  )
  sampler = BranchSampler(BranchConfig(roots=2, base=0.0))
  tasks = [make_task(i) for i in range(150)]
  settled(lambda: play(engine, tasks[:30], 4, sampler=sampler))
  before = resources()
  members = settled(lambda: play(engine, tasks, 4, sampler=sampler))
  assert not resources() - before and len(members) == 600
  assert engine.live_contexts == engine.live_prefixes == 0
  assert all(t.status is Status.OK for t in members if t.task_id % 100 != 7)


def test_a_tool_that_hangs_costs_its_own_call_only(run):
  async def answer():
    await asyncio.sleep(0)
    return ToolResult(ToolStatus.OK, "4")

  calls = []

  async def sometimes():
    calls.append(len(calls))
    if calls[-1] % 10 == 3:
      await asyncio.sleep(600)
    return await answer()

  engine = ScriptedEngine(
    lambda address, turn: [say("", call="oracle why"), say("#### 4")][min(turn, 1)]
  )
  before = resources()
  members = run(
    engine,
    [make_task(i) for i in range(50)],
    make_environment=tool_environment(sometimes, timeout=0.5),
  )
  assert {t.status for t in members} == {Status.OK}
  assert collections.Counter(t.tools[0].status for t in members) == {"ok": 45, "timeout": 5}
  assert resources()["files"] <= before["files"] + 3  # the loop's own, until it is collected


def test_a_bug_in_a_program_is_loud_and_what_was_done_before_is_kept(run):
  finished = {}

  async def buggy(episode):
    await episode.open(await episode.reset())
    while True:
      step = await episode.step(await episode.act())
      if episode.task.id == 105 and not fixed:
        raise ZeroDivisionError("in the program")
      await episode.observe(step.observation)

  tasks, fixed = [make_task(100 + i) for i in range(7)], False
  engine = ScriptedEngine(
    lambda address, turn: say("hm"), delay=lambda address: 0.004 * (address[1] - 100)
  )
  before = resources()
  with pytest.raises(ZeroDivisionError, match="in the program"):
    run(
      engine,
      tasks,
      make_environment=World,
      program=buggy,
      on_finish=lambda t: finished.setdefault(t.address, t),
    )
  assert engine.live_contexts == engine.live_prefixes == 0
  grown = resources() - before
  assert set(grown) <= {"files"}
  assert 1 <= len(finished) < 7
  fixed = True
  members = run(engine, tasks, make_environment=World, program=buggy, finished=finished)
  assert len(members) == 7 and {t.status for t in members} == {Status.OK}
  assert all(t is finished[t.address] for t in members if t.address in finished)


# With an engine, where calls are cut off in the middle of what the device does.


@pytest.fixture(scope="module")
def engine():
  model = models.ModelConfig(
    vocab_size=TOKENIZER.vocab_size,
    d_model=16,
    pattern="M*-",
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    d_mlp=16,
    mamba_heads=2,
    mamba_head_dim=8,
    mamba_state=4,
    chunk_size=16,
  )
  config = EngineConfig(
    slots=4, max_length=256, chunk_tokens=4, extend_buckets=(32,), extend_rows=(4,)
  )
  engine = Engine(model, config, decode=TOKENIZER.decode)
  engine.publish(models.init(model, jax.random.key(0)), 1)
  yield engine
  engine.close()


SAMPLER = BranchSampler(BranchConfig(roots=2, base=0.9))


def kept_bytes(engine):
  """Of contexts outside of slots, in pages or in the store: pressure moves them to the store."""
  (lane,) = engine.scheduler.lanes
  programs = lane.slots.programs
  (layers,) = programs.layers
  used = sum(layers.pages - 1 - pool.free for pool in lane.slots.pools)
  return sum(engine.stored_bytes) + used * layers.block_bytes


@pytest.mark.parametrize(
  "sampler",
  [
    pytest.param(None, id="independent"),
    pytest.param(SAMPLER, id="branched", marks=pytest.mark.slow),
  ],
)
def test_cancelling_in_the_middle_of_a_chunk_frees_every_slot(engine, sampler):
  tasks = [make_task(i) for i in range(6)]
  settings = {"max_tokens_per_turn": 12, "max_total_tokens": 200, "concurrency": 16}

  def whole():
    return content(settled(lambda: play(engine, tasks, 4, sampler=sampler, **settings)))

  whole()  # compiles
  start = time.monotonic()
  reference = whole()
  seconds = time.monotonic() - start - SETTLING
  assert idle(engine)
  before, kept, cancelled = resources(), kept_bytes(engine), 0
  for delay in np.linspace(0.0, 0.5 * seconds, 12):

    async def cut(delay=delay):
      work = asyncio.ensure_future(play(engine, tasks, 4, sampler=sampler, **settings))
      await asyncio.sleep(delay)
      work.cancel()
      with contextlib.suppress(asyncio.CancelledError):
        await work
      return work.cancelled()

    cancelled += asyncio.run(cut())
    assert idle(engine)
  assert cancelled >= 3
  assert not resources() - before  # what other tests left behind may go meanwhile
  np.testing.assert_equal(whole(), reference)
  gc.collect()
  # What a lane held when its loop ended in the middle of a cycle is gone after its next one.
  assert kept_bytes(engine) == kept


def test_one_cancelled_episode_leaves_the_others_their_bits(engine):
  tasks = [make_task(i) for i in range(4)]
  settings = {"max_tokens_per_turn": 12, "max_total_tokens": 200}
  alone = content(settled(lambda: play(engine, tasks[:3], **settings)))

  async def main():
    doomed = asyncio.ensure_future(play(engine, tasks[3:], **settings))
    others = asyncio.ensure_future(play(engine, tasks[:3], **settings))
    await asyncio.sleep(0.01)
    doomed.cancel()
    result = await others
    with pytest.raises(asyncio.CancelledError):
      await doomed
    return result

  np.testing.assert_equal(content(asyncio.run(main())), alone)
  assert idle(engine)


@pytest.mark.parametrize("ended", [True, False])
def test_prefixes_are_given_back_even_where_that_is_cancelled(ended):
  """As where another group fails while this one, which is done, gives its prefixes back."""

  async def main():
    engine = ScriptedEngine(lambda address, turn: say("hm"))
    prefixes, asked = SharedPrefixes(engine), []
    for i in range(3):
      asked.append(asyncio.ensure_future(prefixes.get([1, i], ())))
    await asyncio.gather(*asked)
    assert engine.live_prefixes == 3
    if not ended:  # its prefill does not heed that it is cancelled, but gives a prefix later
      inner = engine.prefill

      async def stubborn(*args, **kwargs):
        with contextlib.suppress(asyncio.CancelledError):
          await asyncio.sleep(0.05)
        return await inner(*args, **kwargs)

      engine.prefill = stubborn
      late = asyncio.ensure_future(prefixes.get([2], ()))
      await asyncio.sleep(0)
      late.cancel()
    releasing = asyncio.ensure_future(prefixes.release())
    await asyncio.sleep(0)
    releasing.cancel()
    await asyncio.wait([releasing])
    await asyncio.sleep(0.1)
    assert engine.live_prefixes == 0

  asyncio.run(main())
