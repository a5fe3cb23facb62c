"""Groups over scripted services: chains of stages, and summaries as branches of the record."""

import asyncio
import dataclasses
import functools
import types
from collections.abc import Mapping

from agentjax.engine import SamplingConfig
from agentjax.recipes.grandcode.pool import PoolConfig
from agentjax.recipes.grandcode.sampler import ChainConfig, ChainSampler
from agentjax.recipes.grandcode.settings import HYPOTHESIS, SOLVER, SUMMARISER, SeatsConfig
from agentjax.recipes.grandcode.world import GrandCodeConfig, GrandCodeWorld, restarts
from agentjax.rewards import RewardConfig, build_rewards
from agentjax.rewards.scorers import SCORERS
from agentjax.rollout import RolloutConfig
from agentjax.rollout.loop import collect
from agentjax.rollout.program import Player, tool_episode
from agentjax.rollout.seats import SeatPlayer, take_seats
from agentjax.text import ByteTokenizer
from agentjax.text.chat import MarkedChat
from agentjax.worlds.code.code_block import mark_code
from agentjax.worlds.code.tasks import code_task
from tests.recipes.grandcode.local import LocalRunner

_RIGHT = "def top(xs):\n  return max(xs)\n"
_WRONG = "def top(xs):\n  return xs\n"
_TASK = code_task(
  id=3,
  source="x",
  text="Give the largest.",
  reference=_RIGHT,
  tests=["assert top([3, 1]) == 3", "assert top([1, 2, 9]) == 9", "assert top([1, 2, 3]) == 3"],
  shown=2,
)
_CHAT = MarkedChat(ByteTokenizer())


class _Script:
  """Says what a function of the conversation says."""

  def __init__(self, say):
    self._say = say

  async def reply(self, messages, *, key):
    return self._say(messages)


@dataclasses.dataclass(frozen=True)
class _Players(Player):
  """Scripts in all seats, which count as learning."""

  scripts: Mapping = dataclasses.field(default_factory=dict)

  def take_seats(self, agents, address):
    seats = {
      agent: SeatPlayer("policy", _CHAT, service=_Script(self.scripts[agent]), learns=True)
      for agent in agents
    }
    return take_seats(agents, next(iter(seats.values())), seats)


def _play(world, scripts, step, size, sampler=None):
  player = _Players(
    engine=types.SimpleNamespace(version=0),
    chat=_CHAT,
    sampling=SamplingConfig(),
    config=RolloutConfig(max_turns=8, max_total_tokens=100_000),
    run_seed=0,
    scripts=scripts,
  )
  rewards = build_rewards(RewardConfig(parts=("environment",)), SCORERS)
  return asyncio.run(
    collect(
      [_TASK],
      step=step,
      samples_per_task=size,
      player=player,
      make_environment=world.environment,
      rewards=rewards,
      program=functools.partial(tool_episode, context=restarts),
      sampler=sampler,
    )
  )


def _world(**changes):
  return GrandCodeWorld(GrandCodeConfig(pool=PoolConfig(proposals=10, sizes=(200,)), **changes),
                        LocalRunner())  # fmt: skip


def test_each_chain_goes_on_with_its_own_conjecture_in_the_next_step():
  holds = mark_code("def holds(arguments, result):\n  return result == max(arguments[0])")
  said = []

  def conjecture(messages):
    said.append(f"Conjecture {len(said)}.")
    return f"{said[-1]}\n{holds}"

  seen = []

  def solve(messages):
    seen.append(messages[0].content.split("Conjecture ")[1][0])
    return mark_code(_RIGHT if seen[-1] == "1" else _WRONG)

  scripts = {HYPOTHESIS: conjecture, SOLVER: solve}
  world, sampler = _world(seats=SeatsConfig(solutions=1)), ChainConfig().build(None)
  first = _play(world, scripts, 1, 3, sampler)
  assert [tuple(t.agents) for t in first] == [(HYPOTHESIS,)] * 3 and not seen
  assert [t.agents[HYPOTHESIS].reward.value for t in first] == [1.0] * 3
  asyncio.run(world.learn(first))
  second = _play(world, scripts, 2, 3, sampler)
  assert [tuple(t.agents) for t in second] == [(SOLVER,)] * 3
  left = [t.answer.split("Conjecture ")[1][0] for t in first]
  assert [t.agents[SOLVER].reward.value for t in second] == [float(n == "1") for n in left]
  asyncio.run(world.learn(second))
  assert world.chain(3).rounds == 1 and world.chain(3).accepted == [_RIGHT]


def test_known_members_of_a_group_are_not_played_again():
  world, scripts = _world(stages=(SOLVER,)), {SOLVER: lambda messages: mark_code(_RIGHT)}
  members = _play(world, scripts, 1, 2, ChainSampler())
  group = types.SimpleNamespace(size=2, finished=lambda: members)
  assert asyncio.run(ChainSampler().sample(group)) is members


def test_a_summary_begins_a_new_branch_and_the_solver_sees_nothing_else():
  def solve(messages):
    return mark_code(_RIGHT if "lesson" in messages[0].content else _WRONG)

  scripts = {SOLVER: solve, SUMMARISER: lambda messages: "A lesson: take the largest."}
  world = _world(stages=(SOLVER,), seats=SeatsConfig(solutions=3, summarise_after=1))
  (episode,) = _play(world, scripts, 1, 1)
  own = [i for i, s in enumerate(episode.segments) if s.agent == SOLVER]
  roots = [i for i in own if episode.segments[i].parent is None]
  assert len(roots) == 2
  ids = [t for i in own if i >= roots[1] for t in episode.segments[i].token_ids]
  last = _CHAT.tokenizer.decode(ids)
  assert "A lesson" in last and "return xs" not in last
  assert episode.agents[SOLVER].reward.value == episode.agents[SUMMARISER].reward.value == 1.0
