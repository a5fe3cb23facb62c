"""Games chosen by config: their tasks, their prompts, and what is refused."""

import asyncio
import dataclasses
import pathlib

import pytest

from agentjax.config import ConfigError
from agentjax.data import DataConfig
from agentjax.data.splits import FIRST_TEST_ID
from agentjax.names import known_names
from agentjax.training import Extensions, load_experiment
from agentjax.training.build import build_parts
from agentjax.world.environment import Action
from agentjax.world.games import GameConfig
from agentjax.world.world import WorldConfig
from tests.training.smoke import smoke_experiment

_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def experiment(kind):
  base = smoke_experiment()
  return dataclasses.replace(
    base,
    data=DataConfig(train_size=6, test_size=2),
    world=WorldConfig.from_name(kind, "config.world"),
    engine=dataclasses.replace(base.engine, max_length=640),
    rollout=dataclasses.replace(base.rollout, max_total_tokens=640),
    rl=dataclasses.replace(base.rl, row_length=640),
  )


WORLDS = {name: WorldConfig.from_name(name, "world") for name in known_names(WorldConfig)}
GAMES = [name for name, settings in WORLDS.items() if isinstance(settings, GameConfig)]


@pytest.mark.parametrize("kind", [name for name in GAMES if name != "number_game"])
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
  accepted = ("Done", "They offer")  # the second is what the other seat sees
  assert step.reward is not None and (step.terminated or shown[0].startswith(accepted))
  asyncio.run(parts.close())


def test_generated_tasks_have_a_number():
  settings = experiment("sokoban")
  settings.data.train_size = None
  with pytest.raises(ConfigError, match=r"config\.data\.train_size=None; .*'sokoban'"):
    settings.validate()


@pytest.mark.parametrize("name", ["ragen_sokoban", "ragen2_frozen_lake", "dapo_countdown"])
def test_recipes_are_valid(name):
  load_experiment(_CONFIGS / f"{name}.py").validate()
