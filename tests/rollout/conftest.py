"""Parts that most tests of the rollout need."""

import asyncio
import dataclasses

import pytest

from agentjax.engine import SamplingConfig
from agentjax.rewards import Formula, RewardGraph
from agentjax.rewards.scorers import SCORERS
from agentjax.rollout.config import RolloutConfig
from agentjax.rollout.evaluation import play, summarise
from agentjax.rollout.loop import collect
from agentjax.rollout.program import Player
from agentjax.text.chat import MarkedChat
from agentjax.tools.calculator import CalculatorTool
from agentjax.tools.registry import ToolRegistry
from agentjax.trajectory.record import Message, Task
from agentjax.world.question import QuestionEnvironment
from tests.rollout.scripted_engine import RUN_SEED, TOKENIZER

CONFIG = RolloutConfig(
  max_turns=4,
  max_tokens_per_turn=40,
  max_total_tokens=400,
  environment_timeout=30.0,
  episode_timeout=60.0,
  reward_timeout=30.0,
  cancel_grace=0.05,
  concurrency=16,
)
REGISTRY = ToolRegistry([CalculatorTool()])
REWARDS = RewardGraph({"exact_match": SCORERS["exact_match"]}, Formula("exact_match"))


def make_task(number, *, answer="4", source="sums", prompt="What is 2 + 2?", **metadata):
  return Task(number, (Message("user", prompt),), answer, source, metadata=metadata)


def question(task):
  return QuestionEnvironment(REGISTRY, max_turns=4, tool_timeout=30.0)


def make_player(engine, **changes):
  return Player(
    engine=engine,
    chat=MarkedChat(TOKENIZER),
    sampling=SamplingConfig(),
    config=dataclasses.replace(CONFIG, **changes),
    run_seed=RUN_SEED,
  )


def idle(engine):
  """Whether no slot of an engine is taken, and nothing waits for one."""
  lanes = engine.scheduler.lanes
  empty = all(len(lane.free) == lane.slots.slots for lane in lanes)
  return empty and not any(lane.jobs or lane.idle for lane in lanes) and not engine.waiting


@pytest.fixture
def run():
  """Collects episodes in an event loop that must end with no task left behind."""

  def run(engine, tasks, *, samples=1, make_environment=question, rewards=REWARDS, **settings):
    passed = ("finished", "on_finish", "program", "sampler")
    options = {k: settings.pop(k) for k in passed if k in settings}

    async def main():
      try:
        return await collect(
          tasks,
          step=5,
          samples_per_task=samples,
          player=make_player(engine, **settings),
          make_environment=make_environment,
          rewards=rewards,
          **options,
        )
      finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"still running: {left}"

    return asyncio.run(main())

  return run


async def evaluate(tasks, *, player, plan, tool_names, step, **settings):
  """Plays an evaluation and sums it up."""
  episodes = await play(tasks, player=player, plan=plan, step=step, **settings)
  return summarise(
    tasks, *episodes, plan=plan, tool_names=tool_names, seed=player.run_seed, step=step
  )
