"""The environment of a run is chosen by its settings, and flags reach them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib

import pytest

from agentjax.config import ConfigError
from agentjax.data.config import DataConfig
from agentjax.rewards.config import RewardConfig
from agentjax.tools.build import ToolsConfig
from agentjax.training.build import Extensions, build_parts
from agentjax.training.experiment import Experiment
from agentjax.world.world import WorldConfig
from agentjax.worlds.question.word_problems import WordProblemConfig
from agentjax.worlds.sql.tool import SqlConfig

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def _smoke():
  spec = importlib.util.spec_from_file_location("smoke", CONFIGS / "smoke.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config()


def _experiment(kind, data, reward, tools=()):
  """The smoke run with a context that any task fits, in another world."""
  experiment = _smoke()
  length = 16_384
  return dataclasses.replace(
    experiment,
    world=WorldConfig.from_name(kind, "config.world"),
    data=data,
    reward=RewardConfig(parts=(reward,)),
    tools=ToolsConfig(names=tools),
    engine=dataclasses.replace(experiment.engine, max_length=length),
    rollout=dataclasses.replace(experiment.rollout, max_total_tokens=length, max_turns=6),
    rl=dataclasses.replace(experiment.rl, row_length=length),
  )


def test_tools_that_do_not_fit_the_world_are_refused_before_anything_is_built():
  data = DataConfig(source=WordProblemConfig(), train_size=8, test_size=0)
  for kind, tools, field in (
    ("repair", ("calculator",), r"config\.tools\.names=\('calculator',\); allowed: 'files'"),
    ("mle", ("python",), r"config\.tools\.names=\('python',\); allowed: no 'python'"),
  ):
    with pytest.raises(ConfigError, match=field):
      _experiment(kind, data, "exact_match", tools).validate()
  writable = _experiment("sql", data, "exact_match", ("sql",))
  writable.tools.settings["sql"] = SqlConfig(writable=True)
  with pytest.raises(ConfigError, match=r"tools\.settings\.sql\.writable=True; allowed: False"):
    writable.validate()


def test_a_part_of_another_world_is_no_part():
  experiment = _experiment("question", DataConfig(train_size=8, test_size=8), "sql_match")
  with pytest.raises(ConfigError, match="config.reward.parts='sql_match'"):
    build_parts(experiment, None, Extensions())


def test_an_unknown_kind_and_a_setting_come_back_from_json():
  with pytest.raises(ConfigError, match="config.world='chess'; allowed: 'bandit', 'code'"):
    WorldConfig.from_name("chess", "config.world")
  experiment = _experiment("sql", DataConfig(train_size=8, test_size=0), "sql_match")
  experiment.world.copies = 5
  assert experiment.to_short_dict()["world"] == {"use": "sql", "copies": 5}
  assert Experiment.from_dict(json.loads(json.dumps(experiment.to_dict()))) == experiment
