"""Faults of environments, tools, verifiers and the engine: each has its kind, none is lost."""

import asyncio
import threading
import time

import numpy as np
import pytest

from agentjax.rewards import Formula, RewardGraph
from agentjax.rollout.loop import collect
from agentjax.text.chat import MarkedChat
from agentjax.tools.protocol import ToolResult, ToolStatus
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.builder import check_trajectory
from agentjax.trajectory.record import Flag, Message, Reward, Status
from agentjax.world.environment import Environment, Observation, Step
from agentjax.world.question import QuestionEnvironment
from tests.rollout.conftest import REWARDS, make_player, make_task, question
from tests.rollout.scripted_engine import ScriptedEngine, say

SOLVE = [say("", call="calculator 2+2"), say("#### 4")]


def solver():
  return ScriptedEngine(lambda address, turn: SOLVE[turn])


class Tracked(Environment):
  """Delegates to a question; counts closes; one method may be replaced by a fault."""

  def __init__(self, task, closes, **faults):
    self.inner, self.task, self.closes, self.faults = question(task), task, closes, faults
    self.tools = self.inner.tools

  async def reset(self, task, key):
    await self.maybe("reset")
    return await self.inner.reset(task, key)

  async def step(self, action):
    await self.maybe("step")
    return await self.inner.step(action)

  async def close(self):
    self.closes.append(self.task.id)
    await self.maybe("close")

  async def maybe(self, where):
    if where in self.faults:
      await self.faults[where]()

  def snapshot(self):
    return b""

  def restore(self, state):
    del state


async def raises():
  raise OSError("the disk is on fire")


async def hangs():
  await asyncio.sleep(60)


async def hangs_and_ignores_cancellation():
  end = time.monotonic() + 3.0
  while time.monotonic() < end:
    try:
      await asyncio.sleep(0.1)
    except asyncio.CancelledError:
      pass


async def cancels_itself():
  raise asyncio.CancelledError


def faulty_one(closes, **faults):
  """Task 1 is well, task 2 meets the faults."""
  return lambda task: Tracked(task, closes, **(faults if task.id == 2 else {}))


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize(
  ("fault", "reason"),
  [
    (raises, "raised OSError: the disk is on fire"),
    (hangs, "took longer than rollout.environment_timeout=0.5 s"),
    (cancels_itself, "it cancelled itself"),
  ],
  ids=["raises", "hangs", "cancels itself"],
)
def test_a_fault_of_one_environment_masks_that_episode_alone(run, where, fault, reason):
  closes, engine = [], solver()
  well, ill = run(
    engine,
    [make_task(1), make_task(2)],
    make_environment=faulty_one(closes, **{where: fault}),
    environment_timeout=0.5,
  )
  assert well.status is Status.OK and well.reward == Reward(1.0)
  if (where, fault) == ("step", hangs):  # how long an action takes is the policy's
    assert ill.status is Status.TRUNCATED and ill.reward == Reward(0.0)
    assert ill.metadata["fault"]["owner"] == "policy" and ill.metadata["fault"]["cause"] == "time"
  else:
    assert ill.status is Status.ENV_ERROR and not ill.reward.valid
    assert ill.metadata["fault"]["owner"] == "infrastructure"
  assert f"{where}() " in ill.metadata["reason"] and reason in ill.metadata["reason"]
  masked = ill.status is Status.ENV_ERROR
  assert any(Flag.ENV_FAULT in s.flags for s in ill.segments) == (masked and where == "step")
  check_trajectory(ill)
  assert sorted(closes) == [1, 2]
  assert engine.live_contexts == engine.live_prefixes == 0


def test_an_environment_that_ignores_its_cancellation_is_left_behind():
  closes = []

  async def main():
    start = time.monotonic()
    (trajectory,) = await collect(
      [make_task(2)],
      step=0,
      samples_per_task=1,
      player=make_player(solver(), environment_timeout=0.1),
      make_environment=faulty_one(closes, step=hangs_and_ignores_cancellation),
      rewards=REWARDS,
    )
    return trajectory, time.monotonic() - start

  trajectory, seconds = asyncio.run(main())
  assert trajectory.status is Status.TRUNCATED and closes == [2]
  assert seconds < 2.0  # 0.1 s of time-out, 0.05 s of grace; the environment itself takes 3 s


@pytest.mark.parametrize("fault", [raises, hangs], ids=["raises", "hangs"])
def test_a_failing_close_is_reported_and_costs_nothing(run, fault):
  closes = []
  make = faulty_one(closes, close=fault)
  (trajectory,) = run(solver(), [make_task(2)], make_environment=make, environment_timeout=0.5)
  assert trajectory.status is Status.OK and trajectory.reward == Reward(1.0)
  assert trajectory.metadata["close_error"] and closes == [2]


def test_an_environment_that_cannot_be_made_is_an_environment_error(run):
  def broken(task):
    raise RuntimeError("no sandbox left")

  (trajectory,) = run(solver(), [make_task(1)], make_environment=broken)
  assert trajectory.status is Status.ENV_ERROR and not trajectory.segments
  assert "no sandbox left" in trajectory.metadata["reason"]


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_answer_of_the_wrong_type_is_an_environment_error(run, where):
  environment = question(make_task(1))

  async def nothing(*args):
    return None

  setattr(environment, where, nothing)
  (trajectory,) = run(solver(), [make_task(1)], make_environment=lambda task: environment)
  assert trajectory.status is Status.ENV_ERROR
  assert "returned NoneType instead of" in trajectory.metadata["reason"]


@pytest.mark.parametrize("error", [RecursionError(), ValueError("odd"), OSError("disk")])
def test_a_turn_that_cannot_be_read_ends_its_episode_and_not_the_run(run, monkeypatch, error):
  def parse(self, turn, tools=()):
    raise error

  monkeypatch.setattr(MarkedChat, "parse", parse)
  (trajectory,) = run(solver(), [make_task(1)], make_environment=lambda task: Tracked(task, []))
  owner = trajectory.metadata["fault"]["owner"]
  assert (trajectory.status, owner) == (
    (Status.ENV_ERROR, "infrastructure")
    if isinstance(error, OSError)
    else (Status.POLICY_ERROR, "policy")
  )
  assert "the turn cannot be read" in trajectory.metadata["reason"]


def test_an_observation_that_cannot_be_encoded_is_an_environment_error(run):
  class Wrong(Tracked):
    async def step(self, action):
      return Step(Observation((Message("assistant", "words put into its mouth"),)))

  (trajectory,) = run(solver(), [make_task(1)], make_environment=lambda task: Wrong(task, []))
  assert trajectory.status is Status.ENV_ERROR
  assert "cannot be encoded" in trajectory.metadata["reason"]


def tool_environment(call, *, timeout):
  class Oracle:
    name, description = "oracle", "knows"
    parameters = {
      "type": "object",
      "properties": {"question": {"type": "string"}},
      "required": ["question"],
    }

    async def __call__(self, arguments, context):
      return await call()

  registry = ToolRegistry([Oracle()], retries=0, grace=0.05)
  return lambda task: QuestionEnvironment(registry, max_turns=4, tool_timeout=timeout)


ASK = [say("", call="oracle why"), say("#### 4")]


def asker():
  return ScriptedEngine(lambda address, turn: ASK[turn])


def test_a_tool_that_hangs_is_an_observation_and_the_episode_goes_on(run):
  (trajectory,) = run(
    asker(), [make_task(1)], make_environment=tool_environment(hangs, timeout=0.05)
  )
  assert trajectory.status is Status.OK and trajectory.reward == Reward(1.0)
  assert [r.status for r in trajectory.tools] == ["timeout"]
  assert Flag.TOOL_ERROR in trajectory.segments[2].flags


def test_a_tool_that_fails_by_its_own_fault_masks_the_episode(run):
  (trajectory,) = run(
    asker(), [make_task(1)], make_environment=tool_environment(raises, timeout=10.0)
  )
  assert trajectory.status is Status.ENV_ERROR and not trajectory.reward.valid
  assert [r.status for r in trajectory.tools] == ["infra_error"]
  assert "tool oracle failed" in trajectory.metadata["reason"]


def test_an_episode_that_runs_out_of_time_in_a_tool_call_is_truncated(run):
  start = time.monotonic()
  (trajectory,) = run(
    asker(),
    [make_task(1)],
    make_environment=tool_environment(hangs, timeout=10.0),
    episode_timeout=0.5,
    environment_timeout=10.0,
  )
  assert time.monotonic() - start < 6.0
  assert trajectory.status is Status.TRUNCATED
  assert "rollout.episode_timeout=0.5 s ran out in step()" in trajectory.metadata["reason"]
  assert len(trajectory.segments) == 3 and trajectory.reward == Reward(0.0)


def test_the_time_an_episode_takes_adds_up_over_its_turns(run):
  async def slow():
    await asyncio.sleep(0.2)
    return ToolResult(ToolStatus.OK, "wait")

  engine = ScriptedEngine(lambda address, turn: say("", call="oracle why"))
  (trajectory,) = run(
    engine,
    [make_task(1)],
    make_environment=tool_environment(slow, timeout=10.0),
    episode_timeout=0.5,
  )
  assert trajectory.status is Status.TRUNCATED and len(trajectory.tools) <= 2


def test_waiting_for_the_engine_truncates_nobody(run):
  engine = ScriptedEngine(lambda address, turn: SOLVE[turn], delay=lambda address: 0.4)
  (trajectory,) = run(engine, [make_task(1)], episode_timeout=0.6)
  assert trajectory.status is Status.OK


@pytest.mark.parametrize("samples", [1, 3])
def test_an_error_of_the_engine_ends_the_collection_and_everything_is_closed(run, samples):
  closes = []

  def script(address, turn):
    return RuntimeError("device lost") if address[1] == 2 else SOLVE[turn]

  engine = ScriptedEngine(script, delay=lambda address: 0.01 * address[1])
  kept = []
  with pytest.raises(RuntimeError, match="device lost"):
    run(
      engine,
      [make_task(i) for i in (1, 2, 3, 4)],
      samples=samples,
      make_environment=lambda task: Tracked(task, closes),
      on_finish=lambda t: kept.append(t.address),
    )
  assert engine.live_contexts == engine.live_prefixes == 0
  assert len(closes) == 4 * samples
  assert {a[1] for a in kept} <= {1}


def test_an_error_while_journaling_ends_the_collection(run):
  def full(trajectory):
    raise OSError("no space left on device")

  engine = solver()
  with pytest.raises(OSError, match="no space left"):
    run(engine, [make_task(1), make_task(2)], on_finish=full)
  assert engine.live_contexts == engine.live_prefixes == 0


def test_a_context_that_lost_tokens_is_never_recorded(run):
  class Forgetful(ScriptedEngine):
    async def open(self, prefix, *, priority=()):
      context = await super().open(prefix, priority=priority)
      context.ids.pop()
      return context

  with pytest.raises(RuntimeError, match="no longer sees what is recorded"):
    run(Forgetful(lambda address, turn: SOLVE[turn]), [make_task(1)])


# Verifiers.


def graph(scorer):
  return RewardGraph({"judge": scorer}, Formula("judge"))


def test_one_invalid_member_leaves_the_rest_of_its_group_as_it_is(run):
  def judge(trajectory, task):
    if trajectory.sample == 1:
      raise ConnectionError("judge unreachable")
    return 1.0 + trajectory.sample

  members = run(solver(), [make_task(1)], samples=3, rewards=graph(judge))
  assert [m.status for m in members] == [Status.OK, Status.VERIFIER_ERROR, Status.OK]
  assert [m.reward.value for m in members] == [1.0, None, 3.0]
  assert "judge unreachable" in members[1].reward.reason


def test_a_verifier_that_blocks_its_thread_is_a_verifier_error_in_time(run):
  stop = threading.Event()

  def judge(trajectory, task):
    if trajectory.sample == 0:
      stop.wait(30.0)
      trajectory.metadata["late"] = True
    return 1.0

  start = time.monotonic()
  try:
    stuck, well = run(solver(), [make_task(1)], samples=2, rewards=graph(judge), reward_timeout=1.0)
  finally:
    stop.set()
  assert time.monotonic() - start < 15.0
  assert stuck.status is Status.VERIFIER_ERROR
  assert "rollout.reward_timeout=1 s" in stuck.reward.reason
  assert well.status is Status.OK and well.reward == Reward(1.0)
  time.sleep(0.05)
  assert "late" not in stuck.metadata


def test_a_blocking_verifier_does_not_hold_up_other_episodes(run):
  ends = {}

  def judge(trajectory, task):
    if trajectory.task_id == 1:
      time.sleep(1.0)
    return 1.0

  run(
    solver(),
    [make_task(1), make_task(2)],
    rewards=graph(judge),
    on_finish=lambda t: ends.setdefault(t.task_id, time.monotonic()),
  )
  assert ends[1] - ends[2] > 0.3


def test_a_group_is_compared_without_its_failed_member(run):
  def rank(members, task):
    return [float(np.argsort([m.sample for m in members])[i]) for i in range(len(members))]

  rewards = RewardGraph({}, Formula("rank"), group_scorers={"rank": rank})
  closes = []

  def make(task):
    closes.append(None)
    return Tracked(task, [], **({"step": raises} if len(closes) == 2 else {}))

  members = run(solver(), [make_task(1)], samples=3, rewards=rewards, make_environment=make)
  assert [m.status for m in members] == [Status.OK, Status.ENV_ERROR, Status.OK]
  assert [m.reward.value for m in members] == [0.0, None, 1.0]


# Cancellation.


@pytest.mark.parametrize("after", [0.0, 0.005, 0.03, 0.1])
def test_a_cancelled_collection_closes_everything(after):
  engine = ScriptedEngine(lambda address, turn: SOLVE[turn], delay=lambda a: 0.02 * a[2])
  opened, closes = [], []

  def make(task):
    opened.append(task.id)
    return Tracked(task, closes, **({"step": hangs} if task.id == 2 else {}))

  async def main():
    work = asyncio.ensure_future(
      collect(
        [make_task(i) for i in range(6)],
        step=0,
        samples_per_task=4,
        player=make_player(engine, concurrency=8, environment_timeout=30.0),
        make_environment=make,
        rewards=REWARDS,
      )
    )
    await asyncio.sleep(after)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
      await work
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"still running: {left}"

  asyncio.run(main())
  assert sorted(opened) == sorted(closes)
  assert engine.live_contexts == engine.live_prefixes == 0


# Whose fault a verdict is that takes too long.


def test_an_answer_that_takes_the_verifiers_time_counts_and_its_work_is_cancelled(run):
  ended = []

  async def judge(trajectory, task):
    if trajectory.sample == 0 and trajectory.answer:
      try:
        await asyncio.sleep(60)
      finally:
        ended.append(trajectory.sample)
    return float(bool(trajectory.answer))

  slow, well = run(solver(), [make_task(1)], samples=2, rewards=graph(judge), reward_timeout=0.5)
  assert slow.status is Status.OK and slow.reward == Reward(0.0)
  assert slow.metadata["fault"]["owner"] == "policy" and slow.metadata["fault"]["cause"] == "time"
  assert list(slow.reward_parts.values()) == [Reward(0.0)]  # advantages of parts see a loss as well
  assert well.reward == Reward(1.0)
  time.sleep(0.2)
  assert ended and set(ended) == {0}


def test_waiting_for_a_place_is_no_part_of_a_verdicts_time(run):
  from agentjax.places import Places

  places = Places(1)

  async def judge(trajectory, task):
    async with places.one():
      await asyncio.sleep(0.4)
    return 1.0

  members = run(solver(), [make_task(1)], samples=6, rewards=graph(judge), reward_timeout=1.0)
  assert [m.reward for m in members] == [Reward(1.0)] * 6


def test_one_slow_member_takes_nothing_from_the_group_it_is_compared_with(run):
  async def rank(members, task):
    if any(m.sample == 1 and m.answer for m in members):
      await asyncio.sleep(60)
    return [1.0 + m.sample for m in members]

  rewards = RewardGraph({}, Formula("rank"), group_scorers={"rank": rank})
  members = run(solver(), [make_task(1)], samples=3, rewards=rewards, reward_timeout=0.5)
  assert [m.status for m in members] == [Status.OK] * 3
  assert [m.reward.value for m in members] == [1.0, 0.0, 3.0]


@pytest.mark.parametrize(
  "error", [ValueError("odd"), RecursionError(), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x")]
)
@pytest.mark.parametrize("where", ["reset", "step"])
def test_what_an_action_makes_an_environment_raise_counts(run, error, where):
  async def breaks():
    raise error

  (trajectory,) = run(solver(), [make_task(2)], make_environment=faulty_one([], **{where: breaks}))
  if where == "step":
    assert trajectory.status is Status.POLICY_ERROR and trajectory.reward == Reward(0.0)
    assert trajectory.metadata["fault"]["owner"] == "policy"
  else:
    assert trajectory.status is Status.ENV_ERROR
    assert trajectory.metadata["fault"]["owner"] == "infrastructure"
