"""A config that names its parts by ``module:attribute`` is the run that ``Extensions`` make."""

import dataclasses
import json
import sys

import numpy as np
import pytest

from agentjax.config import ConfigError
from agentjax.data import TaskSplits
from agentjax.data.source import TaskSource
from agentjax.objectives.advantage_function import AdvantageChoice
from agentjax.objectives.segments import broadcast_to_tokens
from agentjax.recipes.scorers import OverlongConfig
from agentjax.rewards import RewardConfig, build_rewards
from agentjax.rewards.scorer_config import ScorerConfig
from agentjax.rollout.config import SamplerConfig
from agentjax.rollout.schedule import ScheduleConfig
from agentjax.training import Extensions, Run
from agentjax.training.build import build_parts
from agentjax.training.experiment import load_experiment, own_names
from agentjax.trajectory.record import Message, Task
from agentjax.world.cheats import Setting
from agentjax.world.world import World, WorldConfig
from tests.training.smoke import quiet
from tests.training.stages import PaidDigits, fingerprints, staged_experiment

HERE = __name__


def world_of(task):
  del task
  return PaidDigits()


def tasks_of(config):
  """As many tasks as the config says."""
  made = [Task(i, (Message("user", f"Task {i}."),), "", "digits") for i in range(config.train_size)]
  return TaskSplits(made, [])


def even(trajectory, task):
  del task
  drawn = np.concatenate([s.token_ids[s.sampled] for s in trajectory.segments])
  return float(np.mean(drawn % 2 == 0))


@dataclasses.dataclass(unsafe_hash=True)
class Constant(ScorerConfig):
  """A part with a setting of its own."""

  value: float = 1.0

  def build(self, sandboxes):
    return lambda trajectory, task: self.value


class Plain:
  """The members one after the other."""

  async def sample(self, group):
    return group.settle([await group.episode(i) for i in range(group.size)])


def raw(inputs):
  return broadcast_to_tokens(inputs.rewards - 0.5, inputs.segment_ids)


class Digits(World):
  scorers = {"even": staticmethod(even)}

  def environment(self, task):
    return world_of(task)


A_WORLD = Digits()
NOT_ONE = 7
TASKS = tasks_of(dataclasses.make_dataclass("C", [("train_size", int)])(4))


def experiment(**names):
  made = staged_experiment(ScheduleConfig())
  made.rl.steps, made.data.train_size, made.data.test_size = 2, 4, 0
  made.world = WorldConfig.from_name(names.get("world", f"{HERE}:world_of"), "config.world")
  tasks = names.get("tasks", f"{HERE}:tasks_of")
  made.data.source = TaskSource.from_name(tasks, "config.data.source")
  sampler = names.get("sampler", f"{HERE}:Plain")
  made.rollout.sampler = SamplerConfig.from_name(sampler, "config.rollout.sampler")
  made.reward.parts = ("environment", names.get("scorer", f"{HERE}:even"))
  made.reward.weights = (1.0, 1.0)
  made.rl.objective.advantage.function = AdvantageChoice.from_name(
    f"{HERE}:raw", "advantage.function"
  )
  return made


def test_names_build_what_extensions_build():
  made = experiment()
  made.validate()
  parts = build_parts(made.freeze(), None, Extensions())
  task = parts.tasks.train[3]
  assert len(parts.tasks.train) == 4 and task.source == "digits"
  assert isinstance(parts.make_environment(task), PaidDigits)
  assert isinstance(parts.sampler, Plain)
  assert parts.rewards.part_names == ("environment", f"{HERE}:even")
  assert set(own_names(made)) == {
    f"{HERE}:{name}" for name in ("raw", "even", "world_of", "tasks_of", "Plain")
  }


def test_a_part_with_settings_of_its_own_is_built_and_told_apart_from_built_in_ones():
  made = experiment()
  made.reward.parts, made.reward.weights = ("five", "overlong", f"{HERE}:Constant"), (1.0,) * 3
  made.reward.settings = {"five": Constant(5.0), "overlong": OverlongConfig(limit=9, buffer=2)}
  again = RewardConfig.from_dict(json.loads(json.dumps(made.reward.to_short_dict())))
  assert again == made.reward
  assert build_rewards(made.reward).part_names == ("five", "overlong", f"{HERE}:Constant")
  made.reward.parts = made.reward.parts[:2]
  assert f"{HERE}:Constant" in own_names(made) and "overlong" not in own_names(made)


def test_a_whole_world_brings_its_scorers_and_tasks_may_stand_there():
  made = experiment(world=f"{HERE}:A_WORLD", tasks=f"{HERE}:TASKS")
  made.reward.parts = ("environment", "even")
  parts = build_parts(made.freeze(), None, Extensions())
  assert parts.world is A_WORLD and parts.tasks is TASKS
  assert parts.world.cheats(parts.tasks.train[0], Setting()) == {}


@pytest.mark.parametrize(
  ("change", "field"),
  [
    ({"world": f"{HERE}:NOT_ONE"}, "config.world"),
    ({"world": f"{HERE}:PaidDigits"}, "config.world"),  # takes no task
    ({"world": "chess"}, "config.world"),
    ({"tasks": f"{HERE}:NOT_ONE"}, "config.data.source"),
    ({"tasks": f"{HERE}:world_of"}, "config.data.source"),
    ({"tasks": "gsm9k"}, "config.data.source"),
    ({"sampler": f"{HERE}:NOT_ONE"}, "config.rollout.sampler"),
    ({"sampler": "tree"}, "config.rollout.sampler"),
    ({"scorer": f"{HERE}:NOT_ONE"}, "config.reward.parts"),
    ({"scorer": f"{HERE}:world_of"}, "config.reward.parts"),
    ({"scorer": f"{HERE}:missing"}, "config.reward.parts"),
    ({"scorer": "no.colon"}, "config.reward.parts"),
  ],
)
def test_a_name_that_is_not_one_is_refused_with_its_field(change, field):
  with pytest.raises(ConfigError, match="allowed") as error:
    made = experiment(**change)
    made.validate()
    build_parts(made, None, Extensions())
  assert str(error.value).startswith(field)


def test_an_advantage_that_cannot_be_traced_stops_the_run_before_it_claims_a_checkpoint(tmp_path):
  made = experiment()
  made.rl.objective.advantage.function = None
  with pytest.raises(ConfigError, match=r"the advantage .*returned float32\[8\]"):
    run = Run(made, tmp_path / "run", advantage=lambda i: i.rewards, console=quiet())
    run.train()
  assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_a_saved_config_is_the_whole_run(tmp_path):
  """By names from the saved file alone, and by objects: the same updates to the bit."""
  first = Run(experiment(), tmp_path / "named", console=quiet())
  first.train()
  saved = load_experiment(tmp_path / "named" / "config.json")
  again = Run(saved, tmp_path / "again", console=quiet())
  again.train()

  plain = experiment(world="question", tasks="word_problems", sampler="independent")
  plain.reward.parts = ("environment", "even")
  plain.rl.objective.advantage.function = None
  extensions = Extensions(
    tasks=TASKS, make_environment=world_of, scorers={"even": even}, sampler=Plain()
  )
  brought = Run(plain, tmp_path / "brought", advantage=raw, extensions=extensions, console=quiet())
  brought.train()
  hashes = [fingerprints(tmp_path / name) for name in ("named", "again", "brought")]
  assert hashes[0] == hashes[1] == hashes[2] and len(hashes[0]) == 2
  assert first.replay(2).identical
  kept = tmp_path / "named" / "functions" / f"{HERE}.py"
  assert kept.read_text() == open(sys.modules[HERE].__file__).read()
