"""Collecting: order, sharing, concurrency, resumption. Endings come in an order drawn at random."""

import asyncio
import dataclasses

import numpy as np
import pytest

from agentjax.rewards import Formula, RewardGraph
from agentjax.rollout.program import SharedPrefixes
from agentjax.trajectory.record import Message, Reward, Status
from agentjax.trajectory.store import to_record
from agentjax.world.question import QuestionEnvironment
from tests.rollout.conftest import REGISTRY, make_task
from tests.rollout.scripted_engine import ScriptedEngine, say


def answers(address, turn):
  """Sample s of task t first asks for t + s, then says so."""
  _, task, sample = address
  number = task + sample
  return [say("", call=f"calculator {task}+{sample}"), say(f"#### {number}")][turn]


def engine(seed=0):
  """Model calls take 0 to 20 ms."""
  return ScriptedEngine(
    answers, delay=lambda a: np.random.default_rng([seed, *a]).uniform(0.0, 0.02)
  )


TASKS = [make_task(i, answer=str(i + 1), prompt=f"{i} and so on?") for i in (3, 1, 8, 5)]


def content(trajectories):
  """Everything that must not depend on time."""

  def timeless(trajectory):
    segments = [dataclasses.replace(s, seconds=0.0) for s in trajectory.segments]
    tools = [dataclasses.replace(t, seconds=0.0) for t in trajectory.tools]
    return dataclasses.replace(trajectory, segments=segments, tools=tools)

  return [to_record(timeless(t)) for t in trajectories]


def same(left, right):
  np.testing.assert_equal(content(left), content(right))


def test_results_stand_in_the_order_of_their_addresses(run):
  ended = []
  trajectories = run(engine(), TASKS, samples=3, on_finish=lambda t: ended.append(t.address))
  addresses = [(5, task, sample) for task in (1, 3, 5, 8) for sample in range(3)]
  assert [t.address for t in trajectories] == addresses
  assert sorted(ended) == addresses and ended != addresses
  assert [t.answer for t in trajectories] == [str(a[1] + a[2]) for a in addresses]


def test_order_of_tasks_concurrency_and_speed_change_nothing(run):
  reference = run(engine(), TASKS, samples=3)
  same(run(engine(seed=1), TASKS[::-1], samples=3, concurrency=1), reference)
  same(run(engine(seed=2), TASKS[2:] + TASKS[:2], samples=3, concurrency=5), reference)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_episodes_than_allowed_are_at_work(run, concurrency):
  scripted, alive, most = engine(), [0], [0]

  class Counted(QuestionEnvironment):
    async def reset(self, task, key):
      alive[0] += 1
      most[0] = max(most[0], alive[0])
      return await super().reset(task, key)

    async def close(self):
      alive[0] -= 1

  run(
    scripted,
    TASKS,
    samples=3,
    concurrency=concurrency,
    make_environment=lambda task: Counted(REGISTRY),
  )
  assert most[0] == concurrency and alive[0] == 0
  assert scripted.most_contexts <= concurrency


def test_members_of_a_group_share_one_prefill(run):
  scripted = engine()
  run(scripted, TASKS, samples=4, concurrency=3)
  assert len(scripted.prefills) == len(TASKS) and set(scripted.prefills.values()) == {1}
  assert scripted.live_prefixes == scripted.live_contexts == 0


def test_members_whose_prompts_differ_do_not_share(run):
  class Personal(QuestionEnvironment):
    async def reset(self, task, key):
      observation = await super().reset(task, key)
      return dataclasses.replace(
        observation, messages=(*observation.messages, Message("user", f"({key})"))
      )

  scripted = engine()
  run(scripted, TASKS[:1], samples=3, make_environment=lambda task: Personal(REGISTRY))
  assert len(scripted.prefills) == 3 and scripted.live_prefixes == 0


def test_a_prefill_outlives_the_episode_that_started_it():
  scripted = engine()

  async def main():
    prefixes = SharedPrefixes(scripted)
    first, second = (asyncio.ensure_future(prefixes.get([1, 2, 3], (0, 0, 0))) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).ids == [1, 2, 3]
    await prefixes.release()

  asyncio.run(main())
  assert scripted.prefills[1, 2, 3] == 1 and scripted.live_prefixes == 0


def test_finished_episodes_are_not_run_again_and_join_the_result(run):
  reference = run(engine(), TASKS, samples=3)
  kept = {t.address: t for t in reference if t.sample != 1 or t.task_id == 8}
  scripted, ended = engine(seed=1), []
  resumed = run(
    scripted, TASKS, samples=3, finished=kept, on_finish=lambda t: ended.append(t.address)
  )
  same(resumed, reference)
  assert sorted(ended) == [(5, 1, 1), (5, 3, 1), (5, 5, 1)]
  assert {address for address, _, _ in scripted.requests} == set(ended)
  assert all(resumed[i] is kept[t.address] for i, t in enumerate(reference) if t.address in kept)


def test_when_all_is_finished_the_engine_is_not_asked(run):
  reference = run(engine(), TASKS, samples=2)
  idle = ScriptedEngine(lambda address, turn: pytest.fail("asked"))
  same(run(idle, TASKS, samples=2, finished={t.address: t for t in reference}), reference)
  assert not idle.prefills


def test_a_group_that_is_resumed_is_compared_whole(run):
  def best(members, task):
    highest = max(int(m.answer) for m in members)
    return [float(int(m.answer) == highest) for m in members]

  rewards = RewardGraph({}, Formula("best"), group_scorers={"best": best})
  reference = run(engine(), TASKS, samples=3, rewards=rewards)
  assert [t.reward.value for t in reference] == [0.0, 0.0, 1.0] * 4
  finished = {t.address: t for t in reference if t.sample == 2}
  for trajectory in finished.values():
    trajectory.reward = Reward(0.5)  # as recorded; only new members get a score
  scripted, ended = engine(), []
  resumed = run(
    scripted,
    TASKS,
    samples=3,
    rewards=rewards,
    finished=finished,
    on_finish=lambda t: ended.append(t.address),
  )
  assert [t.reward.value for t in resumed] == [0.0, 0.0, 0.5] * 4
  assert sorted(ended) == [t.address for t in reference if t.sample != 2]


def test_what_is_handed_on_is_scored(run):
  rewards = {}
  run(engine(), TASKS, samples=2, on_finish=lambda t: rewards.setdefault(t.address, t.reward))
  assert rewards == {
    (5, task, sample): Reward(float(sample == 1)) for task in (1, 3, 5, 8) for sample in range(2)
  }


def test_a_task_that_stands_twice_gets_a_larger_group(run):
  trajectories = run(engine(), [TASKS[0], TASKS[1], TASKS[0]], samples=2)
  assert [t.address[1:] for t in trajectories] == [
    (1, 0), (1, 1), (3, 0), (3, 1), (3, 2), (3, 3),
  ]  # fmt: skip
  assert len({t.segments[2].token_ids.tobytes() for t in trajectories if t.task_id == 3}) == 4


def test_two_tasks_with_one_id_are_refused(run):
  with pytest.raises(ValueError, match="two tasks have the id 1 .*'sums' and 'products'"):
    run(engine(), [make_task(1), make_task(1, source="products")])


def test_a_group_of_none_is_refused(run):
  with pytest.raises(ValueError, match="samples_per_task=0"):
    run(engine(), TASKS, samples=0)


def test_a_program_of_ones_own_may_end_an_episode_early(run):
  async def one_turn(episode):
    await episode.open(await episode.reset())
    await episode.act()

  trajectories = run(engine(), TASKS, program=one_turn)
  assert {t.status for t in trajectories} == {Status.OK}
  assert all(not t.tools and t.answer is None for t in trajectories)
