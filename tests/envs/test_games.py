"""Games chosen by config: their tasks, their prompts, and what is refused."""

import asyncio
import dataclasses
import pathlib

import pytest

from agentjax.config import ConfigError
from agentjax.data import DataConfig
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.envs.config import GAMES, EnvironmentConfig
from agentjax.envs.environment import Action
from agentjax.training import Extensions, load_experiment
from agentjax.training.parts import build_parts
from tests.training.smoke import smoke_experiment

_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def experiment(kind, source="environment"):
  base = smoke_experiment()
  return dataclasses.replace(
    base,
    data=DataConfig(source=source, train_size=6, test_size=2),
    environment=EnvironmentConfig(kind=kind),
    engine=dataclasses.replace(base.engine, max_length=640),
    rollout=dataclasses.replace(base.rollout, max_total_tokens=640),
    rl=dataclasses.replace(base.rl, row_length=640),
  )


@pytest.mark.parametrize("kind", GAMES)
def test_a_game_brings_tasks_and_environments(kind):
  if kind == "frozen_lake":
    pytest.importorskip("gymnasium", reason="the lake is gymnasium's")
  settings = experiment(kind)
  settings.validate()
  parts = build_parts(settings, None, Extensions())
  assert [t.id for t in parts.tasks.train] == list(range(6))
  assert [t.id for t in parts.tasks.test] == [FIRST_TEST_ID, FIRST_TEST_ID + 1]
  task = parts.tasks.test[0]
  game = parts.make_environment(task)

  async def first_turn():
    observation = await game.reset(task, 0)
    assert observation.messages == task.prompt
    return await game.step(Action(task.demonstration[0].content))

  step = asyncio.run(first_turn())
  shown = [message.content for message in step.observation.messages]
  assert step.reward is not None and (step.terminated or shown[0].startswith("Done"))
  asyncio.run(parts.close())


def test_tasks_of_a_game_need_a_game():
  with pytest.raises(ConfigError, match=r"environment\.kind='question'.*sokoban"):
    experiment("question").validate()


@pytest.mark.parametrize("name", ["ragen_sokoban", "ragen2_frozen_lake", "dapo_countdown"])
def test_recipes_are_valid(name):
  load_experiment(_CONFIGS / f"{name}.py").validate()
